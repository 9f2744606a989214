"""What every stage is, in words: the stage table's methods, those with checks of their own, and the trace's boundaries.

The one source of ``conform stages``, ``conform explain`` and the documentation pages.
"""

from dataclasses import dataclass

from draftconf.reference.config import Choices, DraftConfig
from draftconf.reference.layer import graph

from ..checks.stages import STAGES
from ..checks.walk import is_boundary
from ..protocol.losses import LOSSES


@dataclass(frozen=True)
class Described:
    """A method of the protocol (kind ``method``) or a boundary of the trace (kind ``trace``)."""

    name: str
    kind: str
    equation: str
    source: str  # clause of the specification or equation of the Kimi K3 report
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    decisions: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ("mtp", "eagle3")


MX = "OCP MX v1.0; spec.md 6"
#: Methods that stages.py has no row for: name, equation, source, inputs, outputs.
OTHERS = (
    (
        "align",
        "slot j of step k reads token x[j+k], the feature of position j and target P[j+k]",
        "spec.md 3",
        ("tokens", "low", "mid", "high", "target_logits", "mask", "documents"),
        ("tokens", "low", "mid", "high", "target_logits", "mask", "supervised"),
    ),
    *(
        (name, "blocks of 32: a power-of-two scale, elements rounded half to even", MX, ("x",), ("scales", "codes"))
        for name in ("mxfp4", "mxfp8")
    ),
    *(
        (f"{name}_decode", "element value x 2^(scale - 127)", MX, ("scales", "codes"), ("values",))
        for name in ("mxfp4", "mxfp8")
    ),
    *(
        (f"fake_{name}", "decode(encode(x)), straight-through gradient", MX, ("x",), ("y",))
        for name in ("mxfp4", "mxfp8")
    ),
    (
        "unroll",
        "total loss = sum over steps of weight x mean LK loss of the supervised slots",
        "report 4.1.4; spec.md 4, 5",
        ("tokens", "low", "mid", "high", "target_logits", "mask", "parameters"),
        ("total_loss", "step_losses", "slot_losses"),
    ),
    (
        "pattern",
        "any draft layer: slot j of step k reads features 0..j, tokens 0..j+k-1, and the output of step k-1",
        "spec.md 3, 4, 5",
        ("tokens", "low", "mid", "high", "target_logits", "mask"),
        ("logits", "step_losses", "total_loss"),
        (),
        (),
        ("eagle3",),
    ),
    *(
        (name, equation, source, ("draft_logits", "target_logits", "mask"), ("loss",))
        for name, (equation, source) in LOSSES.items()
    ),
    (
        "draft_sequence",
        "the same step token by token, with a cache",
        "spec.md 8",
        ("features of a prefix", "tokens", "given", "parameters"),
        ("logits", "features"),
    ),
    (
        "speculative_sample",
        "accept with min(1, p/q), else draw from max(p - q, 0) / (1 - alpha)",
        "spec.md 8",
        ("p", "q", "draw"),
        ("residual", "accepted", "token"),
    ),
)

