"""Mutants: small, readable faults of the twin ``fast``, each with the blame that the suite must give it."""

from conformance.mutants import attending, experts, losses, precise, quantising, sealed, unrolled
from conformance.mutants.core import Mutant

MUTANTS: list[Mutant] = [
    *unrolled.MUTANTS,
    *attending.MUTANTS,
    *experts.MUTANTS,
    *quantising.MUTANTS,
    *losses.MUTANTS,
    *precise.MUTANTS,
    *sealed.MUTANTS,
]
