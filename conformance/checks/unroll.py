"""Checks of the whole unroll: the trace walk edge by edge, and end to end against the oracle's own run."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from draftconf.reference import graph as walks
from draftconf.reference.bounds import arithmetic
from draftconf.reference.config import Choices, frozen_parameters, trained_parameters
from draftconf.reference.graph import Node
from draftconf.reference.layer import EXPERT_WEIGHTS, graph
from draftconf.reference.loss import lk_loss_backward, total_loss
from draftconf.reference.ops import Op, log_softmax
from draftconf.reference.running_error import Running, exact, lifted
from draftconf.reference.unroll import draft_sequence, parameter_gradients, stacked_parameters, step_inputs

from ..judging import outcome as verdict
from ..judging.bias import BIAS_LIMIT
from ..judging.compare import Comparison, Mismatch, compare, width
from ..judging.decisions import Decisions, judge_experts, near_best
from ..judging.operands import of_gradient, of_node
from ..judging.outcome import UNDECIDED_WIDTH
from ..protocol.result import AdapterError, NotOffered
from .cases import Case, handed_over, make_inputs, make_parameters
from .growth import growth
from .walk import Edge, Walk, Walker


@dataclass
class UnrollRun:
    """One call of ``unroll`` on one case, the walk along its trace, and the oracle's own run beside it."""

    subject: object
    case: Case
    choices: Choices
    policy: str
    seed: int

    @property
    def formats(self) -> dict:
        return self.subject.description.policies[self.policy]

    @cached_property
    def params(self) -> dict:
        return make_parameters(self.case, self.choices, self.formats["storage"], self.seed)

    @cached_property
    def inputs(self) -> dict:
        documents = self.subject.description.documents
        return make_inputs(self.case, self.choices, self.formats["storage"], self.seed, documents)

    @cached_property
    def result(self):
        """The adapter's answer, or the exception that it raised."""
        given = handed_over(self.params | self.inputs, self.formats["storage"])
        try:
            return self.subject.call(
                "unroll", config=self.case.config, choices=self.choices, policy=self.policy, inputs=given,
                cotangents={"total_loss": np.ones((), given["high"].dtype)},
            )  # fmt: skip
        except (AdapterError, NotOffered) as error:
            return error

    def answer(self):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    @cached_property
    def walker(self) -> Walker:
        result = self.answer()
        return Walker(
            self.params, self.inputs, self.case.config, self.choices, self.formats, result.trace, result.decisions
        )

    @cached_property
    def walk(self) -> Walk:
        return self.walker.run(self.answer().grads if self.differentiated else None)

    @property
    def differentiated(self) -> bool:
        """Whether a backward ran: gradients came back, or cotangents in the trace."""
        result = self.answer()
        return bool(result.grads) or any(name.endswith(".grad") for name in result.trace)

    @cached_property
    def stacked(self) -> dict:
        return stacked_parameters(self.params, self.case.config, self.choices)

    # End to end: the oracle runs on its own, with the implementation's legal decisions pinned.
    @cached_property
    def oracle(self) -> dict:
        """The whole step in Running numbers; ``uncertain`` if a decision could go either way."""
        config, choices = self.case.config, self.choices
        nodes = [self.with_mask(node) for node in graph(config, choices)]
        values = lifted(self.stacked | step_inputs(self.inputs, config, choices))
        with arithmetic(self.formats):
            pins = self.pinned()
            for node in nodes:
                walks.forward([node], values)
                if node.key in pins:
                    values[node.key] = self.kept(node, values, pins[node.key])
            uncertain = self.uncertain(nodes, values)
            cotangents, addends = {(0, "total_loss"): Running(np.ones(()))}, {}
            walks.backward(nodes, values, cotangents, addends)
            grads = parameter_gradients(cotangents, values, config, choices)
        kept = {name: parts for name, parts in addends.items() if name in self.stacked}
        if choices.ste == "identity":  # straight through the quantiser of the weights to what uses them
            kept |= {name: addends.get((0, f"expert_weights.{w}"), []) for w, name in EXPERT_WEIGHTS.items()}
        return {"values": values, "grads": grads, "addends": kept, "uncertain": uncertain}

    def with_mask(self, node: Node) -> Node:
        """The LK mask q < p is a decision too: take it from the logits that were recorded."""
        logits = self.answer().trace.get(f"{node.key[0]}/logits")
        if node.key[1] != "lk_loss" or logits is None:
            return node
        theirs = log_softmax(self.cleaned(logits))

        def backward(draft, log_p, loss, d_loss):
            gap = log_softmax(draft) - log_p
            sure = np.abs(gap.value) > gap.bound()  # there the oracle's own run says it
            theta = np.where(sure, gap.value < 0, theirs < exact(log_p).value).astype(float)
            return lk_loss_backward(draft, log_p, loss, d_loss, theta=theta), None

        return node._replace(op=Op(node.op.forward, backward))

    def pinned(self) -> dict:
        """Expert ids and MX values as recorded, where the walk found them right."""
        result, pins = self.answer(), {}
        if not result.trace:
            return pins
        good = {
            (edge.step, edge.stage) for edge in self.walk.edges if edge.quantity in ("value", "decision") and edge.ok
        }
        bad = {
            (edge.step, edge.stage)
            for edge in self.walk.edges
            if edge.quantity in ("value", "decision") and not edge.ok
        }
        for step, stage in good - bad:
            if stage in ("experts", "tokens"):
                pins[(step, stage)] = np.asarray(result.decisions[f"{step}/{stage}"])
            elif stage in ("mx_input", "mx_hidden"):
                pins[(step, stage)] = Running(self.cleaned(result.trace[f"{step}/{stage}"]))
        return pins

    def kept(self, node: Node, values: dict, theirs):
        """A pinned decision where the oracle's own run allows it; what it cannot have come from is not followed."""
        ours = values[node.key]
        if node.key[1] == "experts":
            scores, bias = (exact(values[key]) for key in node.inputs)
            _, legal = judge_experts(theirs, scores, bias.value, self.case.config.num_experts_per_token, self.formats)
        elif node.key[1] == "tokens":
            legal = near_best(exact(values[node.inputs[0]]), theirs, values["draft_to_target"])
        else:
            with np.errstate(invalid="ignore"):
                legal = ~(np.abs(theirs.value - ours.value) > ours.bound())
        padding = ~self.walker.valid.reshape(self.walker.valid.shape + (1,) * (ours.ndim - 2))
        legal = legal.reshape(legal.shape + (1,) * (ours.ndim - legal.ndim))
        return np.where(legal | padding, theirs, ours)

    def cleaned(self, value: np.ndarray) -> np.ndarray:
        documents = self.inputs.get("documents")
        if documents is None:
            return np.asarray(value, float)
        padding = (documents < 0).reshape(documents.shape + (1,) * (np.ndim(value) - 2))
        return np.where(padding, 0.0, value)

    def uncertain(self, nodes, values: dict) -> bool:
        """Whether an expert set that was not pinned lies within its error of another."""
        for node in nodes:
            if node.key[1] == "experts" and f"{node.key[0]}/experts" not in self.answer().decisions:
                scores, bias = (exact(values[key]) for key in node.inputs)
                ranked = np.sort(scores.value + bias.value, axis=-1)
                n = self.case.config.num_experts_per_token
                if n < ranked.shape[-1] and np.any(ranked[..., -n] - ranked[..., -n - 1] <= 2 * scores.bound().max(-1)):
                    return True
        return False


