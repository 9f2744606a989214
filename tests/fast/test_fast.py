"""What only ``fast`` has: its module, its optimizer step, its storage types. The suite checks the mathematics."""

import json
from pathlib import Path

import pytest
import torch
from batches import CONFIG, LAYOUTS, make_batch, make_model

from draftconf.fast import loss, moe, mx, sampling, unroll
from draftconf.fast.model import PREFIX, DraftModel
from draftconf.fast.train import make_optimizer, train_step
from draftconf.reference.config import Choices, frozen_parameters, parameter_shapes, trained_parameters

BLOCKS = json.loads((Path(__file__).parents[1] / "data" / "mx_blocks.json").read_text(encoding="utf-8"))["blocks"]
BITS = [[int(bits, 16) for bits in block["bits"]] for block in BLOCKS]


def gradients(model, batch, **kwargs):
    model.zero_grad()
    result = model.unroll(batch, **kwargs)
    result["total_loss"].backward()
    return result, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("choices", LAYOUTS, ids=lambda c: c.draft_input)
def test_state_dict_has_the_checkpoint_names(choices):
    model = DraftModel.from_config(CONFIG, choices)
    assert {name: tuple(x.shape) for name, x in model.state_dict().items()} == parameter_shapes(CONFIG, choices)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == frozen_parameters(choices) & set(parameter_shapes(CONFIG, choices))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_initial_fusion_is_the_high_feature(dtype):
    model, batch = DraftModel.from_config(CONFIG, dtype=dtype), make_batch(dtype)
    seen = {}
    model.unroll(batch, record=lambda name, x: seen.setdefault(name, x))
    real = batch["documents"] != -1
    assert torch.equal(seen["1/fusion"][real], batch["high"][real])


