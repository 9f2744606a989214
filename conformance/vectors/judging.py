"""Judging the files that a program wrote: the checks of the plan, run on what was read instead of on an adapter."""

import shlex
from pathlib import Path

import numpy as np

from ..checks import plan as checks
from ..protocol.description import Description
from ..protocol.environment import environment
from ..protocol.result import AdapterError, NotOffered, Result, frames
from ..report import results
from ..report.repeat import VECTORS
from . import manifest, tensors
from .record import COTANGENT, Asked, Vector, digest, narrowed, record, result_of
from .strict import MalformedError, directory, list_files, load_json, read_file, shown

DESCRIBE = "describe.json"
DESCRIBE_LIMIT = 2**20
#: What a program may say of itself. The rest was settled when the vectors were exported.
OWN = ("name", "version", "url", "formats", "policies", "mx_silent", "quantized")


def check(vectors, answers, *, stages=None, ids=None) -> dict:
    """Judge the files of directory ``answers`` by the exported ``vectors``; the results as of a pytest run.

    What is absent counts as not offered. ``stages`` and ``ids`` narrow the checks. Raises MalformedError for files that
    cannot be used, ValueError for a stage or id that is not there.
    """
    root, answered = directory(vectors, "the directory of vectors"), directory(answers, "the directory of results")
    said = manifest.read(root)
    description = _described(said, answered)
    given, arrays = manifest.read_arrays(root, said), _read_answers(answered, said)
    plan, asked = _planned(said, description)
    _same_inputs(given, said, asked)
    _refuse_unasked(arrays, asked)
    subject = FromFiles(description, asked, arrays)
    chosen = {check.id for check in narrowed(plan, stages)}
    if ids is not None:
        unknown = sorted(set(ids) - {check.id for check in plan})
        if unknown:
            raise ValueError(f"there is no check {unknown[0]} for these vectors")
        chosen &= set(ids)
    outcomes = {check.id: outcome_of(check, subject) for check in plan if check.id in chosen}
    return results.build(
        plan=[results.about(check) for check in plan],
        outcomes=outcomes,
        selected=chosen,
        subject=subject.about(),
        adapter=VECTORS + shlex.join([str(vectors), str(answers)]),
        seed=said["seed"],
        env=environment(),
        selection={"stage": ",".join(stages) if stages else None, "policy": None, "pyargs": False},
    )


def outcome_of(check, subject) -> dict:
    """The outcome of a check, as the plugin has it; whatever it raises is one."""
    about = results.about(check)
    try:
        return results.clean(check.run(subject), about)
    except NotOffered as error:
        found = {"verdict": "not offered", "message": str(error)}
    except AdapterError as error:
        found = {"verdict": "error", "message": str(error)}
    except Exception as error:
        where = frames(error).splitlines()[-1:]
        found = {
            "verdict": "error",
            "message": f"{type(error).__name__} in the suite: {error} {' '.join(where)}".strip(),
        }
    return results.clean(results.EMPTY | found, about)


class FromFiles(Asked):
    """Answers with the arrays of the file that belongs to the question."""

    def __init__(self, description: Description, vectors: list[Vector], answers: dict[str, dict]):
        super().__init__(description)
        self.names = {vector.digest: vector.name for vector in vectors}
        self.answers = answers
        self.methods = {vector.method for vector in vectors if vector.name in answers}

    def offers(self, method: str) -> bool:
        return method in self.methods

    def call(self, method, *, config, choices, policy, inputs, cotangents=None, forced=None) -> Result:
        name = self.names.get(digest(method, config, choices, policy, inputs, cotangents or {}))
        if name is None:
            raise NotOffered(f"{method} was not recorded on this input")
        if name not in self.answers:
            raise NotOffered(
                f"{method} is not offered" if method not in self.methods else f"there is no file for {name}"
            )
        return result_of(self.answers[name])


# -- what the vectors were made for ----------------------------------------------------------------------------------


