"""THE table: every method an adapter may offer, with its equation, its source, its wiring in the oracle and its inputs.

A row's ``nodes`` are the oracle's own (reference/layer.py), cut out of the unroll: the stage checks and the trace walk
run the same text. The table drives the checks (checks.py), the report and the documentation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from draftconf.reference import attention, loss
from draftconf.reference.config import Choices, DraftConfig
from draftconf.reference.graph import Key, Node
from draftconf.reference.layer import (
    attention_nodes,
    dense_nodes,
    expert_weight_nodes,
    feature_key,
    glu_rows,
    graph,
    input_nodes,
    loss_nodes,
    moe_nodes,
    rows,
)
from draftconf.reference.ops import LINEAR, Op, linear, linear_backward, no_gradient, situ

from .cases import Case

STEP = 3  # the step of stages that depend on it: an own key of each of two earlier steps


@dataclass(frozen=True)
class Stage:
    """One method of the adapter protocol.

    ``inputs`` maps input names to the graph keys they stand for, ``outputs`` and ``decisions`` the same for what the
    method returns; parameters go by their own names. ``arrays`` makes the activations of a case; ``parameters`` says
    which parameters belong to the method, by prefix.
    """

    name: str
    equation: str
    source: str
    nodes: Callable[[DraftConfig, Choices], list[Node]]
    inputs: dict[str, Key]
    outputs: dict[str, Key]
    arrays: Callable[[Case, Choices, np.random.Generator], dict]
    parameters: tuple[str, ...] = ()
    decisions: dict[str, Key] = field(default_factory=dict)
    layouts: tuple[str, ...] = ("mtp", "eagle3")
    renamed: dict[str, str] = field(default_factory=dict)  # parameter names as this method sees them


def at(stage: str, step: int = STEP) -> Key:
    return (step, stage)


def documents_of(shape: tuple[int, int]) -> np.ndarray:
    """Two documents in row 0, one in the others. int32 [B, T]."""
    documents = np.zeros(shape, np.int32)
    documents[0, shape[1] // 3 :] = 1
    return documents


def activation(rng, case: Case, *shape: int) -> np.ndarray:
    """Rows of the case's magnitudes."""
    decades = min(case.row_decades, 2.0)
    return rng.normal(size=shape) * 10 ** rng.uniform(-decades, decades, (*shape[:-1], 1))


BATCH, SLOTS = 2, 9


def earlier(case: Case, rng, steps: int, step: int = STEP) -> dict:
    """Keys and values of ``steps`` steps, the step and the documents that accompany them."""
    c = case.config
    shape = (steps, BATCH, SLOTS, c.num_attention_heads)
    return {
        "keys": rng.normal(size=(*shape, c.query_head_dim)),
        "values": activation(rng, case, *shape, c.v_head_dim),
        "step": step,
        "documents": documents_of((BATCH, SLOTS)),
    }


def tokens(case: Case, rng) -> np.ndarray:
    return rng.integers(0, case.config.vocab_size, (BATCH, SLOTS)).astype(np.int32)


# -- nodes that exist only here: a stage's method cut out of the layer -------------------------------------------------


def stacked_attention(documents, query, keys, values):
    return attention.attention(query, list(keys), list(values), documents)


def stacked_attention_backward(documents, query, keys, values, y, d_y):
    d_query, d_keys, d_values = attention.attention_backward(query, list(keys), list(values), documents, y, d_y)
    return None, d_query, np.stack(d_keys), np.stack(d_values)


def earlier_keyvalue(index: int) -> Op:
    """Step ``index`` of the stacked keys and values, joined as ``mla_keyvalue`` is."""

    def backward(keys, values, y, d_y):
        width, count = keys.shape[-1], len(keys)
        place = lambda d: np.stack([d if i == index else np.zeros(d.shape) for i in range(count)])  # noqa: E731
        return place(d_y[..., :width]), place(d_y[..., width:])

    return Op(lambda keys, values: np.concatenate([keys[index], values[index]], axis=-1), backward)


def part_of_keyvalue(config: DraftConfig, part: int) -> Op:
    """The key (0) or the value (1) of ``mla_keyvalue``."""
    cut = (slice(None, config.query_head_dim), slice(config.query_head_dim, None))[part]

    def backward(keyvalue, y, d_y):
        rest = np.zeros((*d_y.shape[:-1], keyvalue.shape[-1] - d_y.shape[-1]))
        return (np.concatenate([d_y, rest] if part == 0 else [rest, d_y], axis=-1),)

    return Op(lambda keyvalue: keyvalue[..., cut], backward)


