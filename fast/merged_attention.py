"""Attention over step-1 keys by a flash kernel, and over own-step keys merged in through the log-sum-exp.

A slot of step k sees the step-1 keys up to itself, and k - 1 keys of its own. The first part is plain causal attention,
for which fast kernels exist; they also return the log-sum-exp L1 of their scores. With s_i the own scores,

    L = log(e^L1 + sum_i e^s_i)      o = e^(L1 - L) o1 + sum_i e^(s_i - L) v_i

is the one softmax over all of them, without a map of T x (T + k - 1). Its gradient needs no derivative of L1: the
probabilities of the causal part are e^(S - L), so the kernel's own backward, handed L and o instead of L1 and o1, gives
exactly the gradients of the merged softmax for the causal part, and the own terms are k - 1 products a slot.
"""

import torch
from torch import Tensor

from .ops import wide
from .pointwise import row_blocks

QUERY_BLOCK = 128  # slots of a block where no kernel returns the log-sum-exp: memory is H x this x T
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention(query: Tensor, keys, values, documents: Tensor | None = None, dtype=None) -> Tensor:
    """``fast.attention.attention`` without a map: [B, T, H, dv] of query [B, T, H, D], keys and values k [B, T, H, .].

    Computed and returned in ``dtype``, the wide type when not given. Documents are runs of equal ids; a run of padding
    (-1) attends within itself, and nothing reads it.
    """
    dtype = dtype or wide(query.dtype)
    return _MergedAttention.apply(query, segments(documents), dtype, len(keys), *keys, *values)


def segments(documents: Tensor | None) -> list[tuple[slice, slice]]:
    """Rows and slots of every run of equal ids; all rows at once where the runs are the same. documents int [B, T]."""
    if documents is None:
        return [(slice(None), slice(None))]
    changed = torch.diff(documents, dim=1, prepend=documents[:, :1] - 1) != 0  # [B, T]
    length, starts = documents.shape[1], [row.nonzero().flatten().tolist() for row in changed.cpu()]
    if all(row == starts[0] for row in starts):
        return [(slice(None), slice(a, b)) for a, b in zip(starts[0], [*starts[0][1:], length], strict=True)]
    return [
        (slice(i, i + 1), slice(a, b))
        for i, row in enumerate(starts)
        for a, b in zip(row, [*row[1:], length], strict=True)
    ]


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, parts, dtype, count, *keys_and_values):
        keys, values = keys_and_values[:count], keys_and_values[count:]
        q, k, v = (x.to(dtype) for x in (query, keys[0], values[0]))
        output = q.new_empty(values[0].shape)  # [B, T, H, dv]
        lse = q.new_empty(query.shape[:-1], dtype=wide(dtype))  # [B, T, H]
        for at in parts:
            output[at], lse[at] = causal(q[at], k[at], v[at])
        for at in _blocks(query) if count > 1 else ():
            output[at], lse[at] = merge(
                output[at], lse[at], query[at], [x[at] for x in keys[1:]], [x[at] for x in values[1:]]
            )
        ctx.save_for_backward(query, output, lse, *keys_and_values)
        ctx.parts, ctx.dtype = parts, dtype
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_output):
        query, output, lse, *rest = ctx.saved_tensors
        keys, values = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        q, k, v = (x.to(ctx.dtype) for x in (query, keys[0], values[0]))
        d_query, d_key, d_value = (x.new_empty(x.shape) for x in (q, k, v))
        for at in ctx.parts:
            d_query[at], d_key[at], d_value[at] = causal_backward(
                d_output[at], q[at], k[at], v[at], output[at], lse[at]
            )
        d_keys, d_values = ([x.new_empty(x.shape) for x in own[1:]] for own in (keys, values))
        total = query.new_empty(query.shape) if d_keys else d_query.to(query.dtype)
        for at in _blocks(query) if d_keys else ():
            merged = d_output[at], query[at], output[at], lse[at]
            d_own = merge_backward(*merged, [x[at] for x in keys[1:]], [x[at] for x in values[1:]])
            total[at] = d_own[0].add_(d_query[at])
            for to, d in zip((*d_keys, *d_values), (*d_own[1], *d_own[2]), strict=True):
                to[at] = d
        first = d_key.to(query.dtype), d_value.to(query.dtype)
        return total, None, None, None, first[0], *d_keys, first[1], *d_values


def _blocks(query: Tensor) -> list[tuple[slice, slice]]:
    """Blocks of slots, few enough to stay in the cache. query [B, T, H, D]."""
    slots = row_blocks(query.shape[1], query.shape[0] * query.shape[2] * query.shape[3])
    return [(slice(None), block) for block in slots]


def merge(output: Tensor, lse: Tensor, query: Tensor, keys: list, values: list) -> tuple[Tensor, Tensor]:
    """Add own keys and values, k - 1 of [B, t, H, .], to a softmax known by its output and log-sum-exp [B, t, H]."""
    q, scale = query.to(lse.dtype), query.shape[-1] ** -0.5
    own = torch.stack([(q * key).sum(-1) for key in keys]).mul_(scale)  # [k-1, B, t, H]
    total = torch.logsumexp(torch.cat([lse.unsqueeze(0), own]), dim=0)
    merged = output.to(lse.dtype) * torch.exp(lse - total).unsqueeze(-1)
    for p, value in zip((own - total).exp_(), values, strict=True):
        merged.addcmul_(p.unsqueeze(-1), value.to(p.dtype))
    return merged, total


