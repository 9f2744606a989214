"""The seven-step unroll, forward and through time backward; ``align`` before it and ``draft_sequence``, its serial
form.

Slot arrays are aligned for step 1 (spec.md section 3): slot j holds the token x_{j+1}, the feature of position j and
the target P_{j+1}. Step k reads them shifted k - 1 to the left, with fill: token 0, zero logits, unsupervised.
"""

from dataclasses import dataclass, field

import numpy as np

from . import graph as walk
from .attention import cached_attention_op
from .config import Choices, DraftConfig, expert_of, frozen_parameters, parameter_shapes
from .layer import graph, stacked_experts
from .validate import check_inputs, check_parameters, check_prefix

FEATURES = ("low", "mid", "high")


def shift(x: np.ndarray, count: int, fill=0) -> np.ndarray:
    """x moved ``count`` slots to the left along axis 1, the tail filled."""
    if count == 0:
        return x
    return np.concatenate([x[:, count:], np.full_like(x[:, :count], fill)], axis=1)[:, : x.shape[1]]


@dataclass
class UnrollResult:
    """What one training step computed.

    ``step_losses`` [K] are without the step weight; ``slot_losses`` and ``supervised`` are [K, B, T]; ``trace`` maps
    "{step}/{stage}" and "{step}/{stage}.grad" to arrays; ``decisions`` maps "{step}/experts" to int32 [B, T, n].
    """

    total_loss: float
    step_losses: np.ndarray
    slot_losses: np.ndarray
    supervised: np.ndarray
    grads: dict = field(default_factory=dict)
    trace: dict = field(default_factory=dict)
    decisions: dict = field(default_factory=dict)


def align(raw: dict, config: DraftConfig, choices: Choices) -> dict:
    """One raw sequence -> the step-1 slot arrays and ``supervised`` bool [K, N] (spec.md section 3).

    raw: ``tokens`` int [N], ``low``, ``mid``, ``high`` [N, d], ``target_logits`` [N, V], ``mask`` bool [N], optional
    ``documents`` int [N]. The slot arrays have the same shapes; ``mask`` is that of step 1.
    """
    documents = np.asarray(raw.get("documents", np.zeros(len(raw["tokens"]), np.int32)))
    supervised = np.stack([_supervised_raw(raw["mask"], documents, k, choices) for k in range(1, config.num_steps + 1)])
    slots = {
        "tokens": shift(raw["tokens"][None], 1)[0],
        **{name: raw[name] for name in FEATURES},
        "target_logits": shift(raw["target_logits"][None], 1)[0],
        "mask": supervised[0],
        "supervised": supervised,
    }
    return slots | ({"documents": documents} if "documents" in raw else {})


def _supervised_raw(mask: np.ndarray, documents: np.ndarray, k: int, choices: Choices) -> np.ndarray:
    """Slot j at step k: position j + k exists, lies in j's document, and the mask allows it. bool [N]."""
    offset = {"position": k, "token": k + 1, "slot": k - 1}[choices.mask_alignment]
    beyond = np.arange(len(mask)) + k >= len(mask)
    other = shift(documents[None], k, -1)[0] != documents
    return shift(np.asarray(mask, bool)[None], offset, False)[0] & ~beyond & ~other & (documents >= 0)


def step_inputs(inputs: dict, config: DraftConfig, choices: Choices) -> dict:
    """The data that the stages read, by key: shifted tokens, targets and supervision of every step; padding zeroed."""
    documents = inputs.get("documents")
    padding = np.zeros(inputs["tokens"].shape, bool) if documents is None else documents < 0
    clean = {name: _zeroed(inputs[name], padding) for name in ("tokens", "target_logits", "mask", *FEATURES)}
    values = {name: clean[name] for name in FEATURES}
    values["documents"] = np.zeros(padding.shape, np.int32) if documents is None else documents
    values["first_slots"] = (shift_right(values["documents"], -1) != values["documents"]) & ~padding
    values["draft_to_target"] = inputs.get("draft_to_target") if choices.head == "reduced" else None
    for k in range(1, config.num_steps + 1):
        outside = outside_document(documents, k, padding.shape)
        targets = shift(clean["target_logits"], 0 if choices.target_alignment == "fixed" else k - 1)
        if choices.token_source != "own" or k == 1:
            values[(k, "tokens")] = _zeroed(_step_tokens(inputs, clean["tokens"], k, choices), outside)
        values[(k, "target_logits")] = _zeroed(targets, outside)
        supervised = shift(clean["mask"], k - 1, False) & ~outside
        values[(k, "supervised")] = supervised & _inside(targets, values["draft_to_target"], choices)
    return values


def outside_document(documents, k: int, shape: tuple) -> np.ndarray:
    """Slots whose position j + k is past the end or in another document: they read fill. bool [B, T].

    Without documents the aligned arrays themselves say what exists: only a shift past their end is outside.
    """
    if documents is None:
        return np.broadcast_to(np.arange(shape[1]) + k > shape[1], shape)
    return (shift(documents, k, -1) != documents) | (documents < 0)


def shift_right(x: np.ndarray, fill) -> np.ndarray:
    return np.concatenate([np.full_like(x[:, :1], fill), x[:, :-1]], axis=1)


def _zeroed(x: np.ndarray, padding: np.ndarray) -> np.ndarray:
    """Padding slots hold zeros, whatever was in them."""
    return np.where(padding.reshape(padding.shape + (1,) * (x.ndim - 2)), np.zeros((), x.dtype), x)


def _step_tokens(inputs: dict, tokens: np.ndarray, k: int, choices: Choices) -> np.ndarray:
    return inputs["tokens_by_step"][k - 1] if choices.token_source == "given" else shift(tokens, k - 1)


