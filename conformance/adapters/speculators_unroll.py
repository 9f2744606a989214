"""speculators' EAGLE-3 draft (Llama layers, rotary attention) in its training step, as ``pattern``.

The trainer takes slot-aligned arrays and one row; it shifts tokens, targets and mask itself. Its targets are
``verifier_lm_head(verifier_norm(h))``; both modules are replaced by the identity here, so that logits can be handed in.
``adapter`` has the loss ``nla`` and the trainer's default step decay 1.0; ``kl`` has ``kl_div`` and 0.8, ``tv`` has
``tv``, all with the eager implementations. A step's own loss is that of a run without decay.

Install: ``make peers`` (the package's own pins conflict with the others', so it is installed with --no-deps).
"""

import os
from importlib.metadata import version

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import torch
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    from ..torch_helper import DTYPES, own_weights, pattern_answer
except ImportError as error:
    raise ImportError(
        f"The adapter speculators_unroll needs the package speculators ({error}). Install it with `make peers` and add "
        "`--adapter-python .venv-peers`, or: pip install torch==2.13.0 && "
        "pip install --no-deps -r requirements/peers.txt"
    ) from error


FEATURES = ("low", "mid", "high")
LOSSES = {"nla": "lk", "kl_div": "kl", "tv": "tv"}


class SpeculatorsUnroll:
    protocol = 1

    def __init__(self, loss: str = "nla", decay: float = 1.0, documents: bool = False):
        self.loss, self.decay, self.documents = loss, decay, documents

    def describe(self) -> dict:
        policies = {
            name: {"storage": name, "accumulate": "float32", "logits": name} for name in ("float32", "bfloat16")
        }
        return {
            "name": f"speculators, Eagle3DraftModel, {self.loss}",
            "version": version("speculators"),
            "url": "https://github.com/vllm-project/speculators",
            "formats": policies["float32"],
            "policies": policies,
            "layouts": ["eagle3"],
            "pattern": {
                "loss": LOSSES[self.loss],
                "step_weights": [self.decay**i for i in range(7)],
                "denominator": "supervised",
                "epsilon": 1e-5,
                "batch": 1,
                "documents": self.documents,
            },
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.dtype, self.steps, vocabulary = DTYPES[formats["storage"]], config["num_steps"], config["vocab_size"]
        layer = LlamaConfig(
            vocab_size=vocabulary, hidden_size=config["hidden_size"], intermediate_size=config["intermediate_size"],
            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=20, max_position_embeddings=64,
            attn_implementation="eager",
        )  # fmt: skip
        proposal = GreedyTokenProposalConfig(speculative_tokens=self.steps)
        verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
        self.model = Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                transformer_layer_config=layer, draft_vocab_size=vocabulary, eagle_aux_hidden_state_layer_ids=[0, 1, 2],
                speculators_config=SpeculatorsConfig(algorithm="eagle3", proposal_methods=[proposal],
                                                     default_proposal_method="greedy", verifier=verifier),
            )
        ).to(self.dtype)  # fmt: skip
        self.model.verifier_norm, self.model.verifier_lm_head = torch.nn.Identity(), torch.nn.Identity()
        own_weights(self.model)

    def pattern(self, inputs, *, cotangents=None, forced=None) -> tuple:
        features = {n: torch.tensor(inputs[n], dtype=self.dtype).requires_grad_(bool(cotangents)) for n in FEATURES}
        logits, total, metrics = self._run(inputs, features, self.decay)
        if self.decay != 1:
            metrics = self._run(inputs, features, 1.0)[2]
        steps = [metrics[f"loss_{step}_sum"] for step in range(self.steps)]
        return pattern_answer(logits, steps, total, features, cotangents)

    def _run(self, inputs, features: dict, decay: float) -> tuple:
        tokens, logits = torch.tensor(inputs["tokens"], dtype=torch.long), []
        documents = torch.tensor(inputs["documents"], dtype=torch.long) if "documents" in inputs else 0 * tokens
        mask = torch.tensor(inputs["mask"])
        if "documents" in inputs:  # the package packs documents without their last slot, which has no target
            mask[:, :-1] &= documents[:, :-1] == documents[:, 1:]
        hook = self.model.lm_head.register_forward_hook(lambda _, args, output: logits.append(output.detach().clone()))
        try:
            _, loss, metrics = self.model(
                torch.cat(list(features.values()), -1), tokens, documents, loss_mask=mask,
                verifier_last_hidden_states=torch.tensor(inputs["target_logits"], dtype=self.dtype),
                ttt_steps=self.steps, ttt_step_loss_decay=decay, loss_config=resolve_loss_config(self.loss, "eager"),
            )  # fmt: skip
        finally:
            hook.remove()
        return logits, loss, metrics


adapter = SpeculatorsUnroll()
kl = SpeculatorsUnroll("kl_div", 0.8)
tv = SpeculatorsUnroll("tv")
packed = SpeculatorsUnroll(documents=True)
