"""The trace walk: the oracle walks along an implementation's own recorded numbers.

For every step and stage it takes what the implementation says it consumed, computes the stage in float64 with its error
bound, and compares with what the implementation says it produced. No error compounds and no flipped decision spreads,
so the bounds are as tight at step 7 as at step 1, and the first edge out of bound, in data order, is the faulty one.
Backward the same: the cotangent of a boundary must be the sum of its consumers' vector-Jacobian products, a parameter's
gradient the sum over the steps. A boundary that is not recorded is composed over, with its error.
"""

from dataclasses import dataclass, field

import numpy as np

from draftconf.reference import mx
from draftconf.reference.bounds import arithmetic
from draftconf.reference.config import Choices, DraftConfig, expert_of, trained_parameters
from draftconf.reference.formats import round_to, store
from draftconf.reference.graph import Key, Node, contributions
from draftconf.reference.layer import graph
from draftconf.reference.running_error import Running, exact, lifted
from draftconf.reference.unroll import outside_document, parameter_gradients, stacked_parameters, step_inputs

from ..judging.bias import Bias
from ..judging.compare import Comparison, Mismatch, compare
from ..judging.decisions import Decisions, Illegal, illegal_experts, illegal_token, judge_experts, near_best
from ..judging.operands import listed, of_block, of_node, of_sum

DECISION_STAGES = ("experts", "tokens")
RESIDUAL_SUMS = ("attn_output", "layer_output")
NEARLY_ALL = 0.9  # of a difference's square: then it is a multiple of a contribution; only a choice of words
INTERNAL_STAGES = ("target_log_probs", "step_loss", "expert_weighted")  # values that no implementation hands over


def is_boundary(key: Key) -> bool:
    """Whether a value can be recorded: the trace keys of the protocol."""
    return key[0] > 0 and key[1] not in INTERNAL_STAGES


@dataclass
class Edge:
    """The verdict on one boundary at one step: ``quantity`` is value, cotangent, gradient or decision."""

    quantity: str
    step: int
    stage: str
    position: int  # of the node in data order
    comparison: Comparison | None = None
    fault: str = ""  # a structural fault, in a sentence
    hidden: tuple[str, ...] = ()  # boundaries composed over on the way here
    blame: tuple[int, str] | None = None  # backward: the step and stage whose vector-Jacobian product is wrong
    why: str = ""  # how that was found
    decisions: Decisions | None = None
    illegal: Illegal | None = None  # the first of them that rounding does not allow
    operands: list = field(default_factory=list)  # of the worst element, where it is a fault

    @property
    def ok(self) -> bool:
        legal = self.decisions is None or self.decisions.illegal == 0
        return not self.fault and legal and (self.comparison is None or self.comparison.ok)


@dataclass
class Walk:
    """Everything one walk found. ``bias`` pools each stage and quantity over the steps."""

    edges: list[Edge] = field(default_factory=list)
    bias: dict[tuple[str, str], Bias] = field(default_factory=dict)
    #: (quantity, step, stage): actual, expected, point, valid
    compared: dict[tuple, tuple] = field(default_factory=dict)
    values: dict = field(default_factory=dict)  # by graph key: what was recorded, else what follows from it

    def of(self, stage: str, quantity: str) -> list[Edge]:
        return [e for e in self.edges if e.stage == stage and e.quantity == quantity]


