"""THE table of public packages under test. A package's pins are in ``requirements/matrix/<name>.txt``."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Package:
    """One package: ``name`` as on PyPI, ``adapters`` as for --adapter, each run on its own.

    ``documented`` says in a sentence which rule the package documents, and where; the adapters declare it through
    their choices. ``bases`` are shared environments below its own (``requirements/matrix/bases/<base>.txt``);
    ``variables`` are set for its adapters and scripts.
    """

    name: str
    adapters: tuple[str, ...]
    documented: str = ""
    bases: tuple[str, ...] = ("torch",)
    variables: dict[str, str] = field(default_factory=dict)


PACKAGES = (
    Package(
        "torchao",
        ("torchao", *(f"conformance/adapters/torchao.py:{rule}" for rule in ("rceil", "ceil", "even"))),
        "ScaleCalculationMode: FLOOR is the default of to_mx, RCEIL, CEIL and EVEN are options of it.",
    ),
    Package("gfloat", ("gfloat",), "compute_scale_amax: floor(log2(amax)) - emax, as OCP MX v1.0 section 6.3."),
)
