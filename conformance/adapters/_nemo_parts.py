"""NeMo AutoModel's Kimi K3 modules that its draft and its backbone are both built of."""

from importlib.metadata import version

try:
    import torch
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.kimi_k3 import model as k3
    from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig
    from nemo_automodel.components.models.kimi_k3.state_dict_adapter import dequantize_mxfp4
    from nemo_automodel.components.speculative.eagle import core, draft_deepseek, draft_kimi_k3
except ImportError as error:
    raise ImportError(
        f"The adapter nemo_automodel needs the package nemo-automodel ({error}). Install it with `make peers` and add "
        "`--adapter-python .venv-peers`, or: pip install torch==2.13.0 && "
        "pip install --no-deps -r requirements/peers.txt"
    ) from error

from ..torch_helper import TorchAdapter, stage
from ._kimi_k3 import POLICIES, by_module
from ._mx_pairs import packed_of

__all__ = ["Parts", "core", "draft_deepseek", "draft_kimi_k3", "k3", "refuse"]


class Parts(TorchAdapter):
    """Stages that the draft and the backbone have in common."""

    name = "nemo_automodel"
    version = version("nemo-automodel")
    url = "https://github.com/NVIDIA-NeMo/Automodel"
    formats, policies = POLICIES["float32"], POLICIES

    def describe(self) -> dict:
        return {**super().describe(), "documents": True, "quantized": False}

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        super().start(config, choices, formats)
        self.sizes, self.config = config, KimiK3TextConfig(**config)
        self.backend = BackendConfig(
            attn="eager", linear="torch", rms_norm="torch", experts="torch", dispatcher="torch"
        )

    @stage
    def situ_glu(self, t, forced):
        activation = k3.SituAndMul(self.config.activation_situ_beta, self.config.activation_situ_linear_beta)
        return {"y": activation(torch.cat([t["gate"], t["up"]], -1))}

    @stage
    def dense_mlp(self, t, forced):
        return self._mlp(self.config.intermediate_size, t)

    @stage
    def shared_experts(self, t, forced):
        return self._mlp(self.config.num_shared_experts * self.config.moe_intermediate_size, t)

    def _mlp(self, width: int, t) -> dict:
        mlp = k3.KimiK3MLP(self.config, intermediate_size=width)
        return {"output": torch.func.functional_call(mlp, by_module(t), (t["x"],))}

    @stage
    def route(self, t, forced):
        refuse(forced)
        x = t["x"]
        rows = x.reshape(-1, x.shape[-1])
        weights, ids, _ = torch.func.functional_call(self._moe(0).gate, by_module(t, parts=1), (rows, None))
        shape = (*x.shape[:-1], -1)
        return {"weights": weights.reshape(shape)}, {"experts": ids.reshape(shape)}

    @stage
    def moe(self, t, forced):
        refuse(forced)
        shared = any("shared_experts" in name for name in t)
        moe, seen = self._moe(self.config.num_shared_experts if shared else 0), {}
        moe.gate.register_forward_hook(lambda _, args, output: seen.update(experts=output[1]))
        output = torch.func.functional_call(moe, stacked_experts(t), (t["x"],))
        return {"output": output}, {"experts": seen["experts"].reshape(*t["x"].shape[:-1], -1)}

    def _moe(self, num_shared_experts: int):
        config = KimiK3TextConfig(**{**self.sizes, "num_shared_experts": num_shared_experts})
        return k3.KimiK3MoE(config, k3._build_moe_config(config, self.dtype, None), self.backend)

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        packed = packed_of(inputs)
        rows = [torch.tensor(codes.reshape(-1, codes.shape[-1])) for codes in (packed, inputs["scales"])]
        values = dequantize_mxfp4(*rows, self.dtype).float().numpy()
        return {"values": values.reshape(*packed.shape[:-1], -1)}


def stacked_experts(t: dict) -> dict:
    """The sparse block's parameters in its own layout: [E, in, gate then up] and [E, in, out]."""
    plain = {name.removeprefix("block_sparse_moe."): x for name, x in t.items() if "." in name}
    count = sum(name.endswith(".w1.weight") for name in plain)
    w1, w2, w3 = ([plain.pop(f"experts.{e}.{w}.weight").T for e in range(count)] for w in ("w1", "w2", "w3"))
    gate_up = torch.stack([torch.cat(pair, -1) for pair in zip(w1, w3, strict=True)])
    return plain | {"experts.gate_and_up_projs": gate_up, "experts.down_projs": torch.stack(w2)}


def refuse(forced) -> None:
    if forced:
        raise NotImplementedError(f"decisions cannot be pinned: {', '.join(forced)}")