#: Nodes that are no stage of spec.md section 4, by the stage they belong to.
BLAMED = {
    "experts": "route",
    "step_loss": "lk_loss",
    "tokens": "embed",
    "expert_weights.w1": "expert_hidden",
    "expert_weights.w3": "expert_hidden",
    "expert_weights.w2": "expert_output",
    "expert_weighted": "mx_hidden",
}


def worst_edge(edges: list[Edge]) -> Edge:
    """The first faulty edge in data order; on a pass the one with the largest ratio."""
    faulty = [edge for edge in edges if not edge.ok]
    if faulty:
        return min(faulty, key=rank)
    return max(edges, key=lambda e: e.comparison.ratio if e.comparison else 0.0)


def rank(edge: Edge) -> tuple:
    """Data order: forward by step and stage, then backward from the last step to the first, then parameters."""
    if edge.quantity in ("value", "decision"):
        return (0, edge.step, edge.position)
    if edge.stage == "lk_loss":  # its cotangent is the mask, the weights and the reduction: nothing flowed there yet
        return (1, -1000, edge.step)
    if edge.quantity == "cotangent":
        return (1, -edge.step, -edge.position)
    return (2, 0, edge.position)


def check_edges(run: UnrollRun, stage: str, quantity: str) -> dict:
    """One stage and quantity over all steps."""
    edges = run.walk.of(stage, quantity)
    if not edges:
        return verdict.not_offered(f"the trace has no {stage}" + (".grad" if quantity == "cotangent" else ""))
    steps = [_ratio(edges, k) for k in range(1, run.case.config.num_steps + 1)]
    worst, z = worst_edge(edges), _bias(run, stage, quantity)
    found = edge_outcome(worst, stage, quantity) | {"steps": steps if quantity != "gradient" else [], "bias": z}
    found["compared"] = sum(e.comparison.compared for e in edges if e.comparison)
    if any(e.decisions for e in edges):
        found["decisions"] = _sum_decisions(edges)
        found["compared"] = found["decisions"]["total"]
    if found["verdict"] == "pass" and z is not None and not z <= BIAS_LIMIT:
        message = f"{stage} ({quantity}): over the steps its errors lean one way by {z:.3g} standard errors"
        return found | {
            "verdict": "fail",
            "message": message,
            "rank": [*rank(worst)[:1], run.case.config.num_steps, worst.position],
        }
    return found


