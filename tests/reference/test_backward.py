"""Every backward against complex-step derivatives, which have no truncation and no cancellation error.

f(x + ih) = f(x) + ih f'(x) + O(h^2) with h = 1e-30: the imaginary part over h is the derivative to rounding. Decisions
are pinned: routed experts and drafted tokens are constants, and an MX quantisation, whose gradient is straight-through,
is the function of slope 1 (0 where clipped) through the quantised value.
"""

import numpy as np
import pytest
from helpers import LAYOUTS, MICRO, alternatives, assert_near, case, label

from draftconf.reference import graph as walk
from draftconf.reference.config import DraftConfig
from draftconf.reference.graph import Node
from draftconf.reference.layer import graph
from draftconf.reference.ops import Op
from draftconf.reference.unroll import parameter_gradients, stacked_parameters, step_inputs, unroll

H = 1e-30
RELATIVE = 1e-8  # per coordinate, for those above ...
FLOOR = 1e-13  # ... this part of the largest entry of the same array

#: Values that are data, decisions or frozen: no cotangent may be asked of a stage for them.
CONSTANTS = {"tokens", "embed_tokens.weight", "first_slots", "documents", "experts", "supervised", "draft_to_target",
             "target_logits", "target_log_probs", "block_sparse_moe.gate.e_score_correction_bias"}  # fmt: skip
DECISIONS = {"experts", "tokens", "target_log_probs"}  # and what comes from the frozen target
DOCUMENTS = [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, -1]]

PER_STAGE = [
    {},
    {"draft_input": "eagle3"},
    {"routing_weight": "before_down", "feature_norm": "per_chunk", "renormalize_epsilon": 1e-20, "head": "own"},
    {"draft_input": "eagle3", "feature_norm": "joint", "reduction": "all_slots", "head": "reduced"},
    {"zero_first_embedding": True, "token_source": "own", "quantize_hidden": False, "step_weights": "decay"},
]


def name_of(key) -> str:
    return key if isinstance(key, str) else key[1]


def is_quantised(node: Node) -> bool:
    return name_of(node.key).startswith(("mx_", "expert_weights"))


def evaluated(params, inputs, config, choices):
    """The nodes of the unroll and every value they read or made."""
    values = stacked_parameters(params, config, choices) | step_inputs(inputs, config, choices)
    nodes = graph(config, choices)
    walk.forward(nodes, values)
    return nodes, values


def complex_step(function, x: np.ndarray) -> np.ndarray:
    """The gradient of a scalar function, one coordinate at a time."""
    gradient = np.empty(x.shape)
    moved = np.array(x, complex)
    for at in np.ndindex(x.shape):
        moved[at] += H * 1j
        gradient[at] = np.imag(function(moved)) / H
        moved[at] = x[at]
    return gradient


def assert_backward(node: Node, values: dict, rng) -> None:
    """The stage's cotangents are the derivative of <d_y, stage> in every coordinate of every input."""
    arguments, y = [values[key] for key in node.inputs], values[node.key]
    d_y = rng.normal(size=y.shape)
    cotangents = node.op.backward(*arguments, y, d_y)
    assert len(cotangents) == len(arguments), node.key
    for i, (key, d) in enumerate(zip(node.inputs, cotangents, strict=True)):
        if d is None:
            assert name_of(key) in CONSTANTS, f"{node.key} hands nothing to {key}"
            continue

        def along(x, i=i):
            return np.sum(d_y * node.op.forward(*arguments[:i], x, *arguments[i + 1 :]))

        want = complex_step(along, arguments[i])
        assert d.shape == want.shape, f"{node.key} to {key}"
        error = np.abs(d - want)
        assert (error <= RELATIVE * np.abs(want) + FLOOR * np.abs(want).max()).all(), f"{node.key} to {key}"


