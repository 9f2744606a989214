"""Results made up for the renderings: small, with every verdict, hostile names, and as many checks as asked for."""

from types import SimpleNamespace

from draftconf.conformance.report import results

SUBJECT = {
    "name": "made <b>up</b> & Co", "version": "3", "url": "https://example.org", "formats": {"storage": "float32"},
    "choices": {}, "layouts": ["mtp", "eagle3"],
    "policies": {"float32": {"storage": "float32"}, "bfloat16": {"storage": "bfloat16"}}, "documents": True,
    "offers": ["unroll"], "extra": {},
}  # fmt: skip
PASS = results.EMPTY | {"verdict": "pass", "ratio": 0.5, "compared": 10}
WORST = {
    "step": 3, "index": [0, 4], "actual": 0.1, "expected": -0.2, "error": 0.3, "bound": 1e-3,
    "actual_hex": (0.1).hex(), "expected_hex": (-0.2).hex(),
    "format": "float32", "actual_bits": "0x3dcccccd", "expected_bits": "0xbe4ccccd",
    "operands": [
        {"name": "3/attn_gate", "row": [0, 4], "at": [[1], [7]], "values": [(1.5).hex(), (-2e-7).hex()], "of": 80},
        {"name": "tokens <i>", "row": [0, 4], "at": [], "values": ["17"], "of": 1},
    ],
}  # fmt: skip
ABSENT = results.EMPTY | {"verdict": "not offered", "message": "route is not offered"}
FAIL = PASS | {
    "verdict": "fail", "ratio": 300.0, "steps": [0.1, 0.2, 300.0, 0.1, 0.1, "inf", None], "worst": WORST,
    "first_step": 3, "message": 'attention[0, 4] is <script>alert("x")</script>',
}  # fmt: skip


def entry(stage, quantity="value", kind="trace", case="tame", layout="mtp", policy="float32", order=(0, 0)) -> dict:
    aspect = {"trace": "trace", "stage": "stage", "end_to_end": "end"}[kind]
    check_id = f"{stage}.{quantity}.{aspect}[{layout}-{policy}-{case}]"
    fields = {"id": check_id, "kind": kind, "stage": stage, "quantity": quantity, "aspect": aspect, "case": case}
    return results.about(SimpleNamespace(**fields, layout=layout, policy=policy, order=order))


def build(entries: list, **more) -> dict:
    """Of pairs (entry, outcome); None for a check that was lost."""
    return results.build(
        plan=[check for check, _ in entries],
        outcomes={check["id"]: results.clean(said, check) for check, said in entries if said is not None},
        selected={check["id"] for check, _ in entries},
        subject=SUBJECT,
        adapter="my file.py:adapter",
        seed=5,
        env={"python": "3.11.0", "numpy": "2.4.0", "torch": None},
        selection={"stage": None, "policy": None, "pyargs": False},
        **more,
    )


def everything() -> dict:
    """A run with every verdict that a check can end in."""
    drift = {"error": [1e-7, 2e-7, 0.2, 0.2, 0.3, 0.3, "nan"], "bound": [1e-5] * 6 + ["inf"]}
    return build([
        (entry("embed"), PASS | {"ratio": 0.0, "steps": [0.0] * 7}),
        (entry("attention"), FAIL),
        (entry("attention", "cotangent", order=(1, 0)), PASS | {"steps": [0.5] * 7, "worst": WORST, "bias": 1.5}),
        (entry("experts", "decision"), PASS | {"decisions": {"total": 9, "flipped": 2, "legal": 2, "illegal": 0}}),
        (entry("fc.weight", "gradient", order=(2, 0)), PASS),
        (entry("lk_loss", "loss", "stage", policy="bfloat16"), PASS | {"ratio": 0.99}),
        (entry("route", "weights", "stage"), ABSENT),
        (entry("moe", "output", "stage"), results.EMPTY | {"verdict": "error", "message": "moe raised ValueError: no"}),
        (entry("unroll", "total_loss", "end_to_end"), PASS | {"width": 1e-5, "growth": {"logits": drift}}),
        (entry("unroll", "d_fc.weight", "end_to_end"), PASS | {"verdict": "undecided", "width": 3.0}),
        (entry("head", "logits", "stage"), None),
    ])  # fmt: skip


def many(count: int) -> dict:
    """As many failing checks, with long messages."""
    said = FAIL | {"message": "x" * 400}
    return build([(entry(f"stage_{i % 40}", case=f"case{i}", order=(0, i % 40)), said) for i in range(count)])
