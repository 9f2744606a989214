"""Stage checks: one method on seeded inputs against the oracle's cut-out graph, forward, backward and decisions."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from draftconf.reference import mx
from draftconf.reference.bounds import arithmetic
from draftconf.reference.config import Choices, expert_of, frozen_parameters
from draftconf.reference.formats import round_to, store
from draftconf.reference.graph import Key, contributions
from draftconf.reference.layer import EXPERT_WEIGHTS, stacked_experts
from draftconf.reference.loss import gradient_violation, lk_loss_backward, log_softmax
from draftconf.reference.ops import Op
from draftconf.reference.running_error import Running, exact, lifted

from ..judging import outcome as verdict
from ..judging.bias import Bias
from ..judging.compare import Comparison, Mismatch, compare, width
from ..judging.decisions import Decisions, Illegal, first_of, illegal_experts, judge_experts
from ..judging.operands import ENTRIES, FEW, listed, of_gradient, of_nodes, operand
from ..judging.shrink import minimize, rounded, shown
from ..protocol.result import AdapterCrash, AdapterError, AdapterTimeout, NotOffered, Result
from .cases import Case, chosen_inputs, generator, handed_over, make_parameters
from .stages import STEP, Stage

IDENTITY = Op(lambda x: x, lambda x, y, d_y: (d_y,))
#: Method inputs whose gradient has another format than storage, by the boundary they stand for.
GRADIENT_POINTS = {"draft_logits": (STEP, "logits")}
OPTIONAL_GRADIENTS = {"fusion": ("low", "mid", "high")}  # the target's features: returned or not, not judged
ALL_OF_IT = 1.0  # a bound as wide as the quantity itself would pass zeros
TARGET = "target_logits"  # the target gets no gradient (spec.md section 5)


@dataclass
class StageRun:
    """One call of one method and the oracle's account of it. Attributes are computed when first asked for."""

    subject: object
    stage: Stage
    case: Case
    choices: Choices
    policy: str
    seed: int
    expected: dict = field(default_factory=dict)
    grads: dict = field(default_factory=dict)
    decisions: dict = field(default_factory=dict)
    illegal: dict = field(default_factory=dict)  # of each decision the first that rounding does not allow
    addends: dict = field(default_factory=dict)  # of each gradient: consumer and contribution
    uncertain: bool = False  # a decision that was not returned could have gone either way

    @property
    def formats(self) -> dict:
        return self.subject.description.policies[self.policy]

    @cached_property
    def arrays(self) -> dict:
        """float64 inputs on the storage grid, parameters under the names that the method sees."""
        rng = generator(self.seed, self.case.name, self.stage.name, self.choices.draft_input)
        storage = self.formats["storage"]
        arrays = self.stage.arrays(self.case, self.choices, rng)
        if self.stage.name == "lk_loss":
            arrays |= chosen_inputs(self.case.config, self.choices, rng)
        if "documents" in arrays and not self.subject.description.documents:
            arrays["documents"][:] = 0
        arrays = {k: round_to(v, storage) if _real(v) else v for k, v in arrays.items()}
        return arrays | self.parameters(storage)

    def parameters(self, storage: str) -> dict:
        params = make_parameters(self.case, self.choices, storage, self.seed)
        wanted = {n: x for n, x in params.items() if n.startswith(self.stage.parameters or ("//",))}
        return {self.seen_name(name): x for name, x in wanted.items()}

    def seen_name(self, name: str) -> str:
        for long, short in self.stage.renamed.items():
            name = name.replace(long, short)
        return name

    @cached_property
    def cotangents(self) -> dict:
        """Random, on the grid of each output's format."""
        rng = generator(self.seed, self.case.name, self.stage.name, "cotangents")
        shapes = {name: exact(self.forward_plain[key]).shape for name, key in self.stage.outputs.items()}
        return {name: round_to(rng.normal(size=shape), self.formats["storage"]) for name, shape in shapes.items()}

    @cached_property
    def forward_plain(self) -> dict:
        """The oracle without bounds, for shapes and the cotangents' sizes."""
        values = self.graph_inputs(lift=False)
        for node in self.nodes:
            values[node.key] = node.op.forward(*(values[key] for key in node.inputs))
        return values

    @cached_property
    def nodes(self) -> list:
        nodes = self.stage.nodes(self.case.config, self.choices)
        if self.subject.description.quantized:
            return nodes
        unquantised = ("mx_input", "mx_hidden", *(f"expert_weights.{w}" for w in EXPERT_WEIGHTS))
        return [node._replace(op=IDENTITY) if node.key[1] in unquantised else node for node in nodes]

    def graph_inputs(self, lift: bool = True) -> dict:
        """The arrays under the keys that the nodes read."""
        values = {self.stage.inputs.get(name, name): x for name, x in self.arrays.items()}
        for long, short in self.stage.renamed.items():
            values |= {name.replace(short, long, 1): x for name, x in self.arrays.items() if name.startswith(short)}
        values |= stacked_experts(self.arrays, self.case.config.num_experts)
        values.setdefault("draft_to_target", None)
        return lifted(values) if lift else values

    @cached_property
    def result(self) -> Result:
        """What the adapter returned; raises what the adapter raised, again for every check of this run."""
        storage = self.formats["storage"]
        return self.subject.call(
            self.stage.name, config=self.case.config, choices=self.choices, policy=self.policy,
            inputs=self.passed(storage), cotangents=handed_over(self.cotangents, storage),
        )  # fmt: skip

    def passed(self, storage: str) -> dict:
        """The arrays as the adapter receives them."""
        arrays = {k: v for k, v in self.arrays.items() if isinstance(v, np.ndarray)}
        if not self.subject.description.documents:
            arrays.pop("documents", None)
        return handed_over(arrays, storage) | {k: v for k, v in self.arrays.items() if isinstance(v, int)}

    @cached_property
    def oracle(self) -> "StageRun":
        """Fill in ``expected``, ``grads`` and ``decisions``, with the adapter's legal decisions pinned."""
        with arithmetic(self.formats):
            values = self.graph_inputs()
            for node in self.nodes:
                y = node.op.forward(*(values[key] for key in node.inputs))
                self.expected[node.key] = y
                values[node.key] = self.pinned(node, values, store(y, node.key))
            self.backward(values)
        return self

    def operands(self, key: Key, index: tuple) -> list[dict]:
        """Of an element of the value at ``key``: entries of the method's arrays."""
        inputs = {name: name for name in self.forward_plain if isinstance(name, str)} | self.stage.inputs
        few = FEW if "draft_logits" in self.stage.inputs else ENTRIES
        return of_nodes(self.nodes, self.forward_plain, key, index, inputs, few)

    def pinned(self, node, values: dict, ours):
        """The adapter's decision where it returned a legal one."""
        names = {key: name for name, key in self.stage.decisions.items()}
        name = names.get(node.key)
        if name == "experts":
            return self.pinned_experts(values[node.inputs[0]], exact(values[node.inputs[1]]).value, ours)
        codes = self.result.decisions.get(f"{name}.codes")
        scales = self.result.decisions.get(f"{name}.scales")
        if name not in ("mx_input", "mx_hidden") or codes is None or scales is None:
            return ours
        form = f"mxfp8_{self.choices.mxfp8_element}"
        theirs = mx.dequantize(np.asarray(scales), np.asarray(codes), form)
        if theirs.shape != ours.shape:
            raise Mismatch(f"{name}.codes has shape {theirs.shape}; wanted {ours.shape}")
        flipped = theirs != ours.value
        legal = np.abs(theirs - ours.value) <= ours.bound()
        if (~legal).any():
            at = first_of(legal)
            self.illegal[name] = self.illegal_value(node.key, at, theirs[at], ours[at])
        self.note(name, flipped, legal)
        return np.where(legal, Running(theirs), ours)

    def illegal_value(self, key: Key, at: tuple, theirs: float, ours: Running) -> Illegal:
        """An MX value that no rounding of what the oracle quantised leads to."""
        wanted, bound = float(ours.value), float(ours.bound())
        ratio = abs(theirs - wanted) / bound if bound and np.isfinite(theirs) else np.inf
        sentence = f"{list(at)} stands for {theirs:.9g}, wanted {wanted:.9g}"
        compared = Comparison(float(ratio), 1, at, float(theirs), wanted, bound)
        return Illegal(at, sentence, compared, listed(self.operands, key, at))

    def pinned_experts(self, scores, bias, ours):
        theirs, count = self.result.decisions.get("experts"), self.case.config.num_experts_per_token
        if theirs is None:
            key = np.sort(exact(scores).value + bias, axis=-1)
            gap = key[..., -count] - key[..., -count - 1] if key.shape[-1] > count else np.inf
            self.uncertain = bool(np.any(gap <= 2 * exact(scores).bound().max(-1)))
            return ours
        flipped, legal = judge_experts(theirs, scores, bias, count, self.formats)
        if (~legal).any():
            self.illegal["experts"] = illegal_experts(theirs, scores, bias, legal, self.formats)
        self.note("experts", flipped, legal)
        return np.where(legal[..., None], theirs, ours)

    def note(self, name: str, flipped, legal) -> None:
        self.decisions[name] = Decisions()
        self.decisions[name].add(np.asarray(flipped), np.asarray(legal))

    def backward(self, values: dict) -> None:
        self.addends = {}  # its own, as ``replace`` would share it
        incoming: dict[Key, list] = {}
        for name, key in self.stage.outputs.items():
            incoming.setdefault(key, []).append(Running(self.cotangents[name]))
        for node in reversed(self.nodes):
            if node.key in incoming:
                stored = values | {node.key: _stored_output(values[node.key], node.key)}
                for key, d in contributions(node, stored, total(incoming[node.key], node.key)):
                    incoming.setdefault(key, []).append(d)
                    self.addends.setdefault(key, []).append((node.key, d))
        self.grads = {key: total(parts, key) for key, parts in incoming.items()}

    # What the checks ask.
    def gradient_key(self, name: str) -> Key:
        for long, short in self.stage.renamed.items():
            name = name.replace(short, long, 1) if name.startswith(short) else name
        return self.stage.inputs.get(name, name)

    def gradient_operands(self, name: str, index: tuple) -> list[dict]:
        """The contributions that add up to an element of a gradient."""
        return of_gradient(self.addends, name if expert_of(name) else self.gradient_key(name), index)

    def expected_gradient(self, name: str) -> Running:
        key, expert = expert_of(name) or (self.gradient_key(name), ...)
        d = self.grads.get(key)
        return Running(np.zeros(np.shape(self.arrays[name]))) if d is None else d[expert]


