"""The same on CUDA, in one call of a few minutes: section CUDA of the page. No GPU: nothing is written.

    python -m benchmarks.gpu [--runs 7]

Wanted beside torch with CUDA: triton; for the rows of peers speculators, torchao and liger-kernel where they are there.
"""

import argparse

import torch

from benchmarks import mx, report
from benchmarks.loss import NAMES, STEPS, VOCABULARY, WIDTH, products
from benchmarks.report import Case
from benchmarks.side_by_side import interleaved
from draftconf.fast import loss
from draftconf.fast.linear_loss import linear_lk_loss

F32, BF16 = torch.float32, torch.bfloat16


def synchronised(function):
    def run():
        function()
        torch.cuda.synchronize()

    return run


def peak(function) -> int:
    """Most bytes beyond those at the start, by the caching allocator's count."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured(title: str, bound: str, functions: dict, runs: int, note: str = "") -> Case:
    functions = {name: synchronised(function) for name, function in functions.items()}
    for function in functions.values():  # compile and tune
        function()
    extra = {name: peak(function) for name, function in functions.items()}
    return Case(title, bound, interleaved(functions, runs), extra, note=note)


def loss_peers() -> dict:
    """Losses of draft and target logits [1, T, V] under autograd."""
    found = {}
    try:
        import speculators.losses as fused
        from speculators.losses.eager import neg_log_acceptance_loss

        found["speculators, fused"] = fused.neg_log_acceptance_loss
        found["speculators, eager"] = neg_log_acceptance_loss
    except (ImportError, AttributeError):
        pass
    try:
        from liger_kernel.transformers import LigerTVDLoss

        tvd = LigerTVDLoss()
        found["liger-kernel, TVD of given probabilities"] = lambda z, y: tvd(z[0].softmax(-1), y[0].softmax(-1))
    except ImportError:
        pass
    return found


def loss_alone(slots: int, dtype: torch.dtype, runs: int) -> Case:
    y = torch.randn(slots, VOCABULARY, device="cuda").mul_(3)
    z = torch.randn(slots, VOCABULARY, device="cuda").mul_(0.9).add_(y).to(dtype)
    y = y.to(dtype)
    weight, out, buffer = torch.full((slots,), 1 / slots, device="cuda"), torch.empty_like(z), torch.empty_like(z)
    normaliser, leaf = loss.log_normaliser(y), z.clone().requires_grad_(True)

    def peer(function):
        leaf.grad = None
        function(leaf[None], y[None]).mean().backward()

    functions = {
        "copy of the logits": lambda: buffer.copy_(z),
        "fast": lambda: loss.lk_loss_with_gradient(z, y, weight, target_normaliser=normaliser, out=out),
        "fast, target's normaliser too": lambda: loss.lk_loss_with_gradient(z, y, weight, out=out),
    }
    functions |= {name: lambda f=function: peer(f) for name, function in loss_peers().items()}
    moved = z.nbytes / 1e9
    title = f"LK loss and gradient, {slots} x {VOCABULARY}, {NAMES[dtype]}"
    return measured(title, "copy of the logits", functions, runs, f"The copy reads and writes {moved:.2f} GB each.")


def loss_with_head(slots: int, runs: int) -> Case:
    """Products with bfloat16 logits are the bound; float32 logits come from bfloat16 factors."""
    hidden = torch.randn(STEPS, slots, WIDTH, device="cuda").to(BF16)
    head = torch.empty(VOCABULARY, WIDTH, dtype=BF16, device="cuda").normal_(std=WIDTH**-0.5)
    weights = torch.full((STEPS, slots), 1 / slots, device="cuda")
    for k in range(STEPS):
        weights[k, slots - k :] = 0
    target = torch.randn(slots, WIDTH, device="cuda").to(BF16)
    arguments, settings = (hidden, target, head, weights), {"target_head": head, "chunk_rows": 1024}
    functions = {"products": products(*arguments, head, BF16, 1024)}
    for chunk in ("bfloat16", "float32"):
        functions[f"fast, {chunk} logits"] = lambda c=chunk: linear_lk_loss(*arguments, logits=c, **settings)
    rows = (weights != 0).sum().item()
    tera = (2 * rows + slots) * 2 * VOCABULARY * WIDTH / 1e12
    return measured(
        f"Seven steps with the head, {slots} positions, hidden {WIDTH}, bfloat16", "products", functions, runs,
        f"The products are {tera:.0f} TFLOP.",
    )  # fmt: skip


def mx_case(what: str, form: str, type_name: str, others: dict, runs: int) -> Case:
    functions = mx.functions_of(what, form, mx.TYPES[type_name], others, "cuda")
    return measured(mx.title(what, form, type_name), "copy", functions, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    if not torch.cuda.is_available():
        raise SystemExit("No GPU is here: nothing is measured and nothing is written.")
    cases = [loss_alone(slots, dtype, runs) for slots in (1024, 4096) for dtype in (F32, BF16)]
    cases.append(loss_with_head(1024, runs))
    others = mx.peers()
    for what in ("fake-quantise", "quantise", "dequantise"):
        cases += [mx_case(what, form, name, others, runs) for form in mx.FORMATS for name in mx.TYPES]
    report.save("CUDA", cases)
    for case in cases:
        print(report.table(case), flush=True)


if __name__ == "__main__":
    main()
