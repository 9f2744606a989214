"""A model of ``fast`` and a batch for it."""

import torch

from draftconf.fast.model import DraftModel
from draftconf.reference.config import Choices, DraftConfig

CONFIG = DraftConfig.tiny()
LAYOUTS = [Choices(), Choices(draft_input="eagle3", head="own")]


def make_model(choices=LAYOUTS[0], dtype=torch.float64, device="cpu"):
    """A model with norm weights and router bias away from their neutral values, exact in bfloat16."""
    torch.manual_seed(1)
    model = DraftModel.from_config(CONFIG, choices, torch.bfloat16)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape)
            p.copy_(0.3 * noise + ("bias" not in name) if p.ndim == 1 else noise * p.shape[1] ** -0.5)
    return model.to(device, dtype)


def make_batch(dtype=torch.float64, device="cpu", documents=True):
    g = torch.Generator().manual_seed(5)
    shape, d = (2, 9), CONFIG.hidden_size
    batch = {name: torch.randn(*shape, d, generator=g) for name in ("low", "mid", "high")}
    batch["target_logits"] = 2 * torch.randn(*shape, CONFIG.vocab_size, generator=g)
    batch = {name: x.bfloat16().to(dtype) for name, x in batch.items()}
    batch["tokens"] = torch.randint(0, CONFIG.vocab_size, shape, generator=g)
    batch["mask"] = torch.rand(shape, generator=g) > 0.2
    if documents:
        batch["documents"] = torch.tensor([[0] * 5 + [1] * 4, [-1] + [3] * 6 + [-1] * 2])
    return {name: x.to(device) for name, x in batch.items()}
