"""Mutants: small, readable faults of the twin ``fast``, each with the blame that the suite must give it."""

from conformance.mutants import attending, experts, losses, precise, quantising, sealed, unrolled
from conformance.mutants.catalogue import NOT_EXPRESSIBLE as NOT_EXPRESSIBLE
from conformance.mutants.core import Mutant as Mutant

MUTANTS: list[Mutant] = [
    *unrolled.MUTANTS,
    *attending.MUTANTS,
    *experts.MUTANTS,
    *quantising.MUTANTS,
    *losses.MUTANTS,
    *precise.MUTANTS,
    *sealed.MUTANTS,
]
