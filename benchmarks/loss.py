"""The LK loss with its gradient, alone and with the head, beside copies, bare products and the peers."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.report import Case, MemoryTarget, Target
from benchmarks.side_by_side import interleaved, kept_for_backward, peak_extra
from draftconf.fast import loss
from draftconf.fast.linear_loss import CHUNK_ROWS, chunks, linear_lk_loss

VOCABULARY, WIDTH, STEPS = 163840, 7168, 7
F32, BF16 = torch.float32, torch.bfloat16
NAMES = {F32: "float32", BF16: "bfloat16"}
MEGABYTE = 1_000_000
ONE = f"One step with the head, 256 x {WIDTH} x {VOCABULARY}, bfloat16, target's logits given"
SEVEN = f"Seven steps with the head, 64 positions, hidden {WIDTH}, bfloat16, target from its states"


def logits(slots: int, dtype: torch.dtype):
    """Draft and target logits of a draft that is right two times in three."""
    target = torch.randn(slots, VOCABULARY).mul_(3)
    draft = torch.randn(slots, VOCABULARY).mul_(0.9).add_(target)
    return draft.to(dtype), target.to(dtype)


def peers() -> dict:
    """Each peer as function(draft logits that require a gradient, target logits or probabilities) -> scalar loss."""
    found = {}
    try:
        from speculators.losses.eager import neg_log_acceptance_loss

        found["speculators"] = lambda z, y, p: neg_log_acceptance_loss(z[None], y[None]).mean()
    except ImportError:
        pass
    try:
        specforge = _specforge_losses()
        found["specforge"] = lambda z, y, p: (
            -specforge.compute_acceptance_rate(
                logits=z, target_probs=p, position_mask=torch.ones(len(z), 1, dtype=torch.bool)
            )[1]
        )
    except ImportError:
        pass
    try:
        from nemo_automodel.components.speculative.eagle import core

        trainer = SimpleNamespace(lk_loss_type="alpha", cp_group=None)
        step_loss = core.Eagle3TrainerModule._lk_step_loss
        found["nemo_automodel"] = lambda z, y, p: step_loss(trainer, z[None], p[None], torch.ones(1, len(z), 1).bool())
    except ImportError:
        pass
    return found


def _specforge_losses():
    """Its module of losses by itself: the package's own import needs Triton, the losses do not."""
    package = importlib.util.find_spec("specforge")
    if package is None:
        raise ImportError("specforge")
    path = Path(package.submodule_search_locations[0]) / "core" / "lk_loss.py"
    spec = importlib.util.spec_from_file_location("specforge_lk_loss", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def alone(slots: int, dtype: torch.dtype, runs: int, warm: bool = False) -> Case:
    z, y = logits(slots, dtype)
    weight, out, buffer = torch.full((slots,), 1 / slots), torch.zeros_like(z), torch.zeros_like(z)
    normaliser = loss.log_normaliser(y)
    leaf = z.detach().clone().requires_grad_(True)

    def fast(**known):
        loss.lk_loss_with_gradient(z, y, weight, out=out, **known)

    def peer(function, p):
        leaf.grad = None
        function(leaf, y, p).backward()

    functions = {
        "copy of the logits": lambda: buffer.copy_(z),
        "fast": lambda: fast(target_normaliser=normaliser),
        "fast, target's normaliser too": fast,
    }
    if slots <= 256:  # many small operations, each waited for: on a busy machine that takes forever
        functions["fast, eager"] = lambda: fast(target_normaliser=normaliser, backend="eager")
    others = peers()
    p = y.float().softmax(-1) if others else None
    functions |= {name: lambda f=function: peer(f, p) for name, function in others.items()}
    extra = {name: peak_extra(function) for name, function in functions.items()}  # and warm-up
    times = interleaved(functions, runs)
    kept = {"fast": 0, "fast, lk_loss under autograd": retained(lambda leaf: loss.lk_loss(leaf, y), leaf, y)}
    kept |= {name: retained(lambda leaf, f=f: f(leaf, y, p), leaf, y, p) for name, f in others.items()}
    targets = [Target("fast", "copy of the logits", 5 if dtype == F32 else 8)]
    if others and not warm:
        best = min(others, key=lambda name: sorted(times[name])[runs // 2])
        targets.append(Target(best, "fast", 8, at_least=True))
    return Case(
        f"LK loss and gradient, {slots} x {VOCABULARY}, {NAMES[dtype]}", "copy of the logits", times, extra, kept,
        targets,
        [MemoryTarget("fast", MEGABYTE)],
        "Peers: loss and backward as shipped; nemo_automodel and specforge are given the target's probabilities.",
    )  # fmt: skip


def retained(function, leaf, *own) -> int:
    """Bytes that autograd keeps, the given tensors left out."""
    with kept_for_backward([leaf, *(x for x in own if x is not None)]) as sizes:
        function(leaf)
    return sum(sizes)


def products(hidden, target, head, weights, target_head, dtype, chunk_rows=CHUNK_ROWS):
    """The bare products of ``linear_lk_loss``, in its chunks, with nothing around them."""
    parts = list(chunks(weights, True, chunk_rows, target_head is not None))
    most, like = max(len(part.step) for part in parts), {"dtype": dtype, "device": head.device}
    z, y, d = (torch.empty(most, columns, **like) for columns in (len(head), len(head), head.shape[1]))
    h = hidden.flatten(0, 1)

    def run():
        for part in parts:
            rows = len(part.step)
            torch.mm(h[:rows], head.t(), out=z[:rows])
            if target_head is not None:
                torch.mm(target[: len(part.positions)], target_head.t(), out=y[: len(part.positions)])
            torch.mm(z[:rows], head, out=d[:rows])

    return run


def with_head(steps: int, slots: int, width: int, states: bool, runs: int, title: str) -> Case:
    """``states``: the target's logits are made from its hidden states, once a position."""
    hidden = torch.randn(steps, slots, width).to(BF16)
    head = torch.empty(VOCABULARY, width, dtype=BF16).normal_(std=width**-0.5)
    weights = torch.full((steps, slots), 1 / slots)
    for k in range(steps):
        weights[k, slots - k :] = 0
    target = torch.randn(slots, width).to(BF16) if states else logits(slots, BF16)[1]
    target_head = head if states else None
    arguments = hidden, target, head, weights
    functions = {
        "products": products(*arguments, target_head, BF16),
        "fast": lambda: linear_lk_loss(*arguments, target_head=target_head, logits="bfloat16"),
    }
    results = hidden.nbytes + weights.nbytes
    extra = {"fast": peak_extra(functions["fast"]) - results}
    times = interleaved(functions, runs)
    return Case(
        title, "products", times, extra, targets=[Target("fast", "products", 1.05)],
        note="Extra memory is that beyond the results. The products are those that it makes, in the same chunks.",
    )  # fmt: skip


def memory(positions: list[int], width: int = 64) -> Case:
    """Peak extra memory of seven steps from 128 to 2048 positions; one run each."""
    head = torch.randn(VOCABULARY, width).to(BF16)
    times, extra = {}, {}
    limit = int(1.2 * 4 * 128 * VOCABULARY)
    for slots in positions:
        hidden, target = torch.randn(STEPS, slots, width).to(BF16), torch.randn(slots, width).to(BF16)
        weights = torch.full((STEPS, slots), 1 / slots)
        for k in range(STEPS):
            weights[k, slots - k :] = 0
        settings = {"target_head": head, "logits": "bfloat16"}
        name = f"T = {slots}"
        call = lambda a=(hidden, target, head, weights), s=settings: linear_lk_loss(*a, **s)  # noqa: E731
        extra[name] = peak_extra(call) - hidden.nbytes - weights.nbytes
        times[name] = interleaved({name: call}, 1)[name]
    return Case(
        f"Seven steps with the head, hidden {width}: memory over the positions", f"T = {positions[0]}", times, extra,
        memory_targets=[MemoryTarget(f"T = {slots}", limit) for slots in positions],
        note="The limit is 1.2 float32 matrices of 128 x 163840.",
    )  # fmt: skip


def measure(runs: int) -> Iterator[Case]:
    yield from (alone(slots, dtype, runs) for slots in (64, 256, 1024) for dtype in (F32, BF16))
    yield with_head(1, 256, WIDTH, False, runs, ONE)
    yield with_head(STEPS, 64, WIDTH, True, runs, SEVEN)
    yield memory([128, 512, 2048])


def measure_short(runs: int) -> Iterator[Case]:
    """What shows how much of a peer's time is page faults: one size, for a heap that keeps its pages."""
    yield from (alone(256, dtype, runs, warm=True) for dtype in (F32, BF16))
