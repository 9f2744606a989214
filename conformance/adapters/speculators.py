"""The negative log-acceptance loss of speculators, as ``lk_loss``.

Install: ``make peers`` (the package's own pins conflict with the others', so it is installed with --no-deps).

From 0.9.0 on ``speculators.losses.NAME`` are Triton kernels; this adapter tests the eager function of the same name.
"""

from importlib.metadata import version
from unittest import mock

import numpy as np

try:
    import torch
    from speculators.losses.eager import neg_log_acceptance_loss
except ImportError as error:
    raise ImportError(
        f"The adapter speculators needs the package speculators ({error}). Install it with `make peers` and add "
        "`--adapter-python .venv-peers`, or: pip install torch==2.13.0 && "
        "pip install --no-deps -r requirements/peers.txt"
    ) from error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.dtype = DTYPES[(formats or {}).get("storage", "float32")]

    def lk_loss(self, inputs, *, cotangents=None, forced=None) -> tuple:
        shape = inputs["draft_logits"].shape
        draft = torch.tensor(inputs["draft_logits"], dtype=self.dtype, requires_grad=True)
        target = torch.tensor(inputs["target_logits"], dtype=self.dtype)
        rows = (1, -1, shape[-1])  # the package's batch is one packed row
        with mock.patch.object(torch, "minimum", wraps=torch.minimum) as minimum:
            loss = neg_log_acceptance_loss(draft.reshape(rows), target.reshape(rows)).reshape(shape[:-1])
        (q, p), _ = minimum.call_args  # the probabilities that the package compared
        decisions = {"below": (q < p).reshape(shape).numpy()}
        grads = {}
        if cotangents is not None:
            loss.backward(torch.tensor(np.asarray(cotangents["loss"]), dtype=loss.dtype))
            grads["draft_logits"] = draft.grad.float().numpy()
        return {"loss": loss.detach().numpy()}, grads, decisions, {}


adapter = Speculators()
