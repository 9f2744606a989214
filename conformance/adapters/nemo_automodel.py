"""NeMo AutoModel's EAGLE-3 trainer around its Kimi K3 draft, and parts of its K3 backbone.

Install: ``make peers`` (the package's own pins conflict with the others', so it is installed with --no-deps).

``unroll`` is ``Eagle3TrainerModule(lk_loss_type="alpha")`` on ``KimiK3Eagle3DraftModel``. The trainer takes every array
aligned for step 1, as the protocol hands them over, and shifts tokens, targets and mask itself, so nothing is shifted
here. Documents go in as its packing: ``seq_lens`` is the length of each run of equal ids, ``doc_remaining`` the number
of slots left in the slot's document. Padding becomes a document of its own with 0 left; its contents are passed on as
they are.

``moe``, ``shared_experts`` and ``route`` are the backbone's; its experts compute without fake quantisation, hence
``quantized`` False. ``adapter`` declares the draft (layout eagle3); ``backbone`` declares the backbone in the layout of
the MTP layer, for its ``KimiMLAAttention``: ``--adapter conformance/adapters/nemo_automodel.py:backbone``.
"""

from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from unittest import mock

import numpy as np

try:
    import torch
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.kimi_k3 import model as k3
    from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig
    from nemo_automodel.components.models.kimi_k3.state_dict_adapter import dequantize_mxfp4
    from nemo_automodel.components.speculative.eagle import core, draft_deepseek, draft_kimi_k3
except ImportError as error:
    raise ImportError(
        f"The adapter nemo_automodel needs the package nemo-automodel ({error}). Install it with `make peers` and add "
        "`--adapter-python .venv-peers`, or: pip install torch==2.13.0 && "
        "pip install --no-deps -r requirements/peers.txt"
    ) from error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYER = "model.layers.0."
ATTENTION = LAYER + "self_attn."

#: The stage that a module of the draft puts out, and the stage that a module takes in.
OUTPUTS = {
    "model.fc": "fusion",
    "model.embed_tokens": "embed",
    LAYER + "input_layernorm": "draft_input.enorm",
    LAYER + "hidden_norm": "draft_input.hnorm",
    ATTENTION + "q_a_proj": "mla_query.low",
    ATTENTION + "q_a_layernorm": "mla_query.norm",
    ATTENTION + "kv_a_proj_with_mqa": "mla_latent",
    ATTENTION + "kv_a_layernorm": "mla_keyvalue.norm",
    ATTENTION + "g_proj": "attn_gate.pre",
    LAYER + "post_attention_layernorm": "moe_norm",
    LAYER + "mlp.gate_proj": "dense_mlp.gate",
    LAYER + "mlp.up_proj": "dense_mlp.up",
    LAYER + "mlp": "dense_mlp",
    LAYER.rstrip("."): "layer_output",
    "model.norm": "head_norm",
    "lm_head": "logits",
}
INPUTS = {
    ATTENTION.rstrip("."): "draft_input",
    ATTENTION + "o_proj": "attn_gate",
    LAYER + "post_attention_layernorm": "attn_output",
    LAYER + "mlp.down_proj": "dense_mlp.hidden",
}


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


