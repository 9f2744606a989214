"""Test vectors: the suite's inputs as files for programs in any language, and a verdict on the files they write.

``export`` writes every call that the plan makes, with what the oracle expects and how far off it may be. ``check`` runs
the same plan on what a program answered. docs/vectors.md describes the files.
"""

from .judging import check as check
from .strict import MalformedError as MalformedError
from .writing import export as export
