"""NeMo AutoModel's Kimi K3 backbone in the layout of the MTP layer: ``KimiMLAAttention``, ``KimiK3MoE`` and their like.

Install: as nemo_automodel.py. The norms of the MLA latents keep the epsilon 1e-6, which is declared.
"""

import torch

from ..torch_helper import stage
from ._kimi_k3 import by_module, heads_of
from ._nemo_parts import Parts, k3


class Backbone(Parts):
    choices = {"latent_norm_eps": 1e-6, "renormalize_epsilon": 1e-20}
    layouts = ["mtp"]

    @stage
    def mla(self, t, forced):
        if t.get("step", 1) > 1:
            raise NotImplementedError("only step 1: KimiMLAAttention has no keys and values of earlier steps")
        attention, documents = k3.KimiMLAAttention(self.config, 3, self.backend), t.get("documents")
        packed = None if documents is None else k3.KimiPackedContext(doc_ids=documents.int() + 1)
        mask = k3._make_causal_mask(t["x"], packed, dtype=t["x"].dtype)
        with heads_of(attention) as seen:
            output = torch.func.functional_call(attention, by_module(t), (t["x"], mask))
        return {"output": output, **seen}


adapter = Backbone()