class Recorder:
    """Stage boundaries of every step: tensors on the autograd path, and how they make up the suite's array."""

    def __init__(self):
        self.step, self.kept, self.below, self.step_losses = 0, {}, {}, []

    def keep(self, stage: str, *tensors, layout=np.asarray) -> None:
        for tensor in tensors:
            tensor.requires_grad_().retain_grad()
        self.kept[f"{max(self.step, 1)}/{stage}"] = tensors, layout

    def attach(self, draft) -> None:
        draft.register_forward_pre_hook(self._next_step)
        for name, stage in OUTPUTS.items():
            draft.get_submodule(name).register_forward_hook(
                lambda _, args, output, stage=stage: self.keep(stage, output)
            )
        for name, stage in INPUTS.items():
            draft.get_submodule(name).register_forward_pre_hook(lambda _, args, stage=stage: self.keep(stage, args[0]))
        attention = draft.get_submodule(ATTENTION.rstrip("."))
        attention.register_forward_hook(self._keep_key_value)
        attention.q_b_proj.register_forward_hook(partial(self._keep_query, heads=attention.num_heads))
        attention._eager_attention_forward = partial(self._keep_attention, attention._eager_attention_forward)

    def _next_step(self, draft, args) -> None:
        self.step += 1

    def _keep_query(self, _, args, output, heads) -> None:
        self.keep("mla_query", output, layout=lambda q: q.reshape(*q.shape[:2], heads, -1))

    def _keep_key_value(self, _, args, output) -> None:
        keys, values = args[3]  # the cache: lists of [B,H,T,.], one entry a step
        self.keep("mla_keyvalue", keys[-1], values[-1], layout=lambda k, v: np.concatenate([k, v], -1).swapaxes(1, 2))

    def _keep_attention(self, attend, *args):
        """Stands in for a method that no module hook reaches."""
        output = attend(*args)
        self.keep("attention", output)
        return output

    @contextmanager
    def listening(self):
        """Also keep each slot's loss and the comparison of q with p, which are no module's output."""
        masked_mean, minimum = core._masked_mean, torch.minimum

        def keep_loss(log_acceptance, position_mask):
            self.keep("lk_loss", log_acceptance, layout=np.negative)
            mean = masked_mean(log_acceptance, position_mask)
            self.step_losses.append(-array(mean))
            return mean

        def keep_below(p, q):
            self.below[f"{max(self.step, 1)}/below"] = (q < p).numpy()
            return minimum(p, q)

        with mock.patch.object(core, "_masked_mean", keep_loss), mock.patch.object(torch, "minimum", keep_below):
            yield

    def values(self) -> dict:
        return {key: layout(*map(array, tensors)) for key, (tensors, layout) in self.kept.items()}

    def cotangents(self) -> dict:
        return {f"{key}.grad": layout(*map(gradient, tensors)) for key, (tensors, layout) in self.kept.items()}


