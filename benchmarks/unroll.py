"""The seven-step unroll, forward and backward: beside NeMo AutoModel's trainer, beside its products, and its growth.

bfloat16 storage, hidden size 1024, 16 heads. Ours in the formats of the trainer, logits and attention in bfloat16,
unless a row says "wide": float32, as the report has it. The head is the target's and frozen.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.report import Case, MemoryTarget, Target
from benchmarks.side_by_side import interleaved, kept_for_backward, peak_extra, timed_in_turn
from draftconf.fast import fused
from draftconf.fast.experts import ExpertCache
from draftconf.fast.model import DraftModel
from draftconf.reference.config import Choices, DraftConfig, expert_of, parameter_shapes

STORAGE = fused.Plan(attention="storage", logits="storage")
SLOTS = 512
EAGLE3 = Choices(draft_input="eagle3", step_weights="decay_normalized", renormalize_epsilon=1e-20)
SIZES = DraftConfig(
    hidden_size=1024, vocab_size=163840, num_steps=7, num_attention_heads=16, q_lora_rank=384, kv_lora_rank=256,
    num_experts=32, num_experts_per_token=8, routed_expert_hidden_size=512, moe_intermediate_size=512,
    intermediate_size=4096,
)  # fmt: skip


def sized(**changes) -> DraftConfig:
    """SIZES with changes; the draft's vocabulary is the target's."""
    return replace(SIZES, **changes, draft_vocab_size=changes.get("vocab_size", SIZES.vocab_size))


def batch_of(config: DraftConfig, slots: int) -> dict:
    g = torch.Generator().manual_seed(1)
    batch = {name: torch.randn(1, slots, config.hidden_size, generator=g).bfloat16() for name in ("low", "mid", "high")}
    batch["target_logits"] = torch.randn(1, slots, config.vocab_size, generator=g).mul_(3).bfloat16()
    batch["tokens"] = torch.randint(0, config.vocab_size, (1, slots), generator=g)
    return batch | {"mask": torch.arange(slots).unsqueeze(0) < slots - 1}


class Ours:
    """A model on the fused path, and a batch."""

    def __init__(self, choices: Choices, config: DraftConfig = SIZES, slots: int = SLOTS):
        torch.manual_seed(0)
        self.model = DraftModel.from_config(config, choices, torch.bfloat16)
        self.params, self.batch = dict(self.model.named_parameters()), batch_of(config, slots)
        self.cache = ExpertCache(reuse_gradients=True)

    def run(self, plan: fused.Plan = STORAGE, backward: bool = True) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        model = self.model.config, self.model.choices
        loss = fused.unroll(self.params, self.batch, *model, plan=plan, cache=self.cache)["total_loss"]
        if backward:
            loss.backward()
        return loss.detach()


class Theirs:
    """AutoModel's trainer on the same weights and batch. Raises ImportError where it is not installed."""

    def __init__(self, ours: Ours):
        from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig
        from nemo_automodel.components.speculative.eagle import core, draft_kimi_k3

        from draftconf.conformance.adapters.nemo_automodel import parameter_name

        config, self.batch, weights = ours.model.config, ours.batch, ours.model.state_dict()
        self.draft = draft_kimi_k3.KimiK3Eagle3DraftModel(KimiK3TextConfig(**config.to_dict())).to(torch.bfloat16)
        self.draft.load_state_dict({name: weights[parameter_name(name)] for name in self.draft.state_dict()})
        self.draft.freeze_embeddings()
        self.draft.lm_head.weight.requires_grad_(False)
        everything = torch.arange(config.vocab_size)
        self.trainer = core.Eagle3TrainerModule(
            self.draft, selected_token_ids=everything, selected_token_mask=everything >= 0,
            ttt_steps=config.num_steps, lk_loss_type="alpha",
        )  # fmt: skip
        self.names = {name: parameter_name(name) for name, _ in self.draft.named_parameters()}

    def run(self, backward: bool = True) -> torch.Tensor:
        batch = self.batch
        self.trainer.zero_grad(set_to_none=True)
        loss = self.trainer(
            input_ids=batch["tokens"],
            attention_mask=torch.ones_like(batch["tokens"]),
            loss_mask=batch["mask"],
            aux_hidden_states=torch.cat([batch[name] for name in ("low", "mid", "high")], -1),
            target_logits=batch["target_logits"],
        ).loss
        if backward:
            loss.backward()
        return loss.detach()