def _real(x) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def _stored_output(value, key: Key):
    return value.stored(key) if isinstance(value, Running) else value


def total(parts: list, key: Key) -> Running:
    result = parts[0]
    for d in parts[1:]:
        result = store(result + d, key)
    return exact(result)


def differentiable(stage: Stage, choices: Choices, case: Case) -> tuple[list[str], list[str]]:
    """Input names that must have a gradient, and those that must not."""
    frozen = frozen_parameters(choices)
    run = StageRun(None, stage, case, choices, "", 0)
    params = make_parameters(case, choices, "float64", 0)
    seen = {run.seen_name(n): n in frozen for n in params if n.startswith(stage.parameters or ("//",))}
    fixed = (TARGET,) if TARGET in stage.inputs else ()
    activations = [n for n in stage.inputs if n not in ("tokens", *fixed, *OPTIONAL_GRADIENTS.get(stage.name, ()))]
    required = activations + [n for n, is_frozen in seen.items() if not is_frozen]
    return required, [*(n for n, is_frozen in seen.items() if is_frozen), *fixed]


def check_output(run: StageRun, name: str) -> dict:
    """One output array."""
    actual = run.result.outputs.get(name)
    if actual is None:
        return verdict.failed(f"{run.stage.name} returned no output {name!r}; wanted {', '.join(run.stage.outputs)}")
    key = run.stage.outputs[name]
    found = compared(f"{run.stage.name}.{name}", actual, exact(run.oracle.expected[key]), key, run)
    found = verdict.with_operands(found, lambda index: run.operands(key, index))
    if found["verdict"] == "fail" and found["worst"] and found["worst"]["index"] and "draft_logits" in run.stage.inputs:
        with suppress(AdapterCrash, AdapterTimeout):  # the call that was judged did come back
            found["message"] += smallest_slot(run, found["worst"]["index"])
    return found


