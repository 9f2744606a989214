"""Turn functions on PyTorch tensors into adapter methods, and record a trace.

An adapter of one method::

    from draftconf.torch_helper import TorchAdapter, stage

    class MyLoss(TorchAdapter):
        name = "my loss"
        formats = {"storage": "float32"}
        lk_loss = stage(lambda self, t, forced: {"loss": my_loss(t["draft_logits"], t["target_logits"])},
                        frozen=("target_logits",))

    adapter = MyLoss()
"""

import numpy as np
import torch

from .protocol.keys import BY_NAME, meant_by

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def to_tensor(array, dtype: torch.dtype = torch.float32, device="cpu"):
    """float32 arrays become ``dtype``, float64 ones stay float64, integers int64, booleans bool; None stays None.

    Nothing is rounded: the suite's values are exact in the declared storage type.
    """
    if array is None:
        return None
    array = np.array(array, order="C")
    if array.dtype == np.float32:
        return torch.tensor(array, dtype=dtype, device=device)
    if array.dtype in (np.float64, np.uint8, np.bool_):
        return torch.tensor(array, device=device)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"array has dtype {array.dtype}; wanted float32, float64, an integer or bool")
    return torch.tensor(array, dtype=torch.int64, device=device)


def to_array(x) -> np.ndarray:
    """A NumPy copy: float64 and float32 as they are, shorter floats as float32 (exact), int64 as int32."""
    x = torch.as_tensor(x).detach()
    if x.dtype in (torch.bfloat16, torch.float16):
        x = x.float()
    elif x.dtype == torch.int64:
        x = x.int()
    return x.cpu().numpy().copy()


class TorchAdapter:
    """Base of an adapter: what it says about itself, its device, and the storage type of the run.

    Subclasses set the keys of ``describe()`` as attributes and add methods made by ``stage``.
    """

    protocol = 1
    name = "unnamed"
    version = ""
    url = ""
    formats = {"storage": "float32"}
    policies = {}
    choices = {}
    layouts = ["mtp", "eagle3"]
    pattern_declared = None  # describe()["pattern"], since ``pattern`` is the method
    device = "cpu"

    def describe(self) -> dict:
        """Every key of ``describe()`` (protocol/keys.py) that is an attribute of that name.

        Raises ValueError for an attribute whose name resembles a key's and is none.
        """
        self._refuse_misspelt()
        values = {name: getattr(self, name, None) for name in BY_NAME}
        if callable(values["pattern"]) or self.pattern_declared is not None:
            values["pattern"] = self.pattern_declared
        return {name: value for name, value in values.items() if value is not None}

    def _refuse_misspelt(self) -> None:
        classes = type(self).__mro__[: type(self).__mro__.index(TorchAdapter)]
        for name, value in [item for owner in (*classes, self) for item in vars(owner).items()]:
            described = name in BY_NAME or hasattr(TorchAdapter, name) or name.startswith(("_", "run_"))
            if not described and not callable(value) and not hasattr(value, "__get__") and meant_by(name):
                raise ValueError(f"the adapter has an attribute {name!r}; did you mean {meant_by(name)!r}?")

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        """Begin a run with these sizes and choices, in these formats (the declared ones when absent)."""
        self.run_config, self.run_choices = dict(config), dict(choices)
        self.dtype = DTYPES[(formats or self.formats)["storage"]]

    def stop(self) -> None:
        """End of the run."""

    @property
    def dtype(self) -> torch.dtype:
        return getattr(self, "_dtype", DTYPES[self.formats["storage"]])

    @dtype.setter
    def dtype(self, value: torch.dtype) -> None:
        self._dtype = value


def stage(function=None, *, frozen=(), kept=()):
    """Make an adapter method of ``function(self, tensors, forced)``, a mapping of inputs to a mapping of outputs.

    The function may also return (outputs, decisions). With ``cotangents`` the gradient of every float input that
    autograd reaches is returned, save those in ``frozen``: names, or a function of the adapter that gives them.
    Inputs in ``kept`` keep float32 instead of taking the storage type. Usable as a decorator.
    """
    if function is None:
        return lambda function: stage(function, frozen=frozen, kept=kept)

    def method(self, inputs, *, cotangents=None, forced=None):
        fixed = frozen(self) if callable(frozen) else frozen
        tensors = input_tensors(inputs, self.dtype, self.device, kept)
        leaves = require_gradients(tensors, fixed) if cotangents else {}
        forced = {name: to_tensor(value, self.dtype, self.device) for name, value in (forced or {}).items()}
        with torch.set_grad_enabled(bool(cotangents)):
            result = function(self, tensors, forced)
            outputs, decisions = result if isinstance(result, tuple) else (result, {})
        grads = gradients(outputs, leaves, cotangents) if cotangents else {}
        return to_arrays(outputs), to_arrays(grads), to_arrays(decisions), {}

    method.__name__ = method.__qualname__ = getattr(function, "__name__", "stage")
    method.__doc__ = function.__doc__
    return method


