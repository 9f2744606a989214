"""What the layer reads: the token's embedding and the feature, fused from the target's three at step 1.

Report section 4.1.4 (W_E3, initialised [0 0 I]); spec.md section 4, stages ``embed``, ``fusion``, ``draft_input``.
"""

import numpy as np

from .config import Choices
from .ops import Op, linear, linear_backward, no_gradient, rms_norm, rms_norm_backward


def embed(tokens, table, zeroed=None):
    """table[tokens]; zero where ``zeroed`` is true. tokens int [B, T], table [V, d] -> [B, T, d]."""
    e = table[tokens]
    return e if zeroed is None else np.where(zeroed[..., None], 0.0, e)


EMBED = Op(embed, no_gradient)


def initial_fc(hidden_size: int) -> np.ndarray:
    """[0 0 I]: the fused feature starts as the high one (report 4.1.4). [d, 3 d]."""
    return np.concatenate([np.zeros((hidden_size, 2 * hidden_size)), np.eye(hidden_size)], axis=1)


def fusion(low, mid, high, fc):
    """f = W_E3 [low; mid; high]. Three [B, T, d] and [d, 3 d] -> [B, T, d]."""
    return linear(np.concatenate([low, mid, high], axis=-1), fc)


def fusion_backward(low, mid, high, fc, d_f):
    """That of the product, cut into its three thirds."""
    d_features, d_fc = linear_backward(np.concatenate([low, mid, high], axis=-1), fc, d_f)
    return *_thirds(d_features), d_fc


def _thirds(x) -> tuple:
    d = x.shape[-1] // 3
    return x[..., :d], x[..., d : 2 * d], x[..., 2 * d :]


def fusion_op(choices: Choices, eps: float) -> Op:
    """``fusion`` behind the feature norm that ``choices.feature_norm`` names; its weights follow ``fc``."""
    if choices.feature_norm == "none":
        return Op(fusion, lambda low, mid, high, fc, y, d_y: fusion_backward(low, mid, high, fc, d_y))
    if choices.feature_norm == "per_chunk":
        return Op(lambda *a: _normed_fusion(a[:3], a[3], a[4:], eps), lambda *a: _normed_backward(*_split(a), eps))
    joint = lambda a: ((np.concatenate(a[:3], axis=-1),), a[3], a[4:5])  # noqa: E731
    return Op(lambda *a: _normed_fusion(*joint(a), eps), lambda *a: _joint_backward(joint(a), a[-1], eps))


def _split(a):
    return a[:3], a[3], a[4:-2], a[-1]


def _normed_fusion(chunks, fc, weights, eps):
    normed = [rms_norm(x, w, eps) for x, w in zip(chunks, weights, strict=True)]
    return linear(np.concatenate(normed, axis=-1), fc)


def _normed_backward(chunks, fc, weights, d_y, eps):
    """Through the product, then through each chunk's own norm."""
    normed = [rms_norm(x, w, eps) for x, w in zip(chunks, weights, strict=True)]
    d_normed, d_fc = linear_backward(np.concatenate(normed, axis=-1), fc, d_y)
    pieces = _thirds(d_normed) if len(chunks) == 3 else (d_normed,)
    pairs = [rms_norm_backward(x, w, eps, d) for x, w, d in zip(chunks, weights, pieces, strict=True)]
    return *(d_x for d_x, _ in pairs), d_fc, *(d_w for _, d_w in pairs)


def _joint_backward(arguments, d_y, eps):
    d_features, d_fc, d_w = _normed_backward(*arguments, d_y, eps)
    return *_thirds(d_features), d_fc, d_w


def feature_norm_names(choices: Choices) -> tuple[str, ...]:
    return {
        "none": (),
        "per_chunk": tuple(f"fc_norm.{i}.weight" for i in range(3)),
        "joint": ("fc_norm.weight",),
    }[choices.feature_norm]


def concatenated(e, f):
    """[e; f], the layer's input in layout eagle3. Two [B, T, d] -> [B, T, 2 d]."""
    return np.concatenate([e, f], axis=-1)


def concatenated_backward(e, f, y, d_y):
    d = e.shape[-1]
    return d_y[..., :d], d_y[..., d:]


def projected(e, f, eh_proj):
    """eh_proj [e; f], the layer's input in layout mtp: columns 0..d read the embedding. -> [B, T, d]."""
    return linear(concatenated(e, f), eh_proj)


def projected_backward(e, f, eh_proj, y, d_y):
    d_both, d_weight = linear_backward(concatenated(e, f), eh_proj, d_y)
    return *concatenated_backward(e, f, y, d_both), d_weight


def draft_input_op(choices: Choices) -> Op:
    eagle3 = choices.draft_input == "eagle3"
    return Op(concatenated, concatenated_backward) if eagle3 else Op(projected, projected_backward)
