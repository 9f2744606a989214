"""The draft layer's input: token embedding, the fused target feature, and their join (spec.md section 4)."""

import torch
from torch import Tensor

from .ops import keep, linear, rms_norm


def embed(tokens: Tensor, table: Tensor, zero: Tensor | None = None) -> Tensor:
    """Rows of the table [V, d], zero where the bool ``zero`` [B, T] says so. tokens [B, T] -> [B, T, d]."""
    e = torch.nn.functional.embedding(tokens, table)  # [B, T, d]
    return e if zero is None else torch.where(zero.unsqueeze(-1), 0, e)


def first_slots(tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """Whether a slot is the first of its document, bool [B, T]; padding (-1) is no document."""
    if documents is None:
        documents = torch.zeros_like(tokens)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return first & (documents != -1)


def fusion(low: Tensor, mid: Tensor, high: Tensor, params: dict, config, choices) -> Tensor:
    """fc [low; mid; high] (report section 4.1.4), the parts normed first as ``feature_norm`` says. All [..., d]."""
    eps = config.rms_norm_eps
    parts = [low, mid, high]
    if choices.feature_norm == "per_chunk":
        parts = [rms_norm(part, params[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)]
    joined = torch.cat(parts, dim=-1)  # [..., 3d]
    if choices.feature_norm == "joint":
        joined = rms_norm(joined, params["fc_norm.weight"], eps)
    return linear(joined, params["fc.weight"])


def draft_input(embedding: Tensor, feature: Tensor, params: dict, config, choices, record=keep) -> Tensor:
    """eh_proj [RMSNorm(e); RMSNorm(f)], [..., d]; in layout eagle3 the join itself, [..., 2d]."""
    e = record("draft_input.enorm", rms_norm(embedding, params["enorm.weight"], config.rms_norm_eps))
    f = record("draft_input.hnorm", rms_norm(feature, params["hnorm.weight"], config.rms_norm_eps))
    joined = torch.cat([e, f], dim=-1)  # [..., 2d]
    x = joined if choices.draft_input == "eagle3" else linear(joined, params["eh_proj.weight"])
    return record("draft_input", x)
