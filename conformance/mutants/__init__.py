"""Mutants: small, readable faults of the twin ``fast``, each with the blame that the suite must give it."""

from conformance.mutants import attending, unrolled
from conformance.mutants.core import Mutant

MUTANTS: list[Mutant] = [*unrolled.MUTANTS, *attending.MUTANTS]
