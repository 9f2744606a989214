"""The laws do not add up to 1 where the logits are far from 0: exp(logit - logsumexp) rounds the logsumexp to its own
last place, 2^-10 at 10000 and 2^-19 at 20, while adding a constant to all logits of a side changes no law.
"""
# checks: tv_loss.*

import torch
from liger_kernel.transformers.fused_ce_tvd import LigerFusedCETVDLoss

draft, target = torch.tensor([[0.0, 3.0]]), torch.tensor([[0.0, 1.0]])
label = torch.zeros(1, dtype=torch.long)
near, far = (LigerFusedCETVDLoss()(draft + c, target - c, label)[1].item() for c in (0, 1e4))
print(
    f"draft logits [0, 3], target logits [0, 1]: {near:.7f}; with 10000 added to one and taken from the other {far:.7f}"
)
raise SystemExit(abs(near - far) < 1e-5)