def cache_nodes(config: DraftConfig, step: int = STEP) -> list[Node]:
    """Earlier steps' keys and values in, this step's key and value out."""
    nodes = [Node((k, "mla_keyvalue"), earlier_keyvalue(k - 1), ("keys", "values")) for k in range(1, step)]
    parts = enumerate(("key", "value"))
    return nodes + [Node(at(name, step), part_of_keyvalue(config, i), (at("mla_keyvalue", step),)) for i, name in parts]


def mla_input(choices: Choices) -> str:
    return "draft_input" if choices.draft_input == "eagle3" else "attn_norm"


def mla_method_nodes(config: DraftConfig, choices: Choices, step: int = STEP) -> list[Node]:
    """From the attention's input to o_proj, without the residual."""
    inner = [n for n in attention_nodes(config, choices, step) if n.key[1] not in ("attn_norm", "attn_output")]
    inner = [_renamed_input(node, at(mla_input(choices), step), "x") for node in inner]
    output = Node(at("output", step), LINEAR, (at("attn_gate", step), "self_attn.o_proj.weight"))
    cache = cache_nodes(config, step)
    return [*cache[: step - 1], *inner, output, *cache[step - 1 :]]


def _renamed_input(node: Node, key: Key, name: Key) -> Node:
    return node._replace(inputs=tuple(name if i == key else i for i in node.inputs))


def added_output(shared, latent, up_proj):
    """What the sparse block adds to the residual: shared experts + routed_expert_up_proj latent."""
    return shared + linear(latent, up_proj)


ADDED = Op(added_output, lambda s, x, w, y, d_y: (d_y, *linear_backward(x, w, d_y)))


def moe_method_nodes(config: DraftConfig, choices: Choices) -> list[Node]:
    inner = [n for n in moe_nodes(config, choices, STEP) if n.key[1] not in ("moe_norm", "layer_output")]
    inner = [_renamed_input(node, at("moe_norm"), "x") for node in inner]
    up_proj = "block_sparse_moe.routed_expert_up_proj.weight"
    output = Node(at("output"), ADDED, (at("shared_experts"), at("latent_norm"), up_proj))
    return [*expert_weight_nodes(choices), *inner, output]


def route_method_nodes(config: DraftConfig, choices: Choices) -> list[Node]:
    wanted = ("router_scores", "experts", "route")
    inner = [n for n in moe_nodes(config, choices, STEP) if n.key[1] in wanted]
    return [_renamed_input(node, at("moe_norm"), "x") for node in inner]


def glu_method_nodes(stage: str, prefix: str):
    return lambda config, choices: rows(STEP, (), glu_rows(stage, "x", prefix, config))


def draft_input_nodes(config: DraftConfig, choices: Choices) -> list[Node]:
    given = choices.replace(token_source="given")
    nodes = input_nodes(config, given, STEP)
    return [_renamed_input(n, feature_key(STEP, choices), "feature")._replace(detached=()) for n in nodes]


def layer_method_nodes(config: DraftConfig, choices: Choices) -> list[Node]:
    mlp = dense_nodes if choices.draft_input == "eagle3" else moe_nodes
    weights = [] if choices.draft_input == "eagle3" else expert_weight_nodes(choices)
    cache = cache_nodes(config)
    layer = [
        _renamed_input(n, feature_key(STEP, choices), "feature")._replace(detached=())
        for n in (*attention_nodes(config, choices, STEP), *mlp(config, choices, STEP))
    ]
    return [*weights, *cache[: STEP - 1], *draft_input_nodes(config, choices), *layer, *cache[STEP - 1 :]]


def head_nodes(config: DraftConfig, choices: Choices) -> list[Node]:
    nodes = [n for n in loss_nodes(config, choices, STEP) if n.key[1] in ("head_norm", "logits")]
    return [_renamed_input(n, at("layer_output"), "feature") for n in nodes]


def lk_loss_nodes(config: DraftConfig, choices: Choices) -> list[Node]:
    return [
        Node(at("target_log_probs"), loss.target_op(choices.reduced_target), ("target_logits", "draft_to_target")),
        Node(at("lk_loss"), loss.LK_LOSS, ("draft_logits", at("target_log_probs"))),
        Node(at("below"), Op(below, no_gradient), ("draft_logits", at("target_log_probs"))),
    ]


