"""Adapter of ``fast``, this repository's PyTorch implementation. It has no privilege.

``adapter`` takes for the loss and the MX formats the backend that a user gets on this machine; ``eager`` and ``triton``
(on the CPU with TRITON_INTERPRET=1) are the other ones: --adapter conformance/adapters/fast.py:eager.
"""

from functools import wraps

import torch

from draftconf.fast import attention, backend, fusion, layer, loss, moe, mx, ops, sampling, unroll
from draftconf.reference.config import Choices, DraftConfig, frozen_parameters, parameter_shapes, trained_parameters

from ..checks.cases import make_parameters, unroll_cases
from ..torch_helper import DTYPES, TorchAdapter, Trace, gradients, input_tensors, require_gradients, stage, to_arrays

MOE = moe.MOE
POLICIES = {
    storage: {
        "storage": storage,
        "accumulate": wide,
        "router": wide,
        "logits": wide,
        "attention_output": wide,
    }
    for storage, wide in (("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"))
}


def frozen(self) -> set[str]:
    return frozen_parameters(self.options)


def in_its_backend(cls):
    """Every method that the suite calls runs in ``self.backend``."""

    def wrapped(method):
        @wraps(method)
        def call(self, *args, **kwargs):
            with backend.using(self.backend):
                return method(self, *args, **kwargs)

        return call

    for name, method in list(vars(cls).items()):
        if callable(method) and not name.startswith("_") and name != "start":
            setattr(cls, name, wrapped(method))
    return cls


