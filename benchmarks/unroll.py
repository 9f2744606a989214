"""The seven-step unroll, forward and backward: time, memory, and what autograd keeps. Prints, never asserts.

    python -m benchmarks.unroll {eagle3,mtp,recompute} [--slots 512] [--vocabulary 163840] [--runs 7]

eagle3     beside NeMo AutoModel's trainer on the same weights and inputs, where that package is installed
mtp        beside the sum of its matrix products alone
recompute  bytes kept for the backward pass, and time, by recompute policy

bfloat16 storage. Ours in the formats of the trainer, logits and attention in bfloat16; "wide" is ours with both in
float32, as the report has it, where products on a CPU take several times as long. Hidden size 1024, 16 heads. The head
is the target's and frozen; with --train-head it is trained.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.side_by_side import about, kept_for_backward, peak_extra, ratio, spread, timed_in_turn
from fast import fused
from fast.experts import ExpertCache
from fast.model import DraftModel
from reference.config import Choices, DraftConfig

STORAGE = fused.Plan(attention="storage", logits="storage")


def sizes(vocabulary: int, steps: int = 7) -> DraftConfig:
    return DraftConfig(
        hidden_size=1024, vocab_size=vocabulary, num_steps=steps, num_attention_heads=16, q_lora_rank=384,
        kv_lora_rank=256, num_experts=32, num_experts_per_token=8, routed_expert_hidden_size=512,
        moe_intermediate_size=512, intermediate_size=4096,
    )  # fmt: skip


def batch_of(config: DraftConfig, slots: int) -> dict:
    g = torch.Generator().manual_seed(1)
    batch = {name: torch.randn(1, slots, config.hidden_size, generator=g).bfloat16() for name in ("low", "mid", "high")}
    batch["target_logits"] = torch.randn(1, slots, config.vocab_size, generator=g).mul_(3).bfloat16()
    batch["tokens"] = torch.randint(0, config.vocab_size, (1, slots), generator=g)
    return batch | {"mask": torch.arange(slots).unsqueeze(0) < slots - 1}


class Ours:
    """A model on the fused path."""

    def __init__(self, config: DraftConfig, choices: Choices, batch: dict):
        torch.manual_seed(0)
        self.model = DraftModel.from_config(config, choices, torch.bfloat16)
        self.params, self.batch = dict(self.model.named_parameters()), batch
        self.cache = ExpertCache(reuse_gradients=True)

    def run(self, plan: fused.Plan, backward: bool = True) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        model = self.model.config, self.model.choices
        loss = fused.unroll(self.params, self.batch, *model, plan=plan, cache=self.cache)["total_loss"]
        if backward:
            loss.backward()
        return loss.detach()


def trainer_of(ours: Ours, train_head: bool):
    """AutoModel's trainer on the same weights, and a function of one step; None where it is not installed."""
    try:
        from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig
        from nemo_automodel.components.speculative.eagle import core, draft_kimi_k3

        from conformance.adapters.nemo_automodel import parameter_name
    except ImportError as error:
        print(f"nemo_automodel is not there ({error}): make peers, and run with .venv-peers/bin/python")
        return None
    config, batch = ours.model.config, ours.batch
    draft = draft_kimi_k3.KimiK3Eagle3DraftModel(KimiK3TextConfig(**config.to_dict())).to(torch.bfloat16)
    weights = ours.model.state_dict()
    draft.load_state_dict({name: weights[parameter_name(name)] for name in draft.state_dict()})
    draft.freeze_embeddings()
    draft.lm_head.weight.requires_grad_(train_head)
    everything = torch.arange(config.vocab_size)
    trainer = core.Eagle3TrainerModule(
        draft, selected_token_ids=everything, selected_token_mask=everything >= 0, ttt_steps=config.num_steps,
        lk_loss_type="alpha",
    )  # fmt: skip

    def step() -> torch.Tensor:
        trainer.zero_grad(set_to_none=True)
        loss = trainer(
            input_ids=batch["tokens"],
            attention_mask=torch.ones_like(batch["tokens"]),
            loss_mask=batch["mask"],
            aux_hidden_states=torch.cat([batch[name] for name in ("low", "mid", "high")], -1),
            target_logits=batch["target_logits"],
        ).loss
        loss.backward()
        return loss.detach()

    return step


# -- the products alone -----------------------------------------------------------------------------------------------