def _ratio(edges: list[Edge], step: int) -> float | None:
    found = [e for e in edges if e.step == step]
    if not found:
        return None
    if found[0].comparison:
        return found[0].comparison.ratio
    return 0.0 if found[0].ok else float("inf")


def _bias(run: UnrollRun, stage: str, quantity: str) -> float | None:
    pool = run.walk.bias.get((stage, quantity))
    hidden = any(edge.hidden for edge in run.walk.of(stage, quantity))
    z = None if pool is None or hidden else pool.z()
    return None if z is None else abs(z)


def _sum_decisions(edges: list[Edge]) -> dict:
    total = Decisions()
    for d in (edge.decisions for edge in edges if edge.decisions):
        total.total += d.total
        total.flipped += d.flipped
        total.legal += d.legal
        total.illegal += d.illegal
    return total.to_dict()


def edge_outcome(edge: Edge, stage: str, quantity: str) -> dict:
    """The outcome of a check from the edge that decides it."""
    ratio = edge.comparison.ratio if edge.comparison else (0.0 if edge.ok else float("inf"))
    step = edge.step or None
    worst = edge.comparison.worst(step) if edge.comparison else None
    if edge.ok:
        return verdict.outcome("pass", ratio=ratio, worst=worst)
    if worst:
        worst["operands"] = edge.operands
    where = f"step {step}, " if step else ""
    illegal = f"{where}{stage}: {edge.illegal.message}" if edge.illegal else ""
    message = edge.fault or illegal or where + verdict.exceeds(f"{stage} ({quantity})", edge.comparison)
    if edge.why:
        message += f"; {edge.why}"
    if edge.hidden:
        message += f"; not recorded on the way, so the fault may lie there: {', '.join(edge.hidden)}"
    blamed_step, blamed = edge.blame or (step, edge.stage)
    fields = {"ratio": ratio, "worst": worst} | (verdict.of_illegal(edge.illegal, step) if edge.illegal else {})
    fields["first_step"] = blamed_step or step
    return verdict.failed(message, **fields) | {"rank": list(rank(edge)), "blamed": BLAMED.get(blamed, blamed)}