# -- the products alone -----------------------------------------------------------------------------------------------


def products(config: DraftConfig, choices: Choices, slots: int) -> list[tuple[int, int, int, int]]:
    """Rows, in, out and times of every product with a weight; the attention's own are left out."""
    steps, shapes = config.num_steps, parameter_shapes(config, choices)
    pairs, found = slots * config.num_experts_per_token // config.num_experts, []
    for name, shape in shapes.items():
        if len(shape) != 2 or name == "embed_tokens.weight":
            continue
        out, width = shape
        rows, uses = (pairs if expert_of(name) else slots), (1 if name == "fc.weight" else steps)
        found.append((rows, width, out, uses))  # forward
        if name != "fc.weight":
            found.append((rows, out, width, uses))  # d_x
        if name != "shared_head.head.weight":
            found.append((out, rows * uses, width, 1))  # d_W
    return found


def products_alone(config: DraftConfig, choices: Choices, slots: int) -> Callable[[], None]:
    """A function that does them all in bfloat16, into memory that is there."""
    shapes = products(config, choices, slots)
    memory = torch.zeros(max(max(m * k, k * n, m * n) for m, k, n, _ in shapes), dtype=torch.bfloat16)
    other, result = torch.zeros_like(memory), torch.zeros_like(memory)
    view = lambda x, a, b: x[: a * b].view(a, b)  # noqa: E731

    def run() -> None:
        for m, k, n, uses in shapes:
            weight = view(memory, n, k).t() if n > k else view(memory, k, n)
            for _ in range(uses):
                torch.mm(view(other, m, k), weight, out=view(result, m, n))

    return run


# -- the tables -------------------------------------------------------------------------------------------------------


def title(layout: str, config: DraftConfig = SIZES, slots: int = SLOTS) -> str:
    width, vocabulary = config.hidden_size, config.vocab_size
    return f"Layout {layout}: K = {config.num_steps}, T = {slots}, d = {width}, V = {vocabulary}, bfloat16"


def beside_trainer(runs: int) -> Case:
    ours = Ours(EAGLE3)
    functions = {"products": products_alone(SIZES, EAGLE3, SLOTS), "fast": ours.run}
    targets, memory, note = [], [], "The products are those with weights; the attention's own are left out."
    try:
        theirs = Theirs(ours)
    except ImportError as error:
        note += f" nemo_automodel is not there ({error})."
    else:
        functions["nemo_automodel"] = theirs.run
        targets = [Target("nemo_automodel", "fast", 3, at_least=True)]
        memory = [MemoryTarget("fast", 0.25, "nemo_automodel")]
        note += " " + agreement(ours, theirs)
    extra = {name: peak_extra(function) for name, function in functions.items()}  # and warm-up
    times = timed_in_turn(functions, runs)
    return Case(title("eagle3"), "products", times, extra, targets=targets, memory_targets=memory, note=note)


def agreement(ours: Ours, theirs: Theirs) -> str:
    """How near the two are: total losses, and the trained gradients as one vector."""
    losses = [float(ours.run()), float(theirs.run())]
    grads = {name: p.grad for name, p in ours.params.items() if p.grad is not None}
    squared = [0.0, 0.0]
    for name, p in theirs.draft.named_parameters():
        if p.grad is not None and theirs.names[name] in grads:
            mine = grads.pop(theirs.names[name]).double()
            squared[0] += float((mine - p.grad.double()).square().sum())
            squared[1] += float(mine.square().sum())
    if grads:
        raise RuntimeError(f"nemo_automodel has no gradient of {sorted(grads)[0]}")
    apart = math.sqrt(squared[0] / squared[1])
    return (
        f"Total loss {losses[0]:.6f} (fast) and {losses[1]:.6f} (nemo_automodel); their gradients, as one vector, are "
        f"{apart:.2g} of its length apart, as bfloat16 logits leave them: see `logits` in fast/linear_loss.py. Each is "
        "judged edge by edge by the suite, at small sizes."
    )


def beside_products(runs: int) -> Case:
    choices = Choices()
    ours = Ours(choices)
    functions = {"products": products_alone(SIZES, choices, SLOTS), "fast": ours.run}
    extra = {name: peak_extra(function) for name, function in functions.items()}
    times = timed_in_turn(functions, runs)
    note = f"{SIZES.num_experts} experts, {SIZES.num_experts_per_token} a token."
    return Case(title("mtp"), "products", times, extra, targets=[Target("fast", "products", 1.5)], note=note)


