"""The target's probabilities do not add up to 1 where its logits are far from 0: exp(logit - logsumexp) rounds the
logsumexp to its own last place, 2^-10 at 10000, while adding a constant to all logits of a side changes nothing
(spec.md section 5).
"""
# checks: lk_loss.*[*-tame] lk_loss.*[*-harsh] lk_loss.*[*-corners]

import torch
from specforge.algorithms.eagle3.model import _compute_target_p

everything = torch.ones(2, dtype=torch.bool), torch.ones(1, 1, 1, dtype=torch.long)
target_p = _compute_target_p(torch.tensor([[[-10000.0, -10000.0]]]), *everything)[1].flatten()
print(f"target logits [-10000, -10000]: p = {target_p.tolist()}; wanted [0.5, 0.5]")
raise SystemExit(abs(target_p.sum().item() - 1) < 1e-5)
