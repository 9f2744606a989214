"""manifest.json: what lies where, of which dtype and shape, and which checks it is for; manifest.schema.json."""

import hashlib
import json
import re
from functools import cache
from pathlib import Path

import numpy as np

from draftconf.reference.config import parameter_shapes

from ..protocol.description import Description
from ..protocol.plain import plain
from ..report.fingerprint import suite
from ..report.schema import validate_against
from . import tensors
from .record import Vector
from .strict import SUFFIX, MalformedError, load_json, read_file, shown

NAME = "manifest.json"
LIMIT = 32 * 2**20
FILE_LIMIT = 512 * 2**20
POLICIES = 16
KINDS = {"f": "float", "i": "integer", "u": "integer", "b": "boolean"}
OPTIONAL_OUTPUTS = {"unroll": ("step_losses", "slot_losses")}
PATH = re.compile(r"(inputs|parameters|expected)(/[A-Za-z0-9._-]+){1,2}\.safetensors")


def layout_of(vectors: list[Vector]) -> tuple[dict[str, dict], dict[str, dict]]:
    """Files of inputs and of shared parameters, path -> arrays; and what each vector's entry says of them, by name."""
    files: dict[str, dict] = {}
    entries = {}
    for vector in vectors:
        shared = [name for name in vector.arrays if name in parameter_shapes(vector.config, vector.choices)]
        own = {name: x for name, x in vector.arrays.items() if name not in shared}
        path = f"parameters/{vector.layout}-{vector.policy}-{vector.case}{SUFFIX}"
        if shared and not _merged(files.setdefault(path, {}), {name: vector.arrays[name] for name in shared}):
            shared, own = [], vector.arrays
        inputs = f"inputs/{vector.name}{SUFFIX}"
        files[inputs] = own
        entries[vector.name] = {"inputs": inputs, "parameters": {"path": path, "names": shared} if shared else None}
    return {path: arrays for path, arrays in files.items() if arrays or path.startswith("inputs/")}, entries


def _merged(into: dict, arrays: dict) -> bool:
    """Add what is not there yet; False, and nothing done, if a name stands for something else."""
    if any(name in into and not _same(into[name], x) for name, x in arrays.items()):
        return False
    into |= arrays
    return True


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def entry_of(vector: Vector, where: dict, configs: dict, answer: dict) -> dict:
    """A vector's entry. ``configs`` gains the vector's config if it is new."""
    sizes = vector.config.to_dict()
    config = next((name for name, known in configs.items() if known == sizes), vector.case)
    configs.setdefault(config, sizes)
    optional = OPTIONAL_OUTPUTS.get(vector.method, ())
    return {
        "name": vector.name, "method": vector.method, "layout": vector.layout, "policy": vector.policy,
        "case": vector.case, "config": config, "digest": vector.digest, **where,
        "expected": f"expected/{vector.name}{SUFFIX}", "results": f"{vector.name}{SUFFIX}",
        "answer": [
            {"name": name, "kind": KINDS[x.dtype.kind], "shape": list(x.shape),
             "required": "/" not in name and name not in optional}
            for name, x in answer.items()
        ],
        "checks": vector.checks,
    }  # fmt: skip


def file_entry(path: str, data: bytes, arrays: dict[str, np.ndarray]) -> dict:
    described = [{"name": name, "dtype": tensors.dtype_name(x), "shape": list(x.shape)} for name, x in arrays.items()]
    return {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "arrays": described}


def build(
    *, description: Description, seed: int, stages, full: bool, configs: dict, files: list, vectors: list
) -> dict:
    said = description.to_dict()
    said |= said.pop("extra")
    manifest = {
        "schema": 1,
        "suite": suite(),
        "seed": seed,
        "stages": stages,
        "full": full,
        "description": plain(said),
        "choices": {layout: plain(description.choices_for(layout).to_dict()) for layout in description.layouts},
        "configs": configs,
        "files": files,
        "vectors": vectors,
    }
    validate(manifest)
    return manifest


# -- reading it ------------------------------------------------------------------------------------------------------


@cache
def schema() -> dict:
    return json.loads(Path(__file__).with_name("manifest.schema.json").read_text(encoding="utf-8"))


def validate(manifest) -> None:
    try:
        validate_against(manifest, schema(), NAME)
    except ValueError as error:
        raise MalformedError(str(error)) from None


def loads(data: bytes) -> dict:
    """A manifest whose every path stays where paths may lead. Raises MalformedError."""
    manifest = load_json(data, NAME)
    validate(manifest)
    if manifest["seed"] < 0:
        raise MalformedError(f"{NAME} has seed {shown(manifest['seed'])}; wanted at least 0")
    paths = [file["path"] for file in manifest["files"]]
    for path in paths:
        if not PATH.fullmatch(path) or ".." in path:
            raise MalformedError(
                f"{NAME} names the file {shown(path)}, which is not below inputs, parameters or expected"
            )
    if len(set(paths)) != len(paths):
        raise MalformedError(f"{NAME} describes a file twice")
    for vector in manifest["vectors"]:
        shared = [vector["parameters"]["path"]] if vector["parameters"] else []
        for path in (vector["inputs"], vector["expected"], *shared):
            if path not in paths:
                raise MalformedError(
                    f"{NAME}: vector {shown(vector['name'])} needs {shown(path)}, which is not in files"
                )
    return manifest


def read(root: Path) -> dict:
    return loads(read_file(root, NAME, LIMIT))


def described(manifest: dict) -> Description:
    """The description that the vectors were exported for."""
    try:
        description = Description.from_dict(manifest["description"])
        if len(description.policies) > POLICIES:
            raise ValueError(f"{len(description.policies)} policies; at most {POLICIES} are read")
        return description
    except (ValueError, TypeError) as error:
        raise MalformedError(f"{NAME}: {error}") from None


def read_arrays(root: Path, manifest: dict) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of every file of the manifest, which must be the files that were exported, byte for byte."""
    found = {}
    for entry in manifest["files"]:
        path = entry["path"]
        data = read_file(root, path, FILE_LIMIT)
        arrays = tensors.loads(data, path)
        names = {array["name"]: array for array in entry["arrays"]}
        absent = sorted(set(names) - set(arrays))
        if absent:
            raise MalformedError(f"{path} has no array {shown(absent[0])}, which {NAME} describes")
        for name, x in arrays.items():
            said = names.get(name)
            if said is None or said["shape"] != list(x.shape) or said["dtype"] != tensors.dtype_name(x):
                here = f"{tensors.dtype_name(x)} {list(x.shape)}"
                raise MalformedError(f"{path}: array {shown(name)} is {here}, which is not what {NAME} describes")
        if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise MalformedError(f"{path} is not the file that was exported: its SHA-256 differs")
        found[path] = arrays
    return found
