"""The documentation's pages: written from the tables, complete, and without a dead link."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftconf.conformance.catalogue.descriptions import boundaries, methods
from draftconf.conformance.catalogue.faults import FAULTS
from draftconf.conformance.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages") / "site"
    subprocess.run([sys.executable, str(ROOT / "docs" / "pages.py"), str(folder)], check=True, timeout=120)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_every_stage_option_and_fault_has_its_row(pages):
    for stage in (*methods(), *boundaries()):
        assert f"| `{stage.name}` |" in pages["stages.md"]
    for option in OPTIONS:
        assert f"`{option.ini}`" in pages["options.md"]
    for fault in FAULTS:
        assert f"| {fault.what} |" in pages["faults.md"]


def test_links_lead_to_other_pages(pages):
    for text in pages.values():
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert link in pages


def test_modules_come_with_their_docstrings(pages):
    for name in ("reference.loss", "conformance.checks.walk", "fast.moe"):
        assert f"### {name}\n" in pages["modules.md"]