def input_tensors(inputs, dtype: torch.dtype, device="cpu", kept=()) -> dict:
    """Tensors of an adapter method's inputs; plain integers (``step``) pass through."""
    return {
        name: value if isinstance(value, int) else to_tensor(value, torch.float32 if name in kept else dtype, device)
        for name, value in inputs.items()
    }


def require_gradients(tensors: dict, frozen=()) -> dict:
    """Make a leaf of every float tensor that is not frozen, and return those."""
    leaves = {
        name: x
        for name, x in tensors.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point() and name not in frozen
    }
    for x in leaves.values():
        x.requires_grad_(True)
    return leaves


def own_weights(module: torch.nn.Module, seed: int = 0) -> None:
    """Fill a module's parameters, the same ones each time: matrices of rows of about unit length, gains around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, x in sorted(module.named_parameters()):
            values = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            x.copy_(1 + 0.2 * values if x.dim() == 1 else values / x.shape[-1] ** 0.5)


def pattern_answer(logits: list, step_losses: list, total_loss, features: dict, cotangents) -> tuple:
    """What ``pattern`` returns, from the tensors of each step and the features that the total loss hangs on."""
    if cotangents:
        total_loss.backward(torch.tensor(cotangents["total_loss"], dtype=total_loss.dtype))
    outputs = {"logits": torch.stack(logits), "step_losses": torch.stack(step_losses), "total_loss": total_loss}
    grads = {name: x.grad for name, x in features.items() if x.grad is not None}
    return to_arrays(outputs), to_arrays(grads)


def gradients(outputs: dict, leaves: dict, cotangents: dict) -> dict:
    """Vector-Jacobian product of the outputs named in ``cotangents``, for every leaf that autograd reaches.

    A leaf without a gradient is left out: whether that is right is for the suite to say.
    """
    heads = [outputs[name] for name in cotangents]
    seeds = [torch.tensor(c, dtype=o.dtype, device=o.device) for o, c in zip(heads, cotangents.values(), strict=True)]
    torch.autograd.backward(heads, seeds)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def to_arrays(tensors: dict) -> dict:
    return {name: to_array(x) for name, x in tensors.items()}


class Trace:
    """Records tensors that lie on the autograd path, with their cotangents once a backward has run.

    ``record(name, x)`` returns what the next stage must consume: x itself, or a leaf of the same value where x did
    not require a gradient (a frozen embedding). Integer and bool tensors are kept as decisions. The forward must run
    with gradients enabled.
    """

    def __init__(self):
        self.values: dict[str, torch.Tensor] = {}
        self.decisions: dict[str, torch.Tensor] = {}

    def record(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            self.decisions[name] = x.detach()
            return x
        if not x.requires_grad:
            x = x.detach().requires_grad_(True)
        x.retain_grad()
        self.values[name] = x
        return x

    def hook(self, module: torch.nn.Module, name, shape=None):
        """Record a module's output at every call. Returns the handle, to be removed.

        ``name`` is the key, or a function that gives it for each call (to count steps). ``shape`` reshapes the output
        to that of the trace table; the module then returns the recorded tensor in its own shape again.
        """

        def forward_hook(_module, _args, output):
            key = name() if callable(name) else name
            if shape is None:
                return self.record(key, output)
            return self.record(key, shape(output)).reshape(output.shape)

        return module.register_forward_hook(forward_hook)

    def arrays(self, backward: bool = True) -> dict[str, np.ndarray]:
        """The trace: "name", and after a backward "name.grad", zeros where the gradient does not reach."""
        trace = {name: to_array(x) for name, x in self.values.items()}
        if backward:
            for name, x in self.values.items():
                trace[name + ".grad"] = to_array(torch.zeros_like(x) if x.grad is None else x.grad)
        return trace
