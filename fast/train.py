"""Training steps of the draft layer: master weights, clipping, accumulation, data parallelism, checkpoints.

Frozen parameters are not given to the optimizer at all. A loss is a mean over the supervised slots of the whole batch,
so parts of a batch (micro-batches, ranks) are computed with the whole batch's counts and then simply added.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from draftconf.reference.config import trained_parameters

from . import fused
from .experts import ExpertCache
from .model import DraftModel
from .unroll import sanitize

AVERAGES = ("exp_avg", "exp_avg_sq")


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


@dataclass(frozen=True)
class Settings:
    """What the report leaves undisclosed. Norm gains are not decayed. ``max_norm`` None does not clip."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float | None = 1.0


class Trainer:
    """Optimizer steps of a ``DraftModel`` on the fused path.

    Master weights, gradients and AdamW's averages are kept in at least float32 for the trained parameters, and for
    those only; the model's own parameters are their rounding. With a process group every rank holds the whole model:
    counts and gradients are summed over the group.
    """

    def __init__(self, model: DraftModel, settings: Settings | None = None, plan: fused.Plan | None = None, group=None):
        self.model, self.settings, self.plan, self.group = model, settings or Settings(), plan or fused.Plan(), group
        self.cache, self.steps, params = ExpertCache(reuse_gradients=True), 0, dict(model.named_parameters())
        self.trained = {name: params[name] for name in trained_parameters(model.config, model.choices)}
        self.masters = {name: _master(p) for name, p in self.trained.items()}
        s = self.settings
        groups = [
            {"params": [p for p in self.masters.values() if p.ndim > 1], "weight_decay": s.weight_decay},
            {"params": [p for p in self.masters.values() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, eps=s.eps)

    def step(self, batches: Sequence[dict], lr: float | None = None) -> dict:
        """One optimizer step on the whole batch that ``batches`` (of this rank and of all others) are parts of.

        ``lr`` overrides the settings' for this step. Returns loss and grad_norm (before clipping), both of the whole
        batch before the step, as floats, and counts [K]. Raises RuntimeError, the weights as they were, where the
        gradients are not finite.
        """
        counts = self.summed(sum(self.counts(batch) for batch in batches))
        params, loss = dict(self.model.named_parameters()), 0.0
        for p in (*self.trained.values(), *self.masters.values()):
            p.grad = None
        for batch in batches:
            model = self.model.config, self.model.choices
            part = fused.unroll(params, batch, *model, counts=counts, plan=self.plan, cache=self.cache)["total_loss"]
            part.backward()
            self.gather()
            loss = loss + part.detach()
        grads = [master.grad for master in self.masters.values()]
        loss = self.summed(loss)
        for grad in grads:
            self.summed(grad)
        norm = self.clip(grads)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr if lr is None else lr
        self.optimizer.step()
        self.publish()
        self.steps += 1
        return {"loss": float(loss), "grad_norm": norm, "counts": counts}

    def counts(self, batch: dict) -> Tensor:
        """What this part adds to the divisors of the step losses. int64 [K]."""
        config, choices = self.model.config, self.model.choices
        return fused.slot_counts(fused.supervised_slots(sanitize(batch), config, choices), choices)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the process group, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self) -> None:
        """Add the model's gradients to the masters', wide, and let go of them."""
        for name, p in self.trained.items():
            master, grad = self.masters[name], p.grad
            p.grad = None
            if master.grad is None:
                master.grad = grad.to(master.dtype, copy=True)
            else:
                master.grad.add_(grad)

    def clip(self, grads: list[Tensor]) -> float:
        """Scale the gradients of all trained parameters to a joint 2-norm of at most ``max_norm``."""
        norms = torch.stack([torch.linalg.vector_norm(grad) for grad in grads])
        norm = torch.linalg.vector_norm(norms).item()
        if not norm < float("inf"):
            bad = [name for name, n in zip(self.masters, norms.tolist(), strict=True) if not n < float("inf")]
            raise RuntimeError(f"the gradient of {(bad or ['all parameters together'])[0]} is not finite")
        if self.settings.max_norm is not None and norm > self.settings.max_norm:
            torch._foreach_mul_(grads, self.settings.max_norm / norm)
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """The model's parameters as the masters' rounding; their versions move, so experts are quantised anew."""
        for name, p in self.trained.items():
            if p is not self.masters[name]:
                p.copy_(self.masters[name])

    # Checkpoints.
    def save(self, path) -> None:
        """All that resuming needs, in one safetensors file that is whole or not there.

        The model under its checkpoint names; masters and averages as "optimizer.{master,exp_avg,exp_avg_sq}.NAME".
        """
        from .checkpoint import TRAINING, write_tensors  # needs safetensors, which training alone does not

        tensors = {**self.model.state_dict(), **self._masters(), **self._averages()}
        write_tensors(path, tensors, {TRAINING: json.dumps(self._described() | {"steps": self.steps})})

    def _masters(self) -> dict[str, Tensor]:
        """Masters that are not the parameters themselves."""
        return {f"optimizer.master.{name}": m for name, m in self.masters.items() if m is not self.trained[name]}

    def _averages(self) -> dict[str, Tensor]:
        """AdamW's averages, zero before the first step."""
        averages = {}
        for name, master in self.masters.items():
            state = self.optimizer.state.get(master, {})
            for key in AVERAGES:
                averages[f"optimizer.{key}.{name}"] = state[key] if state else torch.zeros_like(master)
        return averages

    def _described(self) -> dict:
        config, choices = self.model.config, self.model.choices
        described = {"config": config.to_dict(), "choices": choices.to_dict(), "settings": asdict(self.settings)}
        return json.loads(json.dumps(described))

    @torch.no_grad()
    def resume(self, path) -> None:
        """Continue from ``save``: the next step is the one that would have followed, in every bit.

        Raises CheckpointError for a file that is broken or was written by another config, other choices or settings,
        naming the first that differs, or whose tensors are missing, unknown, or of another shape or type.
        """
        from .checkpoint import TensorFile

        with TensorFile(path) as file:
            steps = file.training_state(self._described())
            wanted = {**self.model.state_dict(), **self._masters(), **self._averages()}
            file.refuse_unknown(wanted)
            read = {name: file.read(name, tuple(x.shape), (x.dtype,)) for name, x in wanted.items()}
        for name, x in {**self.model.state_dict(), **self._masters()}.items():
            x.copy_(read[name])
        for name, master in self.masters.items():
            averages = {key: read[f"optimizer.{key}.{name}"].to(master.device) for key in AVERAGES}
            self.optimizer.state[master] = {"step": torch.tensor(float(steps)), **averages}
        self.steps = steps


def _master(p: Tensor) -> Tensor:
    """A parameter's master: itself where it is wide enough, else a float32 copy."""
    return p if p.dtype in (torch.float32, torch.float64) else p.detach().float()
