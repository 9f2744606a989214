"""The fast LK loss in every backend, and the loss with the head, against the oracle; what memory they take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import peak_allocated

from draftconf.fast import backend, linear_loss, loss
from draftconf.fast.kernels import build
from draftconf.reference import loss as oracle

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
NO_COMPILER = build.problem()
native = pytest.param("native", marks=pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER[:200]))
every_backend = pytest.mark.parametrize("name", ["eager", native])
every_type = pytest.mark.parametrize(("draft", "target"), [(F32, F32), (BF16, BF16), (BF16, F32)], ids=str)


def logits(rows: int, size: int, seed: int = 0, scale: float = 3.0, noise: float = 1.0):
    """Draft and target logits, float64."""
    g = torch.Generator().manual_seed(seed)
    target = scale * torch.randn(rows, size, generator=g, dtype=F64)
    return target + noise * torch.randn(rows, size, generator=g, dtype=F64), target


def expected(draft, target, weight):
    """Losses [R] and gradient [R, V] of the oracle, float64."""
    draft, log_p = draft.double().numpy(), oracle.target_log_probs(target.double().numpy())
    value = oracle.lk_loss(draft, log_p)
    gradient = oracle.lk_loss_backward(draft, log_p, value, weight.double().numpy())
    return torch.from_numpy(value), torch.from_numpy(gradient)


def distance(actual, wanted) -> float:
    return ((actual.double() - wanted).norm() / wanted.norm()).item()


@every_backend
@every_type
@pytest.mark.parametrize("size", [1, 3, 16, 97, 5001, 70000])
def test_loss_and_gradient_are_the_oracles(name, draft, target, size):
    z, y = logits(5, size)
    z, y, weight = z.to(draft), y.to(target), torch.rand(5) + 0.1
    value, gradient = loss.lk_loss_with_gradient(z, y, weight, out=torch.empty(z.shape), backend=name)
    want, d_want = expected(z, y, weight)
    torch.testing.assert_close(value.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), d_want, rtol=1e-5, atol=1e-6 * d_want.abs().max().item())


@every_backend
@every_type
def test_rounding_of_the_gradient_is_that_of_its_buffer(name, draft, target):
    z, y = logits(4, 1003)
    z, y, weight = z.to(draft), y.to(target), torch.rand(4)
    _, wide = loss.lk_loss_with_gradient(z, y, weight, out=torch.empty(z.shape), backend=name)
    _, own = loss.lk_loss_with_gradient(z, y, weight, backend=name)
    assert own.dtype == draft
    assert torch.equal(own, wide.to(draft))


@every_backend
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("size", [7, 4096, 100003])
def test_equal_logits_give_a_gradient_of_exact_zeros(name, dtype, size):
    z, _ = logits(3, size, scale=8)
    value, gradient = loss.lk_loss_with_gradient(z.to(dtype), z.to(dtype), torch.ones(3), backend=name)
    assert torch.count_nonzero(gradient) == 0
    assert value.abs().max() < 1e-6


@every_backend
def test_the_gradient_may_replace_the_logits(name):
    z, y = (x.float() for x in logits(6, 2050))
    weight = torch.rand(6)
    value, gradient = loss.lk_loss_with_gradient(z, y, weight, backend=name)
    again, same = loss.lk_loss_with_gradient(z, y, weight, out=z, backend=name)
    assert same is z
    assert torch.equal(value, again)
    assert torch.equal(gradient, z)


@every_backend
def test_target_rows_and_a_known_normaliser_change_no_bit(name):
    z, _ = (x.float() for x in logits(9, 1001))
    _, y = (x.float() for x in logits(4, 1001, seed=1))
    rows, weight = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0, 0]), torch.rand(9)
    normaliser = loss.log_normaliser(y, name)
    plain = loss.lk_loss_with_gradient(z, y[rows], weight, backend=name)
    by_row = loss.lk_loss_with_gradient(z, y, weight, target_rows=rows, target_normaliser=normaliser, backend=name)
    assert all(torch.equal(a, b) for a, b in zip(plain, by_row, strict=True))


@every_backend
def test_shapes_strides_and_extra_axes(name):
    z, y = (x.float().view(2, 3, 130) for x in logits(6, 130))
    weight = torch.rand(2, 3)
    value, gradient = loss.lk_loss_with_gradient(z, y, weight, backend=name)
    assert value.shape == (2, 3)
    assert gradient.shape == z.shape
    wide = torch.empty(2, 3, 2, 130)  # rows that lie apart
    wide[..., 1, :] = z
    value_apart, gradient_apart = loss.lk_loss_with_gradient(wide[..., 1, :], y, weight, backend=name)
    assert torch.equal(value_apart, value)
    assert torch.equal(gradient_apart, gradient)
    columns = z.mT.contiguous().mT  # values that lie apart
    assert torch.equal(loss.lk_loss_with_gradient(columns, y, weight, backend=name)[1], gradient)
    with pytest.raises(ValueError, match="rows in memory"):
        loss.lk_loss_with_gradient(z, y, weight, out=columns, backend=name)
    with pytest.raises(ValueError, match="out has shape"):
        loss.lk_loss_with_gradient(z, y, weight, out=torch.empty(6, 130), backend=name)


@every_backend
def test_weight_zero_gives_zeros_and_a_nan_stays_in_its_row(name):
    z, y = (x.float() for x in logits(5, 333))
    z[1, 7] = y[2, 300] = torch.nan
    z[3] = torch.nan
    value, gradient = loss.lk_loss_with_gradient(z, y, torch.tensor([1.0, 1, 1, 0, 1]), backend=name)
    assert value.isnan().tolist() == [False, True, True, True, False]
    assert gradient.isnan().any(1).tolist() == [False, True, True, False, False]
    assert torch.count_nonzero(gradient[3]) == 0


@every_backend
def test_tokens_of_no_probability(name):
    z, y = logits(2, 100)
    z[:, 60:] = -torch.inf
    value, gradient = loss.lk_loss_with_gradient(z.float(), y.float(), torch.ones(2), backend=name)
    want, _ = expected(z[:, :60], y[:, :60], torch.ones(2))  # p keeps its mass elsewhere: compare with the identity
    left = torch.logsumexp(y[:, :60], 1) - torch.logsumexp(y, 1)
    log_p, log_q = y.log_softmax(1), z.log_softmax(1)
    exact = -torch.minimum(log_p, log_q).logsumexp(1)
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-6)
    assert (want < exact).all()
    assert (left < 0).all()
    assert torch.count_nonzero(gradient[:, 60:]) == 0
    assert gradient.isfinite().all()


@every_backend
@pytest.mark.parametrize("gap", [30.0, 90.0, 200.0, 800.0, 20000.0])
def test_acceptance_far_below_the_smallest_number(name, gap):
    """spec.md section 5: target [G, 0, 0, ..], draft [0, G, 0, ..]."""
    z, y = torch.zeros(2, 1, 1000, dtype=F64)
    y[0, 0] = z[0, 1] = gap
    value, gradient = loss.lk_loss_with_gradient(z.float(), y.float(), torch.ones(1), backend=name)
    want, d_want = expected(z, y, torch.ones(1))
    torch.testing.assert_close(value.double(), want, rtol=3e-7, atol=0)
    torch.testing.assert_close(gradient.double(), d_want, rtol=max(1e-5, gap * 1e-6), atol=1e-30)


@every_backend
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_autograd_gives_the_same(name, dtype):
    z, y = (x.to(dtype) for x in logits(4, 501))
    weight = torch.rand(4)
    value, gradient = loss.lk_loss_with_gradient(z, y, weight, backend=name)
    z.requires_grad_(True)
    losses = loss.lk_loss(z, y, backend=name)
    (losses * weight).sum().backward()
    assert torch.equal(losses, value)
    assert torch.equal(z.grad, gradient)


@pytest.mark.parametrize("reading", ["restricted", "renormalized"])
def test_backends_agree_on_a_reduced_vocabulary(reading):
    z, y = (x.float() for x in logits(4, 501))
    subset = torch.arange(0, 501, 5)
    grads = []
    for name in ("eager", "auto"):
        leaf = z[:, : len(subset)].clone().requires_grad_(True)
        losses = loss.lk_loss(leaf, y, subset, reading, backend=name)
        losses.sum().backward()
        grads.append((losses.detach(), leaf.grad))
    torch.testing.assert_close(*(g for _, g in grads), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(*(value for value, _ in grads), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's own, while tracing
def test_a_step_compiles_into_one_graph():
    z, y = (x.float() for x in logits(4, 501))
    z.requires_grad_(True)
    eager = loss.lk_loss(z, y)
    compiled = torch.compile(loss.lk_loss, fullgraph=True, backend="aot_eager")(z, y)
    assert torch.equal(eager, compiled)
    gradients = [torch.autograd.grad(x.sum(), z)[0] for x in (eager, compiled)]
    assert torch.equal(*gradients)


# -- backends ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_library():
    """``build.library`` and ``problem`` as in a fresh process."""
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def test_without_a_compiler_plain_pytorch_gives_the_result(monkeypatch, without_library):
    monkeypatch.setattr(build, "compiler", lambda: None)
    z, y = (x.float() for x in logits(4, 501))
    assert backend.choose(None, z, y) == "eager"
    value, gradient = loss.lk_loss_with_gradient(z, y, torch.ones(4))
    want, d_want = expected(z, y, torch.ones(4))
    assert distance(value, want) < 1e-6
    assert distance(gradient, d_want) < 1e-6
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        loss.lk_loss_with_gradient(z, y, torch.ones(4), backend="native")


def test_a_compiler_that_fails_is_none(monkeypatch, without_library, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\ntest $2 = -dM || { echo cannot vectorise >&2; exit 1; }\n")
    broken.chmod(0o755)
    monkeypatch.setattr(build, "compiler", lambda: str(broken))
    assert backend.choose("auto", torch.zeros(1)) == "eager"
    assert "cannot vectorise" in build.problem()


@pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER[:200])
def test_the_build_is_kept_and_needs_no_writable_home(monkeypatch, without_library, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.library() is not None
    kept = list(tmp_path.glob("draftconf/*"))
    assert [path.suffix for path in kept] == [".so"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept[0] / "no folder"))
    build.library.cache_clear()
    assert build.library() is not None


def test_backends_by_name():
    with pytest.raises(ValueError, match="wanted one of auto, native, triton, eager"):
        backend.choose("fast")
    with backend.using("eager"):
        assert backend.choose(None, torch.zeros(1)) == "eager"
        with pytest.raises(ValueError, match="backend is 'x'"), backend.using("x"):
            pass
    assert backend.choose("auto", torch.zeros(1, dtype=F64)) == "eager"


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "limit"), [pytest.param(*native.values, 1 << 20, marks=native.marks), ("eager", 33 << 20)]
)
def test_the_loss_takes_no_matrix_of_logits(name, limit):
    z, y = (torch.randn(64, 163840) for _ in range(2))
    weight, out = torch.ones(64), torch.empty(z.shape)
    assert z.nbytes > 40_000_000
    taken = peak_allocated(lambda: loss.lk_loss_with_gradient(z, y, weight, out=out, backend=name))
    assert taken < limit


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_memory_of_the_loss_with_the_head_does_not_grow_with_the_positions(dtype):
    steps, width, size, rows = 7, 64, 20000, 64
    head = torch.randn(size, width).to(dtype)
    taken = []
    for slots in (32, 64, 256):
        hidden, target = torch.randn(steps, slots, width).to(dtype), torch.randn(slots, width).to(dtype)
        weights = torch.ones(steps, slots) * (torch.arange(slots) < slots - steps)
        settings = {"target_head": head, "chunk_rows": rows, "logits": str(dtype).removeprefix("torch.")}
        results = hidden.nbytes + 4 * weights.numel()
        taken.append(
            peak_allocated(lambda a=(hidden, target, head, weights), s=settings: linear_loss.linear_lk_loss(*a, **s))
            - results
        )
    chunk = rows * size * dtype.itemsize
    assert taken[-1] < 1.2 * chunk + 300_000
    assert taken[-1] - taken[0] < 150 * 7 * 256  # indices of the supervised slots


# -- the loss with the head --------------------------------------------------------------------------------------------

STEPS, SLOTS, WIDTH, SIZE = 3, 11, 8, 50


def problem(dtype, target_states: bool, seed: int = 0):
    """hidden, target, head, weights, and the target's head or None; some slots unsupervised, none past the end."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=F64).to(dtype)

    hidden, head = random(STEPS, SLOTS, WIDTH), random(SIZE, WIDTH)
    weights = torch.rand(STEPS, SLOTS, generator=g) * (torch.rand(STEPS, SLOTS, generator=g) > 0.4)
    for k in range(STEPS):
        weights[k, SLOTS - k :] = 0
    target_head = random(SIZE, 6) if target_states else None
    return hidden, random(SLOTS, 6 if target_states else SIZE), head, weights, target_head


