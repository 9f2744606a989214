"""BENCHMARKS.md from made-up measurements: ratios run by run, targets that are missed, sections in their order."""

import json
from dataclasses import asdict

import pytest

from benchmarks import report
from benchmarks.report import Case, MemoryTarget, Target

FACTS = {"when": "2026-01-01", "machine": "made up", "threads": 2, "load": 0.0, "python": "3.11.0", "compiler": "none",
         "versions": {"torch": "2.13.0"}, "heap": "warm"}  # fmt: skip


def case(title="a case", **changes) -> Case:
    times = {"copy": [1.0, 2.0, 4.0], "ours": [2.0, 2.0, 2.0], "theirs": [9.0, 8.0, 30.0]}
    extra = {"copy": 0, "ours": 2_000_000, "theirs": 4_000_000}
    return Case(title, "copy", times, extra, **changes)


def page(sections: dict[str, list[Case]]) -> str:
    data = {name: {"environment": FACTS, "cases": [asdict(c) for c in cases]} for name, cases in sections.items()}
    return report.page(json.loads(json.dumps(data)))


@pytest.mark.parametrize(
    ("target", "reached", "text"),
    [
        (Target("ours", "copy", 1.5), True, "ours / copy <= 1.5: 1.00 (0.50 to 2.00)"),
        (Target("ours", "copy", 0.9), False, "ours / copy <= 0.9: 1.00 (0.50 to 2.00)"),
        (Target("theirs", "ours", 4, at_least=True), True, "theirs / ours >= 4: 4.50 (4.00 to 15.00)"),
        (Target("theirs", "ours", 5, at_least=True), False, "theirs / ours >= 5: 4.50 (4.00 to 15.00)"),
    ],
)
def test_a_target_is_judged_by_the_median_ratio_within_one_run(target, reached, text):
    assert target.reached(case().times) == (reached, text)


@pytest.mark.parametrize(("limit", "against", "reached"), [(2e6, "", True), (1e6, "", False), (0.5, "theirs", True),
                                                           (0.4, "theirs", False)])  # fmt: skip
def test_a_memory_target_is_bytes_or_a_share(limit, against, reached):
    assert MemoryTarget("ours", limit, against).reached(case().extra)[0] is reached


def test_the_page_begins_with_all_targets_and_keeps_the_order_of_sections():
    missed = [Target("ours", "copy", 0.5)]
    text = page(
        {"unroll": [case("last", targets=missed)], "loss": [case("first", targets=[Target("ours", "copy", 3)])]}
    )
    assert "1 of 2 are reached" in text
    assert "| last | ours / copy <= 0.5: 1.00 (0.50 to 2.00) | **not reached** |" in text
    assert text.index("## Targets") < text.index("### first") < text.index("### last")
    assert "Not measured: no GPU was there" in text


def test_a_section_names_the_code_that_it_measured():
    facts = FACTS | {"subject": "0123456789ab"}
    assert report.about(facts).startswith("fast 0123456789ab; 2026-01-01; ")
    assert report.about(FACTS).startswith("2026-01-01; ")


def test_saving_a_section_keeps_the_others_and_makes_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DATA", tmp_path / "data" / "benchmarks.json")
    monkeypatch.setattr(report, "PAGE", tmp_path / "BENCHMARKS.md")
    report.save("mx", [case("the first")])
    report.save("loss", [case("the second")])
    data = json.loads(report.DATA.read_text(encoding="utf-8"))
    assert list(data) == ["mx", "loss"]
    assert report.PAGE.read_text(encoding="utf-8") == report.page(data)
    assert "### the first" in report.page(data)
