"""``conform explain``: what a check compares, what it hunts, where its bound comes from, and how to repeat it."""

import re
from dataclasses import dataclass

from ..checks.cases import unroll_cases
from ..checks.exact import MX_CASES, SILENT
from ..checks.stages import FIRST
from ..protocol.losses import LOSSES
from ..report.repeat import repeat_command
from .descriptions import find
from .faults import hunted

ID = re.compile(r"(?P<name>.+)\.(?P<aspect>stage|trace|end|exact)\[(?P<layout>[^-]+)-(?P<policy>.+)-(?P<case>[^-]+)\]")
CASES = {
    "tame": "ordinary sizes, two documents, ragged masks, padding poisoned with 1e30",
    "harsh": "rows of 1e-3 to 1e3 times their size, low-rank projections scaled by 0.01, gates at their caps",
    "extreme": "one target logit 200 above the rest in every third slot, one draft logit that dominates",
    "corners": "fewer slots than steps, documents of one slot, padding on the left, saturated and tied router scores",
    "poisoned": "the tame case with NaN in the padding",
    "plain": "one document, a ragged mask",
    "documents": "two documents and padding",
    "steps": "ten slots, a ragged mask; two documents in the last row if the adapter takes them",
    "laws": "pairs of laws: ordinary, equal, disjoint, one-hot, sparse; three uniform draws each",
    "all_codes": "every scale byte with every element code",
}
EXACT = "None: the value is exact, so it is compared byte for byte, or number for number."
BOUNDS = {
    "stage": "The oracle computes the stage in float64 on numbers that carry their error: store, reduce and propagate "
    "for the declared formats, from the inputs of the case (docs/bounds.md).",
    "trace": "As for a stage (docs/bounds.md), from the implementation's own recorded inputs of the step, so that no "
    "error compounds; the value itself may be rounded once to its format. A boundary that is not recorded is composed "
    "over, with its error.",
    "end": "Carried through all seven steps from the inputs, decisions pinned. Inside a bound wider than a tenth of "
    "the quantity nothing is decided, and the width is reported.",
    "exact": EXACT,
}
SETS = {
    "gradient_set": "Membership in Clarke's set of gradients, which is the only right answer where q = p.",
    "frozen": "None: what is frozen must be absent, None or exactly zero.",
}
SPECIAL = {
    "gradient_set": "the gradient of draft_logits, as a member of the set of right ones,",
    "frozen": "that what is frozen gets no gradient, in a call",
}
MOVED = "None: those that the oracle's own step moves; noise is what runs on the same inputs differ by."
#: What the checks of ``pattern`` compare, and what decides.
PATTERN = {
    "tokens": ("which logits move with the token of one slot", MOVED),
    "features": ("which logits move with the features of one slot", MOVED),
    "fusion": ("whether each of low, mid and high moves the logits of step 1", "None: each must."),
    "recycle": ("whether a step goes on from the output of the step before, where all slots hold the same",
                "Two roundings to the storage format and 64 to the accumulation format: two steps closer than that "
                "read the same."),
    "cache": ("which keys a step attends: the features made 256 and 1024 times as large, the effect of a token on step "
              "k less that on step k - 1",
              "A key's effect keeps its size and any other falls to a quarter; half is the limit. Below the rounding "
              "of the logits nothing is decided."),
    "step_losses": ("the loss of every step, from the logits that were returned",
                    "The oracle computes the declared loss on numbers that carry their error (docs/bounds.md)."),
    "mask": ("whether targets at slots that the mask leaves out move a loss", "None: they must not."),
    "empty_steps": ("the losses where later steps have no supervised slot",
                    "As for step_losses; nothing may be NaN or infinite."),
    "total_loss": ("the total as the weighted sum of the step losses that were returned", "As for step_losses."),
    "d_features": ("the gradient of the total loss along itself and along a random direction",
                   "The range of three difference quotients that converge, the bends of min(p, q), the spread of the "
                   "loss on neighbouring inputs over the step, and 16 roundings of the gradient."),
}  # fmt: skip
DECIDED = "A decision must be right wherever its margin exceeds the error of what it was taken from."
DECISIONS = ("experts", "below", "decision", "tokens", "mx_input", "mx_hidden")


