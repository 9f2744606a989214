"""Known deviations: reading the file, judging its entries, and a run with one."""

import datetime
from pathlib import Path

import pytest
from stand_in import last_line, read

from draftconf.conformance.report import deviations
from draftconf.conformance.report.deviations import Deviation, Deviations
from draftconf.conformance.report.results import EMPTY

TODAY = datetime.date(2026, 6, 1)
GOOD = {
    "id": "route.output.trace[mtp-float32-*]",
    "kind": "fail",
    "ratio": [30.0, 50.0],
    "reason": "the router sums in another order",
    "url": "https://example.org/issues/7",
    "until": "2999-12-31",
}


def toml(*entries) -> str:
    lines = []
    for entry in entries:
        lines += ["[[deviation]]", *(f"{key} = {value!r}" for key, value in entry.items())]
    return "\n".join(lines) + "\n"


def loaded(tmp_path, text: str) -> Deviations:
    (tmp_path / "known.toml").write_text(text, encoding="utf-8")
    return deviations.load(tmp_path / "known.toml")


def without(key: str) -> dict:
    return {name: value for name, value in GOOD.items() if name != key}


# -- reading ---------------------------------------------------------------------------------------------------------


def test_good_file(tmp_path):
    crash = without("ratio") | {"kind": "crash"}
    unmeasured = GOOD | {"ratio": "none"}
    first, second, third = loaded(tmp_path, toml(GOOD, crash, unmeasured)).entries
    assert (first.number, first.ratio, first.until) == (1, (30.0, 50.0), datetime.date(2999, 12, 31))
    assert (second.kind, second.ratio, third.ratio) == ("crash", None, None)
    assert loaded(tmp_path, "").entries == ()
    assert loaded(tmp_path, toml(GOOD).replace("'2999-12-31'", "2999-12-31")).entries == (first,)