@pytest.mark.parametrize("change", PER_STAGE, ids=label)
def test_backward_of_every_stage_in_every_coordinate(change):
    arguments = case(change, MICRO, documents=[row[:6] for row in DOCUMENTS])
    nodes, values = evaluated(*arguments)
    rng = np.random.default_rng(3)
    checked = set()
    for node in nodes:
        if name_of(node.key) not in DECISIONS and not is_quantised(node):
            assert_backward(node, values, rng)
            checked.add(name_of(node.key))
    skipped = {name_of(node.key) for node in nodes} - checked
    assert skipped <= DECISIONS | {"mx_input", "mx_hidden", *(f"expert_weights.{w}" for w in ("w1", "w2", "w3"))}


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_backward_of_attention_reaches_the_keys_and_values_of_every_step(steps):
    arguments = case({}, DraftConfig(**{**MICRO.to_dict(), "num_steps": steps}), documents=[[0, 0, 0, 1, 1, -1]])
    nodes, values = evaluated(*arguments)
    node = next(n for n in nodes if n.key == (steps, "attention"))
    assert sum(name_of(key) == "mla_keyvalue" for key in node.inputs) == steps
    assert_backward(node, values, np.random.default_rng(4))


@pytest.mark.parametrize("change", PER_STAGE, ids=label)
def test_decisions_and_lookups_hand_no_cotangent_to_anything(change):
    nodes, values = evaluated(*case(change, MICRO))
    for node in nodes:
        if name_of(node.key) in DECISIONS:
            assert not walk.contributions(node, values, np.ones(values[node.key].shape)), node.key


def pinned(node: Node, values: dict) -> Node:
    """The function whose derivative the straight-through gradient is."""
    if not is_quantised(node):
        return node
    x, y = values[node.inputs[0]], values[node.key]
    (slope,) = node.op.backward(x, y, np.ones_like(y))
    assert set(np.unique(slope)) <= {0.0, 1.0}
    return node._replace(op=Op(lambda moved: y + slope * (moved - x), node.op.backward))


class Directional:
    """The derivative of the total loss along a direction of any value, decisions pinned, detached inputs held."""

    def __init__(self, arguments):
        self.params, self.inputs, self.config, self.choices = arguments
        nodes, self.values = evaluated(*arguments)
        self.nodes = [pinned(node, self.values) for node in nodes]
        made = {node.key for node in nodes}
        self.given = {key: value for key, value in self.values.items() if key not in made or name_of(key) in DECISIONS}

    def loss(self, moved: dict):
        values = self.given | moved
        for node in self.nodes:
            if node.key not in values:
                read = (self.values[key] if key in node.detached else values[key] for key in node.inputs)
                values[node.key] = node.op.forward(*read)
        return values[(0, "total_loss")]

    def along(self, directions: dict) -> float:
        return np.imag(self.loss({key: self.values[key] + H * 1j * v for key, v in directions.items()})) / H

    def along_parameters(self, directions: dict) -> float:
        moved = {name: self.params[name] + H * 1j * v for name, v in directions.items()}
        stacked = stacked_parameters(self.params | moved, self.config, self.choices)
        return np.imag(self.loss(stacked)) / H


SEVEN = DraftConfig(**{**MICRO.to_dict(), "num_steps": 7})


