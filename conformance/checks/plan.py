"""The plan: every check of a run, in data order, from the stage table, the cases and what the adapter declares.

A check knows its id ``stage.quantity.aspect[case]`` and how to run itself; calls to the adapter are shared between the
checks of one case, so that asking for one more quantity costs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from draftconf.reference.config import Choices, kind_of, trained_parameters
from draftconf.reference.layer import graph

from ..judging.outcome import dump
from ..protocol.description import Description
from . import exact as exactly
from . import pattern as reading
from . import pattern_losses as summing
from . import sampling as sampled
from . import stage as staged
from . import unroll as unrolled
from .cases import Case, cases_for, unroll_cases
from .losses import loss_stages
from .stages import FIRST, FIRST_STEP, STAGES, Stage
from .walk import DECISION_STAGES, is_boundary

LOSS_OUTPUTS = ("slot_losses", "step_losses", "total_loss")
FIRST_CASES = ("tame", "harsh")  # the others differ in what no method at step 1 reads
MX_METHODS = ("mxfp4", "mxfp8")
PATTERN_LAYOUT = "eagle3"  # whose wiring the checks of any draft's pattern go by
ALIGNED = ("tokens", "low", "mid", "high", "target_logits", "mask", "supervised")


@dataclass(frozen=True)
class Check:
    """One question to the adapter. ``judge(subject)`` answers it with an outcome (results.schema.json)."""

    stage: str
    quantity: str
    aspect: str
    case: str
    layout: str
    policy: str
    kind: str  # stage, trace or end_to_end
    order: tuple
    judge: Callable = field(repr=False, compare=False)
    arrays: Callable = field(repr=False, compare=False, default=lambda subject: {})

    @property
    def id(self) -> str:
        return f"{self.stage}.{self.quantity}.{self.aspect}[{self.layout}-{self.policy}-{self.case}]"

    def run(self, subject) -> dict:
        found = self.judge(subject)
        if found["verdict"] == "fail" and subject.dump:
            dump(subject.dump, self.id, self.arrays(subject))
        return found


def plan(description: Description, *, policies=None, stages=None, seed: int = 0) -> list[Check]:
    """All checks for what ``describe()`` declared, in data order. ``policies`` and ``stages`` narrow it by name."""
    checks = []
    for layout in description.layouts:
        choices = description.choices_for(layout)
        for policy in policies or description.policies:
            for case in cases_for(choices):
                at = Place(layout, policy, case, choices, seed)
                losses = loss_stages(description.losses)
                checks += [*stage_checks(at, [*STAGES, *losses]), *trace_checks(at), *end_checks(at)]
            at = Place(layout, policy, cases_for(choices)[0], choices, seed)
            checks += exact_checks(at)
            if description.pattern is not None and layout == PATTERN_LAYOUT:
                checks += pattern_checks(at)
            if layout == description.layouts[0]:  # MX knows no layout
                checks += mx_checks(at)
    chosen = [check for check in checks if stages is None or check.stage in stages]
    kinds, names = ("stage", "trace", "end_to_end"), [case.name for case in unroll_cases()]
    plain = lambda check: check.case.removesuffix(FIRST)  # noqa: E731
    position = lambda check: names.index(plain(check)) if plain(check) in names else -1  # noqa: E731  simple ones first
    return sorted(chosen, key=lambda check: (kinds.index(check.kind), check.order, position(check), check.id))


@dataclass(frozen=True)
class Place:
    """Where a check stands: layout, policy and case; ``memo`` shares one run among its checks."""

    layout: str
    policy: str
    case: Case
    choices: Choices
    seed: int
    memo: dict = field(default_factory=dict, hash=False, compare=False)

    def check(self, stage, quantity, aspect, kind, order, judge, case: str = "", arrays=lambda subject: {}) -> Check:
        return Check(
            stage, quantity, aspect, case or self.case.name, self.layout, self.policy, kind, order, judge, arrays
        )

    def shared(self, key, subject, make):
        """One object per key and subject."""
        whole = (key, id(subject))
        if whole not in self.memo:
            self.memo[whole] = make()
        return self.memo[whole]


def grouped(names: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(kind_of(name), []).append(name)
    return groups


# -- stage checks -----------------------------------------------------------------------------------------------------


def stage_checks(at: Place, stages: list[Stage]) -> list[Check]:
    checks = []
    for position, stage in enumerate(stages):
        if at.layout in stage.layouts:
            checks += method_checks(at, stage, position, at.case.name)
            if stage.name in FIRST_STEP and at.case.name in FIRST_CASES:
                checks += method_checks(at, FIRST_STEP[stage.name], position, at.case.name + FIRST)
    return checks


def method_checks(at: Place, stage: Stage, position: int, case: str) -> list[Check]:
    """Every question to one method; ``case`` is what the ids say."""
    checks: list[Check] = []

    def run(subject):
        make = lambda: staged.StageRun(subject, stage, at.case, at.choices, at.policy, at.seed)  # noqa: E731
        return at.shared((stage.name, case), subject, make)

    def add(quantity, judge):
        order = (position, int(case.endswith(FIRST)), len(checks))
        arrays = lambda subject: run(subject).arrays  # noqa: E731
        judged = lambda subject: judge(run(subject))  # noqa: E731
        checks.append(at.check(stage.name, quantity, "stage", "stage", order, judged, case, arrays))

    for name in stage.decisions:
        add(name, lambda r, n=name: staged.check_decision(r, n))
    for name in stage.outputs:
        add(name, lambda r, n=name: staged.check_output(r, n))
    required, frozen = staged.differentiable(stage, at.choices, at.case)
    for name, names in grouped(required).items():
        add(f"d_{name}", lambda r, n=names: staged.check_gradient(r, n))
    if frozen:
        add("frozen", lambda r, n=frozen: staged.check_frozen(r, n))
    if stage.name == "lk_loss":
        add("gradient_set", staged.check_gradient_set)
    return checks


# -- exact checks -----------------------------------------------------------------------------------------------------


def exact_checks(at: Place) -> list[Check]:
    checks: list[Check] = []
    base = len(STAGES)

    def add(stage, quantity, judge, case, order):
        checks.append(at.check(stage, quantity, "exact", "stage", order, judge, case))

    arguments = (at.case, at.choices, at.policy, at.seed)
    for i, what in enumerate(ALIGNED):
        for documents in (False, True):
            judge = lambda s, w=what, d=documents: exactly.check_align(s, *arguments, w, d)  # noqa: E731
            add("align", what, judge, "documents" if documents else "plain", (-1, i))
    for i, what in enumerate(("residual", "accepted", "token")):
        judge = lambda s, w=what: sampled.check_sampling(s, *arguments, w)  # noqa: E731
        add("speculative_sample", what, judge, "laws", (base + 2, i))
    for i, what in enumerate(("features", "logits")):
        judge = lambda s, w=what: unrolled.check_draft_sequence(s, *arguments, w)  # noqa: E731
        checks.append(at.check("draft_sequence", what, "stage", "stage", (base + 1, i), judge))
    return checks


def mx_checks(at: Place) -> list[Check]:
    """Quantise, fake-quantise and decode; they come first, as everything behind them depends on them."""
    checks: list[Check] = []

    def add(method, quantity, case, judge):
        def run(subject):
            make = lambda: exactly.MXRun(subject, method, case, at.case, at.choices, at.policy, at.seed)  # noqa: E731
            return at.shared((method, case), subject, make)

        order = (-2, len(checks))
        arrays = lambda subject: {"x": run(subject).x}  # noqa: E731
        checks.append(at.check(method, quantity, "exact", "stage", order, lambda s: judge(run(s)), case, arrays))

    for method in MX_METHODS:
        for case in exactly.MX_CASES:
            for what in ("scales", "codes"):
                add(method, what, case, lambda r, w=what: exactly.check_encoding(r, w))
        add(f"{method}_decode", "values", "all_codes", exactly.check_decoding)
        for case in exactly.MX_CASES:
            for what in ("y", "d_x"):
                add(f"fake_{method}", what, case, lambda r, w=what: exactly.check_fake(r, w))
    return checks


def pattern_checks(at: Place) -> list[Check]:
    """A step whose layer may be any, from outside: with the whole vocabulary and the teacher's tokens."""
    checks: list[Check] = []
    whole = {"head": "own", "reduced_target": "restricted", "reduced_supervision": "all"}
    choices = at.choices.replace(token_source="teacher", **(whole if at.choices.head == "reduced" else {}))
    case = cases_for(choices)[0]
    judges = {
        "tokens": lambda r: reading.check_reads(r, "tokens"),
        "features": lambda r: reading.check_reads(r, "features"),
        "fusion": reading.check_fusion,
        "recycle": reading.check_recycle,
        "cache": reading.check_cache,
        "step_losses": summing.check_losses,
        "mask": summing.check_mask,
        "empty_steps": summing.check_empty,
        "total_loss": summing.check_total,
        "d_features": summing.check_gradient,
    }

    def run(subject):
        make = lambda: reading.PatternRun(subject, case, choices, at.policy, at.seed)  # noqa: E731
        return at.shared("pattern", subject, make)

    for i, (what, judge) in enumerate(judges.items()):
        order, judged = (len(STAGES) + 3, i), lambda s, j=judge: j(run(s))
        arrays = lambda s: run(s).inputs  # noqa: E731
        checks.append(at.check("pattern", what, "stage", "stage", order, judged, "steps", arrays))
    return checks