def _inside(targets: np.ndarray, draft_to_target, choices: Choices):
    """Slots that ``reduced_supervision`` lets be supervised."""
    return choices.reduced_supervision == "all" or np.isin(np.argmax(targets, axis=-1), draft_to_target)


def stacked_parameters(params: dict, config: DraftConfig, choices: Choices) -> dict:
    """The parameters, with each kind of expert weight stacked to one array [E, out, in]."""
    values = {name: params[name] for name in parameter_shapes(config, choices) if not expert_of(name)}
    return values | (stacked_experts(params, config.num_experts) if choices.draft_input == "mtp" else {})


def parameter_gradients(cotangents: dict, values: dict, config: DraftConfig, choices: Choices) -> dict:
    """Gradient of every trained parameter, expert weights unstacked; zero where nothing reached it."""
    frozen, grads = frozen_parameters(choices), {}
    for name in parameter_shapes(config, choices):
        if name in frozen:
            continue
        key, expert = expert_of(name) or (name, ...)
        d = cotangents[key] if key in cotangents else np.zeros_like(values[key])
        grads[name] = d[expert]
    return grads


def unroll(
    params: dict, inputs: dict, config: DraftConfig, choices: Choices, *, gradients=True, forced=None
) -> UnrollResult:
    """The whole training step (spec.md sections 3 to 7).

    inputs: ``tokens`` int [B, T], ``low``, ``mid``, ``high`` [B, T, d], ``target_logits`` [B, T, V], ``mask`` bool
    [B, T]; optional ``documents`` int [B, T], ``draft_to_target`` int [draft vocabulary], ``tokens_by_step`` [K, B, T].
    ``forced`` pins values by key, e.g. ``{(2, "experts"): ids}``. Raises ValueError naming the bad argument.
    """
    choices.check(config)
    check_parameters(params, config, choices)
    check_inputs(inputs, config, choices)
    values = stacked_parameters(params, config, choices) | step_inputs(inputs, config, choices) | (forced or {})
    nodes = graph(config, choices)
    walk.forward(nodes, values)
    cotangents = {(0, "total_loss"): np.ones(())}
    if gradients:
        walk.backward(nodes, values, cotangents)
    return result_of(nodes, values, cotangents if gradients else {}, config, choices)


def result_of(nodes, values: dict, cotangents: dict, config: DraftConfig, choices: Choices) -> UnrollResult:
    steps = range(1, config.num_steps + 1)
    per_step = lambda name: np.stack([values[(k, name)] for k in steps])  # noqa: E731
    result = UnrollResult(values[(0, "total_loss")], per_step("step_loss"), per_step("lk_loss"), per_step("supervised"))
    for (step, stage), value in ((node.key, values[node.key]) for node in nodes if node.key[0]):
        if stage == "target_log_probs":
            continue
        if stage in ("experts", "tokens"):
            result.decisions[f"{step}/{stage}"] = value.astype(np.int32)
            continue
        result.trace[f"{step}/{stage}"] = value
        if cotangents:
            d = cotangents.get((step, stage))
            result.trace[f"{step}/{stage}.grad"] = np.zeros_like(value) if d is None else d
    if cotangents:
        result.grads = parameter_gradients(cotangents, values, config, choices)
    return result


def draft_sequence(params: dict, inputs: dict, config: DraftConfig, choices: Choices) -> tuple[np.ndarray, np.ndarray]:
    """Draft K tokens one after another from the last slot of a prefix, with a cache (spec.md section 8).

    inputs: ``tokens`` int [T] slot-aligned, ``given`` int [K-1] (the tokens fed at steps 2..K), and the prefix's
    ``feature`` [T, d] after fusion or its ``low``, ``mid``, ``high``. The cache holds the step-1 keys and values of the
    slots up to the anchor, then one of each step. Returns logits [K, V] and features [K, d] of the anchor.
    """
    choices.check(config)
    check_parameters(params, config, choices)
    check_prefix(inputs, config)
    prefix = {name: inputs[name][None] for name in ("tokens", "feature", *FEATURES) if name in inputs}
    values = stacked_parameters(params, config, choices) | prefix
    slots = values["tokens"].shape[1]
    values |= {"documents": np.zeros((1, slots), np.int32), "first_slots": np.arange(slots)[None] == 0}
    values |= {"draft_to_target": None, (1, "tokens"): values["tokens"]}
    if "feature" in prefix:
        values[(1, "fusion")] = prefix["feature"]
    nodes = _drafting_nodes(config, choices)
    walk.forward([node for node in nodes if node.key[0] <= 1], values)
    _keep_anchor(values, slots - 1)
    for k, token in enumerate(np.asarray(inputs["given"]), start=2):
        values[(k, "tokens")] = np.full((1, 1), token)
        walk.forward([node for node in nodes if node.key[0] == k], values)
    steps = range(1, config.num_steps + 1)
    logits, features = (np.stack([values[(k, s)][0, -1] for k in steps]) for s in ("logits", "layer_output"))
    return logits, features


def _drafting_nodes(config: DraftConfig, choices: Choices) -> list:
    """The unroll's own nodes without the loss; beyond step 1 attention reads the whole cache of the one anchor."""
    nodes = [
        node
        for node in graph(config, choices.replace(token_source="given"))
        if not node.key[1].endswith(("loss", "log_probs"))
    ]
    cached = cached_attention_op(config)
    return [node._replace(op=cached) if node.key[1] == "attention" and node.key[0] > 1 else node for node in nodes]


def _keep_anchor(values: dict, anchor: int) -> None:
    """Drop every slot but the anchor from what later steps read; only the step-1 keys and values stay: the cache."""
    for key in [key for key in values if isinstance(key, tuple) and key[0] == 1 and key[1] != "mla_keyvalue"]:
        values[key] = values[key][:, anchor : anchor + 1]
