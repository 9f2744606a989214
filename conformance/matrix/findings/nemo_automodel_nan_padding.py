"""NaN in a padding slot reaches the slots before it in its row: causal attention multiplies its value by a probability
of 0, the slot's acceptance becomes NaN and its loss 0, so the loss of the row vanishes and every gradient is NaN;
padding slots are masked and no value in them should matter.
"""
# checks: unroll.*.end[*-poisoned]

import torch
from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig
from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule
from nemo_automodel.components.speculative.eagle.draft_kimi_k3 import KimiK3Eagle3DraftModel

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "q_lora_rank": 16}
heads = {"num_attention_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
config = KimiK3TextConfig(**sizes, **heads)
config.draft_vocab_size, config.target_hidden_size = 32, 32
draft, vocabulary = KimiK3Eagle3DraftModel(config), torch.arange(32)
choice = {"selected_token_ids": vocabulary, "selected_token_mask": vocabulary >= 0, "lk_loss_type": "alpha"}
trainer = Eagle3TrainerModule(draft, **choice, ttt_steps=2)
tokens, mask = torch.zeros(1, 6, dtype=torch.long), torch.tensor([[1, 1, 1, 1, 0, 0]])
features, target, losses = torch.randn(1, 6, 96), torch.randn(1, 6, 32), []
for padding in (0.0, float("nan")):
    features[:, 4:] = padding
    losses.append(trainer(tokens, mask, mask, features, target).loss)
losses[1].backward()
finite = bool(draft.model.fc.weight.grad.isfinite().all())
print(f"loss {losses[0].item():.3g} with 0 in the padding, {losses[1].item():.3g} with NaN; gradient finite: {finite}")
raise SystemExit(finite and losses[0].item() == losses[1].item())