def unfused(hidden, target, head, weights, target_head, shifted=True, subset=None):
    """Losses and the gradients on the hidden states and the head, by autograd in float64."""
    hidden, head, target = (x.detach().double().requires_grad_(True) for x in (hidden, head, target))
    target = target if target_head is None else target @ target_head.double().T
    losses, total = torch.zeros(weights.shape, dtype=F64), 0
    for k, row in enumerate(weights):
        moved = k if shifted else 0
        slots = row.nonzero()[:, 0]
        losses[k, slots] = loss.lk_loss(hidden[k, slots] @ head.T, target.detach()[slots + moved], subset)
        total = total + (losses[k] * row).sum()
    return losses.detach(), *torch.autograd.grad(total, (hidden, head))


@pytest.mark.parametrize("rows", [1, 4, 7, 256])
@pytest.mark.parametrize("states", [False, True], ids=["target logits", "target states"])
@pytest.mark.parametrize(
    ("dtype", "chunk", "bound"), [(F64, "float32", 1e-14), (F32, "float32", 3e-6), (BF16, "float32", 3e-3)], ids=str
)
def test_the_head_and_the_loss_together(dtype, chunk, bound, states, rows):
    hidden, target, head, weights, target_head = problem(dtype, states)
    d_head = torch.zeros(head.shape, dtype=F64 if dtype == F64 else F32)
    losses, d_hidden = linear_loss.linear_lk_loss(
        hidden, target, head, weights, target_head=target_head, logits=chunk, d_head=d_head, chunk_rows=rows
    )
    want, d_hidden_want, d_head_want = unfused(hidden, target, head, weights, target_head)
    assert (losses == 0).equal(weights == 0)
    assert distance(losses, want) < min(bound, 3e-6)
    assert distance(d_hidden, d_hidden_want) < bound  # bfloat16: rounded when stored
    assert distance(d_head, d_head_want) < min(bound, 3e-6)