@in_its_backend
class FastAdapter(TorchAdapter):
    name = "fast"
    version = f"torch {torch.__version__}"
    url = ""
    formats = POLICIES["float32"]
    policies = POLICIES

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        super().start(config, choices, formats)
        self.config, self.options = DraftConfig(**config), Choices.from_dict(choices)
        self.options.check(self.config)

    def describe(self) -> dict:
        choices = Choices.from_dict({**self.choices, "draft_input": "eagle3"})
        weights = choices.weights(DraftConfig.tiny().num_steps)
        pattern = {"loss": "lk", "step_weights": weights, "denominator": choices.reduction, "documents": True}
        return super().describe() | {"pattern": pattern}

    def __init__(self, backend: str = "auto"):
        self.config, self.options, self.backend = DraftConfig.tiny(), Choices(), backend
        if backend != "auto":
            self.name = f"fast, {backend}"

    @property
    def wide(self) -> torch.dtype:
        return ops.wide(self.dtype)

    @property
    def mxfp8_format(self) -> str:
        return "mxfp8_" + self.options.mxfp8_element

    @stage(kept=("target_logits",))
    def align(self, t, forced):
        return unroll.align(t, self.config.num_steps, self.options.mask_alignment)

    # MX

    def _quantize(self, x, format: str) -> dict:
        scales, codes = mx.quantize(x, format, self.options.mx_scale_rule)
        return {"scales": scales, "codes": codes}

    def _decode(self, t, format: str) -> dict:
        packed = "packed" in t
        codes = t["packed" if packed else "codes"]
        return {"values": mx.dequantize(t["scales"], codes, format, self.wide, packed=packed)}

    def _fake(self, x, format: str) -> dict:
        choices = self.options
        return {"y": mx.fake_quantize(x, format, choices.mx_scale_rule, choices.quantize_source, choices.ste)}

    mxfp4 = stage(lambda self, t, forced: self._quantize(t["x"], "mxfp4"))
    mxfp8 = stage(lambda self, t, forced: self._quantize(t["x"], self.mxfp8_format))
    mxfp4_decode = stage(lambda self, t, forced: self._decode(t, "mxfp4"))
    mxfp8_decode = stage(lambda self, t, forced: self._decode(t, self.mxfp8_format))
    fake_mxfp4 = stage(lambda self, t, forced: self._fake(t["x"], "mxfp4"))
    fake_mxfp8 = stage(lambda self, t, forced: self._fake(t["x"], self.mxfp8_format))

    # Stages

    @stage
    def fusion(self, t, forced):
        return {"feature": fusion.fusion(t["low"], t["mid"], t["high"], t, self.config, self.options)}

    def _zero(self, t):
        """Embeddings to be zeroed, where the choice asks for it and this is known to be step 1."""
        if self.options.zero_first_embedding and t.get("step") == 1:
            return fusion.first_slots(t["tokens"], t.get("documents"))
        return None

    @stage(frozen=frozen)
    def draft_input(self, t, forced):
        embedding = fusion.embed(t["tokens"], t["embed_tokens.weight"], self._zero(t))
        return {"x": fusion.draft_input(embedding, t["feature"], t, self.config, self.options)}

    @stage
    def situ_glu(self, t, forced):
        beta, linear_beta = self.config.activation_situ_beta, self.config.activation_situ_linear_beta
        return {"y": ops.situ_glu(t["gate"], t["up"], beta, linear_beta)}

    @stage
    def attention(self, t, forced):
        return {"output": attention.attention(t["query"], t["keys"], t["values"], t.get("documents"))}

    @stage(frozen=frozen)
    def mla(self, t, forced):
        gated, key, value = attention.mla(t["x"], t, self.config, self.options, *self._earlier(t), t.get("documents"))
        return {"output": ops.linear(gated, t["self_attn.o_proj.weight"]), "key": key, "value": value}

    def _earlier(self, t) -> tuple:
        """Earlier steps' keys and values, empty when absent."""
        return tuple(() if t.get(name) is None else tuple(t[name].unbind(0)) for name in ("keys", "values"))

    @stage(frozen=("gate.e_score_correction_bias",))
    def route(self, t, forced):
        scores = moe.router_scores(t["x"], t["gate.weight"])
        bias = t["gate.e_score_correction_bias"]
        weights, experts = moe.route(scores, bias, self.config, self.options, forced.get("experts"))
        return {"weights": weights}, {"experts": experts}

    @stage(frozen=frozen)
    def moe(self, t, forced):
        seen = {}
        pinned = forced.get("experts")
        output = moe.moe(t["x"], t, self.config, self.options, experts=pinned, record=_keep_in(seen))
        return {"output": output.to(t["x"].dtype)}, self._moe_decisions(seen)

    def _moe_decisions(self, seen: dict) -> dict:
        """Expert ids, and the MX codes of the two quantised activations, by the choices' own rule and source."""
        decisions = {"experts": seen["experts"]}
        sources = {"mx_input": seen["latent_down"]}
        if self.options.quantize_hidden:
            sources["mx_hidden"] = seen.get("expert_weighted", seen["expert_hidden"])
        for name, x in sources.items():
            x = x.bfloat16() if self.options.quantize_source == "bfloat16" else x
            scales, codes = mx.quantize(x.detach(), self.mxfp8_format, self.options.mx_scale_rule)
            decisions |= {f"{name}.scales": scales, f"{name}.codes": codes}
        return decisions

    @stage
    def shared_experts(self, t, forced):
        return {"output": moe.shared_experts(t["x"], t, self.config)}

    @stage
    def dense_mlp(self, t, forced):
        return {"output": moe.dense_mlp(t["x"], t, self.config)}

    @stage(frozen=frozen)
    def draft_layer(self, t, forced):
        seen = {}
        feature, key, value = layer.draft_layer(
            t["feature"], t["tokens"], t, self.config, self.options, *self._earlier(t), t.get("documents"),
            experts=forced.get("experts"), zero=self._zero(t), record=_keep_in(seen),
        )  # fmt: skip
        decisions = self._moe_decisions(seen) if "experts" in seen else {}
        return {"feature": feature, "key": key, "value": value}, decisions

    @stage(frozen=frozen)
    def head(self, t, forced):
        return {"logits": layer.head(t["feature"], t, self.config)}

    @stage(frozen=("target_logits",), kept=("draft_logits", "target_logits"))
    def lk_loss(self, t, forced):
        draft, target = t["draft_logits"], t["target_logits"]
        reduced = t.get("draft_to_target"), self.options.reduced_target
        return {"loss": loss.lk_loss(draft, target, *reduced)}, {"below": loss.below(draft, target, *reduced)}

    # The whole step

    def unroll(self, inputs, *, cotangents=None, forced=None):
        """total_loss, step_losses and slot_losses; with cotangents also parameter gradients; always a trace."""
        tensors = input_tensors(inputs, self.dtype, self.device, kept=("target_logits",))
        leaves = {}
        if cotangents:
            trained = trained_parameters(self.config, self.options)
            leaves = require_gradients({name: tensors[name] for name in trained})
        forced = input_tensors(forced or {}, self.dtype, self.device)
        trace = Trace()
        result = unroll.unroll(self._parameters(tensors), tensors, self.config, self.options, trace.record, forced)
        outputs = {name: result[name] for name in ("total_loss", "step_losses", "slot_losses")}
        grads = gradients(outputs, leaves, cotangents) if cotangents else {}
        return to_arrays(outputs), to_arrays(grads), to_arrays(trace.decisions), trace.arrays(bool(cotangents))

    def _parameters(self, t) -> dict:
        names = parameter_shapes(self.config, self.options)
        return {name: x for name, x in t.items() if name in names}

    @stage(kept=("target_logits",), frozen=("target_logits",))
    def pattern(self, t, forced):
        """The step on parameters of its own: those of the suite's tame case."""
        storage = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        params = make_parameters(unroll_cases(self.config)[0], self.options, storage, 0)
        params = {name: torch.tensor(x, dtype=self.dtype) for name, x in params.items()}
        seen = {}
        result = unroll.unroll(params, t, self.config, self.options, _keep_in(seen))
        logits = torch.stack([seen[f"{k}/logits"] for k in range(1, self.config.num_steps + 1)])
        return {"logits": logits, "step_losses": result["step_losses"], "total_loss": result["total_loss"]}

    @stage
    def draft_sequence(self, t, forced):
        return unroll.draft_sequence(self._parameters(t), t, self.config, self.options)

    @stage(kept=("p", "q", "draw"))
    def speculative_sample(self, t, forced):
        token, accepted, residual = sampling.speculative_sample(t["p"], t["q"], t["draw"])
        return {"token": token, "accepted": accepted, "residual": residual}


def _keep_in(seen: dict):
    """A recorder that only notes what passes."""
    return lambda name, x: seen.setdefault(name, x)


adapter = FastAdapter()
eager = FastAdapter("eager")
triton = FastAdapter("triton")
