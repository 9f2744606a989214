"""Checkpoints: K3's layout read and written, and files that are either whole or not there.

A K3 checkpoint is a folder of ``config.json`` and safetensors files, with an index where there are several. The draft
layer is layer ``num_hidden_layers``; its tensors go by the names of spec.md section 2 behind a prefix, expert weights
packed as MXFP4 pairs. Only what the layer needs is read, one tensor at a time.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from draftconf.reference.config import IGNORED_PARAMETERS, Choices, DraftConfig, expert_of, parameter_shapes

from .model import DraftModel
from .mx import BLOCK, dequantize, pack, quantize, unpack

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError as error:
    raise ImportError("checkpoints need safetensors: pip install 'draftconf[train]'") from error

LAYER_PREFIX = "language_model.model.layers.{}."
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TRAINING = "draftconf.training"  # the metadata key of a saved training
#: Where the frozen parameters are when the draft layer does not ship its own: the target's.
OF_TARGET = {
    "embed_tokens.weight": "language_model.model.embed_tokens.weight",
    "shared_head.head.weight": "language_model.lm_head.weight",
}
FLOATS = (torch.bfloat16, torch.float32, torch.float64)


class CheckpointError(ValueError):
    """A file that is missing, broken, or holds something else than was wanted; the message names it."""


class TensorFile:
    """One safetensors file, its tensors read on demand. Raises CheckpointError."""

    def __init__(self, path):
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"{self.path} is missing")
        try:
            self._file = safe_open(self.path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.__exit__(*error)

    @property
    def names(self) -> set[str]:
        return set(self._file.keys())

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """One tensor. Raises CheckpointError, naming it, where it is missing or of another shape or type."""
        try:
            found = tuple(self._file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{name} is missing from {self.path}") from error
        if found != tuple(shape):
            raise CheckpointError(f"{name} has shape {list(found)}; wanted {list(shape)}")
        tensor = self._file.get_tensor(name)
        if tensor.dtype not in dtypes:
            raise CheckpointError(f"{name} has dtype {tensor.dtype}; wanted {' or '.join(map(str, dtypes))}")
        return tensor

    def refuse_unknown(self, known) -> None:
        extra = sorted(self.names - set(known))
        if extra:
            raise CheckpointError(f"{self.path} holds {extra[0]}, which is not known here")

    def training_state(self, described: dict) -> int:
        """The number of steps taken. Raises CheckpointError, naming the field, where another training wrote it."""
        try:
            state = json.loads(self._file.metadata()[TRAINING])
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{self.path} is no saved training") from error
        for part, fields in described.items():
            for name, value in fields.items():
                if state[part].get(name) != value:
                    raise CheckpointError(f"{part}: {name} is {state[part].get(name)!r} in {self.path}, here {value!r}")
        return state["steps"]


class Shards:
    """The tensors of a checkpoint folder by name, read on demand. Raises CheckpointError."""

    def __init__(self, folder):
        self.folder, self._open = Path(folder), {}
        self.files = self._index()

    def _index(self) -> dict[str, str]:
        """name -> file name."""
        path = self.folder / INDEX
        if path.is_file():
            try:
                return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{path} is no index: {error!r}; wanted a weight_map") from error
        if not (self.folder / SINGLE).is_file():
            raise CheckpointError(f"{self.folder} has neither {INDEX} nor {SINGLE}")
        return dict.fromkeys(self._file(SINGLE).names, SINGLE)

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name)
        return self._open[name]

    def close(self) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open = {}

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        return self._file(self.files[name]).read(name, shape, dtypes)


def load_k3(folder, choices: Choices | None = None, dtype=torch.bfloat16, device=None, layer=None, **sizes):
    """The draft layer of a K3-layout checkpoint as a ``DraftModel`` in ``dtype``.

    ``layer`` is its number, ``num_hidden_layers`` of config.json when absent; ``sizes`` go to ``DraftConfig.from_json``
    (num_steps, draft_vocab_size). Embedding and head are the layer's own, else the target's. A checkpoint from before
    the fine-tuning has no fc.weight: it then starts as [0 0 I] (report section 4.1.4). Raises CheckpointError for a
    tensor of this layer that is missing, unknown, or of another shape or type.
    """
    folder, choices = Path(folder), choices or Choices()
    config, layer = read_config(folder, layer, **sizes)
    model, prefix, shards = DraftModel(config, choices, dtype, device), LAYER_PREFIX.format(layer), Shards(folder)
    try:
        refuse_unknown(shards, prefix, config, choices)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(find(shards, prefix, name, tuple(parameter.shape)))
    finally:
        shards.close()
    return model


def read_config(folder: Path, layer: int | None = None, **sizes) -> tuple[DraftConfig, int]:
    """Sizes, and the number of the draft layer."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    data = json.loads(path.read_text(encoding="utf-8"))
    if layer is None:
        layer = data.get("text_config", data).get("num_hidden_layers")
    if layer is None:
        raise CheckpointError(f"{path} has no num_hidden_layers; name the draft layer's number")
    return DraftConfig.from_json(data, **sizes), layer


