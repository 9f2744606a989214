"""One optimizer step of the draft layer. Frozen parameters are not given to the optimizer at all."""

import torch
from torch import Tensor

from fast.model import DraftModel


def make_optimizer(
    model: DraftModel,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """AdamW over the trained parameters only; the report does not disclose its settings."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def train_step(model: DraftModel, optimizer: torch.optim.Optimizer, batch: dict) -> Tensor:
    """Gradients of the batch's total loss and one optimizer step. Returns the loss [] before the step, detached."""
    optimizer.zero_grad(set_to_none=True)
    loss = model.unroll(batch)["total_loss"]
    loss.backward()
    optimizer.step()
    return loss.detach()
