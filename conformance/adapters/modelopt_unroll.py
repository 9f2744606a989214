"""NVIDIA ModelOpt's EAGLE-3 training step (Llama layer) from precomputed hidden states, as ``pattern``.

The trainer takes raw sequences and keeps every token in its own row: at step k the hidden states move k - 1 rows to
the right. So one position is put before the slots, whose token, features and target nothing supervised reads, and
slot t of step k is row t + k - 1 of the logits. The loss is a soft cross-entropy, the step weights are 0.9^i.
``padded`` is judged on a row that begins with padding, which goes in as ``attention_mask``.

Install: ``make matrix``, or
``pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/nvidia-modelopt.txt``.
"""

import os
from importlib.metadata import version
from unittest import mock

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import modelopt.torch.speculative as mtsp
    import torch
    from modelopt.torch.speculative.plugins.modeling_fakebase import FakeBaseConfig, FakeBaseModel

    from ..torch_helper import DTYPES, own_weights, pattern_answer
except ImportError as error:
    raise ImportError(
        f"The adapter modelopt_unroll needs the package nvidia-modelopt ({error}). Install it with `make matrix`, or: "
        "pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/nvidia-modelopt.txt"
    ) from error


FEATURES = ("low", "mid", "high")


class ModelOptUnroll:
    protocol = 1

    def __init__(self, padding: bool = False):
        self.padding = padding

    def describe(self) -> dict:
        policies = {"float32": {"storage": "float32"}}
        return {
            "name": "nvidia-modelopt, EAGLE-3",
            "version": version("nvidia-modelopt"),
            "url": "https://github.com/NVIDIA/Model-Optimizer",
            "formats": policies["float32"],
            "policies": policies,
            "layouts": ["eagle3"],
            "pattern": {
                "loss": "soft_ce",
                "epsilon": 1e-5,
                "step_weights": [0.9**i for i in range(7)],
                "padding": self.padding,
            },
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.dtype, self.steps = DTYPES[formats["storage"]], config["num_steps"]
        sizes = {name: config[name] for name in ("hidden_size", "vocab_size")} | {"max_position_embeddings": 64}
        layer = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": config["intermediate_size"]}
        base = FakeBaseModel(FakeBaseConfig(num_hidden_layers=6, dtype=self.dtype, **sizes, **layer))
        architecture = {
            **sizes, **layer, "num_hidden_layers": 1, "head_dim": 20, "draft_vocab_size": config["vocab_size"],
            "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_last_layernorm": True,
            "has_lm_head": True, "attn_implementation": "eager",
        }  # fmt: skip
        options = {
            "eagle_offline": True, "eagle_decoder_type": "llama", "eagle_ttt_steps": self.steps,
            "eagle_use_torch_compile": False, "eagle_architecture_config": architecture,
        }  # fmt: skip
        self.model = mtsp.convert(base, [("eagle", options)])
        self.model.train()
        own_weights(self.model)

    def pattern(self, inputs, *, cotangents=None, forced=None) -> tuple:
        features = {n: torch.tensor(inputs[n], dtype=self.dtype).requires_grad_(bool(cotangents)) for n in FEATURES}
        before = lambda x: np.concatenate([np.zeros_like(x[:, :1]), x], 1)  # noqa: E731
        target = torch.tensor(before(inputs["target_logits"]), dtype=self.dtype)
        hidden = torch.cat(list(features.values()), -1)
        hidden = torch.cat([hidden, torch.zeros_like(hidden[:, :1])], 1)  # of the last position, which has no slot
        tokens = torch.tensor(before(inputs["tokens"]), dtype=torch.long)
        real = inputs["documents"] >= 0 if "documents" in inputs else np.ones(inputs["tokens"].shape, bool)
        attention = torch.tensor(np.concatenate([real[:, :1], real], 1), dtype=torch.long)
        rows, losses = [], []
        step = self.model._eagle_loss

        def listening(*arguments):
            loss, accuracy = step(*arguments)
            losses.append(loss.detach().clone())  # the trainer weights it in place
            return loss, accuracy

        hook = self.model.eagle_module.lm_head.register_forward_hook(
            lambda _, args, output: rows.append(output.detach().clone())
        )
        try:
            with mock.patch.object(self.model, "_eagle_loss", listening):
                total = self.model(
                    input_ids=tokens, attention_mask=attention,
                    loss_mask=torch.tensor(before(inputs["mask"] & real)),
                    base_model_outputs={"base_model_hidden_states": hidden[..., : hidden.shape[-1] // 3],
                                        "aux_hidden_states": hidden, "base_model_logits": target},
                ).loss  # fmt: skip
        finally:
            hook.remove()
        slots = inputs["tokens"].shape[1]
        logits = [torch.full_like(x[:, :slots], torch.nan) for x in rows]
        for k, x in enumerate(rows):
            logits[k][:, : slots - k] = x[:, k:slots].detach()
        return pattern_answer(logits, losses, total, features, cotangents)


adapter = ModelOptUnroll()
padded = ModelOptUnroll(padding=True)
