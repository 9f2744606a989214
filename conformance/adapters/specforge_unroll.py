"""SpecForge's EAGLE-3 training step around its Llama draft (rotary attention, SwiGLU), as ``pattern``.

``Eagle3TrainStrategy.forward_loss`` runs ``OnlineEagle3Model`` on slot-aligned arrays and weights the steps 0.8^i.
``adapter`` has the loss ``alpha`` (LK), ``kl`` the package's default, a soft cross-entropy averaged over all slots.
Its cross-entropy is a Triton kernel, which runs in Triton's interpreter here.

Install: ``make matrix``, or
``pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/specforge.txt``.
"""

import os
from importlib.metadata import version

for name, value in {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}.items():
    os.environ.setdefault(name, value)
try:
    import torch
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import LlamaConfig

    from ..torch_helper import DTYPES, own_weights, pattern_answer
except ImportError as error:
    raise ImportError(
        f"The adapter specforge_unroll needs the package specforge ({error}). Install it with `make matrix`, or: "
        "pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/specforge.txt"
    ) from error


FEATURES = ("low", "mid", "high")
REDUCTIONS = {"alpha": ("lk", "supervised"), None: ("soft_ce", "all_slots")}


class SpecForgeUnroll:
    protocol = 1

    def __init__(self, kind: str | None = "alpha"):
        self.kind = kind

    def describe(self) -> dict:
        policies = {
            name: {"storage": name, "accumulate": "float32", "logits": name} for name in ("float32", "bfloat16")
        }
        loss, denominator = REDUCTIONS[self.kind]
        return {
            "name": f"specforge, OnlineEagle3Model, {self.kind or 'KL'}",
            "version": version("specforge"),
            "url": "https://github.com/sgl-project/SpecForge",
            "formats": policies["float32"],
            "policies": policies,
            "layouts": ["eagle3"],
            "pattern": {
                "loss": loss,
                "denominator": denominator,
                "step_weights": [0.8**i for i in range(7)],
            },
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.dtype, vocabulary = DTYPES[formats["storage"]], config["vocab_size"]
        layer = LlamaConfig(
            vocab_size=vocabulary, hidden_size=config["hidden_size"], intermediate_size=config["intermediate_size"],
            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            pad_token_id=0,
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
        hook = self.model.draft_model.lm_head.register_forward_hook(
            lambda _, args, output: logits.append(output.detach().clone())
        )
        try:
            found = Eagle3TrainStrategy(self.model).forward_loss(TrainBatch(rows, "eagle3", tensors))
        finally:
            hook.remove()
        return pattern_answer(logits, found.metrics["plosses"], found.loss, features, cotangents)


adapter = SpecForgeUnroll()
kl = SpecForgeUnroll(None)
