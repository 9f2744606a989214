"""The operands of a failing element: the few numbers that the oracle made its expected value of, in hexadecimal.

Which ones they are is read off the oracle's own vector-Jacobian product: the entries of each input with a derivative at
that element. Of more than fit, those with the largest product of derivative and value are kept.
"""

import struct

import numpy as np

from draftconf.reference.config import BLOCK, expert_of
from draftconf.reference.graph import Key, Node, backward
from draftconf.reference.running_error import Running

ENTRIES = 256  # of one element, all its operands together
FEW = 32  # where a row of logits is an operand
LEAST = 8  # of each operand


def listed(make, *args) -> list[dict]:
    """``make(*args)``; what goes wrong in there is told in place of the operands and never changes a verdict."""
    try:
        return make(*args)
    except Exception as error:
        reason = f"not listed ({type(error).__name__}: {error})"
        return [{"name": reason, "row": [], "at": [], "values": [], "of": 0}]


def plain(value):
    """The values of a Running array; anything else as it is."""
    return value.value if isinstance(value, Running) else value


def operand(name: str, array, places: np.ndarray, count: int | None = None) -> dict:
    """Entries of one array. places [n, array.ndim]; ``count`` of how many they are the decisive ones."""
    array, places = np.asarray(array), np.asarray(places, int).reshape(-1, np.ndim(array))
    shared = 0
    while len(places) and shared < array.ndim and (places[:, shared] == places[0, shared]).all():
        shared += 1
    return {
        "name": name,
        "row": places[0, :shared].tolist() if len(places) else [],
        "at": [] if len(places) == 1 else places[:, shared:].tolist(),
        "values": [digits(array[tuple(place)]) for place in places],
        "of": len(places) if count is None else count,
    }


def digits(value) -> str:
    """A float in hexadecimal, exactly; an integer or a truth value as it is."""
    return float(value).hex() if np.asarray(value).dtype.kind == "f" else str(value)


def lines(found: dict) -> list[tuple[str, str, str]]:
    """What a report shows of an operand: place, decimal and hexadecimal of each entry; integers have no hexadecimal."""
    places = found["at"] or [[]] * len(found["values"])
    shown = [(name_at([*found["row"], *rest]), value) for rest, value in zip(places, found["values"], strict=True)]
    decimal = lambda text: f"{float.fromhex(text):.9g}" if is_hexadecimal(text) else text  # noqa: E731
    return [(place, decimal(text), text if is_hexadecimal(text) else "") for place, text in shown]


def name_at(place: list) -> str:
    return str(place) if place else ""


def is_hexadecimal(text: str) -> bool:
    return "p" in text or text.strip("-") in ("inf", "nan")


def title(found: dict) -> str:
    """Its name, and how many of its entries are listed where those are not all that have a part in the element."""
    count = len(found["values"])
    return found["name"] if found["of"] == count else f"{found['name']}, the {count} decisive of {found['of']} entries"


def named(key: Key) -> str:
    """A parameter or input by name, a stage's value as the trace calls it."""
    return key if isinstance(key, str) else f"{key[0]}/{key[1]}"


def of_node(node: Node, values: dict, index: tuple) -> list[dict]:
    """What one stage computed the element of: entries of each of its inputs."""
    inputs = [plain(values[key]) for key in node.inputs]
    y = node.op.forward(*inputs)
    derivatives = node.op.backward(*inputs, y, one_at(index, np.shape(y)))
    triples = [(named(key), x, d) for key, x, d in zip(node.inputs, inputs, derivatives, strict=True)]
    return decisive(triples, index, FEW if node.key[1] in ("lk_loss", "slot_loss") else ENTRIES)


def of_nodes(nodes: list, values: dict, key: Key, index: tuple, inputs: dict[str, Key], entries: int) -> list[dict]:
    """The same through several stages: entries of the arrays in ``inputs``, names to keys."""
    d = {key: one_at(index, np.shape(values[key]))}
    backward(nodes, dict(values), d)
    return decisive([(name, values[source], d.get(source)) for name, source in inputs.items()], index, entries)


def of_sum(parts: list, index: tuple) -> list[dict]:
    """The addends of the element. ``parts``: consumer and contribution."""
    addends = [(consumer, plain(d)) for consumer, d in parts if d.ndim == len(index)]
    names = [f"contribution of {named(consumer) if consumer else 'the loss'}" for consumer, _ in addends]
    return [operand(name, d, [index]) for name, (_, d) in zip(names, addends, strict=True)][:ENTRIES]


def of_gradient(addends: dict, name: Key, index: tuple) -> list[dict]:
    """The addends of an element of a gradient; those of an expert's weight are of all experts' at once."""
    if isinstance(name, str) and (expert := expert_of(name)):
        name, index = expert[0], (expert[1], *index)
    return of_sum(addends.get(name, []), index)


def of_block(x: np.ndarray, scales: np.ndarray, index: tuple, of_scale: bool = False) -> list[dict]:
    """The block of 32 that an element is in (that a scale is for, if ``of_scale``), and its right scale byte."""
    block = index[-1] if of_scale else index[-1] // BLOCK
    places = [(*index[:-1], block * BLOCK + i) for i in range(BLOCK)]
    return [operand("x", x, places), operand("scale byte", scales, [(*index[:-1], block)])]


def one_at(index: tuple, shape: tuple) -> np.ndarray:
    d = np.zeros(shape)
    d[tuple(index)] = 1.0
    return d


def decisive(triples: list, index: tuple, entries: int) -> list[dict]:
    """``triples``: name, array, derivative (None for what has none).

    Integers are taken at the element's place, a frozen array at the places of one of its shape: the target's logits.
    """
    used = [(name, np.asarray(x), d) for name, x, d in triples if x is not None]
    floats = [(name, x, np.asarray(d)) for name, x, d in used if d is not None and np.any(d)]
    shapes = [x.shape for _, x, _ in floats]
    frozen = [(name, x) for name, x, d in used if d is None and x.dtype.kind == "f" and x.shape in shapes]
    limit = max(LEAST, entries // max(1, len(floats) + len(frozen)))
    found = [operand(name, x, [index[: x.ndim]]) for name, x, _ in used if x.dtype.kind in "iu" and inside(x, index)]
    for name, x, d in floats:
        places = np.argwhere(d != 0)
        size = np.nan_to_num(np.abs(d * x)[tuple(places.T)], nan=np.inf)
        kept = places[np.sort(np.argsort(-size, kind="stable")[:limit])]
        found.append(operand(name, x, kept, len(places)))
        found += [operand(other, y, kept, len(places)) for other, y in frozen if y.shape == x.shape]
    return found


def inside(x: np.ndarray, index: tuple) -> bool:
    return 0 < x.ndim <= len(index) and all(i < n for i, n in zip(index, x.shape, strict=False))


# -- bits --------------------------------------------------------------------------------------------------------------


def bits(value: float, form: str) -> str:
    """The bits that a format stores for ``value``, rounded to nearest where it is none of its numbers: 0x3f80."""
    from draftconf.reference.formats import round_to

    if form not in ("float64", "float32", "bfloat16", "float16"):
        return ""
    with np.errstate(over="ignore"):
        held = float(round_to(np.float64(value), form))
        packed = struct.pack(">d", held) if form == "float64" else np.array(held, ">f4").tobytes()
        packed = np.array(held, ">f2").tobytes() if form == "float16" else packed
    return "0x" + (packed[:2] if form == "bfloat16" else packed).hex()