def test_bfloat16_logits_are_a_choice_that_costs():
    """The product is rounded: the loss moves little, the gradient much more."""
    hidden, target, head, weights, _ = problem(BF16, False)
    want, d_want, _ = unfused(hidden, target, head, weights, None)
    losses, d_hidden = linear_loss.linear_lk_loss(hidden, target, head, weights, logits="bfloat16")
    wide = linear_loss.linear_lk_loss(hidden, target, head, weights)
    assert 1e-5 < distance(losses, want) < 1e-2
    assert distance(d_hidden, d_want) > 2 * distance(wide[1], d_want)


def test_own_target_and_a_reduced_vocabulary():
    hidden, target, head, weights, _ = problem(F64, False)
    subset = torch.arange(0, SIZE, 2)
    settings = {"target_shift": False, "draft_to_target": subset, "reduced_target": "restricted"}
    losses, d_hidden = linear_loss.linear_lk_loss(hidden, target, head[: len(subset)], weights, **settings)
    want, d_want, _ = unfused(hidden, target, head[: len(subset)], weights, None, shifted=False, subset=subset)
    assert distance(losses, want) < 1e-14
    assert distance(d_hidden, d_want) < 1e-14


def test_what_no_supervised_slot_needs_is_not_read():
    hidden, target, head, weights, _ = problem(F32, False)
    weights[:, 4:8] = 0
    clean = linear_loss.linear_lk_loss(hidden, target, head, weights)
    step, slot = weights.nonzero(as_tuple=True)
    unread = torch.ones(SLOTS, dtype=torch.bool)
    unread[slot + step] = False
    hidden[weights == 0], target[unread] = torch.nan, torch.nan
    assert unread.any()
    assert all(map(torch.equal, clean, linear_loss.linear_lk_loss(hidden, target, head, weights)))
    losses, d_hidden = linear_loss.linear_lk_loss(hidden, target, head, 0 * weights)
    assert torch.count_nonzero(losses) == torch.count_nonzero(d_hidden) == 0


