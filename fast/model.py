"""The draft layer as an ``nn.Module`` whose state_dict has the checkpoint's names (spec.md section 2)."""

import torch
from torch import Tensor, nn

from draftconf.reference.config import IGNORED_PARAMETERS, Choices, DraftConfig, frozen_parameters, parameter_shapes

from .mx import dequantize, unpack
from .ops import keep, wide
from .unroll import draft_sequence, unroll

PREFIX = "language_model.model.layers.93."


class DraftModel(nn.Module):
    """Parameters of the draft step, uninitialised; frozen ones do not require a gradient.

    Raises ValueError for choices that these sizes cannot have.
    """

    def __init__(self, config: DraftConfig, choices: Choices, dtype: torch.dtype = torch.float32, device=None):
        super().__init__()
        choices.check(config)
        self.config, self.choices = config, choices
        frozen = frozen_parameters(choices)
        for name, shape in parameter_shapes(config, choices).items():
            # The router is computed wide; its bias, which only chooses, is kept so too.
            kept = wide(dtype) if name.endswith("e_score_correction_bias") else dtype
            value = torch.empty(shape, dtype=kept, device=device)
            self._attach(name, nn.Parameter(value, requires_grad=name not in frozen))

    def _attach(self, name: str, parameter: nn.Parameter) -> None:
        *path, leaf = name.split(".")
        module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(leaf, parameter)

    @classmethod
    def from_config(
        cls, config: DraftConfig, choices: Choices | None = None, dtype: torch.dtype = torch.float32, device=None
    ) -> "DraftModel":
        """A model with random weights, norms of one, and W_E3 = [0 0 I] (report section 4.1.4)."""
        model = cls(config, choices or Choices(), dtype, device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name == "fc.weight":
                    parameter.zero_()[:, -config.hidden_size :].fill_diagonal_(1)
                elif name.endswith("e_score_correction_bias"):
                    parameter.zero_()
                elif parameter.ndim == 1:
                    parameter.fill_(1)
                else:
                    parameter.normal_(std=0.02)
        return model

    def load_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """Take weights under checkpoint names, with or without the layer's prefix, MXFP4 pairs dequantised.

        Raises RuntimeError for a name that is missing or unknown; residual-mixing weights are accepted and ignored.
        """
        tensors = {name.removeprefix(PREFIX): x for name, x in tensors.items()}
        state = {}
        for name, x in tensors.items():
            if name.endswith(".weight_packed"):
                scales = tensors[name.removesuffix("_packed") + "_scale"]
                state[name.removesuffix("_packed")] = dequantize(scales, unpack(x), "mxfp4")
            elif not name.endswith(".weight_scale") and name not in IGNORED_PARAMETERS:
                state[name] = x
        self.load_state_dict(state)

    def unroll(self, inputs: dict, record=keep, forced: dict | None = None, counts: Tensor | None = None) -> dict:
        """The loss of the step and its parts; see ``fast.unroll.unroll``."""
        params = dict(self.named_parameters())
        return unroll(params, inputs, self.config, self.choices, record, forced, counts)

    forward = unroll

    @torch.no_grad()
    def draft(self, inputs: dict) -> dict:
        """Draft K tokens one after another; see ``fast.unroll.draft_sequence``."""
        return draft_sequence(dict(self.named_parameters()), inputs, self.config, self.choices)
