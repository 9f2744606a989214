"""The fused path against the recorded one, which the suite certifies: the same numbers in every choice."""

from dataclasses import replace

import pytest
import torch
from batches import CONFIG, make_batch, make_model

from draftconf.fast import experts, fused, layer, merged_attention, moe
from draftconf.fast.attention import attention
from draftconf.fast.model import DraftModel
from draftconf.fast.ops import wide
from draftconf.reference.config import ALTERNATIVES, Choices, DraftConfig

LAYOUTS = ["mtp", "eagle3"]
SMALL_VOCABULARY = replace(CONFIG, draft_vocab_size=41)
ALTERNATIVE = [(f, v) for f, values in ALTERNATIVES.items() for v in values[1:] if f != "draft_input"]


def relative(a, b) -> float:
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()


def model_of(choices, dtype=torch.float64) -> DraftModel:
    model = make_model(choices, dtype)
    if choices.head == "reduced":
        model, whole = DraftModel(SMALL_VOCABULARY, choices, dtype), model.state_dict()
        name = "shared_head.head.weight"
        model.load_state_dict({**whole, name: whole[name][: SMALL_VOCABULARY.draft_vocab_size]})
    return model


def batch_of(choices, dtype=torch.float64, documents=True) -> dict:
    batch = make_batch(dtype, documents=documents)
    if choices.head == "reduced":
        batch["draft_to_target"] = torch.arange(0, 97, 2)[: SMALL_VOCABULARY.draft_vocab_size]
    if choices.token_source == "given":
        batch["tokens_by_step"] = torch.arange(7 * 18).reshape(7, 2, 9) % 97
    return batch


def run(model, batch, path, **kwargs) -> tuple[dict, dict]:
    """The results and the gradients of "recorded" or "fused"."""
    model.zero_grad()
    unroll = model.unroll
    if path == "fused":
        params = dict(model.named_parameters())
        unroll = lambda b, **k: fused.unroll(params, b, model.config, model.choices, **k)  # noqa: E731
    result = unroll(batch, **kwargs)
    result["total_loss"].backward()
    return result, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs, tolerance):
    (result, grads), (expected, expected_grads) = ours, theirs
    supervised = expected["supervised"]
    assert torch.equal(result["supervised"], supervised)
    assert relative(result["total_loss"], expected["total_loss"]) <= tolerance
    assert relative(result["step_losses"], expected["step_losses"]) <= tolerance
    assert relative(result["slot_losses"][supervised], expected["slot_losses"][supervised]) <= tolerance
    assert set(grads) == set(expected_grads)
    for name, expected_grad in expected_grads.items():
        assert grads[name].dtype == expected_grad.dtype
        assert relative(grads[name], expected_grad) <= tolerance, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("field", "value"), [("draft_input", None), *ALTERNATIVE], ids=str)
