"""In a packed row the last slots of a document are supervised at step 2 and later by the targets of the next document:
align_for_step shifts targets and mask over the whole row; slot j of step k counts only where position j + k lies in
its document (spec.md section 3). Of two documents of three slots each step 2 has 2 + 2.
"""
# checks: pattern.step_losses.stage[*]
# adapters: conformance/adapters/speculators_unroll.py:packed

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

layer = LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=2, head_dim=8, attn_implementation="eager")  # fmt: skip
proposal = [GreedyTokenProposalConfig(speculative_tokens=2)]
verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
made = SpeculatorsConfig(
    algorithm="eagle3", proposal_methods=proposal, default_proposal_method="greedy", verifier=verifier
)
model = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=16,
                         eagle_aux_hidden_state_layer_ids=[0, 1, 2], speculators_config=made))  # fmt: skip
_, _, metrics = model(
    torch.randn(1, 6, 48), torch.zeros(1, 6, dtype=torch.long), torch.tensor([[0, 0, 0, 1, 1, 1]]),
    loss_mask=torch.ones(1, 6, dtype=torch.bool), verifier_last_hidden_states=torch.randn(1, 6, 16), ttt_steps=2,
    loss_config=resolve_loss_config("nla", "eager"),
)  # fmt: skip
counted = int(metrics["full_acc_1_total"])
print(f"two documents of three slots: step 2 supervises {counted} slots; wanted 4")
raise SystemExit(counted == 4)