def below(draft_logits, log_p):
    return np.real(loss.below(loss.log_softmax(draft_logits), log_p)) > 0.5


def fusion_nodes(config: DraftConfig, choices: Choices) -> list[Node]:
    return [n for n in graph(config, choices, 1) if n.key == (1, "fusion")]


# -- inputs -----------------------------------------------------------------------------------------------------------


def lk_arrays(case: Case, choices: Choices, rng) -> dict:
    """Slots of every kind: ordinary, nearly equal, equal, tied, one-hot, disjoint peaks, huge offsets."""
    width = case.config.vocab_size
    draft, target = rng.normal(size=(2, 12, width)) * 2
    target[1] = draft[1] + 0.05 * rng.normal(size=width)
    target[2] = draft[2]
    target[3] = draft[3][::-1].copy() + 3.0
    draft[4], target[4] = 0.0, 0.0
    target[4, :5] = 1.0
    draft[5], target[5] = 0.0, 0.0
    peak = 200.0 if case.onehot else 20.0
    draft[5, 1], target[5, 0] = peak, peak
    target[6] += peak * (np.arange(width) == 9)
    draft[7] += 1e4
    target[7] -= 1e4
    draft[8] *= 10 ** min(case.row_decades, 1.5)
    half = width // 2
    draft[9, :half] = target[9, :half]  # ties against a different rest
    draft[10] = np.round(draft[10])
    target[10] = np.round(target[10])
    return {"draft_logits": draft[:, : case.config.draft_vocab_size], "target_logits": target}


def situ_arrays(case: Case, choices: Choices, rng) -> dict:
    """From far below to far above the caps of both factors; four corners: capped, negative, zero, of unlike sign."""
    size = 10 ** rng.uniform(-2, 2, (2, 7, 64))
    gate, up = rng.normal(size=(2, 2, 7, 64)) * size
    gate[0, 0, :4], up[0, 0, :4] = [10.0, -6.0, 0.0, 17.0], [50.0, 3.0, 1.0, -200.0]
    return {"gate": gate, "up": up}


def hidden(case: Case, rng, width: int) -> dict:
    return {
        "x": activation(rng, case, BATCH, SLOTS, width) if case.row_decades else rng.normal(size=(BATCH, SLOTS, width))
    }


def route_arrays(case: Case, choices: Choices, rng) -> dict:
    return hidden(case, rng, case.config.hidden_size)


def mla_arrays(case: Case, choices: Choices, rng) -> dict:
    width = case.config.hidden_size * (2 if choices.draft_input == "eagle3" else 1)
    return hidden(case, rng, width) | earlier(case, rng, STEP - 1)


def mla_first_arrays(case: Case, choices: Choices, rng) -> dict:
    """At step 1 there are no earlier keys and values: the arrays have no entry. keys [0, B, T, H, .]."""
    return mla_arrays(case, choices, rng) | earlier(case, rng, 0, step=1)


def attention_arrays(case: Case, choices: Choices, rng) -> dict:
    c = case.config
    query = rng.normal(size=(BATCH, SLOTS, c.num_attention_heads, c.query_head_dim))
    return {"query": query * (30.0 if case.onehot else 1.0)} | earlier(case, rng, STEP)


def feature_and_tokens(case: Case, choices: Choices, rng) -> dict:
    return {"feature": hidden(case, rng, case.config.hidden_size)["x"], "tokens": tokens(case, rng)}


def fusion_arrays(case: Case, choices: Choices, rng) -> dict:
    return {name: hidden(case, rng, case.config.hidden_size)["x"] for name in ("low", "mid", "high")}


