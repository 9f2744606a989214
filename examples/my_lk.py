"""An adapter in ten lines: it offers the LK loss alone. Run: pytest conformance/ --adapter examples/my_lk.py:MyLoss"""

import torch

from draftconf.torch_helper import TorchAdapter, stage


def my_loss(draft_logits, target_logits):
    draft, target = draft_logits.log_softmax(-1), target_logits.log_softmax(-1)
    return -torch.minimum(draft, target).logsumexp(-1)


class MyLoss(TorchAdapter):
    name = "my loss"
    formats = {"storage": "float32"}
    lk_loss = stage(
        lambda self, t, forced: {"loss": my_loss(t["draft_logits"], t["target_logits"])}, frozen=("target_logits",)
    )
