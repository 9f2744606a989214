"""results.schema.json, and whether a value fits it."""

import json
from functools import cache
from pathlib import Path

TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip


def validate(results: dict) -> None:
    """Check against results.schema.json: the part of JSON schema that it uses. Raises ValueError naming the place."""
    _validate(results, _schema(), _schema()["$defs"], "results")


def validate_against(value, schema: dict, where: str) -> None:
    """The same for another schema that uses no more than that part."""
    _validate(value, schema, schema["$defs"], where)


def validate_check(check: dict) -> None:
    """The same for one entry of ``checks``."""
    _validate(check, _schema()["properties"]["checks"]["items"], _schema()["$defs"], "outcome")


@cache
def _schema() -> dict:
    return json.loads(Path(__file__).with_name("results.schema.json").read_text(encoding="utf-8"))


def _validate(value, schema: dict, definitions: dict, where: str) -> None:
    if "$ref" in schema:
        _validate(value, definitions[schema["$ref"].rpartition("/")[2]], definitions, where)
    if "anyOf" in schema and not any(_fits(value, option, definitions) for option in schema["anyOf"]):
        raise ValueError(f"{where} is {value!r}, which fits no alternative of its schema")
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and value not in allowed:
        raise ValueError(f"{where} is {value!r}; wanted one of {allowed}")
    if "type" in schema:
        _check_type(value, schema["type"], where)
    if isinstance(value, dict):
        _check_object(value, schema, definitions, where)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            _validate(item, schema["items"], definitions, f"{where}[{index}]")


def _check_type(value, names, where: str) -> None:
    names = [names] if isinstance(names, str) else names
    if not any(isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool)) for name in names):
        raise ValueError(f"{where} is {value!r}; wanted {' or '.join(names)}")


def _check_object(value: dict, schema: dict, definitions: dict, where: str) -> None:
    missing = [name for name in schema.get("required", ()) if name not in value]
    unknown = [name for name in value if name not in schema.get("properties", {})]
    if missing:
        raise ValueError(f"{where} has no {missing[0]}")
    if unknown and schema.get("additionalProperties") is False:
        raise ValueError(f"{where} has {unknown[0]}, which its schema does not know")
    for name, item in value.items():
        if name in schema.get("properties", {}):
            _validate(item, schema["properties"][name], definitions, f"{where}.{name}")


def _fits(value, schema: dict, definitions: dict) -> bool:
    try:
        _validate(value, schema, definitions, "")
    except ValueError:
        return False
    return True
