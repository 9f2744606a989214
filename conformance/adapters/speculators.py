"""The losses of speculators: the negative log-acceptance as ``lk_loss``, and those that it has beside it.

Install: ``make peers`` (the package's own pins conflict with the others', so it is installed with --no-deps).

From 0.9.0 on ``speculators.losses.NAME`` are Triton kernels; this adapter tests the eager function of the same name.
"""

from importlib.metadata import version
from unittest import mock

import numpy as np

try:
    import torch
    from speculators.losses import eager
except ImportError as error:
    raise ImportError(
        f"The adapter speculators needs the package speculators ({error}). Install it with `make peers` and add "
        "`--adapter-python .venv-peers`, or: pip install torch==2.13.0 && "
        "pip install --no-deps -r requirements/peers.txt"
    ) from error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOSSES = {
    "kl_loss": eager.kl_div_loss,
    "reverse_kl_loss": eager.reverse_kl_div_loss,
    "js_loss": eager.js_div_loss,
    "tv_loss": eager.tv_loss,
    "hybrid_loss": eager.lk_hybrid_loss,
}


class Speculators:
    protocol = 1

    def describe(self) -> dict:
        policies = {name: {"storage": name, "accumulate": "float32", "logits": name} for name in DTYPES}
        return {
            "name": "speculators",
            "version": version("speculators"),
            "url": "https://github.com/vllm-project/speculators",
            "formats": policies["float32"],
            "policies": policies,
            "choices": {},
            "layouts": ["eagle3"],
            "losses": {name: {} for name in LOSSES} | {"hybrid_loss": {"first": "kl", "decay": 3.0}},
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.dtype = DTYPES[(formats or {}).get("storage", "float32")]

    def lk_loss(self, inputs, *, cotangents=None, forced=None) -> tuple:
        with mock.patch.object(torch, "minimum", wraps=torch.minimum) as minimum:
            answer = self._loss(eager.neg_log_acceptance_loss, inputs, cotangents)
        (q, p), _ = minimum.call_args  # the probabilities that the package compared
        return *answer, {"below": (q < p).reshape(inputs["draft_logits"].shape).numpy()}, {}

    def _loss(self, function, inputs, cotangents) -> tuple:
        shape = inputs["draft_logits"].shape
        draft = torch.tensor(inputs["draft_logits"], dtype=self.dtype, requires_grad=True)
        target = torch.tensor(inputs["target_logits"], dtype=self.dtype)
        rows = (1, -1, shape[-1])  # the package's batch is one packed row
        loss, grads = function(draft.reshape(rows), target.reshape(rows)).reshape(shape[:-1]), {}
        if cotangents is not None:
            loss.backward(torch.tensor(np.asarray(cotangents["loss"]), dtype=loss.dtype))
            grads["draft_logits"] = draft.grad.float().numpy()
        return {"loss": loss.detach().numpy()}, grads


def _method(function):
    return lambda self, inputs, *, cotangents=None, forced=None: self._loss(function, inputs, cotangents)


for _name, _function in LOSSES.items():
    setattr(Speculators, _name, _method(_function))

adapter = Speculators()