MOE = "block_sparse_moe."
STAGES = [
    Stage(
        "fusion", "f = fc [low; mid; high]", "report 4.1.4", fusion_nodes,
        {"low": "low", "mid": "mid", "high": "high"}, {"feature": (1, "fusion")}, fusion_arrays, ("fc",),
    ),
    Stage(
        "draft_input", "x0 = eh_proj [RMSNorm(e; enorm); RMSNorm(f; hnorm)]", "spec.md 4", draft_input_nodes,
        {"feature": "feature", "tokens": at("tokens")}, {"x": at("draft_input")}, feature_and_tokens,
        ("embed_tokens", "enorm", "hnorm", "eh_proj"),
    ),
    Stage(
        "situ_glu", "beta1 tanh(g/beta1) sigmoid(g) beta2 tanh(u/beta2)", "report eq. 12, 19",
        lambda c, _: [Node(at("y"), situ(c.activation_situ_beta, c.activation_situ_linear_beta), ("gate", "up"))],
        {"gate": "gate", "up": "up"}, {"y": at("y")}, situ_arrays,
    ),
    Stage(
        "attention", "softmax over step-1 keys i <= j of the document and the slot's own later keys", "spec.md 4",
        lambda c, _: [Node(at("attention"), Op(stacked_attention, stacked_attention_backward),
                           ("documents", "query", "keys", "values"))],
        {"query": "query", "keys": "keys", "values": "values"}, {"output": at("attention")}, attention_arrays,
    ),
    Stage(
        "mla", "o_proj (sigmoid(g_proj a) * attention)", "report 2.1.2, eq. 7", mla_method_nodes,
        {"x": "x", "keys": "keys", "values": "values"},
        {"output": at("output"), "key": at("key"), "value": at("value")}, mla_arrays, ("self_attn.",),
    ),
    Stage(
        "route", "weights s_i / sum s of the n largest s + bias, times the factor", "report eq. 13",
        route_method_nodes, {"x": "x"}, {"weights": at("route")}, route_arrays, (MOE + "gate.",),
        {"experts": at("experts")}, ("mtp",), {MOE + "gate.": "gate."},
    ),
    Stage(
        "moe", "shared_experts + routed_expert_up_proj RMSNorm(sum of weight x expert)", "report 2.3, eq. 11-13",
        moe_method_nodes, {"x": "x"}, {"output": at("output")}, route_arrays, (MOE,),
        {"experts": at("experts"), "mx_input": at("mx_input"), "mx_hidden": at("mx_hidden")}, ("mtp",),
    ),
    Stage(
        "shared_experts", "down_proj SiTU-GLU(gate_proj x, up_proj x)", "report 2.3",
        glu_method_nodes("shared_experts", MOE + "shared_experts."), {"x": "x"}, {"output": at("shared_experts")},
        route_arrays, (MOE + "shared_experts.",), layouts=("mtp",),
    ),
    Stage(
        "dense_mlp", "down_proj SiTU-GLU(gate_proj x, up_proj x)", "spec.md 4",
        glu_method_nodes("dense_mlp", "mlp."), {"x": "x"}, {"output": at("dense_mlp")}, route_arrays, ("mlp.",),
        layouts=("eagle3",),
    ),
    Stage(
        "draft_layer", "one decoder layer, from the fused or recycled feature to f'", "spec.md 4", layer_method_nodes,
        {"feature": "feature", "tokens": at("tokens"), "keys": "keys", "values": "values"},
        {"feature": at("layer_output"), "key": at("key"), "value": at("value")},
        lambda case, choices, rng: feature_and_tokens(case, choices, rng) | earlier(case, rng, STEP - 1),
        ("embed_tokens", "enorm", "hnorm", "eh_proj", "input_layernorm", "self_attn.", "post_attention", MOE, "mlp."),
        {"experts": at("experts"), "mx_input": at("mx_input"), "mx_hidden": at("mx_hidden")},
    ),
    Stage(
        "head", "logits = shared_head.head RMSNorm(f'; shared_head.norm)", "spec.md 4", head_nodes,
        {"feature": "feature"}, {"logits": at("logits")},
        lambda case, choices, rng: {"feature": hidden(case, rng, case.config.hidden_size)["x"]}, ("shared_head.",),
    ),
    Stage(
        "lk_loss", "-log sum min(p, q) at temperature 1", "report eq. 16", lk_loss_nodes,
        {"draft_logits": "draft_logits", "target_logits": "target_logits"}, {"loss": at("lk_loss")}, lk_arrays,
        decisions={"below": at("below")},
    ),
]  # fmt: skip

#: Methods that are asked at step 1 too, where an implementation without the draft's later steps can answer.
FIRST_STEP = {
    "mla": Stage(
        "mla", "o_proj (sigmoid(g_proj a) * causal attention)", "report 2.1.2, eq. 7",
        lambda config, choices: mla_method_nodes(config, choices, 1), {"x": "x"},
        {name: at(name, 1) for name in ("output", "key", "value")}, mla_first_arrays, ("self_attn.",),
    ),
}  # fmt: skip
FIRST = "_first"  # what the name of a case ends in there


def row_of(method: str, step: int = STEP) -> Stage | None:
    """The row of a method at a step; None for a method that has none."""
    rows_of_stages = {stage.name: stage for stage in STAGES} | (FIRST_STEP if step == 1 else {})
    return rows_of_stages.get(method)
