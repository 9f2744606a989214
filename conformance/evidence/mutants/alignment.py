"""Wrong alignment: tokens, features, targets and mask of a slot, edges of documents."""

import torch

from draftconf.fast import unroll

from .core import area, around, patch

MUTANTS: list = []
mutant = area("alignment", MUTANTS)
SLOTS = "slot j: token j+1, feature j, target P_{j+1} (spec.md 3)"
ALIGN = {"methods": ("align",)}


def slots(change):
    """``change(raw, slots)`` of what ``align`` returns, in place."""

    def wrapper(original, raw, *args):
        out = original(raw, *args)
        change(raw, out)
        return out

    return around(unroll, "align", wrapper)


@mutant("align", "forward", None, SLOTS, "T07: SpecForge #885", **ALIGN)
def tokens_not_aligned():
    return slots(lambda raw, out: out.update(tokens=raw["tokens"]))


@mutant("align", "forward", None, SLOTS, "T07: SpecForge #895", **ALIGN)
def targets_not_aligned():
    return slots(lambda raw, out: out.update(target_logits=raw["target_logits"]))


@mutant("align", "forward", None, SLOTS, "T13: vLLM #46788", **ALIGN)
def features_aligned_too():
    return slots(lambda raw, out: out.update(high=torch.cat([raw["high"][1:], 0 * raw["high"][:1]])))


@mutant("align", "forward", None, "mask_alignment: position", "T08: miles #3219", **ALIGN)
def mask_aligned_by_token():
    return around(unroll, "align", lambda o, raw, steps, *_: o(raw, steps, "token"))


@mutant("align", "forward", None, "mask_alignment: slot", "T08", choices={"mask_alignment": "slot"}, **ALIGN)
def mask_aligned_by_position_though_declared_slot():
    return around(unroll, "align", lambda o, raw, steps, *_: o(raw, steps, "position"))


@mutant("align", "forward", None, "position j+k must exist", "T23: Automodel #2464", **ALIGN)
def supervision_wraps_around():
    return around(unroll, "shift", lambda o, x, by, fill: x.roll(-by, 1))


@mutant("align", "forward", None, "position j+k lies in the document of j", "T24: NeMo-RL #3463", **ALIGN)
def alignment_crosses_documents():
    return around(unroll, "align", lambda o, raw, *args: o({n: x for n, x in raw.items() if n != "documents"}, *args))


@mutant("align", "forward", None, "padding is no document", "T38: Automodel #2312", **ALIGN)
def padding_is_supervised():
    return patch(unroll, "inside", lambda documents, k: unroll.shift(documents, k, -9) == documents)


@mutant("align", "forward", None, "supervised has K rows", "own", **ALIGN)
def supervision_of_the_first_step_for_all():
    return slots(lambda raw, out: out.update(supervised=out["supervised"][:1].expand_as(out["supervised"])))
