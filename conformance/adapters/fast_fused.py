"""Adapter of the fused path of ``fast``: fused modules, head and loss after the unroll. It has no privilege.

Only the boundaries that exist are recorded: the walk composes the stages inside the experts, the head and the loss.
"""

from draftconf.fast import fused, fusion, merged_attention, mx, pointwise
from draftconf.fast.ops import keep
from draftconf.reference.config import trained_parameters

from ..torch_helper import Trace, gradients, input_tensors, require_gradients, stage, to_arrays
from .fast import MOE, POLICIES, FastAdapter, _keep_in, frozen

BFLOAT16 = dict.fromkeys(("logits", "attention_output", "attention_scores", "attention_probabilities"), "bfloat16")


class FastFusedAdapter(FastAdapter):
    name = "fast, fused"
    policies = POLICIES | {"bfloat16-storage": POLICIES["bfloat16"] | BFLOAT16}
    recompute = "none"

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        super().start(config, choices, formats)
        formats = formats or self.formats
        precision = "storage" if formats["logits"] == "bfloat16" else "wide"
        self.plan = fused.Plan(self.recompute, attention=precision, logits=precision)

    def __init__(self):
        super().__init__()
        self.plan = fused.Plan(self.recompute)

    def _layer(self, t) -> fused.Layer:
        """A layer of those parameters that this method was given."""
        return fused.Layer(self._parameters(t), self.config, self.options, self.plan)

    @stage
    def fusion(self, t, forced):
        return {"feature": self._layer(t).fusion(t["low"], t["mid"], t["high"])}

    @stage(frozen=frozen)
    def draft_input(self, t, forced):
        embedding = fusion.embed(t["tokens"], t["embed_tokens.weight"], self._zero(t))
        return {"x": self._layer(t).draft_input(embedding, t["feature"])}

    @stage
    def situ_glu(self, t, forced):
        beta, linear_beta = self.config.activation_situ_beta, self.config.activation_situ_linear_beta
        return {"y": pointwise.situ_glu(t["gate"], t["up"], beta, linear_beta)}

    @stage
    def attention(self, t, forced):
        dtype = self.dtype if self.plan.attention == "storage" else self.wide
        keys, values = t["keys"].unbind(0), t["values"].unbind(0)
        return {"output": merged_attention.attention(t["query"], keys, values, t.get("documents"), dtype)}

    @stage(frozen=frozen)
    def mla(self, t, forced):
        layer, (keys, values) = self._layer(t), self._earlier(t)
        gated, key, value = layer.mla(t["x"], t.get("documents"), keep, *keys, *values)
        return {"output": layer.linear("self_attn.o_proj", gated), "key": key, "value": value}

    @stage(frozen=frozen)
    def moe(self, t, forced):
        seen = {}
        output = self._layer(t).moe(t["x"], forced.get("experts"), _keep_in(seen))
        return {"output": output}, self._moe_decisions(seen)

    def _moe_decisions(self, seen: dict) -> dict:
        """Expert ids, and the MX codes of the latent; those of the hidden stay inside the experts."""
        x, choices = seen["latent_down"].detach(), self.options
        x = x.bfloat16() if choices.quantize_source == "bfloat16" else x
        scales, codes = mx.quantize(x, self.mxfp8_format, choices.mx_scale_rule)
        return {"experts": seen["experts"], "mx_input.scales": scales, "mx_input.codes": codes}

    @stage
    def shared_experts(self, t, forced):
        return {"output": self._layer(t).mlp(t["x"], MOE + "shared_experts.", "shared_experts")}

    @stage
    def dense_mlp(self, t, forced):
        return {"output": self._layer(t).mlp(t["x"], "mlp.", "dense_mlp")}

    @stage(frozen=frozen)
    def draft_layer(self, t, forced):
        seen, (keys, values) = {}, self._earlier(t)
        embedding = fusion.embed(t["tokens"], t["embed_tokens.weight"], self._zero(t))
        feature, key, value = self._layer(t).step(
            t["feature"], embedding, t.get("documents"), forced.get("experts"), _keep_in(seen), *keys, *values
        )
        decisions = self._moe_decisions(seen) if "experts" in seen else {}
        return {"feature": feature, "key": key, "value": value}, decisions

    def unroll(self, inputs, *, cotangents=None, forced=None):
        """total_loss, step_losses and slot_losses; with cotangents also parameter gradients; always a trace."""
        tensors = input_tensors(inputs, self.dtype, self.device, kept=("target_logits",))
        trained = trained_parameters(self.config, self.options)
        leaves = require_gradients({name: tensors[name] for name in trained}) if cotangents else {}
        forced = input_tensors(forced or {}, self.dtype, self.device)
        trace, params = Trace(), self._parameters(tensors)
        result = fused.unroll(params, tensors, self.config, self.options, trace.record, forced, plan=self.plan)
        outputs = {name: result[name] for name in ("total_loss", "step_losses", "slot_losses")}
        grads = gradients(outputs, leaves, cotangents) if cotangents else {}
        return to_arrays(outputs), to_arrays(grads), to_arrays(trace.decisions), trace.arrays(bool(cotangents))


adapter = FastFusedAdapter()
