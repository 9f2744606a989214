"""llmcompressor's copy of the Kimi K3 modelling code: ``KimiMLAAttention``, ``KimiMoEGate``, ``KimiSparseMoeBlock``.

Install: ``make matrix`` (in an environment of its own), or as the error below says.

``adapter`` runs the sparse block under ``moe_calibration_context``, whose dispatch ``moe_train`` has gradients;
``infer`` runs its default, ``moe_infer``, which is under ``no_grad``: outputs only. The experts compute without fake
quantisation, hence ``quantized`` False. The norms of the MLA latents keep the epsilon of ``KimiRMSNorm``, 1e-6, and the
router adds 1e-20 to its denominator: both are declared. The causal mask is the model's own (``create_causal_mask``); it
knows no documents.
"""

from importlib.metadata import version

try:
    import torch
    from llmcompressor.modeling.kimi_k3 import modeling_kimi_linear as k3
    from llmcompressor.modeling.kimi_k3.configuration_kimi_k3 import KimiLinearConfig
    from llmcompressor.modeling.moe.context import moe_calibration_context
except ImportError as error:
    raise ImportError(
        f"The adapter llmcompressor needs the package llmcompressor ({error}). Install it with: "
        "pip install torch==2.13.0 && pip install --no-deps -r requirements/matrix/llmcompressor.txt"
    ) from error

from ..torch_helper import TorchAdapter, stage
from ._kimi_k3 import POLICIES, by_module, heads_of

#: What K3's config.json says and the suite's sizes do not.
FIXED = {
    "hidden_act": "situ", "mla_use_nope": True, "mla_use_output_gate": True, "latent_moe_use_norm": True,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
}  # fmt: skip


class Infer(TorchAdapter):
    """The modules as a loaded model runs them."""

    name = "llmcompressor"
    version = version("llmcompressor")
    url = "https://github.com/vllm-project/llm-compressor"
    formats, policies = POLICIES["float32"], POLICIES
    choices = {"latent_norm_eps": 1e-6, "renormalize_epsilon": 1e-20}
    layouts = ["mtp"]

    def describe(self) -> dict:
        return {**super().describe(), "documents": False, "quantized": False}

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        super().start(config, choices, formats)
        self.config = KimiLinearConfig(**config, **FIXED)
        self.config._attn_implementation = "eager"

    @stage
    def situ_glu(self, t, forced):
        activation = k3.SituAndMul(self.config.activation_situ_beta, self.config.activation_situ_linear_beta)
        return {"y": activation(torch.cat([t["gate"], t["up"]], -1))}

    @stage
    def mla(self, t, forced):
        if t["step"] > 1:
            raise NotImplementedError("only step 1: KimiMLAAttention has no keys and values of earlier steps")
        attention = k3.KimiMLAAttention(self.config, layer_idx=0).to(self.dtype)
        mask = k3.create_causal_mask(
            config=self.config, inputs_embeds=t["x"], attention_mask=None, past_key_values=None,
            position_ids=torch.arange(t["x"].shape[1])[None],
        )  # fmt: skip
        with heads_of(attention) as seen:
            output = torch.func.functional_call(attention, by_module(t), (t["x"], mask))
        return {"output": output, **seen}

    @stage
    def route(self, t, forced):
        experts, weights = torch.func.functional_call(k3.KimiMoEGate(self.config), by_module(t, parts=1), (t["x"],))
        shape = (*t["x"].shape[:-1], -1)
        return {"weights": weights.reshape(shape)}, {"experts": experts.reshape(shape)}

    @stage
    def shared_experts(self, t, forced):
        width = self.config.num_shared_experts * self.config.moe_intermediate_size
        mlp = k3.KimiMLP(self.config, intermediate_size=width)
        return {"output": torch.func.functional_call(mlp, by_module(t), (t["x"],))}

    def moe(self, inputs, *, cotangents=None, forced=None):
        return self._moe(inputs)  # without gradients: they do not reach the experts

    @stage
    def _moe(self, t, forced):
        return self._block(t)

    def _block(self, t):
        block, seen = k3.KimiSparseMoeBlock(self.config), {}
        block.gate.register_forward_hook(lambda _, args, output: seen.update(experts=output[0]))
        parameters = {name.removeprefix("block_sparse_moe."): x for name, x in t.items() if name != "x"}
        output = torch.func.functional_call(block, parameters, (t["x"],))
        return {"output": output}, {"experts": seen["experts"].reshape(*t["x"].shape[:-1], -1)}


class LLMCompressor(Infer):
    """With gradients through the experts."""

    @stage
    def moe(self, t, forced):
        with moe_calibration_context():
            return self._block(t)


adapter = LLMCompressor()
infer = Infer()