def check_sums(run: UnrollRun, what: str) -> dict:
    """A loss output against what lies below it: slot losses as recorded, step losses as their means, the total."""
    actual = run.answer().outputs.get(what)
    if actual is None or not run.answer().trace:
        return verdict.not_offered(f"needs a trace and {what}")
    found, given, wanted = (
        None,
        np.reshape(actual, (-1, *np.shape(actual)[what != "total_loss" :])),
        expected_sums(run, what),
    )
    if len(given) != len(wanted):
        message = f"{what} has {len(given)} steps; wanted {len(wanted)}"
        return verdict.failed(message, ratio=float("inf")) | _sums_blame(run, what, min(len(given), len(wanted)) + 1)
    for step, (one, expected) in enumerate(zip(given, wanted, strict=True), start=1):
        valid = run.walk.values[(step, "supervised")] if what == "slot_losses" else None
        try:
            comparison = compare(what, one, expected, (0, "total_loss"), run.formats, valid)
        except Mismatch as mismatch:
            return verdict.failed(str(mismatch), ratio=float("inf")) | _sums_blame(run, what, None)
        judged = verdict.of_comparison(what, comparison)
        if judged["verdict"] == "fail":
            return judged | _sums_blame(run, what, None if what == "total_loss" else step)
        found = judged if found is None else verdict.worse(found, judged)
    return found


def expected_sums(run: UnrollRun, what: str) -> list[Running]:
    """One number or array a step; for the total just one, from the step losses that were returned if any were."""
    values, steps = run.walk.values, range(1, run.case.config.num_steps + 1)
    if what != "total_loss":
        return [exact(values[(k, "lk_loss" if what == "slot_losses" else "step_loss")]) for k in steps]
    given = run.answer().outputs.get("step_losses")
    usable = given is not None and np.shape(given) == (len(steps),) and np.isfinite(given).all()
    parts = [Running(x) for x in np.asarray(given)] if usable else [values[(k, "step_loss")] for k in steps]
    with arithmetic(run.formats):
        return [exact(total_loss(run.choices.weights(len(steps))).forward(*parts))]


def _sums_blame(run: UnrollRun, what: str, step: int | None) -> dict:
    """Behind every stage of every step, before anything backward."""
    order = ("slot_losses", "step_losses", "total_loss").index(what)
    rank = [0, run.case.config.num_steps + 1, order, step or 0]
    return {"rank": rank, "first_step": step, "blamed": "total_loss" if what == "total_loss" else "lk_loss"}


def check_parameter(run: UnrollRun, names: list[str]) -> dict:
    """The gradient of one parameter (of one kind of expert weight) as the sum of the recorded products."""
    if not run.differentiated:
        return verdict.not_offered("unroll returned no gradients")
    found = None
    for name in names:
        edge = worst_edge(run.walk.of(name, "gradient"))
        one = edge_outcome(edge, name, "gradient")
        one["compared"] = edge.comparison.compared if edge.comparison else 0
        found = one if found is None else verdict.worse(found, one)
    return found


def check_frozen(run: UnrollRun) -> dict:
    """Frozen parameters and inputs: absent, None or all zero."""
    grads = run.answer().grads
    if not grads:
        return verdict.not_offered("unroll returned no gradients")
    frozen = sorted(frozen_parameters(run.choices) | set(run.inputs))
    for name in frozen:
        if grads.get(name) is not None and np.any(np.asarray(grads[name]) != 0):
            return verdict.failed(f"unroll: {name} is frozen but received a gradient", ratio=float("inf"))
    unknown = sorted(set(grads) - set(frozen) - set(trained_parameters(run.case.config, run.choices)))
    if unknown:
        return verdict.failed(f"unroll returned a gradient of {unknown[0]!r}, which is no parameter of this layout")
    return verdict.outcome("pass", ratio=0.0, compared=len(frozen))


def check_end_to_end(run: UnrollRun, what: str) -> dict:
    """A loss output against the oracle's own run."""
    actual = run.answer().outputs.get(what)
    if actual is None:
        missing = verdict.failed("unroll returned no output 'total_loss'")
        return missing if what == "total_loss" else verdict.not_offered(f"unroll returned no {what}")
    steps, values = range(1, run.case.config.num_steps + 1), run.oracle["values"]
    if what == "total_loss":
        key = (0, "total_loss")
        judged = end_outcome(run, what, actual, exact(values[key]), key, lambda index: made_of(run, key, index))
        return judged | {"growth": growth(run)}
    key = "step_loss" if what == "step_losses" else "lk_loss"
    expected = np.stack([exact(values[(k, key)]) for k in steps])
    supervised = np.stack([values[(k, "supervised")] for k in steps])
    valid = supervised if what == "slot_losses" else None
    return end_outcome(
        run, what, actual, expected, (1, key), lambda index: made_of(run, (index[0] + 1, key), index[1:]), valid
    )