class Walker:
    """One walk over one recorded run. ``trace`` and ``decisions`` are keyed as the adapter protocol says."""

    def __init__(self, params, inputs, config: DraftConfig, choices: Choices, formats: dict, trace, decisions):
        self.config, self.choices, self.formats = config, choices, formats
        self.trace, self.decisions = trace, decisions
        self.params, self.nodes = params, graph(config, choices)
        self.values = lifted(stacked_parameters(params, config, choices) | step_inputs(inputs, config, choices))
        documents = inputs.get("documents")
        self.valid = np.ones(inputs["tokens"].shape, bool) if documents is None else documents >= 0
        steps = range(1, config.num_steps + 1)
        self.inside = {k: ~outside_document(documents, k, self.valid.shape) for k in steps}
        self.hidden: dict[Key, tuple[str, ...]] = {}
        self.detached: dict[Key, list] = {}  # products that must not flow, to recognise one that does
        self.walk = Walk()

    def run(self, grads: dict | None) -> Walk:
        with arithmetic(self.formats):
            for position, node in enumerate(self.nodes):
                self.step_forward(position, node)
            self.walk.values = self.values
            if grads is not None:
                self.run_backward(grads)
        return self.walk

    # Forward.
    def recorded(self, key: Key, suffix: str = "") -> np.ndarray | None:
        value = self.trace.get(f"{key[0]}/{key[1]}{suffix}")
        return None if value is None else np.asarray(value)

    def clean(self, value: np.ndarray) -> np.ndarray:
        """float64, with padding slots zeroed: what they hold is nobody's business. Parameters have no slots."""
        value = np.asarray(value, np.float64)
        if value.shape[:2] != self.valid.shape:
            return value
        return np.where(self.valid.reshape(self.valid.shape + (1,) * (value.ndim - 2)), value, 0.0)

    def compared_slots(self, key: Key) -> np.ndarray:
        """Slots whose value means something: their position j + k lies in their document; for the loss, supervised.

        What the others compute reaches no loss and no gradient: their cotangent must be zero, their value may be
        anything.
        """
        step, stage = key
        return self.values[(step, "supervised")] if stage == "lk_loss" else self.inside[step]

    def step_forward(self, position: int, node: Node) -> None:
        stage = node.key[1]
        if stage in DECISION_STAGES:
            self.values[node.key] = self.decide(position, node)
            return
        expected = node.op.forward(*(self.values[key] for key in node.inputs))
        spans = tuple(dict.fromkeys(name for key in node.inputs for name in self.hidden.get(key, ())))
        actual = self.recorded(node.key)
        if actual is None or not is_boundary(node.key):
            self.values[node.key] = store(expected, node.key)
            self.hidden[node.key] = (*spans, stage) if is_boundary(node.key) else spans
            return
        edge = self.judge("value", position, node.key, actual, exact(expected), self.compared_slots(node.key))
        edge.hidden = spans
        if not edge.ok and edge.comparison:
            edge.operands = listed(self.operands, node, edge.comparison.index)
        usable = not edge.fault and np.isfinite(self.clean(actual)).all()
        self.values[node.key] = Running(self.clean(actual)) if usable else store(expected, node.key)

    def operands(self, node: Node, index: tuple) -> list[dict]:
        """What a stage made the element of: as recorded, or as it follows from what was."""
        if node.key[1] in ("mx_input", "mx_hidden"):
            form = f"mxfp8_{self.choices.mxfp8_element}"
            x = exact(self.values[node.inputs[0]]).value
            x = round_to(x, "bfloat16") if self.choices.quantize_source == "bfloat16" else x
            return of_block(x, mx.quantize(x, form, self.choices.mx_scale_rule)[0], index)
        return of_node(node, self.values, index)

    def judge(self, quantity: str, position: int, key: Key, actual, expected: Running, valid) -> Edge:
        """Compare one recorded array and note the verdict."""
        edge = Edge(quantity, key[0], key[1], position)
        point = key if quantity != "gradient" else "gradient"
        self.walk.compared[(quantity, *key)] = (actual, expected, point, valid)
        try:
            edge.comparison = compare(f"{key[0]}/{key[1]}", actual, expected, point, self.formats, valid)
            if quantity != "gradient" and expected.ndim > 0:
                pool = self.walk.bias.setdefault((key[1], quantity), Bias.empty())
                pool.add(np.asarray(actual, np.float64), expected, point, self.formats, valid)
        except Mismatch as mismatch:
            edge.fault = str(mismatch)
        self.walk.edges.append(edge)
        return edge

    def decide(self, position: int, node: Node) -> np.ndarray:
        """A decision: the implementation's own where it is legal, else (or where none is recorded) the oracle's."""
        step, stage = node.key
        ours = node.op.forward(*(self.values[key] for key in node.inputs))
        theirs = self.decisions.get(f"{step}/{stage}")
        if theirs is None:
            return ours
        edge = Edge("decision", step, stage, position, decisions=Decisions())
        self.walk.edges.append(edge)
        try:
            flipped, legal = self.judged(node, np.asarray(theirs), ours)
        except Mismatch as mismatch:
            edge.fault = str(mismatch)
            return ours
        slots = self.compared_slots(node.key)
        edge.decisions.add(flipped[slots], legal[slots])
        if edge.decisions.illegal:
            edge.illegal = self.illegal(node, np.asarray(theirs), legal | ~slots)
        keep = legal.reshape(legal.shape + (1,) * (ours.ndim - legal.ndim))
        return np.where(keep & self.valid.reshape(keep.shape), theirs, ours)

    def judged(self, node: Node, theirs: np.ndarray, ours: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if node.key[1] == "experts":
            scores, bias = (exact(self.values[key]) for key in node.inputs)
            return judge_experts(theirs, scores, bias.value, self.config.num_experts_per_token, self.formats)
        if theirs.shape != ours.shape:
            raise Mismatch(f"{node.key[0]}/tokens has shape {theirs.shape}; wanted {ours.shape}")
        flipped = theirs != ours
        return flipped, ~flipped | near_best(exact(self.values[node.inputs[0]]), theirs, self.values["draft_to_target"])

    def illegal(self, node: Node, theirs: np.ndarray, legal: np.ndarray) -> Illegal:
        read = exact(self.values[node.inputs[0]])
        if node.key[1] == "experts":
            return illegal_experts(theirs, read, exact(self.values[node.inputs[1]]).value, legal, self.formats)
        return illegal_token(read, theirs, self.values["draft_to_target"], legal)

    # Backward.
    def run_backward(self, grads: dict) -> None:
        incoming: dict[Key, list] = {(0, "total_loss"): [(None, Running(np.ones(())))]}
        for position, node in reversed(list(enumerate(self.nodes))):
            if node.key not in incoming:
                if is_boundary(node.key) and node.key[1] not in DECISION_STAGES:
                    self.take_cotangent(position, node.key, [])
                continue
            d_y = self.take_cotangent(position, node.key, incoming[node.key])
            stored = self.values | {node.key: self.output_of(node.key)}
            for key, d in contributions(node._replace(detached=()), stored, d_y):
                (self.detached if key in node.detached else incoming).setdefault(key, []).append((node.key, d))
        self.judge_parameters(incoming, grads)

    def output_of(self, key: Key):
        """A VJP may use the stage's output before or after its rounding to storage."""
        value = self.values[key]
        return value.stored(key) if isinstance(value, Running) else value

    def take_cotangent(self, position: int, key: Key, parts: list):
        """The recorded cotangent, judged against the sum of its consumers' products; else that sum."""
        total = self.total(key, parts)
        actual = self.recorded(key, ".grad") if is_boundary(key) else None
        if actual is None:
            return total
        valid = None if key[1] == "lk_loss" else self.valid
        edge = self.judge("cotangent", position, key, actual, total, valid)
        if not edge.ok and edge.comparison:
            edge.blame, edge.why = self.blame(key, actual, parts, valid)
            edge.operands = listed(of_sum, parts, edge.comparison.index)
        usable = not edge.fault and np.isfinite(self.clean(actual)).all()
        return Running(self.clean(actual)) if usable else total

    def total(self, key: Key, parts: list) -> Running:
        if not parts:
            return Running(np.zeros_like(exact(self.values[key]).value))
        total = parts[0][1]
        for _, d in parts[1:]:
            total = store(total + d, key)
        return exact(total)

    def blame(self, key: Key, actual, parts: list, valid) -> tuple[Key | None, str]:
        """Which consumer's contribution is wrong: the one without which the sum fits, or that explains most of it."""
        for consumer, d in self.detached.get(key, ()):
            if compare("leak", actual, self.total(key, [*parts, (consumer, d)]), key, self.formats, valid).ok:
                return consumer, f"it has the contribution of {_name(consumer)}, which is declared detached"
        if not parts:
            return None, "nothing reads it, so its cotangent is zero"
        if len(parts) == 1:
            return parts[0][0], f"its one consumer is {_name(parts[0][0])}"
        for consumer, d in parts:
            rest = [part for part in parts if part[0] is not consumer]
            if compare("rest", actual, self.total(key, rest), key, self.formats, valid).ok:
                return consumer, f"it fits without the contribution of {_name(consumer)}, which is missing"
            if compare("only", actual, exact(d), key, self.formats, valid).ok:
                there = [
                    c for c, d in rest if not compare("none", np.zeros(d.shape), exact(d), key, self.formats, valid).ok
                ]
                missing = (there or [rest[0][0]])[0]
                return missing, f"only the contribution of {_name(consumer)} is there; that of {_name(missing)} is not"
        residual = self.clean(actual) - self.total(key, parts).value
        explained = {consumer: _explained(residual, exact(d).value) for consumer, d in parts}
        likely = max(explained, key=explained.get)
        if explained[likely] < NEARLY_ALL:
            return self.without_direction(key, parts)
        return likely, f"most of the difference lies along the contribution of {_name(likely)}"

    def without_direction(self, key: Key, parts: list) -> tuple[Key, str]:
        """A difference that no contribution explains: of a parameter no single step; else not a residual's sum, which
        hands its cotangent on as it is and can only lose it.
        """
        if not isinstance(key, tuple):
            return (0, parts[0][0][1]), "no single step explains the difference"
        others = [consumer for consumer, _ in parts if consumer[1] not in RESIDUAL_SUMS] or [parts[0][0]]
        return others[0], f"{_name(others[0])} is the first consumer that could have made the difference"

    def judge_parameters(self, incoming: dict, grads: dict) -> None:
        totals = {key: self.total(key, parts) for key, parts in incoming.items() if isinstance(key, str)}
        expected = parameter_gradients(totals, self.values, self.config, self.choices)
        for position, name in enumerate(trained_parameters(self.config, self.choices)):
            if grads.get(name) is None:
                edge = Edge("gradient", 0, name, position, fault=f"the gradient of {name} is absent; wanted an array")
                self.walk.edges.append(edge)
            else:
                edge = self.judge("gradient", position, (0, name), grads[name], exact(expected[name]), None)
                if not edge.ok and edge.comparison:
                    edge.operands = listed(of_sum, *self.addends(name, incoming, edge.comparison.index))
            if not edge.ok:
                edge.blame, edge.why = self.blame_parameter(name, grads.get(name), incoming)

    def addends(self, name: str, incoming: dict, index: tuple) -> tuple[list, tuple]:
        """The contributions to a parameter's gradient, one a step or use, and the place of the element in them."""
        expert = expert_of(name)
        if not expert:
            return incoming.get(name, []), index
        parts = incoming.get(expert[0], [])
        through = parts[0][0] if parts else None  # the step-0 node that puts the weight on the MX grid
        return incoming.get(through, []), (expert[1], *index)

    def blame_parameter(self, name: str, actual, incoming: dict) -> tuple[Key | None, str]:
        """The stage that reads the parameter; with one contribution a step, the step that is missing or wrong."""
        expert = expert_of(name)
        parts = incoming.get(expert[0] if expert else name, [])
        if expert and parts:  # through the step-0 node that puts the weight on the MX grid, to its uses
            parts = [(consumer, exact(d)[expert[1]]) for consumer, d in incoming.get(parts[0][0], [])]
        if actual is None or np.shape(actual) != (parts and exact(parts[0][1]).shape):
            return (parts[0][0] if parts else None), ""
        return self.blame("gradient", np.asarray(actual, float), parts, None)


def _name(key: Key | None) -> str:
    return "the loss" if key is None else f"{key[1]} of step {key[0]}"


def _explained(residual: np.ndarray, direction: np.ndarray) -> float:
    """The share of the residual's square that lies along ``direction``."""
    with np.errstate(all="ignore"):
        size = np.vdot(direction, direction) * np.vdot(residual, residual)
        share = np.vdot(residual, direction) ** 2 / size if size > 0 else 0.0
    return float(share) if np.isfinite(share) else 0.0