def products(config: DraftConfig, choices: Choices, slots: int, train_head: bool) -> list[tuple[int, int, int, int]]:
    """Rows, in, out and times of every product with a weight; the attention's own are left out."""
    from reference.config import parameter_shapes

    steps, shapes = config.num_steps, parameter_shapes(config, choices)
    pairs, found = slots * config.num_experts_per_token // config.num_experts, []
    for name, shape in shapes.items():
        if len(shape) != 2 or name == "embed_tokens.weight":
            continue
        out, width = shape
        rows, uses = (pairs if ".experts." in name else slots), (1 if name == "fc.weight" else steps)
        found.append((rows, width, out, uses))  # forward
        if name != "fc.weight":
            found.append((rows, out, width, uses))  # d_x
        if name != "shared_head.head.weight" or train_head:
            found.append((out, rows * uses, width, 1))  # d_W
    return found


def products_alone(config: DraftConfig, choices: Choices, slots: int, train_head: bool) -> Callable[[], None]:
    """A function that does them all in bfloat16, into memory that is there; the head in chunks of 256 rows."""
    shapes = products(config, choices, slots, train_head)
    memory = torch.zeros(max(max(m * k, k * n, m * n) for m, k, n, _ in shapes), dtype=torch.bfloat16)
    other, result = torch.zeros_like(memory), torch.zeros_like(memory)
    view = lambda x, a, b: x[: a * b].view(a, b)  # noqa: E731

    def run() -> None:
        for m, k, n, uses in shapes:
            weight = view(memory, n, k).t() if n > k else view(memory, k, n)
            for _ in range(uses):
                torch.mm(view(other, m, k), weight, out=view(result, m, n))

    return run


# -- the three comparisons --------------------------------------------------------------------------------------------


def compare(kinds: dict[str, Callable], base: str, runs: int) -> None:
    """A first round for the memory, then the times."""
    extra = {name: peak_extra(function) / 2**20 for name, function in kinds.items()}
    times = timed_in_turn(kinds, runs)
    for name in kinds:
        print(f"  {name:16}{spread(times[name]):>26}  {ratio(times, name, base):>18} of {base}, +{extra[name]:.0f} MiB")


def eagle3(options) -> None:
    choices = Choices(
        draft_input="eagle3", head="own" if options.train_head else "frozen_target", step_weights="decay_normalized",
        renormalize_epsilon=1e-20,
    )  # fmt: skip
    config = sizes(options.vocabulary)
    ours = Ours(config, choices, batch_of(config, options.slots))
    kinds = {"products": products_alone(config, choices, options.slots, options.train_head)}
    kinds["ours"] = partial(ours.run, STORAGE)
    if options.wide:
        kinds["ours, wide"] = partial(ours.run, fused.Plan())
    theirs = trainer_of(ours, options.train_head)
    if theirs is not None:
        kinds["nemo_automodel"] = theirs
    compare(kinds, "ours", options.runs)


def mtp(options) -> None:
    choices, config = Choices(), sizes(options.vocabulary)
    ours = Ours(config, choices, batch_of(config, options.slots))
    kinds = {"products": products_alone(config, choices, options.slots, False), "ours": partial(ours.run, STORAGE)}
    if options.wide:
        kinds["ours, wide"] = partial(ours.run, fused.Plan())
    compare(kinds, "products", options.runs)


def recompute(options) -> None:
    for layout in ("eagle3", "mtp"):
        for steps in (3, 7):
            config, choices = sizes(options.vocabulary, steps), Choices(draft_input=layout)
            ours = Ours(config, choices, batch_of(config, options.slots))
            plans = {which: fused.Plan(which, "storage", "storage") for which in fused.RECOMPUTE}
            runs = {which: partial(ours.run, plan) for which, plan in plans.items()}
            extra = {which: peak_extra(run) / 2**20 for which, run in runs.items()}
            times = timed_in_turn(runs, options.runs)
            for which, plan in plans.items():
                with kept_for_backward([*ours.params.values(), *ours.batch.values()]) as kept:
                    ours.run(plan, backward=False)
                print(f"  {layout:7} K = {steps}, {which:10} kept {sum(kept) / 2**20:6.0f} MiB, "
                      f"peak +{extra[which]:6.0f} MiB, {ratio(times, which, 'none')} of the time of none")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["eagle3", "mtp", "recompute"])
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=163840)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--train-head", action="store_true")
    parser.add_argument("--wide", action="store_true", help="also with logits and attention in float32")
    options = parser.parse_args()
    print(f"{about()}\n{options.which}: T = {options.slots}, V = {options.vocabulary}, bfloat16")
    {"eagle3": eagle3, "mtp": mtp, "recompute": recompute}[options.which](options)


if __name__ == "__main__":
    main()