def merge_backward(d_output, query, output, lse, keys: list, values: list) -> tuple[Tensor, list, list]:
    """d_query, d_keys and d_values of the own terms, wide: with D = d_o . o, d_s = p (d_o . v - D)."""
    q, d_o, scale = query.to(lse.dtype), d_output.to(lse.dtype), query.shape[-1] ** -0.5
    dot = (d_o * output).sum(-1)  # [B, t, H]
    d_query, d_keys, d_values = torch.zeros_like(q), [], []
    for key, value in zip(keys, values, strict=True):
        p = torch.exp((q * key).sum(-1).mul_(scale).sub_(lse))
        d_score = ((d_o * value).sum(-1).sub_(dot)).mul_(p).mul_(scale).unsqueeze(-1)
        d_query.addcmul_(d_score, key.to(q.dtype))
        d_keys.append(d_score * q)
        d_values.append(p.unsqueeze(-1) * d_o)
    return d_query, d_keys, d_values


def has_flash(x: Tensor) -> bool:
    """Whether the kernel that returns the log-sum-exp is there. Elsewhere blocks of queries are used."""
    return x.device.type == "cpu"


def _padded(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention and its log-sum-exp. q, k [B, T, H, D], v [B, T, H, dv] -> [B, T, H, dv], [B, T, H] wide.

    The kernel wants keys and values of one width: the narrower is padded with zeros, which changes no product.
    """
    if not has_flash(q):
        return causal_in_blocks(q, k, v)
    width = max(q.shape[-1], v.shape[-1])
    heads_first = (_padded(x, width).transpose(1, 2) for x in (q, k, v))
    output, lse = FLASH(*heads_first, is_causal=True, scale=q.shape[-1] ** -0.5)
    return output.transpose(1, 2)[..., : v.shape[-1]], lse.transpose(1, 2)


def causal_backward(d_output, q, k, v, output, lse) -> tuple[Tensor, Tensor, Tensor]:
    """d_q, d_k, d_v of the causal part of a softmax whose output and log-sum-exp over everything are given."""
    if not has_flash(q):
        return causal_in_blocks_backward(d_output, q, k, v, output, lse)
    width = max(q.shape[-1], v.shape[-1])
    heads_first = [_padded(x, width).transpose(1, 2) for x in (d_output, q, k, v, output)]
    grads = FLASH_BACKWARD(*heads_first, lse.transpose(1, 2), 0.0, True, scale=q.shape[-1] ** -0.5)
    return tuple(g.transpose(1, 2)[..., : x.shape[-1]] for g, x in zip(grads, (q, k, v), strict=True))


def causal_in_blocks(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``causal`` in blocks of queries, on any device and in any type."""
    output, lse = q.new_empty(v.shape), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))
    for start in range(0, q.shape[1], QUERY_BLOCK):
        at = slice(start, min(start + QUERY_BLOCK, q.shape[1]))
        scores = _block_scores(q, k, at)  # [B, H, t, i]
        lse[:, at] = torch.logsumexp(scores, dim=-1).transpose(1, 2)
        probs = torch.exp(scores - lse[:, at].transpose(1, 2).unsqueeze(-1))
        output[:, at] = torch.einsum("bhts,bshv->bthv", probs, v[:, : at.stop].to(probs.dtype))
    return output, lse


def causal_in_blocks_backward(d_output, q, k, v, output, lse) -> tuple[Tensor, Tensor, Tensor]:
    compute, scale = lse.dtype, q.shape[-1] ** -0.5
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=compute) for x in (q, k, v))
    for start in range(0, q.shape[1], QUERY_BLOCK):
        at = slice(start, min(start + QUERY_BLOCK, q.shape[1]))
        seen, d_o = slice(0, at.stop), d_output[:, at].to(compute)
        probs = torch.exp(_block_scores(q, k, at) - lse[:, at].transpose(1, 2).unsqueeze(-1))
        d_probs = torch.einsum("bthv,bshv->bhts", d_o, v[:, seen].to(compute))
        dot = (d_o * output[:, at]).sum(-1).transpose(1, 2).unsqueeze(-1)  # [B, H, t, 1]
        d_scores = probs * (d_probs - dot) * scale
        d_q[:, at] = torch.einsum("bhts,bshd->bthd", d_scores, k[:, seen].to(compute))
        d_k[:, seen] += torch.einsum("bhts,bthd->bshd", d_scores, q[:, at].to(compute))
        d_v[:, seen] += torch.einsum("bhts,bthv->bshv", probs, d_o)
    return d_q, d_k, d_v


def _block_scores(q: Tensor, k: Tensor, at: slice) -> Tensor:
    """Scaled causal scores, wide, of the queries ``at`` with the keys up to the last of them. [B, H, t, at.stop]."""
    compute = wide(q.dtype)
    scores = torch.einsum("bthd,bshd->bhts", q[:, at].to(compute), k[:, : at.stop].to(compute))
    rows = torch.arange(at.start, at.stop, device=q.device).unsqueeze(-1)
    later = torch.arange(at.stop, device=q.device) > rows
    return scores.mul_(q.shape[-1] ** -0.5).masked_fill_(later, -torch.inf)
