"""Refusals: bad input gets a sentence that names the argument, the value found and the value wanted."""

import numpy as np

from .config import IGNORED_PARAMETERS, Choices, DraftConfig, parameter_shapes


def require(condition: bool, name: str, found, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {found}; wanted {wanted}")


def check_finite(name: str, x: np.ndarray, ignored: np.ndarray | None = None) -> None:
    """Refuse a NaN or an infinity outside the slots in ``ignored`` [B, T], naming the first index."""
    bad = ~np.isfinite(x)
    if ignored is not None:
        bad &= ~ignored.reshape(ignored.shape + (1,) * (x.ndim - ignored.ndim))
    if bad.any():
        index = tuple(map(int, np.argwhere(bad)[0]))
        raise ValueError(f"{name}{list(index)} is {x[index]}; wanted finite values")


def check_parameters(params: dict, config: DraftConfig, choices: Choices) -> None:
    """Every parameter there, in its shape, finite, and nothing else."""
    shapes = parameter_shapes(config, choices)
    for name, shape in shapes.items():
        require(name in params, f"parameter {name}", "missing", f"an array of shape {shape}")
        require(np.shape(params[name]) == shape, f"parameter {name}", f"of shape {np.shape(params[name])}", str(shape))
        if isinstance(params[name], np.ndarray):
            check_finite(name, params[name])
    extra = sorted(set(params) - set(shapes) - set(IGNORED_PARAMETERS))
    if extra:
        raise ValueError(
            f"parameter {extra[0]} is not one of this layout; wanted the {len(shapes)} of spec.md section 2"
        )


def check_ids(name: str, ids: np.ndarray, limit: int, ignored: np.ndarray | None = None) -> None:
    require(np.issubdtype(ids.dtype, np.integer), name, f"of dtype {ids.dtype}", "an integer dtype")
    bad = (ids < 0) | (ids >= limit)
    if ignored is not None:
        bad = bad & ~ignored
    if bad.any():
        index = tuple(map(int, np.argwhere(bad)[0]))
        raise ValueError(f"{name}{list(index)} is {int(ids[index])}; wanted an id from 0 to {limit - 1}")


def check_documents(documents: np.ndarray, shape: tuple) -> None:
    """Integer, the slots' shape, and equal ids contiguous in their row; -1 is padding."""
    require(documents.shape == shape, "documents", f"of shape {documents.shape}", str(shape))
    require(np.issubdtype(documents.dtype, np.integer), "documents", f"of dtype {documents.dtype}", "an integer dtype")
    for row, ids in enumerate(documents):
        starts = ids[np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))]
        starts = starts[starts >= 0]
        require(len(set(starts.tolist())) == len(starts), f"documents[{row}]", "split: one id returns after another",
                "each document contiguous")  # fmt: skip


def check_inputs(inputs: dict, config: DraftConfig, choices: Choices) -> None:
    """Shapes, dtypes, token ids and finite values of the unroll's inputs."""
    for name in ("tokens", "low", "mid", "high", "target_logits", "mask"):
        require(name in inputs, name, "missing", "an array")
    shape = inputs["tokens"].shape
    require(len(shape) == 2 and 0 not in shape, "tokens", f"of shape {shape}", "[B, T]")
    widths = {"low": config.hidden_size, "mid": config.hidden_size, "high": config.hidden_size}
    for name, width in (widths | {"target_logits": config.vocab_size}).items():
        wanted = (*shape, width)
        require(inputs[name].shape == wanted, name, f"of shape {inputs[name].shape}", str(wanted))
    require(inputs["mask"].shape == shape, "mask", f"of shape {inputs['mask'].shape}", str(shape))
    require(inputs["mask"].dtype == bool, "mask", f"of dtype {inputs['mask'].dtype}", "bool")
    padding, unread = None, None
    if inputs.get("documents") is not None:
        check_documents(inputs["documents"], shape)
        padding = inputs["documents"] < 0
        following = np.concatenate([inputs["documents"][:, 1:], np.full((shape[0], 1), -1)], axis=1)
        unread = padding | (following != inputs["documents"])  # what is aligned there belongs to another document
    check_ids("tokens", inputs["tokens"], config.vocab_size, unread)
    for name in ("low", "mid", "high", "target_logits"):
        if isinstance(inputs[name], np.ndarray):
            check_finite(name, inputs[name], unread if name == "target_logits" else padding)
    check_chosen_inputs(inputs, config, choices, padding)


def check_chosen_inputs(inputs: dict, config: DraftConfig, choices: Choices, padding) -> None:
    """What only some choices read: ``draft_to_target`` and ``tokens_by_step``."""
    if choices.head == "reduced":
        ids = inputs.get("draft_to_target")
        require(ids is not None, "draft_to_target", "missing", "the target id of every draft id: head is 'reduced'")
        require(np.shape(ids) == (config.draft_vocab_size,), "draft_to_target", f"of shape {np.shape(ids)}",
                f"({config.draft_vocab_size},)")  # fmt: skip
        check_ids("draft_to_target", np.asarray(ids), config.vocab_size)
        require(len(np.unique(ids)) == len(ids), "draft_to_target", "not one to one", "distinct target ids")
    if choices.token_source == "given":
        tokens = inputs.get("tokens_by_step")
        wanted = (config.num_steps, *inputs["tokens"].shape)
        require(tokens is not None, "tokens_by_step", "missing", f"int {wanted}: token_source is 'given'")
        require(np.shape(tokens) == wanted, "tokens_by_step", f"of shape {np.shape(tokens)}", str(wanted))
        ignored = None if padding is None else np.broadcast_to(padding, wanted)
        check_ids("tokens_by_step", np.asarray(tokens), config.vocab_size, ignored)


def check_prefix(inputs: dict, config: DraftConfig) -> None:
    """What ``draft_sequence`` reads: the prefix's tokens and features, and the tokens given for steps 2..K."""
    features = ("feature",) if "feature" in inputs else ("low", "mid", "high")
    for name in ("tokens", "given", *features):
        require(name in inputs, name, "missing", "an array")
    slots, steps = np.shape(inputs["tokens"]), np.shape(inputs["given"])
    require(len(slots) == 1 and slots != (0,), "tokens", f"of shape {slots}", "[T]")
    require(steps == (config.num_steps - 1,), "given", f"of shape {steps}", f"({config.num_steps - 1},)")
    for name in ("tokens", "given"):
        if np.size(inputs[name]):
            check_ids(name, np.asarray(inputs[name]), config.vocab_size)
    for name in features:
        wanted = (*slots, config.hidden_size)
        require(inputs[name].shape == wanted, name, f"of shape {inputs[name].shape}", str(wanted))
        if isinstance(inputs[name], np.ndarray):
            check_finite(name, inputs[name])
