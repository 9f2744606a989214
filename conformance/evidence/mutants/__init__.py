"""Mutants: small, readable faults of the twin ``fast``, each with the blame that the suite must give it."""

from . import attending, experts, losses, precise, quantising, sealed, unrolled
from .catalogue import NOT_EXPRESSIBLE as NOT_EXPRESSIBLE
from .core import Mutant as Mutant

MUTANTS: list[Mutant] = [
    *unrolled.MUTANTS,
    *attending.MUTANTS,
    *experts.MUTANTS,
    *quantising.MUTANTS,
    *losses.MUTANTS,
    *precise.MUTANTS,
    *sealed.MUTANTS,
]
