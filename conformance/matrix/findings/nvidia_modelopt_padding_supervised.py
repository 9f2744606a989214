"""Slots of padding before the tokens are supervised by the first tokens: the loss mask is looked up at the target's
position only, while a padding slot is supervised at no step (spec.md section 3). Such a slot attends all slots alike,
later ones too, since its scores vanish beside the mask's largest negative number; backward they get a gradient.
"""
# checks: pattern.step_losses.stage[*] pattern.d_features.stage[*]
# adapters: conformance/adapters/modelopt_unroll.py:padded

import modelopt.torch.speculative as mtsp
import torch
from modelopt.torch.speculative.plugins.modeling_fakebase import FakeBaseConfig, FakeBaseModel

sizes = {"hidden_size": 32, "vocab_size": 20, "max_position_embeddings": 16, "num_attention_heads": 2,
         "num_key_value_heads": 2, "intermediate_size": 32}  # fmt: skip
draft = {**sizes, "num_hidden_layers": 1, "head_dim": 16, "draft_vocab_size": 20, "use_aux_hidden_state": True,
         "eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_last_layernorm": True, "has_lm_head": True,
         "attn_implementation": "eager"}  # fmt: skip
options = {"eagle_offline": True, "eagle_ttt_steps": 2, "eagle_use_torch_compile": False,
           "eagle_architecture_config": draft}  # fmt: skip
base = FakeBaseModel(FakeBaseConfig(num_hidden_layers=6, dtype=torch.float32, **sizes))
model, counted = mtsp.convert(base, [("eagle", options)]).train(), []
real = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])  # three positions of padding, five tokens
step = model._eagle_loss
model._eagle_loss = lambda *given: (counted.append(int(given[3].sum())), step(*given))[1]
hidden, target = torch.randn(1, 8, 96), torch.randn(1, 8, 20)
model(
    input_ids=torch.ones_like(real), attention_mask=real,
    base_model_outputs={"base_model_hidden_states": hidden[..., :32], "aux_hidden_states": hidden,
                        "base_model_logits": target},
)  # fmt: skip
print(f"steps 1 and 2 supervise {counted[0]} and {counted[1]} slots; wanted 4 and 3")
raise SystemExit(counted == [4, 3])