@settings(max_examples=200, deadline=None)
@given(
    weights=st.integers(1, 5).flatmap(
        lambda k: st.integers(1, 9).flatmap(
            lambda t: st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=k, max_size=k)
        )
    ),
    rows=st.integers(1, 12),
    counts_target=st.booleans(),
)
def test_chunks_hold_every_slot_once_and_every_target_position_once(weights, rows, counts_target):
    weights = torch.tensor(weights, dtype=F32)
    steps, slots = weights.shape
    for k in range(steps):
        weights[k, max(0, slots - k) :] = 0
    parts = list(linear_loss.chunks(weights, True, rows, counts_target))
    seen = [(k, t) for part in parts for k, t in zip(part.step.tolist(), part.slot.tolist(), strict=True)]
    assert sorted(seen) == list(map(tuple, weights.nonzero().tolist()))
    positions = [u for part in parts for u in part.positions.tolist()]
    assert positions == sorted({k + t for k, t in seen})
    for part in parts:
        assert part.positions[part.target].tolist() == (part.slot + part.step).tolist()
        size = len(part.step) + (len(part.positions) if counts_target else 0)
        assert size <= rows or len(part.positions) == 1


def test_total_and_its_gradients():
    hidden, target, head, weights, _ = problem(F64, False)
    hidden.requires_grad_(True)
    head.requires_grad_(True)
    total, losses = linear_loss.linear_lk_total(hidden, target, head, weights)
    (3 * total).backward()
    want, d_hidden, d_head = unfused(hidden, target, head, weights, None)
    assert total.item() == pytest.approx((want * weights).sum().item(), rel=1e-14)
    assert not losses.requires_grad
    assert distance(hidden.grad, 3 * d_hidden) < 1e-14
    assert distance(head.grad, 3 * d_head) < 1e-14
    frozen = head.detach()
    total, _ = linear_loss.linear_lk_total(hidden, target, frozen, weights)
    total.backward()
    assert frozen.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.ones(STEPS, SLOTS)}, r"weights\[2, 10\] is not zero"),
        ({"weights": torch.ones(SLOTS)}, r"weights has shape \(11,\); wanted \(3, 11\)"),
        ({"target": torch.zeros(SLOTS - 1, SIZE)}, "target has shape"),
        ({"head": torch.zeros(SIZE, WIDTH + 1)}, "head has shape"),
        ({"target_head": torch.zeros(SIZE, 5)}, "target has shape"),
        ({"logits": "float16"}, "logits is 'float16'; wanted one of float32, bfloat16"),
        ({"logits": "bfloat16"}, "wanted both bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    hidden, target, head, weights, _ = problem(F32, False)
    arguments = {"hidden": hidden, "target": target, "head": head, "weights": weights} | change
    with pytest.raises(ValueError, match=message):
        linear_loss.linear_lk_loss(**arguments)


def test_products_of_wide_and_narrow_factors(monkeypatch):
    monkeypatch.setattr(linear_loss, "WIDENED", 20)  # several parts
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(11, 8).bfloat16()
    out = linear_loss.times_transposed(x, weight, torch.empty(3, 11))
    torch.testing.assert_close(out, x.float() @ weight.float().T)
    y = torch.randn(3, 11)
    torch.testing.assert_close(linear_loss.times(y, weight, torch.empty(3, 8)), y @ weight.float())
    d = torch.ones(11, 8)
    linear_loss.add_outer(d, y, x)
    torch.testing.assert_close(d, 1 + y.T @ x.float())
