"""Where the bounds of later steps decide nothing, the leading steps still do."""

import numpy as np
import pytest

from draftconf.conformance.adapters.reference import Reference
from draftconf.conformance.checks import plan as checks
from draftconf.conformance.checks.unroll import leading_steps
from draftconf.conformance.judging.outcome import UNDECIDED_WIDTH
from draftconf.conformance.protocol.subject import Subject
from draftconf.reference.running_error import Running

FORMATS = {"storage": "float32", "accumulate": "float32"}
EXPECTED = np.arange(1.0, 22.0).reshape(7, 3)


def expected(relative: list[float]) -> Running:
    """[7, 3] with a relative bound for each step."""
    error = EXPECTED * np.array(relative)[:, None]
    return Running(EXPECTED, error, error)


def judged(actual, relative: list[float]) -> dict:
    return leading_steps("logits", actual, expected(relative), "storage", FORMATS)


def moved(step: int, by: float) -> np.ndarray:
    actual = EXPECTED.copy()
    actual[step - 1] *= 1 + by
    return actual


WIDENING = [1e-6, 1e-5, 1e-3, 5.0, np.inf, np.inf, np.inf]


def test_the_leading_steps_are_judged_and_counted():
    found = judged(EXPECTED, WIDENING)
    assert (found["verdict"], found["judged"], found["compared"]) == ("pass", [3, 7], 9)
    assert "the first 3 of 7 steps are judged" in found["message"]
    assert found["width"] <= UNDECIDED_WIDTH


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_fault_in_a_leading_step_fails(step):
    found = judged(moved(step, 0.02), WIDENING)
    assert found["verdict"] == "fail"
    assert found["worst"]["index"][0] == step - 1


def test_a_fault_beyond_a_wide_bound_fails_too():
    assert judged(moved(4, 1000.0), WIDENING)["verdict"] == "fail"


def test_nothing_is_decided_where_the_first_step_is_not():
    assert judged(EXPECTED, [0.5] * 7)["verdict"] == "undecided"
    assert "judged" not in judged(EXPECTED, [0.5] * 7)


def test_all_steps_are_judged_where_all_bounds_are_narrow():
    found = judged(EXPECTED, [1e-5] * 7)
    assert (found["verdict"], found["compared"], "judged" in found) == ("pass", 21, False)


class Drafts(Reference):
    """The oracle in place of a float32 implementation, wrong by one part in a thousand at one step."""

    def __init__(self, wrong_step: int):
        self.wrong_step = wrong_step

    def describe(self) -> dict:
        return super().describe() | {"formats": {"storage": "float32"}, "layouts": ["mtp"]}

    def draft_sequence(self, inputs, **options):
        outputs = super().draft_sequence(inputs, **options)
        if self.wrong_step:
            outputs["logits"][self.wrong_step - 1] *= 1.001
        return outputs


@pytest.mark.parametrize(("wrong_step", "verdict"), [(0, "pass"), (1, "fail"), (2, "fail")])
def test_drafting_in_float32_is_decided_in_its_leading_steps(wrong_step, verdict):
    subject = Subject(Drafts(wrong_step))
    check = next(c for c in checks.plan(subject.description) if c.id.startswith("draft_sequence.logits"))
    found = check.run(subject)
    assert found["verdict"] == verdict
    if verdict == "pass":
        assert 0 < found["judged"][0] < found["judged"][1] == 7
