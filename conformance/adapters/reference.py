"""The oracle itself as an adapter, in float64: the suite must pass its own reference.

Stage methods run the rows of the stage table forward and backward on plain arrays, without bounds.
"""

import numpy as np

from draftconf import __version__
from draftconf.reference import mx, sampling, unroll
from draftconf.reference.config import Choices, DraftConfig, expert_of, frozen_parameters, parameter_shapes
from draftconf.reference.formats import round_to
from draftconf.reference.graph import backward, forward
from draftconf.reference.layer import graph, stacked_experts

from ..checks.cases import make_parameters, unroll_cases
from ..checks.losses import loss_row
from ..checks.stages import STAGES, STEP, Stage, row_of
from ..protocol.losses import LOSSES

PER_STEP = {"logits": "logits", "step_losses": "step_loss"}  # outputs of pattern by the stage that they are


class Reference:
    """``losses``: what it declares as ``describe()["losses"]``; every loss, slot by slot, if left out."""

    protocol = 1
    losses = {name: {} for name in LOSSES}

    def __init__(self, losses: dict | None = None):
        self.losses = self.losses if losses is None else losses

    def describe(self) -> dict:
        return {
            "name": "reference",
            "version": __version__,
            "url": "",
            "formats": {"storage": "float64"},
            "layouts": ["mtp", "eagle3"],
            "pattern": {"loss": "lk", "step_weights": [1 / 7] * 7, "denominator": "supervised", "documents": True},
            "losses": self.losses,
        }

    def start(self, config: dict, choices: dict) -> None:
        self.config, self.choices = DraftConfig(**config), Choices.from_dict(choices)

    @property
    def fp8(self) -> str:
        return f"mxfp8_{self.choices.mxfp8_element}"

    def align(self, inputs, *, cotangents=None, forced=None):
        return unroll.align(dict(inputs), self.config, self.choices)

    def mxfp4(self, inputs, *, cotangents=None, forced=None):
        return self._quantize(inputs["x"], "mxfp4")

    def mxfp8(self, inputs, *, cotangents=None, forced=None):
        return self._quantize(inputs["x"], self.fp8)

    def _quantize(self, x, form: str) -> dict:
        x = round_to(x, "bfloat16") if self.choices.quantize_source == "bfloat16" else x
        return dict(zip(("scales", "codes"), mx.quantize(x, form, self.choices.mx_scale_rule), strict=True))

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None):
        codes = mx.unpack(inputs["packed"]) if "packed" in inputs else inputs["codes"]
        return {"values": mx.dequantize(inputs["scales"], codes, "mxfp4")}

    def mxfp8_decode(self, inputs, *, cotangents=None, forced=None):
        return {"values": mx.dequantize(inputs["scales"], inputs["codes"], self.fp8)}

    def fake_mxfp4(self, inputs, *, cotangents=None, forced=None):
        return self._fake(inputs["x"], "mxfp4", cotangents)

    def fake_mxfp8(self, inputs, *, cotangents=None, forced=None):
        return self._fake(inputs["x"], self.fp8, cotangents)

    def _fake(self, x, form: str, cotangents):
        c = self.choices
        op = mx.straight_through(form, c.mx_scale_rule, c.quantize_source, c.ste)
        y = op.forward(x)
        return {"y": y}, {"x": op.backward(x, y, cotangents["y"])[0]} if cotangents else {}

    def unroll(self, inputs, *, cotangents=None, forced=None):
        params = {name: inputs[name] for name in parameter_shapes(self.config, self.choices)}
        data = {name: x for name, x in inputs.items() if name not in params}
        pins = {(int(k.split("/")[0]), k.split("/")[1]): v for k, v in (forced or {}).items()}
        result = unroll.unroll(params, data, self.config, self.choices, gradients=bool(cotangents), forced=pins)
        outputs = {name: getattr(result, name) for name in ("total_loss", "step_losses", "slot_losses")}
        return outputs, result.grads, result.decisions, result.trace

    def pattern(self, inputs, *, cotangents=None, forced=None):
        params = make_parameters(unroll_cases(self.config)[0], self.choices, "float64", 0)
        values = unroll.stacked_parameters(params, self.config, self.choices)
        values |= unroll.step_inputs(inputs, self.config, self.choices)
        nodes, d = graph(self.config, self.choices), {(0, "total_loss"): np.ones(())}
        forward(nodes, values)
        if cotangents:
            backward(nodes, values, d)
        steps = range(1, self.config.num_steps + 1)
        outputs = {name: np.stack([values[(k, key)] for k in steps]) for name, key in PER_STEP.items()}
        outputs["total_loss"] = values[(0, "total_loss")]
        return outputs, {name: d[name] for name in unroll.FEATURES if name in d}

    def draft_sequence(self, inputs, *, cotangents=None, forced=None):
        params = {name: inputs[name] for name in parameter_shapes(self.config, self.choices)}
        logits, features = unroll.draft_sequence(params, dict(inputs), self.config, self.choices)
        return {"logits": logits, "features": features}

    def speculative_sample(self, inputs, *, cotangents=None, forced=None):
        return sampling.speculative_sample(inputs["p"], inputs["q"], inputs["draw"])._asdict()

    def _stage(self, stage: Stage, inputs, cotangents, forced):
        """A row of the table: its nodes forward, and backward from the cotangents of its outputs."""
        nodes, values = stage.nodes(self.config, self.choices), self._values(stage, inputs)
        values |= {stage.decisions[name]: x for name, x in (forced or {}).items() if name in stage.decisions}
        forward(nodes, values)
        outputs = {name: values[key] for name, key in stage.outputs.items()}
        d = {stage.outputs[name]: x for name, x in (cotangents or {}).items()}
        backward(nodes, values, d)
        return outputs, self._gradients(stage, inputs, d) if cotangents else {}, self._decisions(stage, values)

    def _values(self, stage: Stage, inputs) -> dict:
        values = {"draft_to_target": None} | {stage.inputs.get(name, name): x for name, x in inputs.items()}
        for long, short in stage.renamed.items():
            values |= {name.replace(short, long, 1): x for name, x in inputs.items() if name.startswith(short)}
        return values | stacked_experts(inputs, self.config.num_experts)

    def _gradients(self, stage: Stage, inputs, d: dict) -> dict:
        grads, frozen = {}, frozen_parameters(self.choices)
        for name in inputs:
            long = next((n + name[len(s) :] for n, s in stage.renamed.items() if name.startswith(s)), name)
            key, expert = expert_of(long) or (stage.inputs.get(name, long), ...)
            if key in d and long not in frozen:
                grads[name] = d[key][expert]
        return grads

    def _decisions(self, stage: Stage, values: dict) -> dict:
        decisions = {}
        for name, key in stage.decisions.items():
            if name.startswith("mx_") and key in values:
                source = "latent_down" if name == "mx_input" else "expert_hidden"
                quantized = self._quantize(values[(key[0], source)], self.fp8)
                decisions |= {f"{name}.{part}": x for part, x in quantized.items()}
            elif key in values:
                decisions[name] = values[key]
        return decisions


def _method(stage: Stage):
    def method(self, inputs, *, cotangents=None, forced=None):
        row = row_of(stage.name, int(inputs.get("step", STEP)))
        return self._stage(row, inputs, cotangents, forced)

    method.__name__, method.__doc__ = stage.name, stage.equation
    return method


def _loss(name: str):
    def method(self, inputs, *, cotangents=None, forced=None):
        return self._stage(loss_row(name, self.losses), inputs, cotangents, forced)

    method.__name__, (method.__doc__, _) = name, LOSSES[name]
    return method


for _row in STAGES:
    setattr(Reference, _row.name, _method(_row))
for _name in LOSSES:
    setattr(Reference, _name, _loss(_name))

adapter = Reference()
