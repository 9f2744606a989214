"""The loss of a slot stops at 11.51 and its gradient is 0 once the acceptance is below 1e-5, where it is clamped
before the logarithm: -log sum min(p, q) of report eq. 16 goes on, and so does its gradient.
"""
# checks: lk_loss.*

import torch
from speculators.losses.eager import neg_log_acceptance_loss

draft = torch.tensor([[[0.0, 20.0]]], requires_grad=True)
loss = neg_log_acceptance_loss(draft, torch.tensor([[[20.0, 0.0]]]))
loss.sum().backward()
print(f"[0,20] against [20,0]: loss {loss.item():.2f}, gradient {draft.grad[0, 0].tolist()}; wanted 19.31, [-0.5, 0.5]")
raise SystemExit(loss.item() > 12)
