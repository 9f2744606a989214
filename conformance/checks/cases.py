"""Seeded cases: inputs of the unroll and of every stage, exactly representable in the declared storage format.

Chosen so that no fault hides: norm weights, router bias and
scaling factor away from their neutral values, ragged masks, two documents in a row, poisoned padding, rows of very
different size, activations at their caps, extreme targets, ties on purpose.
"""

from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from draftconf.reference.config import Choices, DraftConfig, parameter_shapes
from draftconf.reference.formats import round_to

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
    corners: bool = False  # special inputs: fewer slots than steps, documents of one slot, padding on the left, ...

    @property
    def shape(self) -> tuple[int, int]:
        """[B, T] of the unroll."""
        return (4, 5) if self.corners else (BATCH, SLOTS)


def cases_for(choices: Choices) -> list[Case]:
    """The unroll's cases with sizes that these choices need: a reduced vocabulary must be smaller than the whole."""
    tiny = DraftConfig.tiny()
    return unroll_cases(replace(tiny, draft_vocab_size=61) if choices.head == "reduced" else tiny)


def unroll_cases(config: DraftConfig | None = None) -> list[Case]:
    """tame for end to end; harsh, extreme and corners for the walk."""
    config = config or DraftConfig.tiny()
    return [
        Case("tame", config),
        Case(
            "harsh", replace(config, routed_scaling_factor=2.5), row_decades=3, gain=0.5, inner=0.01, glu=8.0,
            target=(0.1, 100.0),
        ),
        Case("extreme", config, onehot=200.0, dominant=150.0, target=(0.1, 3.0)),
        Case("corners", config, corners=True),
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
    if case.corners:
        _corner_parameters(params, case.config, storage)
    return params


def _corner_parameters(params: dict, config: DraftConfig, storage: str) -> None:
    """A router whose scores saturate and vanish; two experts that always tie, three that differ by less than bfloat16
    resolves, one without tokens, one with every token; a token whose embedding is zero.
    """
    params["embed_tokens.weight"][0] = 0.0
    gate = params.get("block_sparse_moe.gate.weight")
    if gate is None:
        return
    together = np.where(np.arange(config.hidden_size) % 3, 1, -1) * 15 / np.sqrt(config.hidden_size)
    gate[:] = round_to(gate + together, storage)  # from exp(-50), which an epsilon of 1e-20 shows, to exactly 1
    bias = params["block_sparse_moe.gate.e_score_correction_bias"]
    bias[:] = round_to(bias - 3.0, storage)  # every score + bias below -1
    gate[5], gate[1], gate[3] = gate[4], gate[0], gate[0]
    bias[:7] = [-3.0 + 2**-8, -3.0, -100.0, -3.0 + 2**-8, -3.0, -3.0, 100.0]
    bias[:] = round_to(bias, storage)


def _scale(name: str, case: Case) -> float:
    if "q_a_proj" in name or "kv_a_proj" in name:
        return case.inner
    if any(part in name for part in ("gate_proj", "up_proj", ".w1.", ".w3.")) and "routed" not in name:
        return case.glu
    return 1.0


def make_inputs(case: Case, choices: Choices, storage: str, seed: int, documents: bool = True) -> dict[str, np.ndarray]:
    """Slot-aligned inputs of the unroll. With ``documents``, two of them in row 0 and padding at the end of row 1."""
    rng, c, shape = generator(seed, case.name, "inputs"), case.config, case.shape
    inputs = {"tokens": rng.integers(0, c.vocab_size, shape).astype(np.int32)}
    for name in ("low", "mid", "high"):
        size = 10 ** rng.uniform(-case.row_decades, case.row_decades, (*shape, 1))
        inputs[name] = rng.normal(size=(*shape, c.hidden_size)) * size
    inputs["target_logits"] = _targets(rng, case, shape)
    inputs["mask"] = rng.random(shape) < 0.85
    inputs["mask"][:, :2] = np.resize([[False, True], [True, False]], (shape[0], 2))  # ragged on the left
    inputs["mask"][:, 3:9] = True  # every step has a supervised slot, where there are enough slots
    inputs["documents"] = _documents(shape)
    if case.corners:
        _corner_inputs(inputs)
    if not documents:
        inputs["mask"][:, -1] = False
        del inputs["documents"]
    inputs |= chosen_inputs(c, choices, rng, shape)
    return _on_grid(inputs, case, storage)


def _documents(shape) -> np.ndarray:
    """Two documents in row 0, padding at the end of the others. int32 [B, T]."""
    slots = np.arange(shape[1])
    documents = np.where(slots < shape[1] - 3, 2, -1) * np.ones((shape[0], 1), int)
    documents[0] = np.where(slots < 6, 3, 1)
    return documents.astype(np.int32)


def _corner_inputs(inputs: dict) -> None:
    """One document that fills its row, documents of two, one and two slots, padding on the left, a lone slot; a slot
    that is zero throughout and has p = q; one token again and again.
    """
    inputs["documents"][:] = [[3] * 5, [5, 5, 6, 7, 7], [-1, -1, 4, 4, 4], [8, -1, -1, -1, -1]]
    inputs["mask"][0], inputs["mask"][1:, :2] = True, True
    inputs["tokens"][0], inputs["tokens"][1:, 0] = [0, 11, 11, 11, 2], 0
    for name in ("low", "mid", "high", "target_logits"):
        inputs[name][0, 0] = 0.0


def _targets(rng, case: Case, shape) -> np.ndarray:
    low, high = np.log(case.target[0]), np.log(case.target[1])
    logits = rng.normal(size=(*shape, case.config.vocab_size)) * np.exp(rng.uniform(low, high, (*shape, 1)))
    if case.onehot:
        for b, t in np.ndindex(*shape):
            if (b + t) % 3 == 0:
                logits[b, t, rng.integers(case.config.vocab_size)] += case.onehot
    return logits


def chosen_inputs(config: DraftConfig, choices: Choices, rng, shape=(BATCH, SLOTS)) -> dict:
    """What only some choices read."""
    extra = {}
    if choices.head == "reduced":
        ids = rng.permutation(config.vocab_size)[: config.draft_vocab_size]
        extra["draft_to_target"] = np.sort(ids).astype(np.int32)
    if choices.token_source == "given":
        size = (config.num_steps, *shape)
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