# -- the unroll -------------------------------------------------------------------------------------------------------


def trace_checks(at: Place) -> list[Check]:
    """One check per stage and quantity over all steps, then one per parameter."""
    run, checks = shared_run(at), []
    nodes = [node for node in graph(at.case.config, at.choices) if is_boundary(node.key)]
    stages = list(dict.fromkeys(key[1] for key in (node.key for node in nodes)))

    def add(stage, quantity, order, judge):
        arrays = lambda subject: recorded(run(subject), stage)  # noqa: E731
        checks.append(at.check(stage, quantity, "trace", "trace", order, lambda s: judge(run(s)), arrays=arrays))

    for position, stage in enumerate(stages):
        quantity = "decision" if stage in DECISION_STAGES else "value"
        add(stage, quantity, (0, position), lambda r, s=stage, q=quantity: unrolled.check_edges(r, s, q))
    for position, stage in enumerate(stages):
        if stage not in DECISION_STAGES:
            add(stage, "cotangent", (1, -position), lambda r, s=stage: unrolled.check_edges(r, s, "cotangent"))
    for position, what in enumerate(LOSS_OUTPUTS):
        add(what, "value", (0, len(stages) + position), lambda r, w=what: unrolled.check_sums(r, w))
    for position, (name, names) in enumerate(grouped(trained_parameters(at.case.config, at.choices)).items()):
        add(name, "gradient", (2, position), lambda r, n=names: unrolled.check_parameter(r, n))
    return checks


