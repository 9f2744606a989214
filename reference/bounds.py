"""What an implementation declares, as roundoffs, and the failure probability that its error bounds are derived from.

The bounds themselves come from running the oracle on the numbers of ``reference.running_error``: docs/bounds.md.
Nothing here is a tolerance: formats in, unit roundoffs out.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from math import log, sqrt

from .formats import FORMATS, Format

FAILURE_PROBABILITY = 1e-6  # of one false alarm in a whole run
COMPARISONS = 2**27  # no run compares more numbers; the report prints how many it did compare
LAMBDA = sqrt(2 * log(2 * COMPARISONS / FAILURE_PROBABILITY))
GRAIN = 1e-150  # keeps squares from underflowing in float64

#: The declared format of a stage's output, where it is not ``storage``.
BOUNDARY_FORMATS = {
    "logits": "logits",
    "target_log_probs": "accumulate",
    "lk_loss": "accumulate",
    "slot_loss": "accumulate",
    "step_loss": "accumulate",
    "total_loss": "accumulate",
    "router_scores": "router",
    "route": "router",
    "attention": "attention_output",
}

#: Places inside a stage where an implementation may round, as keys of its declared formats; default ``accumulate``.
INTERNAL_POINTS = {
    "router": "router logits before the sigmoid",
    "normalized": "RMSNorm's x / rms before the gain",
    "attention_scores": "attention scores, and their cotangents",
    "attention_probabilities": "attention probabilities, and their cotangents",
    "gate": "the sigmoid of the output gate",
    "expert_sum": "expert outputs after the routing weight, before their sum",
}


@dataclass(frozen=True)
class Arithmetic:
    """The formats an implementation declares, as roundoffs. ``formats`` maps the keys above to names of FORMATS, and
    ``rounding`` of its stores to ``nearest`` or ``stochastic``.
    """

    formats: dict = field(default_factory=dict)

    def __getitem__(self, name: str) -> Format:
        fallback = {"storage": "float64", "accumulate": self.formats.get("storage", "float64")}
        default = fallback.get(name) or self.formats.get("storage" if name in _STORED else "accumulate", "float64")
        return FORMATS[self.formats.get(name, default)]

    def at(self, point) -> Format:
        """The format that a value is rounded to at ``point``: a key of ``reference.graph`` or an internal point.

        Stochastic rounding errs by up to a whole spacing, like rounding to nearest with one bit less.
        """
        if isinstance(point, tuple):
            form = self[BOUNDARY_FORMATS.get(point[1], "storage")]
        else:
            form = self[
                point if point in INTERNAL_POINTS or point in self.formats or point == "storage" else "gradient"
            ]
        return replace(form, precision=form.precision - 1) if self.formats.get("rounding") == "stochastic" else form

    @property
    def unit(self) -> float:
        """Roundoff of one operation: the implementation's and the oracle's own."""
        form = self["accumulate"]
        return (2.0**-24 if form.name == "tf32" else form.unit_roundoff) + 2.0**-53

    @property
    def product_input(self) -> float:
        """Rounding of a product's inputs: TF32 keeps 11 bits of them."""
        return self["accumulate"].unit_roundoff if self["accumulate"].name == "tf32" else 0.0

    @property
    def truncates(self) -> bool:
        return self["accumulate"].name == "tensor-core"

    @property
    def grain(self) -> float:
        """The smallest normal number: an implementation may flush below it."""
        return max(2.0 ** self["accumulate"].min_exponent, GRAIN)


_STORED = ("storage", "attention_output", "gradient")
CURRENT: ContextVar[Arithmetic] = ContextVar("arithmetic")


@contextmanager
def arithmetic(formats: dict):
    """Every ``Running`` operation inside rounds as ``formats`` declares."""
    token = CURRENT.set(Arithmetic(formats))
    try:
        yield CURRENT.get()
    finally:
        CURRENT.reset(token)
