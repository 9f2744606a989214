"""The safetensors format, read strictly and written plainly: eight bytes of length, a JSON header, the data.

Stricter than the format's own library where that is lenient (duplicate names, unknown keys), so that two programs
cannot read one file differently. https://github.com/huggingface/safetensors describes the format.
"""

import json
import math

import numpy as np

from .strict import MalformedError, load_json, shown

LENGTH = 8
MAX_HEADER = 4 * 2**20
MAX_DIMENSIONS = 16
METADATA = "__metadata__"
FIELDS = {"dtype", "shape", "data_offsets"}
#: bfloat16 is read into float32, which holds each of its values.
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
NAMES = {np.dtype(code): name for name, code in DTYPES.items() if name != "BF16"}


def dtype_name(array: np.ndarray) -> str:
    return NAMES[array.dtype]


def dumps(arrays: dict[str, np.ndarray]) -> bytes:
    """The bytes of a file: widest dtypes first, so that all data are aligned; the same arrays give the same bytes."""
    header, chunks, end = {}, [], 0
    for name in sorted(arrays, key=lambda n: (-arrays[n].dtype.itemsize, n)):
        array = np.ascontiguousarray(arrays[name], arrays[name].dtype.newbyteorder("<"))
        begin, end = end, end + array.nbytes
        shape = list(arrays[name].shape)  # ascontiguousarray gives a scalar an axis
        header[name] = {"dtype": dtype_name(arrays[name]), "shape": shape, "data_offsets": [begin, end]}
        chunks.append(array.tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH)
    return b"".join([len(text).to_bytes(LENGTH, "little"), text, *chunks])


def loads(data: bytes, what: str) -> dict[str, np.ndarray]:
    """The arrays of a file, by name. Raises MalformedError; ``what`` names the file in its sentence."""
    header, body = _split(data, what)
    entries = {name: _entry(name, entry, what) for name, entry in header.items() if name != METADATA}
    _check_layout(entries, len(body), what)
    return {name: _array(name, entry, body, what) for name, entry in entries.items()}


def _split(data: bytes, what: str) -> tuple[dict, memoryview]:
    if len(data) < LENGTH:
        raise MalformedError(f"{what} has {len(data)} bytes; a safetensors file begins with {LENGTH} bytes of length")
    length = int.from_bytes(data[:LENGTH], "little")
    if length > MAX_HEADER:
        raise MalformedError(f"{what} announces a header of {length} bytes; at most {MAX_HEADER} are read")
    if length > len(data) - LENGTH:
        raise MalformedError(f"{what} is cut short: its header has {length} bytes, and {len(data) - LENGTH} follow")
    header = load_json(bytes(data[LENGTH : LENGTH + length]), f"the header of {what}")
    if not isinstance(header, dict):
        raise MalformedError(f"the header of {what} is no JSON object")
    notes = header.get(METADATA, {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise MalformedError(f"the header of {what} has {METADATA} that does not map strings to strings")
    return header, memoryview(data)[LENGTH + length :]


def _entry(name: str, entry, what: str) -> dict:
    where = f"{what}: array {shown(name)}"
    if not isinstance(entry, dict) or set(entry) != FIELDS:
        raise MalformedError(f"{where} is not described by dtype, shape and data_offsets alone")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise MalformedError(f"{where} has dtype {shown(dtype)}; wanted one of {', '.join(DTYPES)}")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise MalformedError(f"{where} has shape {shown(shape)}; wanted at most {MAX_DIMENSIONS} sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise MalformedError(f"{where} has data_offsets {shown(offsets)}; wanted begin and end")
    wanted, given = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize, offsets[1] - offsets[0]
    if wanted != given:
        raise MalformedError(f"{where} of {dtype} {shown(shape)} takes {shown(wanted)} bytes; its offsets say {given}")
    return entry


def _counts(value) -> bool:
    """A list of whole numbers from 0 to 2^53."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= 2**53 for item in value)


def _check_layout(entries: dict, size: int, what: str) -> None:
    """The arrays follow one another without a gap or an overlap and fill the file."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin = entry["data_offsets"][0]
        if begin != end:
            wrong = "overlaps the one before it" if begin < end else "leaves a gap before it"
            raise MalformedError(f"{what}: array {shown(name)} begins at {begin} and {wrong}, which ends at {end}")
        end = entry["data_offsets"][1]
        if end > size:
            raise MalformedError(f"{what}: array {shown(name)} ends at byte {end} of {size}; the file is cut short")
    if end != size:
        raise MalformedError(f"{what} has {size - end} bytes after its last array")


def _array(name: str, entry: dict, body: memoryview, what: str) -> np.ndarray:
    begin, end = entry["data_offsets"]
    raw, dtype = body[begin:end], entry["dtype"]
    if dtype == "BOOL" and np.frombuffer(raw, np.uint8).max(initial=0) > 1:
        raise MalformedError(f"{what}: array {shown(name)} has a BOOL that is neither 0 nor 1")
    try:
        array = np.frombuffer(raw, DTYPES[dtype]).reshape(entry["shape"])
    except ValueError as error:  # a size of zero beside one that is beyond NumPy
        raise MalformedError(f"{what}: array {shown(name)} has shape {shown(entry['shape'])}: {error}") from None
    if dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    array = array.astype(array.dtype.newbyteorder("="))
    array.setflags(write=False)
    return array