def test_every_choice_gives_what_the_recorded_path_gives(field, value, layout):
    fields = {"draft_input": layout} | ({} if value is None else {field: value})
    if field.startswith("reduced"):
        fields["head"] = "reduced"
    choices = Choices(**fields)
    model, batch = model_of(choices), batch_of(choices)
    assert_same(run(model, batch, "fused"), run(model, batch, "recorded"), 1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recompute", ["attention", "step"])
def test_recomputation_changes_nothing(recompute, layout):
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 2e-7), (torch.bfloat16, 8e-3)):
        model, batch = make_model(Choices(draft_input=layout), dtype), make_batch(dtype)
        ours = run(model, batch, "fused", plan=fused.Plan(recompute))
        assert_same(ours, run(model, batch, "fused"), tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputation_keeps_less(layout):
    choices, kept = Choices(draft_input=layout), {}
    for recompute in fused.RECOMPUTE:
        model, batch, sizes = make_model(choices), make_batch(), []
        params = dict(model.named_parameters())
        own = {p.untyped_storage().data_ptr() for p in params.values()}

        def pack(x, own=own, sizes=sizes):
            if x.untyped_storage().data_ptr() not in own:
                sizes.append(x.nbytes)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            fused.unroll(params, batch, CONFIG, choices, plan=fused.Plan(recompute))
        kept[recompute] = sum(sizes)
    assert kept["step"] < kept["attention"] < kept["none"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_step_twice_is_the_same_in_every_bit(layout, dtype):
    model, batch = make_model(Choices(draft_input=layout), dtype), make_batch(dtype)
    (first, grads), (second, again) = run(model, batch, "fused"), run(model, batch, "fused")
    assert torch.equal(first["slot_losses"], second["slot_losses"])
    assert torch.equal(first["total_loss"], second["total_loss"])
    assert all(torch.equal(grads[name], again[name]) for name in grads)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's own, while tracing
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_the_recorded_path_compiles_without_a_break(layout):
    """The fused path does not: its backward notes factors in Python."""
    choices = Choices(draft_input=layout)
    model, batch = make_model(choices, torch.float32), make_batch(torch.float32, documents=False)
    params = dict(model.named_parameters())

    def two_steps(feature, tokens):
        feature, key, value = layer.draft_layer(feature, tokens, params, CONFIG, choices)
        return layer.draft_layer(feature, tokens, params, CONFIG, choices, [key], [value])[0]

    grads = []
    for step in (two_steps, torch.compile(two_steps, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        step(batch["high"], batch["tokens"]).sum().backward()
        grads.append({name: p.grad.clone() for name, p in params.items() if p.grad is not None})
    assert all(relative(grads[1][name], g) < 1e-6 for name, g in grads[0].items())


def test_an_unknown_plan_is_refused_by_field():
    with pytest.raises(ValueError, match="recompute is 'everything'; wanted one of 'none', 'attention', 'step'"):
        fused.Plan("everything")


def test_bad_inputs_are_refused_by_name_and_index():
    model, choices = make_model(), Choices()
    params = dict(model.named_parameters())
    for name, index, value, text in (
        ("mid", (1, 2, 3), torch.inf, "inf"),
        ("target_logits", (0, 1, 2), torch.nan, "nan"),
        ("tokens", (0, 4), CONFIG.vocab_size, "97"),
    ):
        batch = make_batch(documents=False)
        batch[name][index] = value
        with pytest.raises(ValueError, match=rf"{name}\[{', '.join(map(str, index))}\] is {text}"):
            fused.unroll(params, batch, CONFIG, choices)


def test_no_supervised_slot_gives_zero():
    model, batch = make_model(), make_batch()
    batch["mask"][:] = False
    result, grads = run(model, batch, "fused")
    assert result["total_loss"].item() == 0
    assert all(torch.count_nonzero(g) == 0 for g in grads.values())


# -- attention --------------------------------------------------------------------------------------------------------

DOCUMENTS = [None, [[0] * 5 + [1] * 4, [-1] + [3] * 6 + [-1] * 2], [[2] * 4 + [7] * 5] * 2]


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "blocks"])
@pytest.mark.parametrize("documents", DOCUMENTS, ids=["one", "ragged", "alike"])
@pytest.mark.parametrize(("width", "value_width"), [(18, 10), (10, 18)])
@pytest.mark.parametrize("count", [1, 4])
def test_merged_attention_is_attention(count, width, value_width, documents, flash, monkeypatch):
    monkeypatch.setattr(merged_attention, "has_flash", lambda x: flash)
    monkeypatch.setattr(merged_attention, "QUERY_BLOCK", 4)
    documents = None if documents is None else torch.tensor(documents)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1.5e-2)):
        g = torch.Generator().manual_seed(3)
        make = lambda w, g=g, dtype=dtype: torch.randn(2, 9, 3, w, generator=g).to(dtype).requires_grad_()  # noqa: E731
        leaves = [make(width) for _ in range(1 + count)] + [make(value_width) for _ in range(count)]
        query, keys, values = leaves[0], leaves[1 : 1 + count], leaves[1 + count :]
        real = torch.ones(2, 9, 1, 1) if documents is None else (documents != -1)[:, :, None, None]
        for compute in {dtype, wide(dtype)}:
            d_output = torch.randn(2, 9, 3, value_width, generator=g) * real
            outputs = (
                attention(query, keys, values, documents),
                merged_attention.attention(query, keys, values, documents, compute),
            )
            assert outputs[1].dtype == compute
            assert relative(outputs[1] * real, outputs[0] * real) <= tolerance
            expected, ours = (torch.autograd.grad(y, leaves, d_output.to(y.dtype)) for y in outputs)
            assert all(relative(a, b) <= tolerance for a, b in zip(ours, expected, strict=True))


def test_merged_attention_far_apart_scores():
    """A log-sum-exp beyond the exponential's range, on either side."""
    for size in (1.0, 1e3):
        query = torch.full((1, 4, 1, 16), size)
        keys, values = [torch.ones(1, 4, 1, 16), -torch.ones(1, 4, 1, 16)], [torch.ones(1, 4, 1, 8)] * 2
        out = merged_attention.attention(query, keys, values)
        torch.testing.assert_close(out, torch.ones_like(out))


# -- experts ----------------------------------------------------------------------------------------------------------


