"""The generated pages: each equals what its data renders to, and tells what another suite or subject measured."""

import json
from dataclasses import replace

import pytest
from made_up import FAIL, PASS, build, entry

from draftconf.conformance.report import fingerprint
from draftconf.conformance.report.markdown import markdown
from draftconf.conformance.report.schema import validate
from reports import pages
from reports.pages import DATA, PAGES, ROOT, Origin, changed, needed

NOW = Origin("all", fingerprint.suite()["hash"], fingerprint.subject_hash("fast", ""))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_a_page_is_the_rendering_of_its_data(page):
    text = (ROOT / page.path).read_text(encoding="utf-8")
    assert text == page.render(page.data()), "change the words and `make pages`, or measure again: `make stale`"


def test_there_is_no_data_without_a_page_and_no_page_without_data():
    assert {file.stem for file in DATA.iterdir()} == {page.name for page in PAGES}
    assert {file.name for file in (ROOT / "reports").glob("*.md")} == {
        name for page in PAGES if (name := page.path.removeprefix("reports/")) != page.path
    }


def test_the_results_behind_the_report_are_results():
    validate(json.loads((DATA / "results.json").read_text(encoding="utf-8")))


def test_the_results_are_cut_to_what_the_report_shows():
    passing = PASS | {"worst": FAIL["worst"], "message": "not shown"}
    results = build([(entry("route"), FAIL), (entry("fusion"), passing), (entry("head"), None)])
    brief = needed(results)
    assert markdown(brief) == markdown(results)
    assert [bool(check["worst"]) for check in brief["checks"]] == [True, False, False]


@pytest.mark.parametrize(
    ("origin", "sentence"),
    [
        (NOW, ""),
        (replace(NOW, suite="0123456789ab"), f"all measured with suite 0123456789ab, now {NOW.suite}"),
        (replace(NOW, subject=None), f"all measured with fast not recorded, now {NOW.subject}"),
        (replace(NOW, suite=None, subject="0123456789ab"), f"all measured with fast 0123456789ab, now {NOW.subject}"),
    ],
)
def test_what_has_changed_since_is_one_sentence(origin, sentence):
    assert changed(origin) == sentence


def test_stale_parts_are_counted(monkeypatch):
    page = PAGES[0]
    two = [replace(NOW, suite="0123456789ab"), NOW, replace(NOW, subject=None)]
    monkeypatch.setattr(pages.Page, "data", lambda self: {})
    assert replace(page, origins=lambda data: iter(two)).stale().endswith("; 1 more parts likewise")
    assert replace(page, origins=lambda data: iter([NOW])).stale() == ""
