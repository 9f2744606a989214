"""NeMo AutoModel's EAGLE-3 trainer around its Kimi K3 draft.

Install: ``make peers`` (the package's own pins conflict with the others', so it is installed with --no-deps).

``unroll`` is ``Eagle3TrainerModule(lk_loss_type="alpha")`` on ``KimiK3Eagle3DraftModel``. The trainer takes every array
aligned for step 1, as the protocol hands them over, and shifts tokens, targets and mask itself, so nothing is shifted
here. Documents go in as its packing: ``seq_lens`` is the length of each run of equal ids, ``doc_remaining`` the number
of slots left in the slot's document. Padding becomes a document of its own with 0 left; its contents are passed on as
they are.

The experts compute without fake quantisation, hence ``quantized`` False. ``adapter`` is the draft (layout eagle3),
``backbone`` that of nemo_automodel_backbone.py.
"""

import numpy as np
import torch

from ..torch_helper import stage, to_tensor
from ._kimi_k3 import by_module
from ._nemo_losses import Losses
from ._nemo_packing import draft_mask, packing
from ._nemo_parts import core, draft_kimi_k3, refuse
from ._nemo_recorder import LAYER, Recorder, array
from .nemo_automodel_backbone import adapter as backbone

__all__ = ["adapter", "backbone"]


class Draft(Losses):
    """The EAGLE-3 trainer and its K3 draft."""

    choices = {"head": "own", "step_weights": "decay_normalized", "renormalize_epsilon": 1e-20}
    layouts = ["eagle3"]

    def unroll(self, inputs, *, cotangents=None, forced=None) -> tuple:
        refuse(forced)
        trainer = self._trainer(inputs)
        recorder = Recorder()
        recorder.attach(trainer.draft_model)
        tokens = torch.tensor(inputs["tokens"], dtype=torch.long)
        with recorder.listening():
            loss = trainer(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                loss_mask=torch.tensor(inputs["mask"]),
                aux_hidden_states=torch.cat([self.tensor(inputs[name]) for name in ("low", "mid", "high")], -1),
                target_logits=self.tensor(inputs["target_logits"]),
                **packing(inputs.get("documents")),
            ).loss
        trace, grads = recorder.values(), {}
        slot_losses = [trace[f"{step}/lk_loss"] for step in range(1, recorder.step + 1)]
        outputs = {
            "total_loss": array(loss),
            "step_losses": np.stack(recorder.step_losses),
            "slot_losses": np.stack(slot_losses),
        }
        if cotangents is not None:
            loss.backward(torch.tensor(cotangents["total_loss"], dtype=loss.dtype))
            named = trainer.draft_model.named_parameters()
            grads = {parameter_name(name): array(p.grad) for name, p in named if p.grad is not None}
            trace |= recorder.cotangents()
        return outputs, grads, recorder.below, trace

    def _trainer(self, inputs):
        draft = draft_kimi_k3.KimiK3Eagle3DraftModel(self.config).to(self.dtype)
        draft.load_state_dict({name: self.tensor(inputs[parameter_name(name)]) for name in draft.state_dict()})
        draft.freeze_embeddings()
        return core.Eagle3TrainerModule(
            draft,
            selected_token_ids=torch.arange(self.config.vocab_size),
            selected_token_mask=torch.ones(self.config.vocab_size, dtype=torch.bool),
            ttt_steps=self.sizes["num_steps"],
            lk_loss_type="alpha",
        )

    def tensor(self, values):
        return to_tensor(values, self.dtype)

    @stage
    def mla(self, t, forced):
        if t["x"].shape[-1] != 2 * self.config.hidden_size:
            raise NotImplementedError("the draft's attention reads 2d features; `backbone` offers KimiMLAAttention")
        attention = draft_kimi_k3.KimiK3Eagle3MLAAttention(self.config)
        cache = [[step.transpose(1, 2) for step in t.get(name, ())] for name in ("keys", "values")]
        documents = t.get("documents")
        mask = draft_mask(t["x"], None if documents is None else documents.numpy())
        output = torch.func.functional_call(attention, by_module(t), (t["x"], mask, None, cache))
        return {"output": output, "key": cache[0][-1].transpose(1, 2), "value": cache[1][-1].transpose(1, 2)}


def parameter_name(name: str) -> str:
    """The draft's parameter name in terms of the checkpoint names that the suite uses."""
    for theirs, ours in (
        (LAYER + "input_layernorm.", "enorm."),
        (LAYER + "hidden_norm.", "hnorm."),
        (LAYER, ""),
        ("model.norm.", "shared_head.norm."),
        ("model.", ""),
        ("lm_head.", "shared_head.head."),
    ):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


adapter = Draft()
