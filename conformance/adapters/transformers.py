"""transformers: Kimi Linear's router, gpt-oss' MXFP4 decoding, and the sampling of assisted generation.

Install: ``make matrix`` (in an environment of its own), or as the error below says.

``KimiLinearTopkRouter`` adds 1e-20 to its denominator, which is declared. ``KimiLinearAttention`` has no output gate,
so it is not K3's and not offered. ``_speculative_sampling`` takes logits, hence ``sampled_from``; random numbers as
_uniforms.py says.
"""

import numpy as np

try:
    import torch
    import transformers
    from transformers.generation.utils import _speculative_sampling
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearTopkRouter
except ImportError as error:
    raise ImportError(
        f"The adapter transformers needs the package transformers ({error}). Install it with: "
        "pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/transformers.txt"
    ) from error

from ..torch_helper import TorchAdapter, stage
from ._kimi_k3 import by_module
from ._mx_pairs import packed_of
from ._uniforms import logarithm, sample


class Transformers(TorchAdapter):
    name = "transformers"
    version = transformers.__version__
    url = "https://github.com/huggingface/transformers"
    policies = {
        name: {"storage": name, "accumulate": "float32", "router": "float32"} for name in ("float32", "bfloat16")
    }
    formats = policies["float32"]
    choices = {"renormalize_epsilon": 1e-20}
    layouts = ["mtp"]

    def describe(self) -> dict:
        return {**super().describe(), "sampled_from": "logits"}

    @stage
    def route(self, t, forced):
        sizes = {name: self.run_config[name] for name in ("hidden_size", "routed_scaling_factor")}
        experts = {"num_local_experts": self.run_config["num_experts"], "n_group": 1, "topk_group": 1}
        chosen = {"num_experts_per_tok": self.run_config["num_experts_per_token"], "norm_topk_prob": True}
        router = KimiLinearTopkRouter(transformers.KimiLinearConfig(**sizes, **experts, **chosen))
        _, weights, ids = torch.func.functional_call(router, by_module(t, parts=1), (t["x"],))
        shape = (*t["x"].shape[:-1], -1)
        return {"weights": weights.reshape(shape)}, {"experts": ids.reshape(shape)}

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        packed = packed_of(inputs)
        blocks = torch.tensor(packed).reshape(1, -1, inputs["scales"].shape[-1], 16)
        scales = torch.tensor(inputs["scales"]).reshape(1, -1, inputs["scales"].shape[-1])
        values = convert_moe_packed_tensors(blocks, scales, dtype=self.dtype)[0].T  # [rows, elements]
        return {"values": values.float().numpy().reshape(*packed.shape[:-1], -1)}

    def speculative_sample(self, inputs, *, cotangents=None, forced=None) -> dict:
        return sample({**inputs, "p": np.float32(inputs["p"]), "q": np.float32(inputs["q"])}, self.verify)

    def verify(self, p, q, token) -> tuple:
        log_p, log_q = logarithm(p)[None, None], logarithm(q)[None, None]
        emitted, matches = _speculative_sampling(torch.tensor([[token]]), log_q, 1, log_p.expand(1, 2, -1))
        return emitted[0, 0], matches == 1


adapter = Transformers()
