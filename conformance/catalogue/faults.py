"""What each check hunts: faults that public code has had, by the stages and quantities in which they show.

Not every fault that a check would find, but for each a reason why it is there. Issue numbers are those of the
projects named.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Fault:
    """``where``: patterns of ``stage.quantity``. ``exposed``: the inputs of the suite that show it."""

    where: tuple[str, ...]
    what: str
    source: str
    exposed: str


FAULTS = (
    Fault(
        ("attention.*", "mla.output", "draft_layer.feature"),
        "the step-1 keys are cut back by one slot at every further step",
        "SpecForge #244, #245; EAGLE #247; AngelSlim #170",
        "seven steps with random values: a lost key changes the mean",
    ),
    Fault(
        ("attention.*", "mla.*"),
        "the visibility mask is added to the scores as +1 and 0, so that nothing is masked",
        "speculators #691",
        "two documents in row 0, padding poisoned with 1e30 and NaN",
    ),
    Fault(
        ("attention.*", "mla.*"),
        "attention sees the previous document of a packed row",
        "NeMo-RL #3463; Automodel #3002; speculators #621",
        "two documents in row 0; corners: documents of one slot",
    ),
    Fault(
        ("attention.*", "mla.*"),
        "the softmax scale is built from the wrong width",
        "Megatron-LM #1501; maxtext #1370",
        "dn 12, dr 6 and dv 10 differ, so that every wrong width shows",
    ),
    Fault(
        ("attention.*",),
        "partial softmaxes are merged without subtracting the maximum",
        "cutlass #2274; sglang #6101",
        "extreme: queries times 30",
    ),
    Fault(
        ("attention.*", "mla_query.*", "mla_keyvalue.*", "mla.*"),
        "head axis and slot axis are confused by a reshape",
        "TPA #4; ik_llama.cpp #2130",
        "4 heads, 9 and 16 slots",
    ),
    Fault(
        (
            "mla_query.norm.*",
            "mla_keyvalue.norm.*",
            "mla.*",
            "attn_norm.*",
            "moe_norm.*",
            "head_norm.*",
            "latent_norm.*",
            "draft_input.enorm.*",
            "draft_input.hnorm.*",
        ),
        "epsilon of another layer's norm, outside the root, or the mean taken over d - 1",
        "transformers #44261, #48762; Megatron-LM #6122",
        "harsh: low-rank projections scaled by 0.01; the bias test",
    ),
    Fault(
        ("attn_gate.*", "attn_gate.pre.*", "mla.*"),
        "the output gate is dropped, reads the wrong input, or is interleaved",
        "TensorRT-LLM #9060; imp #1279; larql #439",
        "gate projections of random sign, one per channel",
    ),
    Fault(
        ("mla_query.*", "mla_keyvalue.*", "mla_latent.*"),
        "a rotary embedding is applied where the model has none",
        "EAGLE 4947382; SpecForge #244, #424",
        "every slot and step has another position",
    ),
    Fault(
        ("attn_output.*", "layer_output.*", "draft_layer.*"),
        "the residual is taken before or after the wrong norm",
        "sglang #32334; tokenspeed #958",
        "norm gains away from 1, every fourth one negative",
    ),
    Fault(
        ("fusion.*", "align.low", "align.mid", "align.high"),
        "features swapped, off by one layer, or views changed later",
        "sglang #25454; vLLM #46788; tokenspeed #913",
        "three features of unrelated values",
    ),
    Fault(
        ("fusion.*", "draft_input.*", "draft_input.hnorm.*"),
        "one norm over the concatenation instead of one for each part",
        "speculators #610, #670",
        "harsh: rows between 1e-3 and 1e3 of their size",
    ),
    Fault(
        ("draft_input.*", "draft_input.enorm.*", "embed.*"),
        "embedding and feature swapped, or the first embedding zeroed",
        "vLLM #14647, #33299",
        "every token's embedding counts, the first slot's too",
    ),
    Fault(
        ("draft_input.hnorm.*", "layer_output.*", "head_norm.*", "draft_layer.*", "draft_sequence.*", "tokens.*"),
        "the next step is fed the state after the norm instead of before it",
        "SpecForge #879; EAGLE #233; vLLM #42764",
        "head norm gains away from 1",
    ),
    Fault(
        ("align.*", "embed.*", "lk_loss.value", "slot_losses.*", "supervised.*"),
        "tokens, targets and mask are not shifted together from step to step",
        "SpecForge #885, #895; Megatron-LM #5011",
        "a ragged mask, another token and target in every slot",
    ),
    Fault(
        ("align.*", "lk_loss.value", "slot_losses.*", "step_losses.*"),
        "a shift wraps around, or crosses the end of a document",
        "Automodel #2464; NeMo-RL #3463; PaddleFleet #1808",
        "two documents, and in the corners documents shorter than the steps",
    ),
    Fault(
        (
            "step_losses.*",
            "total_loss.*",
            "unroll.step_losses",
            "unroll.total_loss",
            "unroll.slot_losses",
            "lk_loss.cotangent",
        ),
        "the mean is taken over all slots instead of the supervised ones, or per micro-batch",
        "EAGLE #340; SpecForge #705; transformers #34191",
        "rows with different numbers of supervised slots",
    ),
    Fault(
        ("total_loss.*", "unroll.total_loss", "lk_loss.cotangent"),
        "step weights lost, normalised twice, or 0/0 in an empty step",
        "Automodel #2259, #2908; speculators #798",
        "corners: steps without a supervised slot",
    ),
    Fault(
        ("lk_loss.loss", "lk_loss.value", "lk_loss.*"),
        "the loss is the log of the mean overlap, not the mean of the logs",
        "SpecForge #492",
        "slots of very different overlap",
    ),
    Fault(
        ("lk_loss.d_*", "lk_loss.gradient_set", "logits.cotangent"),
        "a guard behind the logarithm: the value is fine, the gradient 0 times infinity",
        "SpecForge lk_loss; pytorch #68425",
        "disjoint peaks, 200 above the rest in the extreme case",
    ),
    Fault(
        ("lk_loss.d_*", "lk_loss.gradient_set", "lk_loss.below", "logits.cotangent"),
        "softmax and minimum in bfloat16: q - p cancels, the gradient is off by a third, the loss looks right",
        "speculators #788, #951",
        "targets within 0.05 of the draft",
    ),
    Fault(
        ("lk_loss.loss", "lk_loss.value"),
        "slots of no overlap are dropped, or given loss 0",
        "Automodel #3032",
        "disjoint peaks",
    ),
    Fault(
        ("lk_loss.*",),
        "the target is renormalised over the draft's reduced vocabulary",
        "SpecForge #492",
        "adapters that declare head: reduced, 61 of 97 tokens",
    ),
    Fault(
        ("lk_loss.frozen", "unroll.frozen"),
        "the target, the embedding or the router bias receives a gradient",
        "Automodel #2369; speculators #593; Megatron-LM #7021",
        "every gradient that was returned is looked at",
    ),
    Fault(("logits.*", "head.*"), "the head reads the state before its norm", "EAGLE #233", "norm gains away from 1"),
    Fault(
        ("router_scores.*", "route.*", "moe.*"),
        "the router reads the latent, or what was normalised twice",
        "llama.cpp #26185; Automodel #1895",
        "d 80 and l 64 differ; gains away from 1",
    ),
    Fault(
        ("route.*", "experts.*", "moe.*"),
        "the selection bias leaks into the weights",
        "MetaX vLLM #270, #284; sgl-kernel-xpu #180",
        "a bias away from 0, in the corners of 100",
    ),
    Fault(
        ("experts.*", "route.experts"),
        "the correction bias is rounded to bfloat16",
        "vLLM #50761; TensorRT-LLM #17061",
        "near ties: a decision is judged by its margin",
    ),
    Fault(
        ("experts.*", "route.experts"),
        "top-k that starts from -1, selects an expert twice, or loses expert 0",
        "vLLM #31478, #54403; sglang #33541",
        "corners: every score + bias below -1; two experts that always tie",
    ),
    Fault(
        ("route.weights", "route.value", "moe_combine.*", "moe.*"),
        "the scaling factor is missing, or applied twice",
        "vLLM #24119, #45037; sglang #8511",
        "factor 1.5, in the harsh case 2.5",
    ),
    Fault(
        ("route.weights", "route.value"),
        "an epsilon in the renormalisation",
        "sglang #38320; DeepSeek-MoE #33",
        "corners: scores down to exp(-50)",
    ),
    Fault(
        ("route.d_*", "route.cotangent", "router_scores.cotangent", "*.gate.weight.gradient"),
        "the combine weights are detached, so the router learns nothing",
        "Automodel #2995",
        "three experts of eight per token",
    ),
    Fault(
        ("expert_hidden.*", "moe_combine.*", "mx_hidden.*"),
        "the routing weight is applied on the other side of the quantiser",
        "flashinfer #4366; vLLM #43694",
        "MX codes change with the weight",
    ),
    Fault(
        ("expert_output.*", "moe_combine.*", "moe.*", "*experts*"),
        "an expert without tokens gives stale data or no gradient",
        "Automodel #532; sglang #40187",
        "corners: one expert with no token, one with every token",
    ),
    Fault(
        (
            "situ_glu.*",
            "expert_hidden.*",
            "shared_experts.hidden.*",
            "dense_mlp.hidden.*",
            "shared_experts.*",
            "dense_mlp.*",
        ),
        "the caps of SiTU default to 1, or its two arguments are swapped",
        "cudnn-frontend #670; sglang #34883; vLLM #52240",
        "gates and ups from far below to far above the caps",
    ),
    Fault(
        ("situ_glu.d_*", "expert_hidden.cotangent", "shared_experts.gate.cotangent", "dense_mlp.gate.cotangent"),
        "the derivative of one factor is missing",
        "cudnn-frontend #568, #645; TransformerEngine #3402",
        "g = 10, u = 50 and g = -6, u = 3",
    ),
    Fault(
        ("mxfp4.*", "mxfp8.*", "fake_mxfp*", "mx_input.*", "mx_hidden.*"),
        "another scale rule than declared",
        "mlx #4353; ml_dtypes #298; torchao #1643, #3428",
        "block maxima at, below and above powers of two",
    ),
    Fault(
        ("mxfp4.scales", "mxfp8.scales"),
        "the exponent comes from a floating-point logarithm",
        "torchao #1908",
        "neighbours of powers of two, from 2^-90 to 2^99",
    ),
    Fault(
        ("mxfp4.*", "mxfp8.*"),
        "elements are divided by the scale before it was rounded",
        "transformers #46763",
        "every block whose maximum is no power of two",
    ),
    Fault(
        ("mxfp4.codes", "mxfp8.codes"),
        "truncation, or ties away from even",
        "bitstring #342; rocm-systems #6877",
        "every midpoint of the grid, both ways from even",
    ),
    Fault(
        ("mxfp4.*", "mxfp8.*", "fake_mxfp*"),
        "NaN, infinities, -0 or subnormal blocks are lost or become large",
        "TE #3550; torchao #4201; flashinfer #2440",
        "a NaN among ordinary values, -0, blocks below 2^-127",
    ),
    Fault(
        ("mxfp4_decode.*", "mxfp8_decode.*"),
        "nibble order, subnormals, or the scale byte read as an integer",
        "torchao #3123; omlx #2159; 1bit-MONSTER #300",
        "every scale byte with every element code",
    ),
    Fault(
        ("fake_mxfp*.d_x", "mx_input.cotangent", "mx_hidden.cotangent", "latent_down.cotangent"),
        "the straight-through gradient is cut at the bound",
        "torchao #4806; pytorch #191142",
        "blocks that saturate",
    ),
    Fault(
        ("expert_hidden.*", "expert_output.*", "mx_input.cotangent", "*experts*.gradient"),
        "the backward products use other quantised weights than the forward ones",
        "torchao #1501; TE #1490; Primus-Turbo #503",
        "both directions are judged on the recorded values",
    ),
    Fault(
        ("latent_down.*", "shared_experts.*", "router_scores.*", "mla_latent.*"),
        "a layer that must stay wide is quantised too",
        "tokenspeed #527",
        "weights off the MX grid",
    ),
    Fault(
        ("speculative_sample.residual",),
        "equal laws give a residual of zeros, or NaN",
        "jaymody #5; TorchCode #16",
        "p = q among the laws",
    ),
    Fault(
        ("speculative_sample.*",),
        "after a rejection the token is drawn from p, or accepted by token equality",
        "Spec-RL #14; mlx-swift-lm #459",
        "laws with disjoint and overlapping support, fixed draws",
    ),
    Fault(
        ("*.gradient", "unroll.d_*"),
        "a gradient summed twice, per shard, or only over the last step",
        "SpecForge ea5a5f59; Automodel #3247; xtuner #2048",
        "the sum over seven steps, step by step",
    ),
    Fault(
        ("*.cotangent",),
        "a gradient that does not flow between the steps, or flows where it is detached",
        "SpecForge #879; Automodel #3140",
        "the cotangent must be the sum of all its consumers' products, later steps too",
    ),
    Fault(
        ("pattern.tokens", "pattern.features", "pattern.fusion"),
        "a step reads the token of another step, a slot of the future, or of another row",
        "SpecForge #885; Megatron-LM #5011; NeMo-RL #3463",
        "one slot changed at a time, and which logits move",
    ),
    Fault(
        ("pattern.recycle",),
        "later steps read the target's features again instead of the draft's own output",
        "own",
        "one token and one feature in every slot: such a step returns what an earlier one did",
    ),
    Fault(
        ("pattern.cache",),
        "the step-1 keys are cut back by one slot at every further step, or earlier steps' own keys are lost",
        "SpecForge #244, #245; EAGLE #247; AngelSlim #170",
        "features so large that keys are the only way on which a token arrives at full size",
    ),
    Fault(
        ("pattern.step_losses", "pattern.mask", "pattern.empty_steps"),
        "target or mask stay behind or run ahead of the slot, or a step without supervision is NaN",
        "SpecForge #885, #895; Automodel #2464; speculators",
        "a ragged mask and another target in every slot; a mask of the first slots only",
    ),
    Fault(
        ("pattern.total_loss",),
        "step weights begin at the wrong power, or are normalised where declared as they are",
        "EAGLE, SpecForge, AutoModel and speculators weight differently",
        "seven step losses that differ",
    ),
    Fault(
        ("pattern.d_features",),
        "a step detached from the one before, or the gradient of one step only",
        "SpecForge #879; Automodel #3140",
        "difference quotients of the total loss along the gradient itself and a random direction",
    ),
    Fault(
        ("hybrid_loss.*",),
        "the weight of the hybrid is not detached, or the mean's where declared as each slot's",
        "SpecForge 4e9b1e4a; Automodel #3032",
        "slots of very different overlap; the gradient with the weight held",
    ),
    Fault(
        ("kl_loss.*", "reverse_kl_loss.*", "js_loss.*", "hybrid_loss.*"),
        "the divergence runs the other way, or is given probabilities for log-probabilities",
        "ProDA #20, #43; aprender #2153",
        "laws that differ much, so that both directions do",
    ),
    Fault(
        ("soft_ce_loss.*", "hybrid_loss.*", "kl_loss.*"),
        "the mean is divided once more, or taken over other slots than declared",
        "easydistill #16; EAGLE #340; SpecForge #705",
        "every third slot outside the mask",
    ),
    Fault(
        ("kl_loss.*", "reverse_kl_loss.*", "js_loss.*", "soft_ce_loss.*"),
        "the logarithm of a probability that has vanished",
        "own",
        "disjoint peaks, 200 above the rest in the extreme case",
    ),
    Fault(
        ("tv_loss.*",),
        "the sum of absolute differences without the half, or a sign of its own in the gradient",
        "own",
        "slots that are equal, and equal in half of their tokens",
    ),
    Fault(
        ("*.frozen",),
        "what is frozen is trained all the same",
        "speculators #593; Automodel #2369; SpecForge #212",
        "every gradient that was returned is looked at",
    ),
)


def hunted(stage: str, quantity: str) -> list[Fault]:
    """The faults that this check is there for."""
    name = f"{stage}.{quantity}"
    return [fault for fault in FAULTS if any(fnmatchcase(name, pattern) for pattern in fault.where)]
