"""Documents as NeMo AutoModel's EAGLE-3 trainer takes them: lengths of runs, what is left of each, an additive mask."""

import numpy as np
import torch

from ._nemo_parts import draft_deepseek


def packing(documents) -> dict:
    """The trainer's description of packed rows; nothing for one document a row."""
    if documents is None:
        return {}
    slots = np.arange(documents.shape[1])
    starts = np.diff(documents, axis=1, prepend=documents[:, :1] - 1) != 0
    lengths = [np.diff(np.append(np.flatnonzero(row), row.size)) for row in starts]
    ends = np.stack([np.repeat(np.cumsum(row), row) for row in lengths])  # [B,T] one past the slot's document
    seq_lens = np.zeros((len(lengths), max(map(len, lengths))), np.int64)
    for packed, row in zip(seq_lens, lengths, strict=True):
        packed[: len(row)] = row
    remaining = np.where(documents < 0, 0, ends - 1 - slots)
    position = slots - np.maximum.accumulate(np.where(starts, slots, 0), axis=1)
    arrays = {"seq_lens": seq_lens, "doc_remaining": remaining, "position_ids": position}
    return {name: torch.tensor(values) for name, values in arrays.items()}


def draft_mask(x, documents):
    """The additive mask that the draft builds: causal, or causal within documents."""
    if documents is None:
        return draft_deepseek._build_causal_mask(torch.ones(x.shape[:2], dtype=torch.long), x.dtype)
    return draft_deepseek.build_block_causal_additive_mask(
        packing(documents)["seq_lens"], seq_length=x.shape[1], dtype=x.dtype, device=x.device
    )
