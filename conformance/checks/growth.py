"""How far an implementation's free run has drifted from the oracle's own, step by step, beside the bound.

Reported only, never judged: the walk judges each step by itself, and the losses are judged end to end.
"""

import numpy as np

from draftconf.reference.running_error import exact
from draftconf.reference.unroll import outside_document

from ..judging.compare import allowance

DRIFTING = ("layer_output", "logits", "lk_loss")


def growth(run) -> dict:
    """For each recorded stage: error and bound at steps 1..K, both relative to the quantity in the 2-norm."""
    found = {}
    for stage in DRIFTING:
        steps = [at_step(run, stage, step) for step in range(1, run.case.config.num_steps + 1)]
        if all(steps):
            found[stage] = {"error": [error for error, _ in steps], "bound": [bound for _, bound in steps]}
    return found


def at_step(run, stage: str, step: int) -> tuple[float, float] | None:
    """Error and bound over the slots that reach a loss; None where nothing comparable was recorded."""
    actual = run.answer().trace.get(f"{step}/{stage}")
    values = run.oracle["values"]
    expected, valid = exact(values[(step, stage)]), slots(run, stage, step)
    if actual is None or np.shape(actual) != expected.shape or not valid.any():
        return None
    bound = allowance(expected, (step, stage), run.formats)
    error = np.abs(np.asarray(actual, np.float64) - expected.value)
    size = np.linalg.norm(expected.value[valid])
    relative = lambda x: float(np.linalg.norm(x[valid]) / size) if size > 0 else 0.0  # noqa: E731
    return relative(error), relative(bound)


def slots(run, stage: str, step: int) -> np.ndarray:
    """Slots whose value means something, as in the walk. bool [B, T]."""
    if stage == "lk_loss":
        return run.oracle["values"][(step, "supervised")]
    documents, shape = run.inputs.get("documents"), run.inputs["tokens"].shape
    inside = ~outside_document(documents, step, shape)
    return inside if documents is None else inside & (documents >= 0)
