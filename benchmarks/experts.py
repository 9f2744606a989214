"""Routed experts, forward and backward, against the dense product of the same size beside them."""

from collections.abc import Iterator

import torch

from benchmarks.report import Case, Target
from benchmarks.side_by_side import interleaved, peak_extra
from draftconf.fast.experts import ExpertCache, Experts, expert_parameters
from draftconf.reference.config import Choices, DraftConfig

COUNT, TOKENS, LATENT, HIDDEN, STEPS = 24, 37, 3584, 3072, 7
NOTE = """One expert a token, MXFP4 weights quantised before. "dense" is one matrix of the same size with all rows at
once, forward, d_x and d_W: as many operations. "products" are the experts' own products and nothing else."""


def routing(count: int, tokens: int, skewed: bool) -> torch.Tensor:
    """Expert ids int64 [1, N, 1]; skewed as a Zipf law, the most popular some four times the mean."""
    share = 1 / (torch.arange(count) + 3.0) if skewed else torch.ones(count)
    rows = (share / share.sum() * count * tokens).round().long()
    return torch.repeat_interleave(torch.arange(count), rows)[torch.randperm(int(rows.sum()))].view(1, -1, 1)


class Routed:
    """The experts of one routing, and the products to hold them against. ``steps`` share one weight gradient."""

    def __init__(self, skewed: bool, steps: int):
        self.config = DraftConfig(num_experts=COUNT, num_experts_per_token=1)
        self.ids, self.steps = routing(COUNT, TOKENS, skewed), steps
        rows = self.ids.shape[1]
        g = torch.Generator().manual_seed(0)
        make = lambda *shape: torch.randn(*shape, generator=g).bfloat16()  # noqa: E731
        shapes = {"w1": (HIDDEN, LATENT), "w3": (HIDDEN, LATENT), "w2": (LATENT, HIDDEN)}
        self.params = {
            f"block_sparse_moe.experts.{e}.{w}.weight": (make(*shape) * 0.02).requires_grad_()
            for e in range(COUNT)
            for w, shape in shapes.items()
        }
        self.cache = ExpertCache(reuse_gradients=True)
        self.weights = self.cache.get(expert_parameters(self.params, self.config), Choices())
        self.z, self.share = make(1, rows, LATENT).requires_grad_(), torch.rand(1, rows, 1, requires_grad=True)
        self.d_u, self.d_gate_up, self.hidden = make(rows, LATENT), make(rows, 2 * HIDDEN), make(rows, HIDDEN)
        self.d_weight = torch.empty_like(self.weights.gate_up), torch.empty_like(self.weights.down)
        self.slices = torch.bincount(self.ids.flatten(), minlength=COUNT).tolist()

    def experts(self) -> None:
        for leaf in (*self.params.values(), self.z, self.share):
            leaf.grad = None
        experts = Experts(self.params, self.config, Choices(), self.cache)
        outputs = [experts.combine(self.z, self.share, self.ids) for _ in range(self.steps)]
        torch.autograd.backward(outputs, [self.d_u.unsqueeze(0)] * self.steps)

    def products(self) -> None:
        """Per step and expert forward and d_x, per expert d_W over all steps."""
        start = 0
        for e, rows in enumerate(self.slices):
            at = slice(start, start := start + rows)
            z, d_gate_up, hidden, d_u = self.z.detach()[0, at], self.d_gate_up[at], self.hidden[at], self.d_u[at]
            for _ in range(self.steps):
                z @ self.weights.gate_up[e].t(), hidden @ self.weights.down[e].t()
                d_u @ self.weights.down[e], d_gate_up @ self.weights.gate_up[e]
            z, d_gate_up, hidden, d_u = (torch.cat([x] * self.steps) for x in (z, d_gate_up, hidden, d_u))
            torch.mm(d_gate_up.t(), z, out=self.d_weight[0][e])
            torch.mm(d_u.t(), hidden, out=self.d_weight[1][e])

    def dense(self) -> None:
        gate_up, down = self.weights.gate_up[0], self.weights.down[0]
        z = self.z.detach()[0]
        for _ in range(self.steps):
            z @ gate_up.t(), self.hidden @ down.t()
            self.d_u @ down, self.d_gate_up @ gate_up
            torch.mm(self.d_gate_up.t(), z, out=self.d_weight[0][0])
            torch.mm(self.d_u.t(), self.hidden, out=self.d_weight[1][0])


def case(skewed: bool, steps: int, runs: int) -> Case:
    routed = Routed(skewed, steps)
    functions = {"dense": routed.dense, "products": routed.products, "fast": routed.experts}
    extra = {name: peak_extra(function) for name, function in functions.items()}  # and warm-up
    rows = f"{min(routed.slices)} to {max(routed.slices)}" if skewed else f"{TOKENS}"
    title = f"{COUNT} experts of [{LATENT}, {HIDDEN}], {rows} tokens each, {steps} step{'s' * (steps > 1)}, bfloat16"
    return Case(title, "dense", interleaved(functions, runs), extra, targets=[Target("fast", "dense", 2)], note=NOTE)


def measure(runs: int) -> Iterator[Case]:
    yield from (case(skewed, steps, runs) for skewed in (False, True) for steps in (1, STEPS))