class Parts:
    """What the draft and the backbone have in common, and the parts that both are built of."""

    protocol = 1

    def describe(self) -> dict:
        common = {"accumulate": "float32", "router": "float32"}
        stored = (
            "storage", "logits", "attention_output", "attention_scores", "attention_probabilities", "normalized",
            "gate",
        )  # fmt: skip
        policies = {dtype: {**common, **dict.fromkeys(stored, dtype)} for dtype in DTYPES}
        return {
            "name": "nemo_automodel",
            "version": version("nemo-automodel"),
            "url": "https://github.com/NVIDIA-NeMo/Automodel",
            "formats": policies["float32"],
            "policies": policies,
            "documents": True,
            "quantized": False,
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.sizes, self.config = config, KimiK3TextConfig(**config)
        self.dtype = DTYPES[(formats or {}).get("storage", "float32")]
        self.backend = BackendConfig(
            attn="eager", linear="torch", rms_norm="torch", experts="torch", dispatcher="torch"
        )

    def situ_glu(self, inputs, *, cotangents=None, forced=None) -> tuple:
        activation = k3.SituAndMul(self.config.activation_situ_beta, self.config.activation_situ_linear_beta)
        return self._stage(lambda gate, up: {"y": activation(torch.cat([gate, up], -1))}, inputs, cotangents)

    def dense_mlp(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._mlp(self.config.intermediate_size, inputs, cotangents)

    def shared_experts(self, inputs, *, cotangents=None, forced=None) -> tuple:
        return self._mlp(self.config.num_shared_experts * self.config.moe_intermediate_size, inputs, cotangents)

    def _mlp(self, width, inputs, cotangents) -> tuple:
        mlp = k3.KimiK3MLP(self.config, intermediate_size=width)

        def run(x, **parameters):
            return {"output": torch.func.functional_call(mlp, by_module(parameters), (x,))}

        return self._stage(run, inputs, cotangents)

    def route(self, inputs, *, cotangents=None, forced=None) -> tuple:
        refuse(forced)
        gate, experts = self._moe(0).gate, {}

        def run(x, **parameters):
            rows = x.reshape(-1, x.shape[-1])
            weights, ids, _ = torch.func.functional_call(gate, by_module(parameters, parts=1), (rows, None))
            experts["experts"] = ids.reshape(*x.shape[:-1], -1).to(torch.int32).numpy()
            return {"weights": weights.reshape(*x.shape[:-1], -1)}

        return *self._stage(run, inputs, cotangents), experts, {}

    def moe(self, inputs, *, cotangents=None, forced=None) -> tuple:
        refuse(forced)
        shared = any("shared_experts" in name for name in inputs)
        moe, decisions = self._moe(self.config.num_shared_experts if shared else 0), {}
        moe.gate.register_forward_hook(lambda _, args, output: decisions.update(experts=output[1]))

        def run(x, **parameters):
            return {"output": torch.func.functional_call(moe, stacked_experts(parameters), (x,))}

        outputs, grads = self._stage(run, inputs, cotangents)
        experts = decisions["experts"].reshape(*inputs["x"].shape[:-1], -1).to(torch.int32).numpy()
        return outputs, grads, {"experts": experts}, {}

    def _moe(self, num_shared_experts: int):
        config = KimiK3TextConfig(**{**self.sizes, "num_shared_experts": num_shared_experts})
        return k3.KimiK3MoE(config, k3._build_moe_config(config, self.dtype, None), self.backend)

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        packed = inputs["packed"] if "packed" in inputs else inputs["codes"][..., ::2] | inputs["codes"][..., 1::2] << 4
        rows = [torch.tensor(codes.reshape(-1, codes.shape[-1])) for codes in (packed, inputs["scales"])]
        return {"values": array(dequantize_mxfp4(*rows, self.dtype)).reshape(*packed.shape[:-1], -1)}

    def _tensor(self, values):
        return torch.tensor(values, dtype=self.dtype)

    def _stage(self, function, inputs, cotangents) -> tuple:
        """Outputs of ``function`` on the float inputs, and their vector-Jacobian products."""
        floats = {name: a for name, a in inputs.items() if isinstance(a, np.ndarray) and a.dtype.kind == "f"}
        tensors = {name: self._tensor(a).requires_grad_() for name, a in floats.items()}
        outputs = function(**tensors)
        arrays = {name: array(output) for name, output in outputs.items()}
        if cotangents is None:
            return arrays, {}
        pulled = [outputs[name] for name in cotangents]
        vectors = [torch.tensor(v, dtype=t.dtype) for v, t in zip(cotangents.values(), pulled, strict=True)]
        grads = torch.autograd.grad(pulled, list(tensors.values()), vectors, allow_unused=True)
        return arrays, {name: array(g) for name, g in zip(tensors, grads, strict=True) if g is not None}


class Draft(Parts):
    """The EAGLE-3 trainer and its K3 draft."""

    def describe(self) -> dict:
        choices = {"head": "own", "step_weights": "decay_normalized", "renormalize_epsilon": 1e-20}
        return {**super().describe(), "choices": choices, "layouts": ["eagle3"]}

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
                aux_hidden_states=torch.cat([self._tensor(inputs[name]) for name in ("low", "mid", "high")], -1),
                target_logits=self._tensor(inputs["target_logits"]),
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
        draft.load_state_dict({name: self._tensor(inputs[parameter_name(name)]) for name in draft.state_dict()})
        draft.freeze_embeddings()
        return core.Eagle3TrainerModule(
            draft,
            selected_token_ids=torch.arange(self.config.vocab_size),
            selected_token_mask=torch.ones(self.config.vocab_size, dtype=torch.bool),
            ttt_steps=self.sizes["num_steps"],
            lk_loss_type="alpha",
        )

    def lk_loss(self, inputs, *, cotangents=None, forced=None) -> tuple:
        refuse(forced)
        recorder, shape = Recorder(), inputs["draft_logits"].shape

        def run(draft_logits, target_logits):
            vocabulary = torch.arange(shape[-1])
            everywhere = torch.ones(target_logits.shape[:-1], dtype=torch.bool)
            target = core._compute_target_distribution(target_logits, vocabulary, vocabulary >= 0, everywhere)
            trainer = SimpleNamespace(lk_loss_type="alpha", cp_group=None)
            with recorder.listening():
                core.Eagle3TrainerModule._lk_step_loss(trainer, draft_logits, *target)
            (log_acceptance,), _ = recorder.kept["1/lk_loss"]
            return {"loss": -log_acceptance}

        outputs, grads = self._stage(run, inputs, cotangents)
        return outputs, grads, {"below": recorder.below["1/below"]}, {}

    def mla(self, inputs, *, cotangents=None, forced=None) -> tuple:
        if inputs["x"].shape[-1] != 2 * self.config.hidden_size:
            raise NotImplementedError("the draft's attention reads 2d features; `backbone` offers KimiMLAAttention")
        documents = inputs.get("documents")
        return self._stage(lambda **tensors: self._attention(documents, **tensors), inputs, cotangents)

    def _attention(self, documents, x, keys=(), values=(), **parameters) -> dict:
        attention = draft_kimi_k3.KimiK3Eagle3MLAAttention(self.config)
        mask = draft_mask(x, documents)
        cache = [[key.transpose(1, 2) for key in keys], [value.transpose(1, 2) for value in values]]
        output = torch.func.functional_call(attention, by_module(parameters), (x, mask, None, cache))
        return {"output": output, "key": cache[0][-1].transpose(1, 2), "value": cache[1][-1].transpose(1, 2)}


class Backbone(Parts):
    """Parts of the K3 backbone in the layout of the MTP layer; ``KimiMLAAttention`` keeps epsilon 1e-6."""

    def describe(self) -> dict:
        choices = {"latent_norm_eps": 1e-6, "renormalize_epsilon": 1e-20}
        return {**super().describe(), "choices": choices, "layouts": ["mtp"]}

    def mla(self, inputs, *, cotangents=None, forced=None) -> tuple:
        if int(inputs.get("step", 1)) > 1:
            raise NotImplementedError("only step 1: KimiMLAAttention has no keys and values of earlier steps")
        documents = inputs.get("documents")
        return self._stage(lambda **tensors: self._attention(documents, **tensors), inputs, cotangents)

    def _attention(self, documents, x, keys=None, values=None, **parameters) -> dict:
        attention, seen = k3.KimiMLAAttention(self.config, 3, self.backend), {}
        attention.kv_a_proj_with_mqa.register_forward_hook(lambda _, args, output: seen.update(latent=output))
        attention.kv_b_proj.register_forward_hook(lambda _, args, output: seen.update(keyvalue=output))
        packed = None if documents is None else k3.KimiPackedContext(doc_ids=torch.tensor(documents) + 1)
        mask = k3._make_causal_mask(x, packed, dtype=x.dtype)
        output = torch.func.functional_call(attention, by_module(parameters), (x, mask))
        keyvalue = seen["keyvalue"].unflatten(-1, (self.config.num_attention_heads, -1))
        nope, value = keyvalue.split([self.config.qk_nope_head_dim, self.config.v_head_dim], -1)
        rope = seen["latent"][..., None, self.config.kv_lora_rank :].expand(*nope.shape[:-1], -1)
        return {"output": output, "key": torch.cat([nope, rope], -1), "value": value}


def packing(documents) -> dict:
    """The trainer's description of packed rows; nothing for one document a row."""
    if documents is None:
        return {}
    slots = np.arange(documents.shape[1])
    starts = np.diff(documents, axis=1, prepend=documents[:, :1] - 1) != 0
    lengths = [np.diff(np.append(np.flatnonzero(row), row.size)) for row in starts]
    ends = np.stack([np.repeat(np.cumsum(row), row) for row in lengths])  # [B,T] one past the slot's document
    seq_lens = np.zeros((len(lengths), max(map(len, lengths))), np.int64)
    for packed, row in zip(seq_lens, lengths, strict=True):
        packed[: len(row)] = row
    remaining = np.where(documents < 0, 0, ends - 1 - slots)
    position = slots - np.maximum.accumulate(np.where(starts, slots, 0), axis=1)
    arrays = {"seq_lens": seq_lens, "doc_remaining": remaining, "position_ids": position}
    return {name: torch.tensor(values) for name, values in arrays.items()}


def draft_mask(x, documents):
    """The additive mask that the draft builds: causal, or causal within documents."""
    if documents is None:
        return draft_deepseek._build_causal_mask(torch.ones(x.shape[:2], dtype=torch.long), x.dtype)
    return draft_deepseek.build_block_causal_additive_mask(
        packing(documents)["seq_lens"], seq_length=x.shape[1], dtype=x.dtype, device=x.device
    )


def by_module(parameters: dict, parts: int = 2) -> dict:
    """Parameters under the last parts of their names: module and weight."""
    return {".".join(name.split(".")[-parts:]): tensor for name, tensor in parameters.items()}


def stacked_experts(parameters: dict) -> dict:
    """The sparse block's parameters in its own layout: [E, in, gate then up] and [E, in, out]."""
    plain = {name.removeprefix("block_sparse_moe."): tensor for name, tensor in parameters.items()}
    count = sum(name.endswith(".w1.weight") for name in plain)
    w1, w2, w3 = ([plain.pop(f"experts.{e}.{w}.weight").T for e in range(count)] for w in ("w1", "w2", "w3"))
    gate_up = torch.stack([torch.cat(pair, -1) for pair in zip(w1, w3, strict=True)])
    return plain | {"experts.gate_and_up_projs": gate_up, "experts.down_projs": torch.stack(w2)}


def refuse(forced) -> None:
    if forced:
        raise NotImplementedError(f"decisions cannot be pinned: {', '.join(forced)}")


def array(tensor) -> np.ndarray:
    return tensor.detach().float().numpy()


def gradient(tensor) -> np.ndarray:
    return array(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)


adapter = Draft()
backbone = Backbone()
