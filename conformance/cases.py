"""Seeded cases: inputs of the unroll and of every stage, exactly representable in the declared storage format.

Chosen so that no fault hides (design.md, "The suite proves that it could have failed"): norm weights, router bias and
scaling factor away from their neutral values, ragged masks, two documents in a row, poisoned padding, rows of very
different size, activations at their caps, extreme targets, ties on purpose.
"""

from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from reference.config import Choices, DraftConfig, parameter_shapes
from reference.formats import round_to

BATCH, SLOTS = 2, 16


@dataclass(frozen=True)
class Case:
    """One unroll case: a name, the sizes, and the scales that make it what it is."""

    name: str
    config: DraftConfig
    row_decades: float = 0.0  # magnitudes of feature and embedding rows: 10^+-row_decades
    gain: float = 0.3  # norm gains are exp(N(0, gain)), every fourth one negative
    inner: float = 1.0  # scale of the low-rank projections: small enough and the epsilon matters
    glu: float = 1.0  # scale of the gate and up projections: large enough and SiTU reaches its caps
    target: tuple[float, float] = (2.0, 2.0)  # range of the scale of the target logits
    onehot: float = 0.0  # a target logit this far above the rest, in every third slot
    dominant: float = 1.0  # factor on one row of the head: that draft logit dominates
    poison: float = 1e30  # what padding slots hold


def unroll_cases(config: DraftConfig | None = None) -> list[Case]:
    """tame for end to end; harsh and extreme for the walk (tracewalk.md, "Cases")."""
    config = config or DraftConfig.tiny()
    return [
        Case("tame", config),
        Case(
            "harsh", replace(config, routed_scaling_factor=2.5), row_decades=3, gain=0.5, inner=0.01, glu=8.0,
            target=(0.1, 100.0),
        ),
        Case("extreme", config, onehot=200.0, dominant=40.0, target=(0.1, 3.0)),
    ]  # fmt: skip


def generator(seed: int, *names: str) -> np.random.Generator:
    """Independent streams by name: a case does not change when another one is added."""
    return np.random.default_rng([seed, crc32("/".join(names).encode())])


def make_parameters(case: Case, choices: Choices, storage: str, seed: int) -> dict[str, np.ndarray]:
    """Every parameter of the layout, float64 values on the storage format's grid."""
    rng = generator(seed, case.name, "parameters", choices.draft_input)
    params = {}
    for name, shape in parameter_shapes(case.config, choices).items():
        x = rng.normal(size=shape)
        if name == "embed_tokens.weight":
            x *= 10 ** rng.uniform(-case.row_decades, case.row_decades, (len(x), 1))
        elif name.endswith("bias"):
            x *= 0.3
        elif x.ndim == 1:
            x = np.exp(case.gain * x) * np.where(np.arange(len(x)) % 4 == 3, -1, 1)
        else:
            x *= _scale(name, case) / np.sqrt(shape[-1])
        params[name] = round_to(x, storage)
    head = params["shared_head.head.weight"]
    head[7] = round_to(head[7] * case.dominant, storage)
    return params


def _scale(name: str, case: Case) -> float:
    if "q_a_proj" in name or "kv_a_proj" in name:
        return case.inner
    if any(part in name for part in ("gate_proj", "up_proj", ".w1.", ".w3.")) and "routed" not in name:
        return case.glu
    return 1.0


def make_inputs(case: Case, choices: Choices, storage: str, seed: int, documents: bool = True) -> dict[str, np.ndarray]:
    """Slot-aligned inputs of the unroll. With ``documents``, two of them in row 0 and padding at the end of row 1."""
    rng, c = generator(seed, case.name, "inputs"), case.config
    shape = (BATCH, SLOTS)
    inputs = {"tokens": rng.integers(0, c.vocab_size, shape).astype(np.int32)}
    for name in ("low", "mid", "high"):
        size = 10 ** rng.uniform(-case.row_decades, case.row_decades, (*shape, 1))
        inputs[name] = rng.normal(size=(*shape, c.hidden_size)) * size
    inputs["target_logits"] = _targets(rng, case, shape)
    inputs["mask"] = rng.random(shape) < 0.85
    inputs["mask"][:, :2] = [[False, True], [True, False]]  # ragged on the left
    inputs["mask"][:, 3:9] = True  # every step has a supervised slot
    if documents:
        inputs["documents"] = np.where(np.arange(SLOTS) < 6, 3, 1) * np.ones((BATCH, 1), int)
        inputs["documents"][1] = np.where(np.arange(SLOTS) < SLOTS - 3, 2, -1)
        inputs["documents"] = inputs["documents"].astype(np.int32)
    else:
        inputs["mask"][:, -1] = False
    inputs |= chosen_inputs(c, choices, rng)
    return _on_grid(inputs, case, storage)


def _targets(rng, case: Case, shape) -> np.ndarray:
    low, high = np.log(case.target[0]), np.log(case.target[1])
    logits = rng.normal(size=(*shape, case.config.vocab_size)) * np.exp(rng.uniform(low, high, (*shape, 1)))
    if case.onehot:
        for b, t in np.ndindex(*shape):
            if (b + t) % 3 == 0:
                logits[b, t, rng.integers(case.config.vocab_size)] += case.onehot
    return logits


def chosen_inputs(config: DraftConfig, choices: Choices, rng) -> dict:
    """What only some choices read."""
    extra = {}
    if choices.head == "reduced":
        ids = rng.permutation(config.vocab_size)[: config.draft_vocab_size]
        extra["draft_to_target"] = np.sort(ids).astype(np.int32)
    if choices.token_source == "given":
        size = (config.num_steps, BATCH, SLOTS)
        extra["tokens_by_step"] = rng.integers(0, config.vocab_size, size).astype(np.int32)
    return extra


def _on_grid(inputs: dict, case: Case, storage: str) -> dict:
    """Values rounded to storage; padding slots poisoned."""
    for name in ("low", "mid", "high", "target_logits"):
        inputs[name] = round_to(inputs[name], storage)
        if "documents" in inputs:
            inputs[name][inputs["documents"] < 0] = round_to(np.asarray(case.poison), storage)
    return inputs


def handed_over(arrays: dict, storage: str) -> dict:
    """The same arrays in the dtype that adapters receive: float64 for float64 storage, else float32."""
    dtype = np.float64 if storage == "float64" else np.float32
    with np.errstate(over="ignore"):
        return {name: np.asarray(x, dtype) if x.dtype == np.float64 else x for name, x in arrays.items()}