def refuse_unknown(shards: Shards, prefix: str, config: DraftConfig, choices: Choices) -> None:
    """Raises CheckpointError for a tensor under the layer's prefix that the layout does not have."""
    known = set(parameter_shapes(config, choices)) | set(IGNORED_PARAMETERS)
    known |= {name + end for name in known if expert_of(name) for end in ("_packed", "_scale")}
    for name in shards.files:
        if name.startswith(prefix) and name.removeprefix(prefix) not in known:
            raise CheckpointError(f"{name} is no parameter of layout {choices.draft_input}")


def find(shards: Shards, prefix: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """One parameter: as it is, from its MXFP4 pair, from the target, or W_E3's start."""
    full = prefix + name
    if full in shards:
        return shards.read(full, shape, FLOATS)
    if full + "_packed" in shards:
        return unpacked(shards, full, shape)
    if OF_TARGET.get(name) in shards:
        return shards.read(OF_TARGET[name], shape, FLOATS)
    if name == "fc.weight":
        start = torch.zeros(shape)
        start[:, -shape[0] :].fill_diagonal_(1)
        return start
    raise CheckpointError(f"{full} is missing" + (f", and so is {full}_packed" if expert_of(name) else ""))


def unpacked(shards: Shards, name: str, shape: tuple[int, ...]) -> Tensor:
    """The values of NAME_packed uint8 [out, in/2] and NAME_scale uint8 [out, in/32]."""
    if name + "_scale" not in shards:
        raise CheckpointError(f"{name}_scale is missing; {name}_packed is there")
    rows, width = shape
    packed = shards.read(name + "_packed", (rows, width // 2), (torch.uint8,))
    scales = shards.read(name + "_scale", (rows, width // BLOCK), (torch.uint8,))
    return dequantize(scales, unpack(packed), "mxfp4")


# -- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def whole_file(path) -> Iterator[Path]:
    """A path to write to, which takes the name ``path`` once it is complete and on disk; on an error it is removed."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_tensors(path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, whole or not at all."""
    with whole_file(path) as partial:
        save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, partial, metadata)


def write_text(path, text: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def packed_state(model: DraftModel, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its checkpoint name; experts as MXFP4 pairs with the codes that training simulated."""
    choices = model.choices
    for name, p in model.state_dict().items():
        if not expert_of(name):
            yield prefix + name, p
            continue
        value = p.to(torch.bfloat16) if choices.quantize_source == "bfloat16" else p
        scales, codes = quantize(value, "mxfp4", choices.mx_scale_rule)
        yield f"{prefix}{name}_packed", pack(codes)
        yield f"{prefix}{name}_scale", scales


def export_k3(model: DraftModel, folder, layer: int = 93, shard_bytes: int = 5 << 30) -> None:
    """Write the draft layer in K3's layout: config.json, shards of about ``shard_bytes``, and last their index.

    Until the index is there nothing is found, and an export that was there before stays until then.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shard, size, files, number = {}, 0, {}, 1
    tag = f"{os.getpid():x}"

    def flush():
        name = f"model-{tag}-{number:05d}.safetensors"
        write_tensors(folder / name, shard)
        files.update(dict.fromkeys(shard, name))

    for name, x in packed_state(model, LAYER_PREFIX.format(layer)):
        if shard and size + x.nbytes > shard_bytes:
            flush()
            shard, size, number = {}, 0, number + 1
        shard[name], size = x, size + x.nbytes
    flush()
    sizes = {k: v for k, v in model.config.to_dict().items() if k not in ("num_steps", "draft_vocab_size")}
    write_text(folder / "config.json", json.dumps(sizes | {"num_hidden_layers": layer}, indent=2))
    write_text(folder / INDEX, json.dumps({"metadata": {}, "weight_map": files}, indent=2, sort_keys=True))
    for old in folder.glob("model-*.safetensors"):
        if old.name not in files.values():
            old.unlink()