def smallest_slot(run: StageRun, index: list) -> str:
    """The failing slot with the fewest tokens, on the coarsest grid, that still shows the fault."""
    if run.arrays.get("draft_to_target") is not None:
        return ""
    rows = np.stack([run.arrays[name][tuple(index)] for name in ("draft_logits", "target_logits")])  # [2, V]

    def fails(pair: np.ndarray) -> bool:
        arrays = {"draft_logits": pair[:1], "target_logits": pair[1:], "draft_to_target": None}
        arrays["mask"] = np.ones(1, bool)
        trial = replace(run, expected={}, grads={}, decisions={}, illegal={})
        trial.__dict__.update(arrays=arrays, cotangents={"loss": np.ones(1)})
        try:
            actual, key = trial.result.outputs["loss"], run.stage.outputs["loss"]
            return compared("loss", actual, exact(trial.oracle.expected[key]), key, trial)["verdict"] == "fail"
        except (AdapterCrash, AdapterTimeout):
            raise
        except (AdapterError, NotOffered):
            return False

    if not fails(rows):
        return ""
    columns = minimize(list(range(rows.shape[1])), lambda kept: fails(rows[:, kept]))
    pair = rounded(rows[:, columns], fails)
    return f"; smallest input: draft_logits = {shown(pair[0])}, target_logits = {shown(pair[1])}"


