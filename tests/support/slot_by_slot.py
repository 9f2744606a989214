"""The forward step of spec.md written a second time: one slot, one head, one expert, one token at a time.

Nothing of ``reference`` computes here; only sizes and choices are read from it. Slow and literal on purpose. Slots are
those of one row; a position of the raw sequence never appears, as the inputs are aligned already.
"""

from collections import defaultdict

import numpy as np
from helpers import EMAX, GRIDS, SIGNIFICANT_BITS


def rms_norm(x, w, eps):
    return w * x / np.sqrt(np.sum(x**2) / len(x) + eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_softmax(x):
    return x - np.log(np.sum(np.exp(x)))


def bfloat16(x):
    """float32 bits with the lower half rounded off, half to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(float)


def on_grid(x, form, ch):
    """dequantise(quantise(x)), block by block and value by value, by looking for the nearest grid value."""
    x = bfloat16(x) if ch.quantize_source == "bfloat16" else x
    grid = [float(v) for v in GRIDS[form]]
    out = np.zeros_like(x)
    for start in range(0, x.shape[-1], 32):
        block = x[..., start : start + 32]
        amax = np.max(np.abs(block), axis=-1, keepdims=True)
        exponent = np.vectorize(lambda a: scale_exponent(a, form, ch.mx_scale_rule) if a else 0)(amax)
        scaled = np.abs(block) / 2.0**exponent
        distance = np.abs(scaled[..., None] - grid)
        first = np.argmin(distance, axis=-1)  # the lower of two equally near ones
        last = len(grid) - 1 - np.argmin(distance[..., ::-1], axis=-1)
        nearest = np.where(first % 2 == 0, first, last)  # an even code wins a tie
        out[..., start : start + 32] = np.copysign(np.array(grid)[nearest] * 2.0**exponent, block)
    return out


def scale_exponent(amax, form, rule):
    """In float64, whose logarithm is exact enough for values that are not within 1e-13 of a power of two."""
    emax, bits = EMAX[form], SIGNIFICANT_BITS[form]
    if rule == "floor":
        return int(np.floor(np.log2(amax))) - emax
    if rule == "ceil":
        return int(np.ceil(np.log2(amax))) - emax
    if rule == "rceil":
        return int(np.ceil(np.log2(amax / float(GRIDS[form][-1]))))
    unit = 2.0 ** (np.floor(np.log2(amax)) - bits + 1)
    return int(np.floor(np.log2(np.round(amax / unit) * unit))) - emax


class Row:
    """One row of slots through all steps."""

    def __init__(self, params, inputs, row, config, choices):
        self.p, self.c, self.ch = params, config, choices
        self.inputs, self.row, self.slots = inputs, row, inputs["tokens"].shape[1]
        documents = inputs.get("documents")
        self.bounded = documents is not None
        self.documents = documents[row] if self.bounded else np.zeros(self.slots, int)
        self.ids = inputs["draft_to_target"] if choices.head == "reduced" else np.arange(config.vocab_size)
        self.keys, self.values = defaultdict(list), defaultdict(list)  # by slot, one a step; by head inside

    def exists(self, j, k):
        """Whether slot j may read the token and the target of step k: those of its own document."""
        if not self.bounded:
            return j + k - 1 < self.slots
        return j + k < self.slots and self.documents[j] == self.documents[j + k] >= 0

    def token(self, j, k, logits_before):
        if self.ch.token_source == "own" and k > 1:
            return self.ids[np.argmax(logits_before)]
        if not self.exists(j, k):
            return 0
        if self.ch.token_source == "given":
            return self.inputs["tokens_by_step"][k - 1, self.row, j]
        return self.inputs["tokens"][self.row, j + k - 1]

    def embedding(self, j, k, token):
        first = j == 0 or self.documents[j - 1] != self.documents[j]
        if self.ch.zero_first_embedding and k == 1 and first:
            return np.zeros(self.c.hidden_size)
        return self.p["embed_tokens.weight"][token]

    def fused(self, j):
        chunks = [self.inputs[name][self.row, j] for name in ("low", "mid", "high")]
        eps = self.c.rms_norm_eps
        if self.ch.feature_norm == "per_chunk":
            chunks = [rms_norm(x, self.p[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(chunks)]
        joined = np.concatenate(chunks)
        if self.ch.feature_norm == "joint":
            joined = rms_norm(joined, self.p["fc_norm.weight"], eps)
        return self.p["fc.weight"] @ joined

    def layer(self, j, k, token, feature):
        """Step k of slot j; its key and value of this step, and the earlier ones it may see, are there already."""
        p, eps = self.p, self.c.rms_norm_eps
        x0, a = self.read(j, k, token, feature)
        residual = feature if self.ch.draft_input == "eagle3" else x0
        x1 = residual + p["self_attn.o_proj.weight"] @ self.attend(j, k, a)
        h = rms_norm(x1, p["post_attention_layernorm.weight"], eps)
        if self.ch.draft_input == "eagle3":
            return x1 + self.glu_mlp(h, "mlp.")
        moe = "block_sparse_moe."
        latent = rms_norm(self.experts(h), p[moe + "routed_expert_norm.weight"], eps)
        return x1 + self.glu_mlp(h, moe + "shared_experts.") + p[moe + "routed_expert_up_proj.weight"] @ latent

    def read(self, j, k, token, feature):
        """x0 and a, the input of the attention."""
        p, eps = self.p, self.c.rms_norm_eps
        e = rms_norm(self.embedding(j, k, token), p["enorm.weight"], eps)
        f = rms_norm(feature, p["hnorm.weight"], eps)
        if self.ch.draft_input == "eagle3":
            return None, np.concatenate([e, f])
        x0 = p["eh_proj.weight"][:, : len(e)] @ e + p["eh_proj.weight"][:, len(e) :] @ f
        return x0, rms_norm(x0, p["input_layernorm.weight"], eps)

    def remember(self, j, a):
        """Append the slot's key and value of this step, one per head."""
        p, c = self.p, self.c
        both = p["self_attn.kv_a_proj_with_mqa.weight"] @ a
        latent, shared = both[: c.kv_lora_rank], both[c.kv_lora_rank :]
        latent = rms_norm(latent, p["self_attn.kv_a_layernorm.weight"], self.ch.latent_norm_eps)
        per_head = (p["self_attn.kv_b_proj.weight"] @ latent).reshape(c.num_attention_heads, -1)
        self.keys[j].append([np.concatenate([kv[: c.qk_nope_head_dim], shared]) for kv in per_head])
        self.values[j].append([kv[c.qk_nope_head_dim :] for kv in per_head])

    def attend(self, j, k, a):
        p, c = self.p, self.c
        latent = p["self_attn.q_a_proj.weight"] @ a
        latent = rms_norm(latent, p["self_attn.q_a_layernorm.weight"], self.ch.latent_norm_eps)
        query = (p["self_attn.q_b_proj.weight"] @ latent).reshape(c.num_attention_heads, -1)
        seen = [(i, 0) for i in range(j + 1) if self.documents[i] == self.documents[j]]
        seen += [(j, step) for step in range(1, k)]
        heads = []
        for head, q in enumerate(query):
            scores = np.array([q @ self.keys[i][s][head] for i, s in seen]) / np.sqrt(len(q))
            weights = np.exp(log_softmax(scores))
            heads.append(sum(w * self.values[i][s][head] for w, (i, s) in zip(weights, seen, strict=True)))
        return sigmoid(p["self_attn.g_proj.weight"] @ a) * np.concatenate(heads)

    def situ(self, gate, up):
        b1, b2 = self.c.activation_situ_beta, self.c.activation_situ_linear_beta
        return b1 * np.tanh(gate / b1) * sigmoid(gate) * b2 * np.tanh(up / b2)

    def glu_mlp(self, h, prefix):
        gate, up, down = (self.p[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ self.situ(gate @ h, up @ h)

    def experts(self, h):
        p, c, ch, moe = self.p, self.c, self.ch, "block_sparse_moe."
        scores = sigmoid(p[moe + "gate.weight"] @ h)
        ranked = sorted(range(c.num_experts), key=lambda e: (-(scores + p[moe + "gate.e_score_correction_bias"])[e], e))
        chosen = ranked[: c.num_experts_per_token]
        total = sum(scores[e] for e in chosen) + ch.renormalize_epsilon
        fp8 = f"mxfp8_{ch.mxfp8_element}"
        z = on_grid(p[moe + "routed_expert_down_proj.weight"] @ h, fp8, ch)
        combined = np.zeros(c.routed_expert_hidden_size)
        for e in chosen:
            w1, w2, w3 = (self.expert_weight(e, w) for w in ("w1", "w2", "w3"))
            weight = scores[e] / total * c.routed_scaling_factor
            hidden = self.situ(w1 @ z, w3 @ z)
            if ch.routing_weight == "before_down":
                hidden, weight = hidden * weight, 1.0
            combined += weight * (w2 @ (on_grid(hidden, fp8, ch) if ch.quantize_hidden else hidden))
        return combined

    def expert_weight(self, e, w):
        name = f"block_sparse_moe.experts.{e}.{w}.weight"
        if ("on grid", name) not in self.p:
            self.p["on grid", name] = on_grid(self.p[name], "mxfp4", self.ch)
        return self.p["on grid", name]

    def loss(self, j, k, logits):
        at = j if self.ch.target_alignment == "fixed" else j + k - 1
        target = self.inputs["target_logits"][self.row, at] if self.exists(j, k) else np.zeros(self.c.vocab_size)
        if self.ch.reduced_target == "renormalized":
            p = np.exp(log_softmax(target[self.ids]))
        else:
            p = np.exp(log_softmax(target))[self.ids]
        return -np.log(np.sum(np.minimum(p, np.exp(log_softmax(logits)))))

    def supervised(self, j, k):
        if not self.exists(j, k) or not self.inputs["mask"][self.row, j + k - 1]:
            return False
        if self.ch.reduced_supervision == "all":
            return True
        at = j if self.ch.target_alignment == "fixed" else j + k - 1
        return np.argmax(self.inputs["target_logits"][self.row, at]) in self.ids

    def run(self):
        """logits [K, T, V], features [K, T, d], losses and supervision [K, T]; padding slots are left out (zero)."""
        c, shape = self.c, (self.c.num_steps, self.slots)
        logits, features = np.zeros((*shape, c.draft_vocab_size)), np.zeros((*shape, c.hidden_size))
        losses, supervised = np.zeros(shape), np.zeros(shape, bool)
        alive = [j for j in range(self.slots) if self.documents[j] >= 0]
        recycled = {j: self.fused(j) for j in alive}
        for k in range(1, c.num_steps + 1):
            tokens = {j: self.token(j, k, logits[k - 2, j]) for j in alive}
            for j in alive:
                self.remember(j, self.read(j, k, tokens[j], recycled[j])[1])
            for j in alive:
                feature = features[k - 1, j] = self.layer(j, k, tokens[j], recycled[j])
                normed = rms_norm(feature, self.p["shared_head.norm.weight"], c.rms_norm_eps)
                logits[k - 1, j] = self.p["shared_head.head.weight"] @ normed
                losses[k - 1, j], supervised[k - 1, j] = self.loss(j, k, logits[k - 1, j]), self.supervised(j, k)
                recycled[j] = normed if self.ch.recycled_feature == "post_norm" else feature
        return logits, features, losses, supervised


def slot_by_slot(params, inputs, config, choices) -> dict:
    """logits [K, B, T, V], features [K, B, T, d], slot_losses and supervised [K, B, T], step_losses [K], total_loss."""
    rows = [Row(dict(params), inputs, row, config, choices).run() for row in range(len(inputs["tokens"]))]
    logits, features, losses, supervised = (np.stack(parts, axis=1) for parts in zip(*rows, strict=True))
    count = supervised.sum(axis=(1, 2)) if choices.reduction == "supervised" else np.full(len(logits), losses[0].size)
    step_losses = (losses * supervised).sum(axis=(1, 2)) / np.maximum(count, 1)
    weights = {
        "uniform": [1 / config.num_steps] * config.num_steps,
        "decay": [0.8**k for k in range(config.num_steps)],
        "decay_normalized": [0.8**k * (1 - 0.8) / (1 - 0.8**config.num_steps) for k in range(config.num_steps)],
    }.get(choices.step_weights, choices.step_weights)
    return {
        "logits": logits, "features": features, "slot_losses": losses, "supervised": supervised,
        "step_losses": step_losses, "total_loss": np.dot(weights, step_losses),
    }  # fmt: skip