def _described(said: dict, answered: Path) -> Description:
    """The description of the vectors, with what the program says of itself in describe.json."""
    exported = manifest.described(said)
    known = said["description"] | {"name": "results"}
    if not (answered / DESCRIBE).exists() and not (answered / DESCRIBE).is_symlink():
        return Description.from_dict(known)
    own = load_json(read_file(answered, DESCRIBE, DESCRIBE_LIMIT), DESCRIBE)
    if not isinstance(own, dict):
        raise MalformedError(f"{DESCRIBE} is no JSON object")
    other = [name for name in own if name not in OWN and own[name] != known.get(name)]
    if other:
        raise MalformedError(f"{DESCRIBE} has {shown(other[0])}, which the vectors were exported with another value of")
    if "formats" in own and "policies" not in own:
        known.pop("policies")
    if "policies" in own and "formats" not in own:
        known.pop("formats")
    try:
        description = Description.from_dict(known | own)
    except (ValueError, TypeError) as error:
        raise MalformedError(f"{DESCRIBE}: {error}") from None
    for name, formats in description.policies.items():
        if formats["storage"] != exported.policies.get(name, {}).get("storage"):
            there = ", ".join(f"{key} ({value['storage']})" for key, value in exported.policies.items())
            raise MalformedError(
                f"{DESCRIBE} has policy {shown(name)} ({formats['storage']}); the vectors have {there}"
            )
    return description


def _planned(said: dict, description: Description) -> tuple[list, list[Vector]]:
    """The checks, and what they ask for; from two plans, for a check keeps what a subject told it."""
    make = lambda: narrowed(checks.plan(description, seed=said["seed"]), said["stages"])  # noqa: E731
    try:
        return make(), record(make(), description)
    except (ValueError, TypeError) as error:
        raise MalformedError(f"{manifest.NAME}: {error}") from None


def _same_inputs(arrays: dict[str, dict], said: dict, asked: list[Vector]) -> None:
    """The files hold just the inputs that the checks of this suite are about."""
    entries = {entry["name"]: entry for entry in said["vectors"]}
    for vector in asked:
        entry = entries.get(vector.name)
        if entry is None or entry["digest"] != vector.digest:
            made = f"suite {said['suite']['version']} ({said['suite']['hash']})"
            raise MalformedError(
                f"the inputs of {vector.name}, exported by {made}, are not those of this suite; export again"
            )
        group = dict(arrays[entry["inputs"]])
        if entry["parameters"]:
            shared = arrays[entry["parameters"]["path"]]
            group |= {name: shared[name] for name in entry["parameters"]["names"] if name in shared}
        given = {name: x for name, x in group.items() if not name.startswith(COTANGENT)}
        cotangents = {name.removeprefix(COTANGENT): x for name, x in group.items() if name.startswith(COTANGENT)}
        found = digest(vector.method, vector.config, vector.choices, vector.policy, given, cotangents)
        if found != vector.digest:
            raise MalformedError(f"the inputs of {vector.name} are not those that {manifest.NAME} describes")


# -- what the program wrote ------------------------------------------------------------------------------------------


def _read_answers(answered: Path, said: dict) -> dict[str, dict]:
    """The arrays of every file of results, by the vector's name."""
    entries, found = {entry["results"]: entry for entry in said["vectors"]}, {}
    for path in list_files(answered):
        entry = entries.get(path)
        if entry is None:
            raise MalformedError(f"the results have {shown(path)}, which belongs to none of these vectors")
        arrays = tensors.loads(read_file(answered, path, manifest.FILE_LIMIT), path)
        _refuse_misfits(path, entry, arrays)
        found[entry["name"]] = arrays
    return found


def _refuse_unasked(answers: dict[str, dict], asked: list[Vector]) -> None:
    unasked = sorted(set(answers) - {vector.name for vector in asked})
    if unasked:
        raise MalformedError(f"the results have {shown(unasked[0])}, of which {DESCRIBE} leaves out the policy")


def _refuse_misfits(path: str, entry: dict, arrays: dict[str, np.ndarray]) -> None:
    for wanted in entry["answer"]:
        x = arrays.get(wanted["name"])
        if x is None and wanted["required"]:
            raise MalformedError(f"{path} has no array {shown(wanted['name'])}")
        if x is not None and manifest.KINDS[x.dtype.kind] != wanted["kind"]:
            kind = f"dtype {tensors.dtype_name(x)}; wanted {wanted['kind']}"
            raise MalformedError(f"{path}: array {shown(wanted['name'])} has {kind}")