@dataclass(frozen=True)
class Named:
    """A check id, taken apart."""

    id: str
    stage: str
    quantity: str
    aspect: str
    layout: str
    policy: str
    case: str

    @property
    def kind(self) -> str:
        return {"trace": "trace", "end": "end_to_end"}.get(self.aspect, "stage")

    @classmethod
    def of(cls, text: str, ids: list[tuple[str, str]]) -> "Named":
        """``ids``: stage and quantity of every check that there is. Raises ValueError with a sentence."""
        found = ID.fullmatch(text)
        if not found:
            raise ValueError(f"{text!r} is no check id: wanted stage.quantity.aspect[layout-policy-case]")
        known = [(stage, quantity) for stage, quantity in ids if f"{stage}.{quantity}" == found["name"]]
        if not known:
            raise ValueError(f"there is no check {found['name']}; conform stages lists what there is")
        return cls(text, *known[0], found["aspect"], found["layout"], found["policy"], found["case"])


def names() -> list[tuple[str, str]]:
    """Stage and quantity of every check of a plan that offers all."""
    from ..checks.plan import plan
    from ..protocol.description import Description

    return list(dict.fromkeys((c.stage, c.quantity) for c in plan(Description.from_dict({
        "name": "any", "formats": {"storage": "float32"}, "pattern": {"step_weights": [1] * 7},
        "losses": {name: {} for name in LOSSES}}))))  # fmt: skip


def explain(check_id: str, adapter: str, seed: int) -> str:
    """Several short paragraphs."""
    check = Named.of(check_id, names())
    parts = [f"{check.id}\n{compared(check)}"]
    wanted = "trace" if check.kind == "trace" else "method"
    for stage in (s for s in find(check.stage) if s.kind == wanted):
        parts.append(f"Equation  {stage.equation}\nSource    {stage.source}\nReads     {', '.join(stage.inputs)}")
    faults = hunted(check.stage, check.quantity)
    parts.append(
        "\n".join(
            ["Hunts", *(f"  {fault.what}\n    seen in {fault.source}; shown by {fault.exposed}" for fault in faults)]
        )
    )
    parts.append(f"Bound     {bound(check)}")
    parts.append(f"Case      {case(check)}")
    command = repeat_command({"kind": check.kind, "id": check.id}, adapter, seed)
    parts.append(f"Repeat    {command}\nArrays    add --dump DIR to save them where the check fails")
    return "\n\n".join(parts)


def compared(check: Named) -> str:
    quantity = check.quantity
    if check.kind == "trace":
        what = {"value": "the recorded value", "decision": "the recorded choice", "cotangent": "the recorded cotangent",
                "gradient": "the gradient of this parameter, a sum over the steps,"}[quantity]  # fmt: skip
        return f"The walk: {what} of {check.stage} at every step against the oracle on the implementation's own inputs."
    if check.kind == "end_to_end":
        return f"End to end: {quantity} of the whole unroll against the oracle's own run."
    if check.stage == "pattern":
        return f"A step whose layer may be any, from outside: {PATTERN[quantity][0]}."
    what = SPECIAL.get(quantity) or (f"the gradient of {quantity[2:]}" if quantity.startswith("d_") else quantity)
    return f"A stage by itself: {what} of {check.stage} on inputs that its storage format holds exactly."


def bound(check: Named) -> str:
    if check.stage == "pattern":
        return PATTERN[check.quantity][1]
    if check.quantity in SETS:
        return SETS[check.quantity]
    if check.quantity in DECISIONS:
        return DECIDED
    return BOUNDS[check.aspect]


def case(check: Named) -> str:
    name = check.case.removesuffix(FIRST)
    told = MX_CASES.get(name) or CASES.get(name)
    if told is None:
        known = ", ".join(dict.fromkeys([*(c.name for c in unroll_cases()), *CASES, *MX_CASES]))
        raise ValueError(f"there is no case {check.case}; known: {known}")
    silent = "; OCP is silent here, an adapter may declare otherwise in mx_silent" if check.case in SILENT else ""
    silent += ", at step 1" if name != check.case else ""
    return f"{check.case}: {told}{silent} (layout {check.layout}, policy {check.policy})"
