"""The step of layout eagle3 as a CUDA graph: forward and backward of a batch of fixed shape in one launch.

No size in that layout's recorded path depends on the data, and nothing in it waits for the device; a test holds it to
both. Layout mtp counts the tokens of each expert on the host, and the fused path chooses the supervised rows.
"""

import torch
from torch import Tensor

from .model import DraftModel
from .unroll import check_inputs, sanitize, unroll_checked

WARM_UPS = 3  # runs before the capture, in which kernels are compiled and workspaces allocated


class CapturedStep:
    """``step(batch)``: the results of ``fast.unroll.unroll`` and, in the parameters' ``grad``, their gradients.

    Made from a first ``batch``; later ones must have its names, shapes and types. Results and gradients are the graph's
    own tensors, overwritten by the next call: leave ``grad`` in place, there is nothing to zero. Raises ValueError for
    parameters that are not on a CUDA device and for layout mtp.
    """

    def __init__(self, model: DraftModel, batch: dict):
        if model.choices.draft_input != "eagle3":
            raise ValueError(f"draft_input is {model.choices.draft_input!r}; wanted 'eagle3', whose shapes are static")
        self.model, self.params = model, dict(model.named_parameters())
        device = next(iter(self.params.values())).device
        if device.type != "cuda":
            raise ValueError(f"the model's parameters are on {device}; a CUDA graph needs them on a CUDA device")
        self.inputs = {name: x.clone() for name, x in self._checked(batch).items()}
        side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._run()
        current.wait_stream(side)
        for p in self.params.values():
            p.grad = None  # the backward pass of the capture then makes them in the graph's own memory
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self._run()

    def __call__(self, batch: dict) -> dict:
        copy_into(self.inputs, self._checked(batch))
        self.graph.replay()
        return self.result

    def _checked(self, batch: dict) -> dict:
        inputs = sanitize(batch)
        check_inputs(inputs, self.model.config.vocab_size)
        return inputs

    def _run(self) -> dict:
        result = unroll_checked(self.params, self.inputs, self.model.config, self.model.choices)
        result["total_loss"].backward()
        return {name: x.detach() for name, x in result.items()}


def copy_into(inputs: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
    """Raises ValueError, naming the array, for another set of names, another shape or type; nothing is copied then."""
    if set(inputs) != set(batch):
        raise ValueError(f"the batch has {', '.join(sorted(batch))}; wanted {', '.join(sorted(inputs))}, as captured")
    for name, x in inputs.items():
        if batch[name].shape != x.shape or batch[name].dtype != x.dtype:
            raise ValueError(
                f"{name} is {batch[name].dtype} of shape {tuple(batch[name].shape)}; wanted {x.dtype} of "
                f"{tuple(x.shape)}, as captured"
            )
    for name, x in inputs.items():
        x.copy_(batch[name])
