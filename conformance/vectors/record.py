"""Every call that a plan makes, recorded by running its checks on a subject that writes down what it is asked."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from draftconf.reference.config import Choices, DraftConfig

from ..adapters.reference import Reference
from ..protocol.description import Description
from ..protocol.result import NotOffered, Result
from ..protocol.subject import Subject

#: A check of these calls several times in turn, so it must be answered to go on.
ANSWERED = ("speculative_sample",)
COTANGENT, GRAD, DECISION, TRACE = "cotangent/", "grad/", "decision/", "trace/"


@dataclass
class Vector:
    """One call: what a method is given, and the checks that ask for it."""

    method: str
    layout: str
    policy: str
    case: str
    config: DraftConfig
    choices: Choices
    inputs: dict
    cotangents: dict
    digest: str
    name: str = ""
    checks: list[str] = field(default_factory=list)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Inputs and cotangents under the names that they have in a file."""
        inputs = {name: np.asarray(x) for name, x in self.inputs.items()}
        return inputs | {COTANGENT + name: np.asarray(x) for name, x in self.cotangents.items()}


class Asked(Subject):
    """A subject without an adapter: a description, and ``call`` of a subclass."""

    def __init__(self, description: Description):
        self.description, self.dump = description, None
        self._running = None

    def offers(self, method: str) -> bool:
        return True


class Recording(Asked):
    """Answers nothing and remembers the question."""

    def __init__(self, description: Description):
        super().__init__(description)
        self.check, self.vectors = None, {}
        self.oracle = Oracle(description)

    def call(self, method, *, config, choices, policy, inputs, cotangents=None, forced=None) -> Result:
        cotangents, check = cotangents or {}, self.check
        key = digest(method, config, choices, policy, inputs, cotangents)
        at = (method, check.layout, check.policy, check.case)
        self.vectors.setdefault(key, Vector(*at, config, choices, inputs, cotangents, key))
        if method not in ANSWERED:
            raise NotOffered(method)
        return self.oracle.call(method, config=config, choices=choices, policy=policy, inputs=inputs)


class Oracle(Subject):
    """The oracle's answers to a plan made for another description, computed in float64."""

    def __init__(self, description: Description):
        super().__init__(Reference(description.losses))
        self.description = description

    def call(self, method, *, config, choices, policy, inputs, cotangents=None, forced=None) -> Result:
        wide = None if cotangents is None else _wide(cotangents)
        given = {"config": config, "choices": choices, "policy": policy, "forced": forced}
        with np.errstate(all="ignore"):
            return super().call(method, inputs=_wide(inputs), cotangents=wide, **given)


def _wide(arrays: dict) -> dict:
    wide = lambda x: isinstance(x, np.ndarray) and x.dtype.kind == "f"  # noqa: E731
    return {name: x.astype(np.float64) if wide(x) else x for name, x in arrays.items()}


def narrowed(plan: list, patterns: list[str] | None) -> list:
    """The checks of some stages; patterns as of ``pytest --stage``. Raises ValueError for one that fits none."""
    for pattern in patterns or ():
        if not any(fnmatchcase(check.stage, pattern) for check in plan):
            some = ", ".join(list(dict.fromkeys(check.stage for check in plan))[:8])
            raise ValueError(f"stage {pattern} is none of the stages planned; they begin with {some}")
    return [check for check in plan if patterns is None or any(fnmatchcase(check.stage, p) for p in patterns)]


def record(plan: Iterable, description: Description) -> list[Vector]:
    """The vectors of a plan, named and sorted. The plan's checks are spent: they keep what they were told."""
    subject, checks = Recording(description), list(plan)
    for check in checks:
        subject.check = check
        try:
            check.run(subject)
        except NotOffered:
            continue
    groups: dict[str, list[Vector]] = {}
    for vector in subject.vectors.values():
        stem = f"{vector.method}/{vector.layout}-{vector.policy}-{vector.case}"
        groups.setdefault(stem, []).append(vector)
    for check in checks:  # of the checks that share a call only the first makes it
        for vector in groups[stem_of(check)]:
            vector.checks.append(check.id)
    for stem, group in groups.items():
        for number, vector in enumerate(group):
            vector.name = stem if len(group) == 1 else f"{stem}-{number:02}"
    return [vector for stem in sorted(groups) for vector in groups[stem]]


def stem_of(check) -> str:
    """What the names of a check's vectors begin with: all of them, but for a number."""
    method = check.stage if check.kind == "stage" else "unroll"
    return f"{method}/{check.layout}-{check.policy}-{check.case}"


def digest(method: str, config: DraftConfig, choices: Choices, policy: str, inputs: dict, cotangents: dict) -> str:
    """Of everything that a call depends on, the formats of the policy apart."""
    about = [method, config.to_dict(), choices.to_dict(), policy]
    total = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for group, arrays in (("", inputs), (COTANGENT, cotangents)):
        for name in sorted(arrays):
            x = np.asarray(arrays[name])
            total.update(f"{group}{name} {x.dtype.str} {x.shape}".encode())
            total.update(np.ascontiguousarray(x).tobytes())
    return total.hexdigest()


def answer_arrays(result: Result) -> dict[str, np.ndarray]:
    """A result under the names that its arrays have in a file."""
    groups = (("", result.outputs), (GRAD, result.grads), (DECISION, result.decisions), (TRACE, result.trace))
    return {prefix + name: np.asarray(x) for prefix, group in groups for name, x in group.items() if x is not None}


def result_of(arrays: dict[str, np.ndarray]) -> Result:
    """The inverse of ``answer_arrays``."""
    parts: dict[str, dict] = {"": {}, GRAD: {}, DECISION: {}, TRACE: {}}
    for name, x in arrays.items():
        prefix = next((p for p in (GRAD, DECISION, TRACE) if name.startswith(p)), "")
        parts[prefix][name.removeprefix(prefix)] = x
    return Result(*parts.values())
