"""Mutants: small, readable faults of the twin ``fast``, each with the blame that the suite must give it."""

from . import alignment, attention, drafting, frozen, loss, moe, mx, precision, sampling, unroll
from .catalogue import NOT_EXPRESSIBLE as NOT_EXPRESSIBLE
from .core import Mutant as Mutant

MUTANTS: list[Mutant] = [
    *unroll.MUTANTS,
    *attention.MUTANTS,
    *moe.MUTANTS,
    *mx.MUTANTS,
    *loss.MUTANTS,
    *precision.MUTANTS,
    *frozen.MUTANTS,
    *sampling.MUTANTS,
    *drafting.MUTANTS,
    *alignment.MUTANTS,
]