def made_of(run: UnrollRun, key: tuple, index: tuple) -> list[dict]:
    """What the oracle's own run made an element of a loss of."""
    node = next(node for node in graph(run.case.config, run.choices) if node.key == key)
    return of_node(node, run.oracle["values"], index)


def check_gradients(run: UnrollRun, names: list[str]) -> dict:
    """A parameter's gradient end to end."""
    given = run.answer().grads
    if not run.differentiated:
        return verdict.not_offered("unroll returned no gradients")
    found = None
    for name in names:
        if given.get(name) is None:
            return verdict.failed(f"the gradient of {name} is absent; wanted an array")
        expected = exact(run.oracle["grads"][name])
        addends = lambda index, n=name: of_gradient(run.oracle["addends"], n, index)  # noqa: E731
        one = end_outcome(run, f"gradient of {name}", given[name], expected, "gradient", addends)
        found = one if found is None else verdict.worse(found, one)
    return found


def end_outcome(run: UnrollRun, what: str, actual, expected: Running, point, operands, valid=None) -> dict:
    """``operands``: those of the element at an index."""
    try:
        comparison: Comparison = compare(what, actual, expected, point, run.formats, valid)
    except Mismatch as mismatch:
        return verdict.failed(str(mismatch))
    if run.oracle["uncertain"] and not comparison.ok:
        return verdict.outcome(
            "undecided", message=f"{what}: an expert choice that was not returned could go either way"
        )
    finite = bool(np.isfinite(np.asarray(actual, float)[... if valid is None else valid]).all())
    if not finite:
        return verdict.failed(f"{what} is not finite", ratio=float("inf"))
    found = verdict.of_comparison(what, comparison, width=width(expected, point, run.formats))
    return verdict.with_operands(found, operands)


def check_draft_sequence(subject, case: Case, choices: Choices, policy: str, seed: int, what: str) -> dict:
    """Drafting one token after another from a prefix, against the oracle's serial form."""
    formats, config = subject.description.policies[policy], case.config
    params = make_parameters(case, choices, formats["storage"], seed)
    inputs = make_inputs(case, choices, formats["storage"], seed, documents=False)
    anchor = 5
    prefix = {name: inputs[name][0, : anchor + 1] for name in ("tokens", "low", "mid", "high")}
    prefix["given"] = inputs["tokens"][0, anchor + 1 : anchor + config.num_steps]
    result = subject.call(
        "draft_sequence", config=config, choices=choices, policy=policy,
        inputs=handed_over(params | prefix, formats["storage"]),
    )  # fmt: skip
    if result.outputs.get(what) is None:
        return verdict.failed(f"draft_sequence returned no output {what!r}; wanted logits and features")
    with arithmetic(formats):
        drafted = draft_sequence(lifted(params), lifted(prefix), config, choices)
    expected = exact(drafted[0 if what == "logits" else 1])
    point = (1, "logits" if what == "logits" else "layer_output")
    return leading_steps(f"draft_sequence.{what}", result.outputs[what], expected, point, formats)


def leading_steps(what: str, actual, expected: Running, point, formats: dict) -> dict:
    """Compare all steps; where the bounds of later ones decide nothing, the leading ones still do. expected [K, .]."""
    try:
        comparison = compare(what, actual, expected, point, formats)
        widths = [width(expected[k], point, formats) for k in range(len(expected))]
        judged = next((k for k, wide in enumerate(widths) if not wide <= UNDECIDED_WIDTH), len(widths))
        if judged in (0, len(widths)) or not comparison.ok:
            return verdict.of_comparison(what, comparison, width=width(expected, point, formats))
        comparison = compare(what, np.asarray(actual)[:judged], expected[:judged], point, formats)
    except Mismatch as mismatch:
        return verdict.failed(str(mismatch))
    message = f"{what}: the first {judged} of {len(widths)} steps are judged; the bound of step {judged + 1} is "
    message += f"{widths[judged]:.2g} of the quantity, which decides nothing"
    found = verdict.of_comparison(what, comparison, width=max(widths[:judged]))
    return found | {"message": message, "judged": [judged, len(widths)]}