def compared(what: str, actual, expected: Running, point, run: StageRun, biased: bool = True) -> dict:
    try:
        comparison = compare(what, actual, expected, point, run.formats)
    except Mismatch as mismatch:
        return verdict.failed(str(mismatch))
    if run.uncertain and not comparison.ok:
        return verdict.outcome("undecided", message=f"{what}: a decision that was not returned could go either way")
    bias = None
    if biased and expected.ndim:
        bias = Bias.empty()
        bias.add(np.asarray(actual, float), expected, point, run.formats, None)
    wide = width_of(run, expected, point) if comparison.ok else 0.0
    return verdict.of_comparison(what, comparison, bias, wide if wide >= ALL_OF_IT else None)


def width_of(run: StageRun, expected: Running, point) -> float:
    """Slots of logits are problems of their own, some of them all ties: the width of the slot in the middle."""
    if "draft_logits" not in run.stage.inputs or expected.ndim < 2:
        return width(expected, point, run.formats)
    rows = expected.reshape(-1, expected.shape[-1])
    return float(np.median([width(rows[i], point, run.formats) for i in range(len(rows))]))


def check_gradient(run: StageRun, names: list[str]) -> dict:
    """The gradients of one input, or of the same weight of every expert."""
    given = run.result.grads
    if not any(g is not None for g in given.values()):
        return verdict.not_offered(f"{run.stage.name} returned no gradients")
    worst: dict | None = None
    for name in names:
        if given.get(name) is None:
            return verdict.failed(f"{run.stage.name}: the gradient of {name} is absent; wanted an array")
        point = GRADIENT_POINTS.get(name, "gradient")
        one = compared(
            f"{run.stage.name}: d {name}", given[name], run.oracle.expected_gradient(name), point, run, False
        )
        one = verdict.with_operands(one, lambda index, n=name: run.gradient_operands(n, index))
        worst = one if worst is None else verdict.worse(worst, one)
    return worst


def check_frozen(run: StageRun, names: list[str]) -> dict:
    """Inputs that receive no gradient: absent, None or all zero."""
    for name in names:
        d = run.result.grads.get(name)
        if d is not None and np.any(np.asarray(d) != 0):
            return verdict.failed(f"{run.stage.name}: {name} is frozen but received a gradient")
    return verdict.outcome("pass", ratio=0.0, compared=len(names))


def check_decision(run: StageRun, name: str) -> dict:
    """A discrete output, legal by margin."""
    if name == "below":
        return check_below(run)
    try:
        noted = run.oracle.decisions.get(name)
    except Mismatch as mismatch:
        return verdict.failed(str(mismatch))
    if noted is None:
        return verdict.not_offered(f"{run.stage.name} returned no decision {name}")
    return verdict.of_decisions(f"{run.stage.name}: {name}", noted, run.illegal.get(name))


