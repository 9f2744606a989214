"""A sample of the calibration: honest twins raise no alarm, no bound is absurdly wide. `make calibrate` runs it all."""

import pytest

from draftconf.conformance.evidence import calibration
from draftconf.conformance.evidence.twins import TWINS

SAMPLE = [
    "as it is",
    "sums permuted",
    "sums in blocks of 4",
    "norm by rsqrt",
    "SiTU reassociated",
    "attention by parts",
    "theta 1/2 at ties",
    "half of the trace",
]
#: Nothing is rounded there: lookups, and cotangents that are slices or handed on as they are.
EXACT = {
    ("embed", "value"),
    ("draft_input", "value"),
    ("draft_input.enorm", "cotangent"),
    ("draft_input.hnorm", "cotangent"),
    ("dense_mlp", "cotangent"),
}
WIDEST = 8  # how far below the expected maximum the worst honest ratio may lie


@pytest.fixture(scope="module")
def sample():
    work = [(name, "float32", "eagle3", 0) for name in SAMPLE]
    return calibration.population(work)


def test_no_honest_twin_raises_an_alarm(sample):
    assert sample.runs == len(SAMPLE) * len(calibration.unroll_cases())
    assert sample.alarms == []


def test_no_bound_is_far_wider_than_the_number_of_samples_leads_to_expect(sample):
    for (_, stage, quantity), tally in sample.tallies.items():
        if (stage, quantity) not in EXACT and tally.compared > 10_000:
            assert tally.worst > tally.expected() / WIDEST, (stage, quantity, tally)


def test_every_twin_has_a_name_of_its_own_and_a_policy():
    assert len({twin.name for twin in TWINS}) == len(TWINS)
    assert all(twin.policies for twin in TWINS)


def test_an_alarm_is_counted_and_named(monkeypatch):
    monkeypatch.setattr(calibration, "BIAS_LIMIT", 0.0)
    found = calibration.population([("as it is", "bfloat16", "eagle3", 0)])
    assert found.alarms
    assert "bias of" in found.alarms[0]
    data = calibration.everything(found)
    assert f"{len(found.alarms)} false alarms" in calibration.markdown(data)