def recorded(run, stage: str) -> dict:
    """What a failing trace check saves: the stage's recorded arrays, and the inputs."""
    trace = run.answer().trace
    return {k: v for k, v in trace.items() if k.partition("/")[2].split(".grad")[0] == stage} | run.inputs


def shared_run(at: Place):
    make = lambda subject: unrolled.UnrollRun(subject, at.case, at.choices, at.policy, at.seed)  # noqa: E731
    return lambda subject: at.shared("unroll", subject, lambda: make(subject))


def end_checks(at: Place) -> list[Check]:
    """Losses and gradients of the tame case against the oracle's own run, and again with NaN in the padding."""
    run = shared_run(at)
    judge = lambda s: unrolled.check_frozen(run(s))  # noqa: E731
    checks = [at.check("unroll", "frozen", "end", "end_to_end", (2, 0), judge)]
    if at.case.name == "tame":
        checks += losses_and_gradients(at, run)
        poisoned = Place(
            at.layout, at.policy, replace(at.case, name="poisoned", poison=float("nan")), at.choices, at.seed
        )
        checks += losses_and_gradients(poisoned, shared_run(poisoned))
    return checks


def losses_and_gradients(at: Place, run) -> list[Check]:
    checks = []

    def add(quantity, order, judge):
        arrays = lambda subject: run(subject).inputs  # noqa: E731
        checks.append(at.check("unroll", quantity, "end", "end_to_end", order, lambda s: judge(run(s)), arrays=arrays))

    for i, what in enumerate(LOSS_OUTPUTS):
        add(what, (0, i), lambda r, w=what: unrolled.check_end_to_end(r, w))
    for i, (name, names) in enumerate(grouped(trained_parameters(at.case.config, at.choices)).items()):
        add(f"d_{name}", (1, i), lambda r, n=names: unrolled.check_gradients(r, n))
    return checks
