"""One name for the packages reference, fast and conformance: ``draftconf.reference.mx``, ``draftconf.fast.loss``.

An installation has the three inside this package, and puts no other name on the path. In a checkout they lie beside
this folder, where they are looked for too.
"""

from pathlib import Path

__version__ = "0.2.0"

_beside = Path(__file__).resolve().parents[1]
if (_beside / "pyproject.toml").is_file() and (_beside / "reference" / "__init__.py").is_file():
    __path__.append(str(_beside))
