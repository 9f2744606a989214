"""The step as a CUDA graph: what a capture needs, on any machine; the capture itself, on a CUDA device."""

import pytest
import torch
from batches import CONFIG, make_batch, make_model
from torch.utils._python_dispatch import TorchDispatchMode

from draftconf.fast import backend
from draftconf.fast.captured import CapturedStep, copy_into
from draftconf.fast.unroll import sanitize, unroll, unroll_checked
from draftconf.reference.config import ALTERNATIVES, Choices

#: Operations that hand a number to the host, or whose result has a size that depends on the data.
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "bincount",
    "equal",
    "is_nonzero",
)
NOT_OF_EAGLE3 = {"draft_input", "head", "reduced_target", "reduced_supervision", "draft_layer", "draft_attn_res",
                 "router_bias", "feature_tap", "token_source"}  # fmt: skip
VARIANTS = [{}] + [{f: v} for f, values in ALTERNATIVES.items() for v in values[1:] if f not in NOT_OF_EAGLE3]


class Waiting(TorchDispatchMode):
    """Collects what must not be in a capture."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in WAITING or by_mask:
            self.found.add(name)
        return function(*args, **(kwargs or {}))


def waiting(choices: Choices, documents: bool = True, checked: bool = True) -> set:
    model, batch = make_model(choices, torch.float32), make_batch(torch.float32, documents=documents)
    if choices.token_source == "given":
        batch["tokens_by_step"] = torch.arange(7 * 18).reshape(7, 2, 9) % 97
    run, inputs = (unroll_checked, sanitize(batch)) if checked else (unroll, batch)
    with Waiting() as mode, backend.using("eager"), pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "numpy"):  # which are no operations
            original = getattr(torch.Tensor, name)
            patch.setattr(torch.Tensor, name, lambda x, n=name, o=original: mode.found.add(n) or o(x))
        run(dict(model.named_parameters()), inputs, CONFIG, choices)["total_loss"].backward()
    return mode.found


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_nothing_in_layout_eagle3_waits_for_the_device(change):
    assert waiting(Choices(draft_input="eagle3", **change)) == set()


@pytest.mark.parametrize("source", ["own", "given"])
def test_nor_where_the_tokens_are_the_drafts_own_or_given(source):
    assert waiting(Choices(draft_input="eagle3", token_source=source), documents=source == "own") == set()


def test_the_search_finds_what_does_wait():
    assert waiting(Choices(draft_input="mtp")) == {"tolist"}
    assert waiting(Choices(draft_input="eagle3"), checked=False) == {"_local_scalar_dense"}


def test_layout_mtp_and_parameters_on_the_cpu_are_refused():
    batch = make_batch(torch.float32, documents=False)
    with pytest.raises(ValueError, match="draft_input is 'mtp'; wanted 'eagle3'"):
        CapturedStep(make_model(Choices(draft_input="mtp"), torch.float32), batch)
    with pytest.raises(ValueError, match="parameters are on cpu; a CUDA graph needs them on a CUDA device"):
        CapturedStep(make_model(Choices(draft_input="eagle3"), torch.float32), batch)


def test_another_shape_type_or_name_is_refused_before_anything_is_copied():
    inputs = {"mask": torch.zeros(2, 3, dtype=torch.bool), "tokens": torch.zeros(2, 3, dtype=torch.long)}
    fresh = {"mask": torch.ones(2, 3, dtype=torch.bool), "tokens": torch.ones(2, 3, dtype=torch.long)}
    for change, message in (
        (
            {"tokens": torch.ones(2, 4, dtype=torch.long)},
            r"tokens is torch.int64 of shape \(2, 4\); wanted torch.int64",
        ),
        ({"tokens": torch.ones(2, 3, dtype=torch.int32)}, "tokens is torch.int32"),
        ({"documents": torch.zeros(2, 3)}, "the batch has documents, mask, tokens; wanted mask, tokens, as captured"),
    ):
        with pytest.raises(ValueError, match=message):
            copy_into(inputs, fresh | change)
        assert not inputs["mask"].any()
    copy_into(inputs, fresh)
    assert inputs["mask"].all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replay_gives_what_a_plain_run_gives():
    choices = Choices(draft_input="eagle3")
    model = make_model(choices, torch.float32).cuda()
    first = {name: x.cuda() for name, x in make_batch(torch.float32).items()}
    second = {name: x.flip(0) for name, x in first.items()} | {"low": 2 * first["low"]}
    step = CapturedStep(model, first)
    loss = step(second)["total_loss"].clone()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plain = model.unroll(second)["total_loss"]
    plain.backward()
    torch.testing.assert_close(loss, plain.detach())
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6)
