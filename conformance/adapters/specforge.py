"""SpecForge's EAGLE-3 training step around its Llama draft (rotary attention, SwiGLU), as ``pattern``, and its losses.

``Eagle3TrainStrategy.forward_loss`` runs ``OnlineEagle3Model`` on slot-aligned arrays and weights the steps 0.8^i.
``adapter`` has the loss ``alpha`` (LK), ``kl`` the package's default, a soft cross-entropy whose mean is over all slots.
Its cross-entropy is a Triton kernel, which runs in Triton's interpreter here.

Install: ``make matrix``, or ``pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/specforge.txt``.
"""

import os
from importlib.metadata import version
from unittest import mock

import numpy as np

for name, value in {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}.items():
    os.environ.setdefault(name, value)
try:
    import torch
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.core.lk_loss import compute_acceptance_rate, compute_lk_loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import LlamaConfig
except ImportError as error:
    raise ImportError(
        f"The adapter specforge needs the package specforge ({error}). Install it with `make matrix`, or: "
        "pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/specforge.txt"
    ) from error

from conformance.torch_helper import DTYPES, own_weights, pattern_answer

FEATURES = ("low", "mid", "high")
REDUCTIONS = {"alpha": ("lk", "supervised"), None: ("soft_ce", "all_slots")}


class SpecForge:
    protocol = 1

    def __init__(self, kind: str | None = "alpha"):
        self.kind = kind

    def describe(self) -> dict:
        policies = {
            name: {"storage": name, "accumulate": "float32", "logits": name} for name in ("float32", "bfloat16")
        }
        loss, denominator = REDUCTIONS[self.kind]
        return {
            "name": f"specforge, {self.kind or 'KL'}",
            "version": version("specforge"),
            "url": "https://github.com/sgl-project/SpecForge",
            "formats": policies["float32"],
            "policies": policies,
            "layouts": ["eagle3"],
            "pattern": {"loss": loss, "denominator": denominator, "step_weights": [0.8**i for i in range(7)]},
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.dtype, vocabulary = DTYPES[formats["storage"]], config["vocab_size"]
        layer = LlamaConfig(
            vocab_size=vocabulary, hidden_size=config["hidden_size"], intermediate_size=config["intermediate_size"],
            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        )  # fmt: skip
        layer.draft_vocab_size = vocabulary
        draft = LlamaForCausalLMEagle3(layer, attention_backend="sdpa").to(self.dtype)
        draft.t2d[:] = True
        draft.d2t[:] = 0
        own_weights(draft)
        self.model = OnlineEagle3Model(
            draft, length=config["num_steps"], attention_backend="sdpa", lk_loss_type=self.kind
        )

    def pattern(self, inputs, *, cotangents=None, forced=None) -> tuple:
        features = {n: torch.tensor(inputs[n], dtype=self.dtype).requires_grad_(bool(cotangents)) for n in FEATURES}
        tokens, logits = torch.tensor(inputs["tokens"], dtype=torch.long), []
        tensors = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "loss_mask": torch.tensor(inputs["mask"])[..., None].long(),
            "hidden_state": torch.cat(list(features.values()), -1),
            "target": torch.tensor(inputs["target_logits"], dtype=self.dtype),
        }
        rows = [str(row) for row in range(len(tokens))]
        hook = self.model.draft_model.lm_head.register_forward_hook(lambda _, args, output: logits.append(output.detach().clone()))
        try:
            found = Eagle3TrainStrategy(self.model).forward_loss(TrainBatch(rows, "eagle3", tensors))
        finally:
            hook.remove()
        return pattern_answer(logits, found.metrics["plosses"], found.loss, features, cotangents)

    def lk_loss(self, inputs, *, cotangents=None, forced=None) -> tuple:
        """Slot by slot: the package returns the mean over slots only, so each slot is a batch of its own."""
        if self.kind != "alpha":
            raise NotImplementedError("only the adapter of the loss alpha offers lk_loss")
        shape = inputs["draft_logits"].shape
        draft = torch.tensor(inputs["draft_logits"], dtype=self.dtype, requires_grad=True)
        target = torch.tensor(inputs["target_logits"], dtype=self.dtype).float().softmax(-1)
        slots = [
            (d[None, None], p[None, None]) for d, p in zip(draft.flatten(0, -2), target.flatten(0, -2), strict=True)
        ]
        with mock.patch.object(torch, "minimum", wraps=torch.minimum) as minimum:
            losses = [self._slot(*slot) for slot in slots]
        below = np.stack([(q < p).numpy() for (p, q), _ in minimum.call_args_list]).reshape(shape)
        loss, grads = torch.stack(losses).reshape(shape[:-1]), {}
        if cotangents is not None:
            loss.backward(torch.tensor(np.asarray(cotangents["loss"]), dtype=loss.dtype))
            grads["draft_logits"] = draft.grad.float().numpy()
        return {"loss": loss.detach().numpy()}, grads, {"below": below}, {}

    def _slot(self, logits, target):
        mask = torch.ones(1, 1, 1, dtype=torch.bool)
        rate, log_rate = compute_acceptance_rate(logits=logits, target_probs=target, position_mask=mask)
        return compute_lk_loss(kl_loss=None, acceptance_rate=rate, log_acceptance_rate=log_rate, lk_loss_type="alpha",
                               kl_scale=1.0, kl_decay=1.0)  # fmt: skip


adapter = SpecForge()
kl = SpecForge(None)