def precision(layout: str, runs: int) -> Case:
    """What each of the two precisions costs in the wide type, whose products a CPU does several times as slowly."""
    ours = Ours(EAGLE3 if layout == "eagle3" else Choices(), sized(vocab_size=32768))
    kinds = {f"attention {a}, logits {z}": fused.Plan("none", a, z) for a in fused.PRECISION for z in fused.PRECISION}
    functions = {name: partial(ours.run, plan) for name, plan in kinds.items()}
    extra = {name: peak_extra(function) for name, function in functions.items()}
    base, grads = "attention storage, logits storage", {name: gradient(ours, plan) for name, plan in kinds.items()}
    wide = grads.pop("attention wide, logits wide")
    off = [f"{name}: {float((g - wide).norm() / wide.norm()):.2g}" for name, g in grads.items()]
    note = f"Gradient of all parameters, as one vector, off from that with both wide, in its length: {'; '.join(off)}."
    return Case(title(layout, ours.model.config), base, timed_in_turn(functions, runs), extra, note=note)


def gradient(ours: Ours, plan: fused.Plan) -> torch.Tensor:
    """That of all trained parameters, one after another, in float32."""
    ours.run(plan)
    return torch.cat([p.grad.flatten().float() for p in ours.params.values() if p.grad is not None])


def recompute(layout: str, steps: int, runs: int) -> Case:
    """What each recompute policy keeps and takes."""
    config = sized(vocab_size=32768, num_steps=steps)
    ours = Ours(EAGLE3 if layout == "eagle3" else Choices(), config)
    plans = {name: replace(STORAGE, recompute=name) for name in fused.RECOMPUTE}
    functions = {name: partial(ours.run, plan) for name, plan in plans.items()}
    extra, kept = {name: peak_extra(function) for name, function in functions.items()}, {}
    for name, plan in plans.items():
        with kept_for_backward([*ours.params.values(), *ours.batch.values()]) as sizes:
            ours.run(plan, backward=False)
        kept[name] = sum(sizes)
    return Case(title(layout, config), "none", timed_in_turn(functions, runs), extra, kept, note="By recompute policy.")


# Each quantity over a range, the others as given; V and T small enough for the whole to take a minute.
GROWTH = {
    "T": ("slots", (256, 512, 1024, 2048)),
    "V": ("vocab_size", (20480, 40960, 81920, 163840)),
    "K": ("num_steps", (1, 2, 4, 7)),
    "E": ("num_experts", (16, 32, 64, 128)),
}


def growth(letter: str, runs: int) -> Case:
    """Time and peak memory over one size, and the slope of both in log-log."""
    field, values = GROWTH[letter]
    times, extra = {}, {}
    for value in values:
        slots, sizes = (value, {}) if field == "slots" else (SLOTS, {field: value})
        ours = Ours(Choices(), sized(**{"vocab_size": 40960} | sizes), slots)
        name = f"{letter} = {value}"
        extra[name] = peak_extra(ours.run)
        times |= interleaved({name: ours.run}, runs)
    middle = [sorted(t)[len(t) // 2] for t in times.values()]
    slopes = slope(values, middle), slope(values, list(extra.values()))
    note = "Slope in log-log between the ends: time {:.2f}, extra memory {:.2f}.".format(*slopes)
    return Case(f"Layout mtp: growth with {letter}", next(iter(times)), times, extra, note=note)


def slope(x: tuple, y: list) -> float:
    return math.log(y[-1] / y[0]) / math.log(x[-1] / x[0])


def measure(runs: int) -> Iterator[Case]:
    yield beside_trainer(runs)
    yield beside_products(runs)


def measure_precision(runs: int) -> Iterator[Case]:
    yield from (precision(layout, runs) for layout in ("eagle3", "mtp"))


def measure_recompute(runs: int) -> Iterator[Case]:
    yield from (recompute(layout, steps, runs) for layout in ("eagle3", "mtp") for steps in (3, 7))


def measure_growth(runs: int) -> Iterator[Case]:
    yield from (growth(letter, min(runs, 3)) for letter in GROWTH)