def log_ratio(run: StageRun) -> Running:
    """log q - log p; where it lies within its bound of zero, either answer to q < p is legal. [..., V]."""
    with arithmetic(run.formats):
        values = run.graph_inputs()
        log_p = run.nodes[0].op.forward(*(values[k] for k in run.nodes[0].inputs))
        return log_softmax(values["draft_logits"]) - log_p


def check_below(run: StageRun) -> dict:
    theirs = run.result.decisions.get("below")
    if theirs is None:
        return verdict.not_offered("lk_loss returned no decision below")
    gap = log_ratio(run)
    ours = gap.value < 0
    theirs = np.asarray(theirs)
    if theirs.shape != ours.shape or theirs.dtype != bool:
        return verdict.failed(f"below is {theirs.dtype} of shape {theirs.shape}; wanted bool of shape {ours.shape}")
    decisions, flipped = Decisions(), theirs != ours
    legal = np.abs(gap.value) <= gap.bound()
    decisions.add(flipped, legal)
    return verdict.of_decisions("lk_loss: below", decisions, illegal_below(run, gap, flipped & ~legal))


def illegal_below(run: StageRun, gap: Running, wrong: np.ndarray) -> Illegal | None:
    if not wrong.any():
        return None
    at = first_of(~wrong)
    apart, bound = float(gap.value[at]), float(gap.bound()[at])
    sentence = f"{list(at)} says that q {'>=' if apart < 0 else '<'} p, but log q - log p is {apart:.9g}"
    rows = [operand(name, run.arrays[name], [at]) for name in ("draft_logits", "target_logits")]
    return Illegal(at, sentence, Comparison(abs(apart) / bound if bound else np.inf, 1, at, 0.0, apart, bound), rows)


def check_gradient_set(run: StageRun) -> dict:
    """The LK gradient as a member of Clarke's set, slot by slot: tight even where q = p everywhere."""
    g = run.result.grads.get("draft_logits")
    if g is None:
        return verdict.not_offered("lk_loss returned no gradient")
    draft, target = run.arrays["draft_logits"], run.arrays["target_logits"]
    if run.arrays.get("draft_to_target") is not None:
        return verdict.not_offered("the set is tested on the full vocabulary")
    g = np.asarray(g, float)
    if g.shape != draft.shape:
        return verdict.failed(f"the gradient of draft_logits has shape {g.shape}; wanted {draft.shape}")
    bound, margin = gradient_rounding(run)
    scale = run.cotangents["loss"]
    ratios = np.array([
        gradient_violation(draft[i], target[i], g[i] / scale[i], bound[i] / abs(scale[i]), margin[i])
        if scale[i] and np.isfinite(g[i]).all() else (0.0 if scale[i] == 0 and not g[i].any() else np.inf)
        for i in np.ndindex(draft.shape[:-1])
    ])  # fmt: skip
    i = int(np.argmax(ratios))
    comparison = Comparison(float(ratios[i]), g.size, (i,), float(ratios[i]), 0.0, 1.0)
    found = verdict.of_comparison("lk_loss: distance of the gradient from its set at slot", comparison)
    return verdict.with_operands(found, lambda slot: logits_at(run, slot))


def logits_at(run: StageRun, slot: tuple) -> list[dict]:
    """The largest logits of a slot, of either side."""
    rows = [(name, run.arrays[name]) for name in ("draft_logits", "target_logits")]
    top = np.unique([np.argsort(-x[slot], kind="stable")[: FEW // 4] for _, x in rows])
    places = [(*slot, column) for column in top]
    return [operand(name, x, places, x.shape[-1]) for name, x in rows]


def gradient_rounding(run: StageRun):
    """Roundings of the gradient with theta held fixed, and how near two log probabilities must be to count as equal."""
    with arithmetic(run.formats):
        values = run.graph_inputs()
        log_p = run.nodes[0].op.forward(*(values[k] for k in run.nodes[0].inputs))
        draft = values["draft_logits"]
        gap = log_softmax(draft) - log_p
        fixed = Running(np.where(gap.value <= 0, 1.0, 0.0))
        loss = run.nodes[1].op.forward(draft, log_p)
        d = lk_loss_backward(draft, log_p, loss, Running(run.cotangents["loss"]), theta=fixed)
        d = store(d, GRADIENT_POINTS["draft_logits"])
    return d.bound(), gap.bound()
