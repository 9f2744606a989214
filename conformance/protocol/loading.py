"""Finding an adapter by its name: built in, a module's attribute, a file's attribute, or an entry point."""

import importlib
import importlib.util
import os
import sys
import warnings
from importlib.metadata import entry_points
from pathlib import Path

ENTRY_POINTS = "draftconf.adapters"


def built_in() -> list[str]:
    """Names of the files in ``conformance/adapters/``."""
    folder = Path(__file__).parents[1] / "adapters"
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def load(name: str):
    """The adapter called ``name``. Raises ValueError with a sentence for one that is unknown or cannot be loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = _find(name)
            factory = isinstance(found, type) or (callable(found) and not hasattr(found, "describe"))
            return found() if factory else found
        except UnknownAdapterError:
            raise
        except ImportError as error:
            raise ValueError(f"adapter {name!r} cannot be loaded: {error}") from error
        except Exception as error:
            raise ValueError(f"adapter {name!r} cannot be loaded: {type(error).__name__}: {error}") from error


class UnknownAdapterError(ValueError):
    """Nothing by that name."""


def _find(name: str):
    if name in built_in():
        return importlib.import_module(f"draftconf.conformance.adapters.{name}").adapter
    place, colon, attribute = name.rpartition(":")
    if colon and place and attribute:
        return _attribute(_load_file(place) if place.endswith(".py") else _import(place), attribute, name)
    plugged_in = entry_points(group=ENTRY_POINTS)
    for entry in plugged_in:
        if entry.name == name:
            return entry.load()
    known = ", ".join(sorted({*built_in(), *plugged_in.names}))
    raise UnknownAdapterError(
        f"there is no adapter {name!r}; known: {known}; or name your own as package.module:attribute "
        "or path/to/file.py:attribute"
    )


def _attribute(module, path: str, name: str):
    found = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise UnknownAdapterError(f"adapter {name!r}: there is no attribute {part!r} in {module.__name__}")
        found = getattr(found, part)
    return found


def _import(module: str):
    if os.getcwd() not in sys.path:  # as `python -m` would have it; the plain `pytest` script leaves it out
        sys.path.append(os.getcwd())
    return importlib.import_module(module)


def _load_file(path: str):
    file = Path(path).resolve()
    if not file.is_file():
        raise UnknownAdapterError(f"there is no adapter file {path}")
    own = Path(__file__).resolve().parents[1]
    if file.is_relative_to(own):
        return importlib.import_module(
            ".".join(("draftconf.conformance", *file.relative_to(own).with_suffix("").parts))
        )
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    if str(root) not in sys.path:
        sys.path.append(str(root))  # so that it can import what lies beside it
    if len(parts) > 1:  # inside a package it goes by its full name, lest it be taken for the package it wraps
        return importlib.import_module(".".join(parts))
    module_name = f"draftconf_adapter_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