@pytest.mark.parametrize("change", alternatives(), ids=label)
def test_gradient_of_the_whole_unroll_along_random_directions(change):
    arguments = case(change, SEVEN, documents=DOCUMENTS)
    step, grads = Directional(arguments), unroll(*arguments).grads
    rng = np.random.default_rng(5)
    for _ in range(3):
        directions = {name: rng.normal(size=grad.shape) for name, grad in grads.items()}
        want = step.along_parameters(directions)
        products = [np.sum(grads[name] * v) for name, v in directions.items()]
        assert abs(sum(products) - want) <= 1e-12 * np.sum(np.abs(products))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_the_tiny_unroll_along_random_directions(layout):
    arguments = case({"draft_input": layout}, DraftConfig.tiny(), documents=[[0] * 7 + [1] * 5, [0] * 10 + [-1] * 2])
    step, grads = Directional(arguments), unroll(*arguments).grads
    rng = np.random.default_rng(6)
    for _ in range(3):
        directions = {name: rng.normal(size=grad.shape) for name, grad in grads.items()}
        products = [np.sum(grads[name] * v) for name, v in directions.items()]
        assert abs(sum(products) - step.along_parameters(directions)) <= 1e-12 * np.sum(np.abs(products))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_every_trained_parameter_on_its_own(layout):
    arguments = case({"draft_input": layout, "head": "own"}, SEVEN, documents=DOCUMENTS)
    step, grads = Directional(arguments), unroll(*arguments).grads
    rng = np.random.default_rng(7)
    for name, grad in grads.items():
        v = rng.normal(size=grad.shape)
        want = step.along_parameters({name: v})
        assert abs(np.sum(grad * v) - want) <= 1e-12 * np.sum(np.abs(grad * v)), name


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"draft_input": "eagle3"},
        {"recycled_feature": "post_norm", "routing_weight": "before_down"},
        {"detach_between_steps": True, "ste": "clipped"},
        {"draft_input": "eagle3", "detach_between_steps": True},
    ],
    ids=label,
)
def test_cotangent_of_every_stage_output_at_every_step(change):
    arguments = case(change, SEVEN, documents=DOCUMENTS)
    step, trace = Directional(arguments), unroll(*arguments).trace
    rng = np.random.default_rng(8)
    stages = [node.key for node in step.nodes if node.key[0] and name_of(node.key) not in DECISIONS]
    assert len(stages) > 7 * 20
    for key in stages:
        grad = trace[f"{key[0]}/{key[1]}.grad"]
        v = rng.normal(size=grad.shape)
        want = step.along({key: v})
        assert abs(np.sum(grad * v) - want) <= 1e-12 * np.sum(np.abs(grad * v)), key


def test_gradients_of_the_features_and_of_the_quantised_weights_reach_the_start_of_the_graph():
    """The cotangents of what is not a parameter: the target's three features, and the weights on the MX grid."""
    arguments = case({}, SEVEN, documents=DOCUMENTS)
    step, cotangents = Directional(arguments), {(0, "total_loss"): np.ones(())}
    walk.backward(step.nodes, step.values, cotangents)
    rng = np.random.default_rng(9)
    for key in ("low", "mid", "high", (0, "expert_weights.w1"), (0, "expert_weights.w2"), (0, "expert_weights.w3")):
        v = rng.normal(size=cotangents[key].shape)
        assert abs(np.sum(cotangents[key] * v) - step.along({key: v})) <= 1e-12 * np.sum(np.abs(cotangents[key] * v)), (
            key
        )


def test_expert_gradients_are_those_of_the_quantised_operands_themselves_unquantised():
    """dW = dY^T Xq and dX = dY Wq, passed straight to the master weight (spec.md section 6)."""
    params, _, config, choices = arguments = case({}, MICRO)
    nodes, values = evaluated(*arguments)
    cotangents = {(0, "total_loss"): np.ones(())}
    walk.backward(nodes, values, cotangents)
    grads = parameter_gradients(cotangents, values, config, choices)
    for w in ("w1", "w2", "w3"):
        for e in range(config.num_experts):
            want = np.zeros_like(params[f"block_sparse_moe.experts.{e}.{w}.weight"])
            for k in range(1, config.num_steps + 1):
                stage = {"w1": "expert_hidden.gate", "w3": "expert_hidden.up", "w2": "expert_output"}[w]
                d_y, experts = cotangents[(k, stage)], values[(k, "experts")]
                for b, t, i in np.argwhere(experts == e):
                    x = values[(k, "mx_hidden")][b, t, i] if w == "w2" else values[(k, "mx_input")][b, t]
                    want += np.outer(d_y[b, t, i], x)
            assert_near(grads[f"block_sparse_moe.experts.{e}.{w}.weight"], want, 1e-13)