def test_packed_checkpoint_is_read():
    model = make_model(dtype=torch.float32)
    state = {PREFIX + name: x for name, x in model.state_dict().items()}
    name = "block_sparse_moe.experts.3.w2.weight"
    scales, codes = mx.quantize(state.pop(PREFIX + name), "mxfp4")
    state |= {PREFIX + name + "_packed": mx.pack(codes), PREFIX + name + "_scale": scales}
    state["self_attention_res_norm.weight"] = torch.ones(CONFIG.hidden_size)
    loaded = DraftModel(CONFIG, Choices())
    loaded.load_checkpoint(state)
    expected = mx.dequantize(scales, codes, "mxfp4")
    assert torch.equal(loaded.state_dict()[name], expected)
    assert torch.equal(mx.fake_quantize(expected, "mxfp4"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choices", LAYOUTS, ids=lambda c: c.draft_input)
def test_training_leaves_frozen_parameters_bitwise_unchanged(choices, dtype):
    model, batch = make_model(choices, dtype), make_batch(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.1)
    losses = [train_step(model, optimizer, batch).item() for _ in range(4)]
    assert losses[-1] < losses[0]
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed <= set(trained_parameters(CONFIG, choices))
    assert {"fc.weight", "shared_head.norm.weight"} <= changed


def test_an_expert_without_tokens_has_a_zero_gradient():
    model, batch = make_model(), make_batch()
    with torch.no_grad():
        model.block_sparse_moe.gate.e_score_correction_bias[2] = -100.0
    _, grads = gradients(model, batch)
    assert all(torch.count_nonzero(grads[f"block_sparse_moe.experts.2.{w}.weight"]) == 0 for w in ("w1", "w2", "w3"))
    assert set(grads) == set(trained_parameters(CONFIG, Choices()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", mx.RULES)
def test_mx_blocks_byte_for_byte(rule, dtype):
    x = torch.tensor(BITS, dtype=torch.uint32).view(torch.float32).to(dtype)
    for case_name, format, width in (("mxfp4", "mxfp4", 1), ("mxfp8", "mxfp8_e4m3", 2)):
        scales, codes = mx.quantize(x, format, rule)
        for i, block in enumerate(BLOCKS):
            expected = block[case_name][rule.upper()]
            assert scales[i].item() == expected["scale"], block["id"]
            if expected["codes"] is not None:
                text = "".join(f"{code:0{width}x}" for code in codes[i].tolist())
                assert text == expected["codes"], block["id"]


def test_mx_grid_is_that_of_torch_float8():
    for format, dtype in (("mxfp8_e4m3", torch.float8_e4m3fn), ("mxfp8_e5m2", torch.float8_e5m2)):
        expected = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        torch.testing.assert_close(mx.grid(mx.FORMATS[format]), expected, rtol=0, atol=0, equal_nan=True)


def test_clipped_gradient_is_zero_beyond_the_largest_magnitude():
    x = torch.zeros(32, dtype=torch.float64)
    x[:4] = torch.tensor([7.0, 6.0, -6.5, 1.0])  # scale 1, largest 6
    x.requires_grad_(True)
    mx.fake_quantize(x, "mxfp4", ste="clipped").sum().backward()
    assert x.grad[:4].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lk_gradient_is_exactly_zero_where_p_is_q(dtype):
    torch.manual_seed(0)
    logits = (5 * torch.randn(64, 1009, dtype=dtype)).requires_grad_(True)
    losses = loss.lk_loss(logits, logits)
    losses.sum().backward()
    assert torch.count_nonzero(logits.grad) == 0
    assert losses.abs().max() < 1000 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("gap", "expected"), [(200, 193.0922447), (800, 793.0922447)])
def test_lk_loss_of_far_one_hots(gap, expected, dtype):
    target, draft = torch.zeros(2, 1000, dtype=dtype)
    target[0] = draft[1] = gap
    value = loss.lk_loss(draft.requires_grad_(True), target)
    value.backward()
    assert value.item() == pytest.approx(expected, rel=1e-7)
    assert draft.grad[1].item() == pytest.approx(1e-3, rel=1e-3)
    assert torch.isfinite(draft.grad).all()


def test_lk_gradient_by_finite_differences():
    torch.manual_seed(0)
    draft, target = torch.randn(4, 11, dtype=torch.float64), 2 * torch.randn(4, 17, dtype=torch.float64)
    subset = torch.arange(0, 17, 2)[:9]
    draft = draft.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda q: loss.lk_loss(q, target[:, :11]), draft)
    for reading in ("restricted", "renormalized"):
        assert torch.autograd.gradcheck(lambda q, r=reading: loss.lk_loss(q[:, :9], target, subset, r), draft)


@pytest.mark.parametrize("choices", LAYOUTS, ids=lambda c: c.draft_input)
def test_gradient_along_random_directions(choices, monkeypatch):
    """With experts pinned and quantisation off the step is smooth but for the loss's kinks."""
    monkeypatch.setattr(moe, "fake_quantize", lambda x, *args: x)
    model, batch, forced = make_model(choices), make_batch(), {}
    _, grads = gradients(model, batch, record=lambda name, x: forced.setdefault(name, x))
    forced = {name: x for name, x in forced.items() if name.endswith("experts")}
    params, h = dict(model.named_parameters()), 1e-7
    torch.manual_seed(2)
    ahead = {name: torch.randn_like(g) for name, g in grads.items()}

    @torch.no_grad()
    def value(step):
        moved = {name: p + step * ahead[name] if name in ahead else p for name, p in params.items()}
        return unroll.unroll(moved, batch, CONFIG, choices, forced=forced)["total_loss"].item()

    expected = sum((ahead[name] * g).sum().item() for name, g in grads.items())
    assert (value(h) - value(-h)) / (2 * h) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("choices", [*LAYOUTS, Choices(token_source="own", recycled_feature="post_norm")], ids=str)
def test_unroll_is_drafting_at_every_anchor(choices):
    model, batch, seen = make_model(choices), make_batch(documents=False), {}
    with torch.no_grad():
        model.unroll(batch, record=lambda name, x: seen.setdefault(name, x))
    tokens, num_steps = batch["tokens"], CONFIG.num_steps
    for anchor in range(tokens.shape[1]):
        prefix = {name: batch[name][0, : anchor + 1] for name in ("tokens", "low", "mid", "high")}
        given = torch.nn.functional.pad(tokens[0, anchor + 1 :], (0, num_steps))[: num_steps - 1]
        drafted = model.draft(prefix if choices.token_source == "own" else {**prefix, "given": given})
        for k in range(num_steps):
            torch.testing.assert_close(drafted["logits"][k], seen[f"{k + 1}/logits"][0, anchor], rtol=0, atol=1e-12)


@pytest.mark.parametrize("choices", LAYOUTS, ids=lambda c: c.draft_input)
def test_padding_does_not_matter_and_packing_is_separate_runs(choices):
    model, batch = make_model(choices), make_batch()
    result, grads = gradients(model, batch)
    poisoned = {name: x.clone() for name, x in batch.items()}
    padding = batch["documents"] == -1
    for name in ("low", "mid", "high", "target_logits"):
        poisoned[name][padding] = torch.nan
    poisoned["tokens"][padding], poisoned["mask"][padding] = -7, True
    again, again_grads = gradients(model, poisoned)
    assert torch.equal(again["total_loss"], result["total_loss"])
    assert all(torch.equal(grads[name], again_grads[name]) for name in grads)

    counts, total, summed = result["supervised"].sum((1, 2)), 0, dict.fromkeys(grads, 0)
    for row, slots in ((0, slice(0, 5)), (0, slice(5, 9)), (1, slice(1, 7))):
        part, part_grads = gradients(model, {name: x[row, slots][None] for name, x in batch.items()}, counts=counts)
        total = total + part["total_loss"]
        summed = {name: summed[name] + part_grads[name] for name in grads}
    torch.testing.assert_close(total, result["total_loss"], rtol=1e-13, atol=0)
    for name in grads:
        torch.testing.assert_close(summed[name], grads[name], rtol=1e-10, atol=1e-13)


def test_no_supervised_slot_gives_zero():
    model, batch = make_model(), make_batch()
    batch["mask"][:] = False
    result, grads = gradients(model, batch)
    assert result["total_loss"].item() == 0
    assert all(torch.count_nonzero(g) == 0 for g in grads.values())


def test_bad_inputs_are_refused_by_name_and_index():
    model, batch = make_model(), make_batch(documents=False)
    batch["mid"][1, 2, 3] = torch.inf
    with pytest.raises(ValueError, match=r"mid\[1, 2, 3\] is inf"):
        model.unroll(batch)
    batch["tokens"][0, 4] = CONFIG.vocab_size
    with pytest.raises(ValueError, match=r"tokens\[0, 4\] is 97"):
        model.unroll(batch)


def test_align_worked_example():
    """The example of spec.md section 3."""
    n = torch.zeros(4, 1)
    raw = {"tokens": torch.arange(4), "mask": torch.tensor([False, False, True, True]), "low": n, "mid": n, "high": n}
    raw["target_logits"] = torch.arange(4.0)[:, None]
    position = unroll.align(raw, 3)
    assert position["supervised"].int().tolist() == [[0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert position["tokens"].tolist() == [1, 2, 3, 0]
    assert position["target_logits"][:, 0].tolist() == [1, 2, 3, 0]
    token = unroll.align(raw, 3, "token")
    assert token["supervised"].int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("choices", LAYOUTS, ids=lambda c: c.draft_input)
def test_storage_types_take_the_same_path(choices):
    """With the float64 run's experts, float32 and bfloat16 land near it, and keep what is to be kept wide."""
    exact, forced = {}, {}
    batch = make_batch()
    reference_loss = make_model(choices).unroll(batch, record=lambda name, x: exact.setdefault(name, x))["total_loss"]
    forced = {name: x for name, x in exact.items() if name.endswith("experts")}
    for dtype, rel in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        seen = {}
        result, grads = gradients(
            make_model(choices, dtype), make_batch(dtype), forced=forced, record=lambda n, x, s=seen: s.setdefault(n, x)
        )
        assert result["total_loss"].item() == pytest.approx(reference_loss.item(), rel=rel)
        wide = {name.split("/")[1] for name, x in seen.items() if x.dtype == torch.float32}
        if dtype == torch.bfloat16:
            assert wide <= {"attention", "router_scores", "route", "logits", "lk_loss"}
        assert {g.dtype for g in grads.values()} == {dtype}
        assert seen.keys() == exact.keys()


def test_speculative_sampling_keeps_the_law():
    p = torch.tensor([0.1, 0.2, 0.7, 0.0], dtype=torch.float64)
    q = torch.tensor([0.5, 0.25, 0.0, 0.25], dtype=torch.float64)
    torch.manual_seed(0)
    draws = torch.rand(4000, 3, dtype=torch.float64)
    results = [sampling.speculative_sample(p, q, draw) for draw in draws]
    share = torch.bincount(torch.stack([token for token, _, _ in results]), minlength=4) / len(results)
    assert (share - p).abs().max() < 5 * (0.25 / len(results)) ** 0.5
    assert share[3] == 0
    assert results[0][2].tolist() == [0, 0, 1, 0]
    assert torch.equal(sampling.speculative_sample(p, p, draws[0])[2], p)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choices", LAYOUTS, ids=lambda c: c.draft_input)
def test_cuda_agrees_with_cpu(choices, dtype):
    seen = {}
    here, grads = gradients(
        make_model(choices, dtype), make_batch(dtype), record=lambda name, x: seen.setdefault(name, x)
    )
    forced = {name: x.cuda() for name, x in seen.items() if name.endswith("experts")}
    there, cuda_grads = gradients(make_model(choices, dtype, "cuda"), make_batch(dtype, "cuda"), forced=forced)
    rel = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype]
    assert there["total_loss"].item() == pytest.approx(here["total_loss"].item(), rel=rel)
    assert cuda_grads.keys() == grads.keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rule", mx.RULES)
def test_cuda_quantizes_to_the_same_bytes(rule):
    x = torch.tensor(BITS, dtype=torch.uint32).view(torch.float32)
    for format in mx.FORMATS:
        for here, there in zip(mx.quantize(x, format, rule), mx.quantize(x.cuda(), format, rule), strict=True):
            assert torch.equal(here, there.cpu())