def expert_inputs(dtype, config=CONFIG, skewed=False, steps=2):
    g = torch.Generator().manual_seed(9)
    latent, n = config.routed_expert_hidden_size, config.num_experts_per_token
    popular = torch.arange(config.num_experts) if not skewed else torch.arange(config.num_experts) % 4
    made = []
    for _ in range(steps):
        z = moe.mx_input(torch.randn(2, 9, latent, generator=g).to(dtype), Choices())
        w = torch.rand(2, 9, n, generator=g, dtype=wide(dtype))
        ids = [popular[torch.randperm(4 if skewed else config.num_experts, generator=g)[:n]] for _ in range(18)]
        made.append((z.requires_grad_(), w.requires_grad_(), torch.stack(ids).view(2, 9, n)))
    return made


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_experts_give_what_the_recorded_path_gives(dtype, skewed, deferred):
    model, choices, made = make_model(dtype=dtype), Choices(), expert_inputs(dtype, skewed=skewed)
    params = {name: p for name, p in model.named_parameters() if ".experts." in name and "shared" not in name}
    leaves = [*params.values(), *(x for z, w, _ in made for x in (z, w))]
    quantized = moe.quantize_experts({name: p.to(wide(dtype)) for name, p in params.items()}, CONFIG, choices)

    def recorded(z, w, ids):
        groups = moe.group_by_expert(ids, CONFIG.num_experts)
        hidden = moe.mx_hidden(moe.expert_hidden(z, quantized, groups, CONFIG), w, choices)
        return moe.moe_combine(moe.expert_output(hidden, quantized, groups), w, choices)

    ours = experts.Experts(params, CONFIG, choices, deferred=deferred)
    outputs = [[f(*step) for step in made] for f in (ours.combine, recorded)]
    seeds = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype) for y in outputs[0]]
    got, expected = (torch.autograd.grad(y, leaves, seeds, allow_unused=True, materialize_grads=True) for y in outputs)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    pairs = [*zip(outputs[0], outputs[1], strict=True), *zip(got, expected, strict=True)]
    assert all(relative(a, b) <= tolerance for a, b in pairs)


def test_experts_are_quantised_once_per_change():
    model, cache = make_model(), experts.ExpertCache()
    parameters = experts.expert_parameters(dict(model.named_parameters()), CONFIG)
    first = cache.get(parameters, Choices())
    assert cache.get(parameters, Choices()) is first
    assert cache.quantizations == 1
    with torch.no_grad():
        parameters[4].mul_(2)
    doubled = cache.get(parameters, Choices()).gate_up[1, CONFIG.moe_intermediate_size :]
    assert cache.quantizations == 2
    assert torch.equal(doubled, experts.fake_quantize(parameters[4].detach(), "mxfp4"))
    cache.get([p.detach().clone() for p in parameters], Choices())  # other tensors, perhaps at the same address
    assert cache.quantizations == 3


def test_a_cache_made_anew_before_the_backward_is_refused():
    model, cache, (step,) = make_model(), experts.ExpertCache(), expert_inputs(torch.float64, steps=1)
    params = dict(model.named_parameters())
    output = experts.Experts(params, CONFIG, Choices(), cache).combine(*step)
    with torch.no_grad():
        params["block_sparse_moe.experts.0.w1.weight"].add_(1)
    cache.get(experts.expert_parameters(params, CONFIG), Choices())
    with pytest.raises(RuntimeError, match="the experts' weights changed between"):
        output.sum().backward()


def test_gradient_memory_is_reused_only_where_nothing_holds_it():
    model, batch = make_model(dtype=torch.float32), make_batch(torch.float32)
    params, cache = dict(model.named_parameters()), experts.ExpertCache(reuse_gradients=True)
    name = "block_sparse_moe.experts.0.w1.weight"
    _, expected = run(model, batch, "fused")

    def backward():
        fused.unroll(params, batch, CONFIG, Choices(), cache=cache)["total_loss"].backward()

    model.zero_grad()
    backward()
    place = params[name].grad.data_ptr()
    backward()
    torch.testing.assert_close(params[name].grad, 2 * expected[name])  # accumulated, not overwritten
    model.zero_grad()
    backward()
    assert params[name].grad.data_ptr() == place
    assert torch.equal(params[name].grad, expected[name])


def test_quantising_reads_the_config_of_the_choices():
    """Small sizes run too, several MX blocks a row."""
    config = DraftConfig.small()
    model = DraftModel.from_config(config, Choices(mx_scale_rule="even"))
    parameters = experts.expert_parameters(dict(model.named_parameters()), config)
    quantized = experts.ExpertCache().get(parameters, model.choices)
    assert torch.equal(quantized.down[7], experts.fake_quantize(parameters[23].detach(), "mxfp4", "even"))
