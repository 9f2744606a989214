"""A slot whose distributions hardly overlap gets loss 0 and gradient 0, as if it were perfect: where the acceptance
underflows in float32 its log is replaced by 0, which the docstring of _lk_step_loss says; -log sum min(p, q) of
report eq. 16 is large there and has a gradient.
"""
# checks: lk_loss.* logits.cotangent.trace[*-extreme]

from types import SimpleNamespace

import torch
from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule

draft = torch.tensor([[[0.0, 200.0]]], requires_grad=True)
target = torch.tensor([[[200.0, 0.0]]]).softmax(-1)
trainer = SimpleNamespace(lk_loss_type="alpha", cp_group=None)
loss = Eagle3TrainerModule._lk_step_loss(trainer, draft, target, torch.ones(1, 1, 1, dtype=torch.bool))
loss.backward()
print(
    f"[0,200] against [200,0]: loss {loss.item()}, gradient {draft.grad.flatten().tolist()}; wanted 199.3, [-0.5, 0.5]"
)
raise SystemExit(loss.item() > 1)
