"""What adapters of PyTorch implementations import: see ``draftconf.conformance.torch_helper``."""

from draftconf.conformance.torch_helper import (
    DTYPES,
    TorchAdapter,
    Trace,
    gradients,
    input_tensors,
    own_weights,
    pattern_answer,
    require_gradients,
    stage,
    to_array,
    to_arrays,
    to_tensor,
)

__all__ = [
    "DTYPES",
    "TorchAdapter",
    "Trace",
    "gradients",
    "input_tensors",
    "own_weights",
    "pattern_answer",
    "require_gradients",
    "stage",
    "to_array",
    "to_arrays",
    "to_tensor",
]
