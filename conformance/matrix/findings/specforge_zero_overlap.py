"""A slot whose distributions do not overlap in float32 gets loss 0, and NaN gradients for the whole batch: the log of
its acceptance is replaced by 0 behind the logarithm, whose derivative at 0 is infinite; -log sum min(p, q) of report
eq. 16 is large there and has a gradient.
"""
# checks: lk_loss.*[*-extreme]

import torch
from specforge.core.lk_loss import compute_acceptance_rate, compute_lk_loss

draft = torch.tensor([[[0.0, 200.0], [1.0, 0.0]]], requires_grad=True)
target = torch.tensor([[[200.0, 0.0], [0.0, 1.0]]]).softmax(-1)
rate, log_rate = compute_acceptance_rate(logits=draft, target_probs=target, position_mask=torch.ones(1, 2, 1))
loss = compute_lk_loss(
    kl_loss=None, acceptance_rate=rate, log_acceptance_rate=log_rate, lk_loss_type="alpha", kl_scale=1.0, kl_decay=1.0
)
loss.backward()
print(f"[0,200] against [200,0]: gradient {draft.grad[0, 0].tolist()}, mean loss {loss.item():.3f} of two slots; "
      "wanted [-0.25, 0.25], 100.0")  # fmt: skip
raise SystemExit(not draft.grad.isnan().any())
