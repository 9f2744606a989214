"""The losses of speculators: the negative log-acceptance as ``lk_loss``, and those that it has beside it.

Install: ``make peers`` (the package's own pins conflict with the others', so it is installed with --no-deps).

From 0.9.0 on ``speculators.losses.NAME`` are Triton kernels; this adapter tests the eager function of the same name.
"""

from importlib.metadata import version
from unittest import mock

try:
    import torch
    from speculators.losses import eager

    from ..torch_helper import TorchAdapter, stage
except ImportError as error:
    raise ImportError(
        f"The adapter speculators needs the package speculators ({error}). Install it with `make peers` and add "
        "`--adapter-python .venv-peers`, or: pip install torch==2.13.0 && "
        "pip install --no-deps -r requirements/peers.txt"
    ) from error

LOSSES = {
    "kl_loss": eager.kl_div_loss,
    "reverse_kl_loss": eager.reverse_kl_div_loss,
    "js_loss": eager.js_div_loss,
    "tv_loss": eager.tv_loss,
    "hybrid_loss": eager.lk_hybrid_loss,
}


class Speculators(TorchAdapter):
    name = "speculators"
    version = version("speculators")
    url = "https://github.com/vllm-project/speculators"
    policies = {name: {"storage": name, "accumulate": "float32", "logits": name} for name in ("float32", "bfloat16")}
    formats = policies["float32"]
    layouts = ["eagle3"]
    losses = {name: {} for name in LOSSES} | {"hybrid_loss": {"first": "kl", "decay": 3.0}}

    @stage(frozen=("target_logits",))
    def lk_loss(self, t, forced):
        with mock.patch.object(torch, "minimum", wraps=torch.minimum) as minimum:
            outputs = loss_of(eager.neg_log_acceptance_loss, t)
        (q, p), _ = minimum.call_args  # the probabilities that the package compared
        return outputs, {"below": (q < p).reshape(t["draft_logits"].shape)}


def loss_of(function, t) -> dict:
    """Of each slot; the package's batch is one packed row."""
    rows = (x.reshape(1, -1, x.shape[-1]) for x in (t["draft_logits"], t["target_logits"]))
    return {"loss": function(*rows).reshape(t["draft_logits"].shape[:-1])}


def _method(function):
    return stage(lambda self, t, forced: loss_of(function, t), frozen=("target_logits",))


for _name, _function in LOSSES.items():
    setattr(Speculators, _name, _method(_function))

adapter = Speculators()