#: Boundaries of the trace: equation and source. Dotted names are finer boundaries inside a stage.
BOUNDARIES = {
    "tokens": ("the token that the step reads; with token_source own, the arg-max of the step before", "spec.md 9"),
    "embed": ("e = embed_tokens[x]", "spec.md 4"),
    "fusion": ("f = fc [low; mid; high], at step 1", "report 4.1.4"),
    "draft_input.enorm": ("RMSNorm(e; enorm)", "spec.md 4"),
    "draft_input.hnorm": ("RMSNorm(f; hnorm), f the fused or recycled feature", "spec.md 4"),
    "draft_input": ("x0 = eh_proj [RMSNorm(e); RMSNorm(f)]; in eagle3 the concatenation itself", "spec.md 4"),
    "attn_norm": ("a = RMSNorm(x0; input_layernorm)", "spec.md 4"),
    "mla_query.low": ("q_a_proj a", "report 2.1.2"),
    "mla_query.norm": ("RMSNorm(q_a_proj a; q_a_layernorm)", "report 2.1.2"),
    "mla_query": ("q = q_b_proj RMSNorm(q_a_proj a), per head", "report 2.1.2"),
    "mla_latent": ("[c; r] = kv_a_proj_with_mqa a", "report 2.1.2"),
    "mla_keyvalue.norm": ("RMSNorm(c; kv_a_layernorm)", "report 2.1.2"),
    "mla_keyvalue": ("[k_nope; v] = kv_b_proj RMSNorm(c); key = [k_nope; r], never rotated", "report 2.1.2"),
    "attention": ("softmax over step-1 keys i <= j of the document and the slot's own later keys", "spec.md 4"),
    "attn_gate.pre": ("g_proj a", "report eq. 7"),
    "attn_gate": ("sigmoid(g_proj a) x attention", "report eq. 7"),
    "attn_output": ("x1 = x0 + o_proj gated; in eagle3 f + o_proj gated", "spec.md 4"),
    "moe_norm": ("h = RMSNorm(x1; post_attention_layernorm)", "spec.md 4"),
    "router_scores": ("s = sigmoid(gate h)", "report eq. 13"),
    "experts": ("the n experts with the largest s + bias", "report eq. 13"),
    "route": ("s_i / sum of the chosen s, times the factor", "report eq. 13"),
    "latent_down": ("z = routed_expert_down_proj h", "report 2.3"),
    "mx_input": ("MXFP8(z)", "report eq. 12; OCP MX v1.0"),
    "expert_hidden.gate": ("W1 mx_input, W1 on the MXFP4 grid", "report eq. 12"),
    "expert_hidden.up": ("W3 mx_input, W3 on the MXFP4 grid", "report eq. 12"),
    "expert_hidden": ("SiTU-GLU(gate, up)", "report eq. 12, 19"),
    "mx_hidden": ("MXFP8(expert_hidden)", "report eq. 12; OCP MX v1.0"),
    "expert_output": ("W2 mx_hidden, W2 on the MXFP4 grid", "report eq. 12"),
    "moe_combine": ("u = sum of weight x expert output", "report eq. 11"),
    "latent_norm": ("RMSNorm(u; routed_expert_norm)", "report 2.3.1"),
    "shared_experts.gate": ("gate_proj h", "report 2.3"),
    "shared_experts.up": ("up_proj h", "report 2.3"),
    "shared_experts.hidden": ("SiTU-GLU(gate, up)", "report eq. 12, 19"),
    "shared_experts": ("down_proj hidden", "report 2.3"),
    "dense_mlp.gate": ("gate_proj h", "spec.md 4"),
    "dense_mlp.up": ("up_proj h", "spec.md 4"),
    "dense_mlp.hidden": ("SiTU-GLU(gate, up)", "report eq. 12, 19"),
    "dense_mlp": ("down_proj hidden", "spec.md 4"),
    "layer_output": ("f' = x1 + shared_experts + routed_expert_up_proj latent_norm", "spec.md 4"),
    "head_norm": ("RMSNorm(f'; shared_head.norm)", "spec.md 4"),
    "logits": ("shared_head.head head_norm", "spec.md 4"),
    "lk_loss": ("-log sum min(p, q) at temperature 1", "report eq. 16"),
}


def methods() -> list[Described]:
    """Every method of the protocol, MX and alignment first, as the plan has them."""
    table = [
        Described(
            s.name, "method", s.equation, s.source, tuple(s.inputs), tuple(s.outputs), tuple(s.decisions), s.parameters,
            s.layouts,
        )
        for s in STAGES
    ]  # fmt: skip
    others = [Described(name, "method", *rest) for name, *rest in OTHERS]
    first = [o for o in others if o.name.startswith(("align", "mx", "fake"))]
    return [*first, *table, *(o for o in others if o not in first)]


def boundaries() -> list[Described]:
    """Every boundary of the trace in data order, with what the wiring says it reads."""
    wired: dict[str, dict] = {}
    for layout in ("mtp", "eagle3"):
        nodes = [n for source in ("teacher", "own") for n in _nodes(layout, source)]
        for node in nodes:
            if is_boundary(node.key):
                at = wired.setdefault(node.key[1], {"inputs": {}, "layouts": {}})
                at["inputs"] |= dict.fromkeys(_name(key, node.key) for key in node.inputs)
                at["layouts"][layout] = None
    order = {name: i for i, name in enumerate(BOUNDARIES)}
    found = [
        Described(name, "trace", *BOUNDARIES[name], tuple(at["inputs"]), (name,), (), (), tuple(at["layouts"]))
        for name, at in wired.items()
    ]
    return sorted(found, key=lambda each: order[each.name])


def _nodes(layout: str, source: str):
    return graph(DraftConfig.tiny(), Choices.from_dict({"draft_input": layout, "token_source": source}), 2)


def _name(key, of) -> str:
    """An input in words: a parameter by its name, a boundary of an earlier step as such."""
    if isinstance(key, str):
        return key
    return key[1] if key[0] in (of[0], 0) else f"{key[1]} of the step before"


def find(name: str) -> list[Described]:
    """A method and a boundary may share a name."""
    return [each for each in (*methods(), *boundaries()) if each.name == name]
