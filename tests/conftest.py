"""Property tests draw the same examples on every run, and never fail for being slow."""

from pathlib import Path

import pytest
import stand_in
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("reproducible", derandomize=True, deadline=None, print_blob=False, database=None)
settings.load_profile("reproducible")


@pytest.fixture
def suite(pytester, monkeypatch):
    """Run ``pytest --pyargs draftconf`` away from the checkout, on the stand-in plan."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(
        standin=stand_in.STAND_IN,
        adapters=stand_in.ADAPTERS,
        lose_one=stand_in.LOSE_ONE,
        numpy_property=stand_in.NUMPY_PROPERTY,
    )
    pytester.makeini("[pytest]")

    def run(adapter, *args, target=("--pyargs", "draftconf.conformance")):
        return pytester.runpytest_subprocess(
            "-p", "standin", "-p", "draftconf.conformance.plugin", *target, "--adapter", f"adapters:{adapter}", *args
        )

    return run
