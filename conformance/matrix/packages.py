"""THE table of public packages under test. A package's pins are in ``requirements/matrix/<name>.txt``."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Package:
    """One package: ``name`` as on PyPI, ``adapters`` as for --adapter, each run on its own.

    ``documented`` says in a sentence which rule the package documents, and where; the adapters declare it through
    their choices. ``bases`` are shared environments below its own (``requirements/matrix/bases/<base>.txt``);
    ``variables`` are set for its adapters and scripts; ``options`` go to pip.
    """

    name: str
    adapters: tuple[str, ...]
    documented: str = ""
    bases: tuple[str, ...] = ("torch",)
    variables: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


ADAPTERS = "conformance/adapters/"
ALPHA = "The LK loss is -log sum min(p, q), report eq. 16"

PACKAGES = (
    Package(
        "nemo-automodel",
        ("nemo_automodel", ADAPTERS + "nemo_automodel.py:backbone", "nemo_automodel_sampling"),
        f"{ALPHA} (lk_loss_type alpha, where an acceptance of 0 counts as a loss of 0), or the hybrid with weight "
        "exp(-3 alpha), alpha the mean acceptance. Of MX it reads blocks only.",
    ),
    Package(
        "speculators",
        (
            "speculators",
            "speculators_unroll",
            *(f"{ADAPTERS}speculators_unroll.py:{kind}" for kind in ("kl", "tv", "packed")),
        ),
        f"{ALPHA} (neg_log_acceptance_loss, acceptance clamped at 1e-5); the hybrid has weight exp(-3 alpha) at each "
        "position. Its EAGLE-3 step: masked means, 1e-5 in "
        "the denominator, step weights decay^i, 1 by default.",
    ),
    Package(
        "torchao",
        (
            "torchao",
            *(f"{ADAPTERS}torchao.py:{rule}" for rule in ("rceil", "ceil", "even")),
            "torchao_qat",
            ADAPTERS + "torchao_qat.py:weight",
        ),
        "ScaleCalculationMode: FLOOR by default in to_mx, RCEIL in MXFakeQuantizeConfig, all four as options.",
    ),
    Package(
        "compressed-tensors",
        ("compressed_tensors",),
        "round_to_power_2: the block's maximum rounded by the mantissa width of the element type, which is EVEN.",
    ),
    Package(
        "nvidia-modelopt",
        ("modelopt", "modelopt_unroll", ADAPTERS + "modelopt_unroll.py:padded"),
        "MXFP8QTensor: scale = 2^ceil(log2(amax / E4M3_max)), which is RCEIL; MXFP4QTensor the same with 6. Its "
        "EAGLE-3 step: soft cross-entropy, masked mean plus 1e-5 in the denominator, step weights 0.9^i.",
    ),
    Package(
        "amd-quark",
        ("quark", *(f"{ADAPTERS}quark.py:{rule}" for rule in ("floor", "ceil"))),
        "OCP_MXFP4Spec and OCP_MXFP8E4M3Spec: scale_calculation_mode even by default, floor and ceil are options.",
    ),
    Package(
        "brevitas", ("brevitas",), "mx_quant_ocp: powers of two by FloorSte, which is FLOOR, named after OCP's formats."
    ),
    Package("gfloat", ("gfloat",), "compute_scale_amax: floor(log2(amax)) - emax, as OCP MX v1.0 section 6.3."),
    Package("ml-dtypes", ("ml_dtypes_mx",), "Element types and E8M0 as in OCP MX v1.0 section 5; no rule for scales."),
    Package(
        "llmcompressor",
        ("llmcompressor", "conformance/adapters/llmcompressor.py:infer"),
        "K3's own modelling code, with the epsilon 1e-6 in the norms of the latents and 1e-20 in the router.",
    ),
    Package(
        "transformers",
        ("transformers",),
        "gpt-oss' checkpoints are OCP MXFP4; assisted generation is algorithm 1 of arXiv:2211.17192.",
    ),
    Package(
        "flashspec",
        ("flashspec", "conformance/adapters/flashspec.py:batched"),
        "sampling/rejection.py: exactly algorithm 1 of arXiv:2211.17192.",
    ),
    Package(
        "specdec", ("specdec",), "SpecDecoder.verify: speculative sampling, a rejected token drawn anew from (p - q)+."
    ),
    Package(
        "naive-speculate",
        ("naive_speculate",),
        "speculate/utils.py: speculative sampling, resampled from the residual law.",
        options=("--ignore-requires-python",),
    ),
    Package(
        "specforge",
        ("specforge", "specforge_unroll", ADAPTERS + "specforge_unroll.py:kl"),
        f"{ALPHA} (lk_loss_type alpha, masked mean). Its default is a soft cross-entropy averaged over all slots; step "
        "weights 0.8^i. The hybrid: weight exp(-alpha), alpha the mean acceptance.",
    ),
    Package(
        "liger-kernel",
        ("liger_kernel",),
        "LigerFusedCETVDLoss: sum |p - q| / 2 of each token; liger_jsd: the generalised JSD, KL at beta 0, reverse KL "
        "at 1, a mean over the tokens with a label. It has no LK loss.",
        variables={"TRITON_INTERPRET": "1"},
    ),
)