@pytest.mark.parametrize("key", [*deviations.REQUIRED, "ratio"])
def test_missing_key_is_named_with_its_entry(tmp_path, key):
    where = "deviation 2" if key == "id" else r"deviation 2 \(route.output.trace"
    with pytest.raises(ValueError, match=f"{where}.* has no key '{key}'"):
        loaded(tmp_path, toml(GOOD, without(key)))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[deviation]", "is not TOML"),
        ("[[deviations]]\n", "has a key 'deviations'"),
        ("deviation = 3\n", "no list of tables"),
        ("deviation = [3]\n", "no list of tables"),
        (toml(GOOD | {"because": "x"}), r"deviation 1 \(route.* has an unknown key 'because'; known: id, kind"),
        (toml(GOOD | {"kind": "skip"}), "has kind = 'skip'; wanted one of fail, error, crash, timeout"),
        (toml(GOOD | {"reason": " "}), "has reason = ' '; wanted a string that says something"),
        (toml(GOOD | {"id": 3}), "deviation 1 has id = 3"),
        (toml(GOOD | {"ratio": [5.0, 2.0]}), r"has ratio = \[5.0, 2.0\]; wanted \[low, high\]"),
        (toml(GOOD | {"ratio": [0, 2.0]}), "with 0 < low"),
        (toml(GOOD | {"ratio": 5.0}), "has ratio = 5.0"),
        (toml(GOOD | {"ratio": ["1", "2"]}), "has ratio"),
        (toml(GOOD).replace("[30.0, 50.0]", "[nan, 50.0]"), "has ratio"),
        (toml(GOOD | {"kind": "error"}), "has a key 'ratio', but kind 'error' measures none"),
        (toml(GOOD | {"until": "soon"}), "has until = 'soon'; wanted a date such as"),
        (toml(GOOD | {"until": 2030}), "has until = 2030"),
    ],
)
def test_malformed_file_is_a_sentence(tmp_path, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        loaded(tmp_path, text)


def test_file_that_is_no_text(tmp_path):
    (tmp_path / "known.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        deviations.load(tmp_path / "known.toml")


# -- judging ---------------------------------------------------------------------------------------------------------


def entry(check_id="a.b.c[d]", kind="fail", ratio=(30.0, 50.0), until="2026-06-01", number=1) -> Deviation:
    return Deviation(number, check_id, kind, ratio, "why", "url", datetime.date.fromisoformat(until))


def ended(verdict="fail", ratio=41.2, check_id="a.b.c[d]") -> dict:
    return {"id": check_id} | EMPTY | {"verdict": verdict, "ratio": ratio, "extra": {}}


def judged(outcome: dict, *entries) -> tuple[str, list[str]]:
    """The verdict after all, and what is said of the entries."""
    known = Deviations(entries or (entry(),), TODAY)
    outcome = known.apply(outcome["id"], outcome)
    return outcome["verdict"], known.faults([outcome])


def test_brackets_stand_for_themselves():
    assert entry("a.b[x]").names("a.b[x]")
    assert not entry("a.b[x]").names("a.bx")
    assert entry("a.*[mtp-?-x]").names("a.b.c[mtp-1-x]")
    assert not entry("a.b").names("a.b.c")


def test_failure_inside_its_range_is_known():
    assert judged(ended()) == ("known deviation", [])
    assert judged(ended(ratio=30.0)) == ("known deviation", [])
    assert judged(ended(ratio="inf"), entry(ratio=(30.0, float("inf")))) == ("known deviation", [])
    assert judged(ended(ratio=None), entry(ratio=None)) == ("known deviation", [])
    assert judged(ended("crash", None), entry(kind="crash", ratio=None)) == ("known deviation", [])


@pytest.mark.parametrize(
    ("outcome", "known", "why"),
    [
        (ended(ratio=51.0), entry(), "its ratio 51 is outside 30 to 50"),
        (ended(ratio=29.0), entry(), "its ratio 29 is outside 30 to 50"),
        (ended(ratio="nan"), entry(), "its ratio inf is outside"),
        (ended(ratio=None), entry(), "the failure has no ratio; the entry says 30 to 50"),
        (ended(ratio=2.0), entry(ratio=None), "its ratio is 2, and the entry says that it has none"),
        (ended("pass", 0.5), entry(), "the check passes"),
        (ended("undecided", 40.0), entry(), "the check ends as 'undecided', not as 'fail'"),
        (ended("not offered", None), entry(), "the check ends as 'not offered'"),
        (ended("timeout", None), entry(kind="crash", ratio=None), "the check ends as 'timeout', not as 'crash'"),
    ],
)
def test_anything_else_is_stale_and_keeps_its_verdict(outcome, known, why):
    verdict, said = judged(outcome, known)
    assert verdict == outcome["verdict"]
    assert len(said) == 1
    assert said[0].startswith("deviation 1 (a.b.c[d]) is stale: a.b.c[d]: " + why)


def test_expired_entry_excuses_nothing():
    verdict, said = judged(ended(), entry(until="2026-05-31"))
    assert verdict == "fail"
    assert said == ["deviation 1 (a.b.c[d]) expired: until 2026-05-31"]


def test_two_entries_for_one_check_excuse_nothing():
    verdict, said = judged(ended(), entry(), entry("a.*", number=2))
    assert verdict == "fail"
    assert said == ["deviation 1 (a.b.c[d]) and deviation 2 (a.*) both name a.b.c[d]; one check, one entry"]


@pytest.mark.parametrize("verdict", ["deselected", "lost"])
def test_check_that_did_not_run_says_nothing_of_its_entry(verdict):
    assert judged(ended(verdict, None)) == (verdict, [])


def test_unmatched_entry():
    known = Deviations((entry(), entry("z.*", number=2)), TODAY)
    assert known.unmatched(["a.b.c[d]"]) == [
        "deviation 2 (z.*) is unmatched: the adapter's plan has no check of that id"
    ]


# -- a run -----------------------------------------------------------------------------------------------------------

ALL = GOOD | {"id": "route.output.*"}


def run(suite, *args, entries=(ALL,), adapter="Wrong"):
    Path("known.toml").write_text(toml(*entries), encoding="utf-8")
    return suite(adapter, "--deviations", "known.toml", "--results", "r.json", "--report", "r.md", *args)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_known_deviation_is_counted_on_its_own(suite, workers):
    result = run(suite, "-n", workers)
    assert result.ret == 0
    assert last_line(result) == "No fault found: 24 passed, 12 known deviations, 12 not offered."
    counts = read("r.json")["counts"]
    assert (counts["passed"], counts["known deviations"], counts["failed"], counts["executed"]) == (24, 12, 0, 36)
    assert "XFAIL" not in result.stdout.str()
    report = Path("r.md").read_text(encoding="utf-8")
    assert "## Known deviations" in report
    assert "| fail | 41 | 30 to 50 | the router sums in another order | https://example.org/issues/7 |" in report


def test_crash_can_be_known(suite):
    crash = {key: value for key, value in ALL.items() if key != "ratio"} | {"kind": "crash"}
    result = run(suite, entries=(crash,), adapter="Dies")
    assert result.ret == 0
    assert read("r.json")["counts"]["known deviations"] == 12


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"id": "rout.*"}, "deviation 1 (rout.*) is unmatched"),
        ({"until": "2020-01-01"}, "deviation 1 (route.output.*) expired: until 2020-01-01"),
        (
            {"id": "attention.*"},
            "deviation 1 (attention.*) is stale: attention.output.stage[mtp-float32-harsh]: the check",
        ),
        ({"ratio": [42.0, 50.0]}, "its ratio 41.2 is outside 42 to 50"),
    ],
)
def test_entry_that_does_not_hold_fails_the_run(suite, change, sentence, workers):
    result = run(suite, "-n", workers, entries=(ALL | change,))
    assert result.ret == 1
    assert sentence in result.stdout.str()
    results = read("r.json")
    assert results["verdict"] == "fault found"
    assert results["counts"]["failed"] == 12
    assert sentence in Path("r.md").read_text(encoding="utf-8")


def test_stale_entry_fails_a_run_without_a_failing_check(suite):
    result = run(suite, adapter="Good")
    assert result.ret == 1
    assert last_line(result).startswith("Fault: deviation 1 (route.output.*) is stale: route.output")


def test_narrowed_run_does_not_complain_of_entries_for_the_rest(suite):
    assert run(suite, "--stage", "attention").ret == 0
    result = run(suite, "--policy", "float32", entries=(ALL, GOOD | {"id": "lk_loss.*float64*"}))
    assert result.ret == 0


@pytest.mark.parametrize("workers", ["0", "2"])
def test_malformed_file_is_a_usage_error(suite, workers):
    result = run(suite, "-n", workers, entries=(ALL | {"because": "x"},))
    assert result.ret == 4
    assert "known.toml deviation 1 (route.output.*) has an unknown key 'because'" in str(result.errlines)
