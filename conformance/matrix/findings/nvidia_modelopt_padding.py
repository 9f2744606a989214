"""From step 2 on padding is attended: the attention mask that is given is part of the mask of step 1 only, and the
masks of later steps are made from the sequence length alone. A padding slot is attended by nothing (spec.md section 3);
it shows where padding comes before the tokens.
"""
# checks: pattern.tokens.stage[*] pattern.features.stage[*]
# adapters: conformance/adapters/modelopt_unroll.py:padded

import modelopt.torch.speculative as mtsp
import torch
from modelopt.torch.speculative.plugins.modeling_fakebase import FakeBaseConfig, FakeBaseModel

torch.manual_seed(0)
sizes = {"hidden_size": 32, "vocab_size": 20, "max_position_embeddings": 16, "num_attention_heads": 2,
         "num_key_value_heads": 2, "intermediate_size": 32}  # fmt: skip
draft = {**sizes, "num_hidden_layers": 1, "head_dim": 16, "draft_vocab_size": 20, "use_aux_hidden_state": True,
         "eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_last_layernorm": True, "has_lm_head": True,
         "attn_implementation": "eager"}  # fmt: skip
options = {"eagle_offline": True, "eagle_ttt_steps": 2, "eagle_use_torch_compile": False,
           "eagle_architecture_config": draft}  # fmt: skip
base = FakeBaseModel(FakeBaseConfig(num_hidden_layers=6, dtype=torch.float32, **sizes))
model = mtsp.convert(base, [("eagle", options)]).train()
hidden, target, losses = torch.randn(1, 8, 96), torch.randn(1, 8, 20), []
real = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])  # three positions of padding; only the last two are supervised
step = model._eagle_loss
model._eagle_loss = lambda *given: (losses.append(step(*given)[0].item()), step(*given))[1]
for x in (hidden, hidden + 9 * (torch.arange(8) == 0)[:, None]):  # other features at the first position of the padding
    model(
        input_ids=torch.ones_like(real), attention_mask=real, loss_mask=torch.arange(8)[None] > 5,
        base_model_outputs={"base_model_hidden_states": x[..., :32], "aux_hidden_states": x,
                            "base_model_logits": target},
    )  # fmt: skip
print(f"other features in the padding move the losses of steps 1 and 2 by {losses[2] - losses[0]:.2g} and "
      f"{losses[3] - losses[1]:.2g}; wanted 0 and 0")  # fmt: skip
raise SystemExit(losses[3] == losses[1])
