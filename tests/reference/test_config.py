"""Sizes, choices and parameter names (spec.md sections 1, 2 and 9)."""

import json

import pytest
from helpers import LAYOUTS

from draftconf.reference.config import (
    ALTERNATIVES,
    REFUSED,
    Choices,
    DraftConfig,
    expert_name,
    expert_of,
    frozen_parameters,
    kind_of,
    parameter_shapes,
    trained_parameters,
)

K3 = {
    "hidden_size": 7168, "vocab_size": 163840, "draft_vocab_size": 163840, "num_steps": 7, "num_attention_heads": 96,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_experts": 896, "num_experts_per_token": 16, "routed_expert_hidden_size": 3584, "moe_intermediate_size": 3072,
    "num_shared_experts": 2, "intermediate_size": 33792, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5,
    "activation_situ_beta": 4, "activation_situ_linear_beta": 25,
}  # fmt: skip
TINY = {
    "hidden_size": 80, "vocab_size": 97, "draft_vocab_size": 97, "num_steps": 7, "num_attention_heads": 4,
    "q_lora_rank": 28, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10,
    "num_experts": 8, "num_experts_per_token": 3, "routed_expert_hidden_size": 64, "moe_intermediate_size": 96,
    "num_shared_experts": 2, "intermediate_size": 72, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-5,
    "activation_situ_beta": 4, "activation_situ_linear_beta": 25,
}  # fmt: skip
SMALL = TINY | {
    "hidden_size": 256, "vocab_size": 1009, "draft_vocab_size": 1009, "num_attention_heads": 8, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 24, "q_lora_rank": 96, "kv_lora_rank": 64, "num_experts": 32,
    "num_experts_per_token": 4, "routed_expert_hidden_size": 128, "moe_intermediate_size": 192,
    "intermediate_size": 320,
}  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), [("k3", K3), ("tiny", TINY), ("small", SMALL)])
def test_a_preset_has_the_sizes_of_the_specification(name, sizes):
    config = getattr(DraftConfig, name)()
    assert config.to_dict() == sizes
    assert DraftConfig(**config.to_dict()) == config


def test_no_two_sizes_of_tiny_could_be_mistaken_for_one_another():
    tiny = DraftConfig.tiny()
    sizes = [x for name, x in tiny.to_dict().items() if isinstance(x, int) and name != "draft_vocab_size"]
    assert len(set(sizes)) == len(sizes)
    for layout in LAYOUTS:
        shapes = parameter_shapes(tiny, Choices(draft_input=layout))
        assert all(len(shape) == 1 or shape[0] != shape[1] for shape in shapes.values())  # no transpose goes unseen
    heads = tiny.num_attention_heads
    widths = [tiny.hidden_size, 2 * tiny.hidden_size, 3 * tiny.hidden_size, heads * tiny.query_head_dim,
              heads * (tiny.qk_nope_head_dim + tiny.v_head_dim), heads * tiny.v_head_dim, tiny.shared_intermediate_size,
              tiny.kv_lora_rank + tiny.qk_rope_head_dim, tiny.routed_expert_hidden_size, tiny.moe_intermediate_size,
              tiny.q_lora_rank, tiny.kv_lora_rank, tiny.vocab_size, tiny.num_experts]  # fmt: skip
    assert len(set(widths)) == len(widths)


JSON = {name: value for name, value in K3.items() if name not in ("num_steps", "draft_vocab_size")} | {
    "model_type": "kimi_k3", "hidden_act": "situ", "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "mla_use_nope": True, "mla_use_output_gate": True, "latent_moe_use_norm": True, "num_expert_group": 1,
    "topk_group": 1, "tie_word_embeddings": False, "num_key_value_heads": 96, "num_hidden_layers": 93,
    "num_nextn_predict_layers": 0, "something_unknown": {"x": 1},
}  # fmt: skip


def test_from_json_reads_an_object_a_text_and_a_file_whole_or_its_text_config(tmp_path):
    whole = {"architectures": ["K3"], "hidden_size": 5, "text_config": JSON}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole), encoding="utf-8")
    for source in (JSON, whole, json.dumps(JSON), json.dumps(whole), path, str(path)):
        assert DraftConfig.from_json(source) == DraftConfig.k3()


def test_from_json_takes_overrides_for_what_the_file_does_not_say():
    config = DraftConfig.from_json(JSON, num_steps=3, draft_vocab_size=1000)
    assert (config.num_steps, config.draft_vocab_size, config.vocab_size) == (3, 1000, 163840)


def test_from_json_ignores_what_it_does_not_know_and_settings_that_are_absent():
    bare = {name: value for name, value in JSON.items() if name in K3}
    assert DraftConfig.from_json(bare) == DraftConfig.k3()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "silu"),
        ("moe_renormalize", False),
        ("moe_router_activation_func", "softmax"),
        ("mla_use_nope", False),
        ("mla_use_output_gate", False),
        ("latent_moe_use_norm", False),
        ("num_expert_group", 8),
        ("topk_group", 4),
        ("tie_word_embeddings", True),
        ("num_key_value_heads", 8),
    ],
)
@pytest.mark.parametrize("nested", [False, True], ids=["whole", "text_config"])
def test_from_json_refuses_other_mathematics_naming_field_and_value(field, value, nested):
    data = JSON | {field: value}
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        DraftConfig.from_json({"text_config": data} if nested else data)


@pytest.mark.parametrize("field", [name for name in JSON if name in K3])
def test_from_json_names_a_size_that_is_missing(field):
    with pytest.raises(KeyError, match=field):
        DraftConfig.from_json({name: value for name, value in JSON.items() if name != field})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"routed_expert_hidden_size": 48}, "routed_expert_hidden_size is 48; wanted a multiple"),
        ({"moe_intermediate_size": 100}, "moe_intermediate_size is 100; wanted a multiple"),
        ({"num_experts_per_token": 9}, "num_experts_per_token is 9; wanted at most num_experts, 8"),
        ({"draft_vocab_size": 98}, "draft_vocab_size is 98; wanted at most vocab_size, 97"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"num_steps": -1}, "num_steps is -1"),
        ({"num_steps": 7.0}, "num_steps is 7.0; wanted an integer"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"hidden_size": "80"}, "hidden_size is '80'"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; wanted a positive"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor is inf"),
        ({"activation_situ_beta": -4.0}, "activation_situ_beta is -4.0"),
        ({"activation_situ_linear_beta": "25"}, "activation_situ_linear_beta is '25'"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused_by_its_field(change, words):
    with pytest.raises(ValueError, match=words):
        DraftConfig(**{**TINY, **change})


@pytest.mark.parametrize("name", [name for name in K3 if isinstance(K3[name], int)])
def test_every_size_refuses_zero(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        DraftConfig(**{**TINY, name: 0})


# Choices


def test_the_defaults_are_those_of_the_specification():
    assert {field: values[0] for field, values in ALTERNATIVES.items()} == Choices().to_dict()
    assert Choices().to_dict() == {
        "draft_input": "mtp", "draft_layer": "mla_moe", "draft_attn_res": "none", "head": "frozen_target",
        "reduced_target": "restricted", "reduced_supervision": "all", "trained": "all", "target_alignment": "shifted",
        "mask_alignment": "position", "token_source": "teacher", "step_weights": "uniform", "reduction": "supervised",
        "routing_weight": "after_down", "renormalize_epsilon": 0.0, "router_bias": "frozen", "latent_norm_eps": 1e-5,
        "feature_norm": "none", "recycled_feature": "pre_norm", "zero_first_embedding": False,
        "detach_between_steps": False, "mx_scale_rule": "floor", "mxfp8_element": "e4m3", "quantize_hidden": True,
        "quantize_source": "stored", "ste": "identity", "feature_tap": "block_sum,block_sum,output_mixture",
    }  # fmt: skip


NEEDS_REDUCED = ("reduced_target", "reduced_supervision")


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in ALTERNATIVES.items() for v in values], ids=str)
def test_every_alternative_is_accepted_and_survives_a_dictionary(field, value):
    needed = {"head": "reduced"} if field in NEEDS_REDUCED else {}
    choices = Choices(**needed, **{field: value})
    assert getattr(choices, field) == value
    assert Choices.from_dict(json.loads(json.dumps(choices.to_dict()))) == choices


def test_a_list_of_step_weights_survives_a_dictionary():
    choices = Choices(step_weights=[1, 0.5, 0])
    assert choices.step_weights == (1.0, 0.5, 0.0)
    assert choices.to_dict()["step_weights"] == [1.0, 0.5, 0.0]
    assert Choices.from_dict(json.loads(json.dumps(choices.to_dict()))) == choices


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in REFUSED.items() for v in values], ids=str)
def test_a_known_reading_that_is_not_computed_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} is '{value}': .* is a known reading that is not computed here yet"):
        Choices(**{field: value})


def test_the_refused_readings_are_those_of_the_specification():
    assert {field: set(values) for field, values in REFUSED.items()} == {
        "draft_layer": {"kda", "kda_block"},
        "draft_attn_res": {"target_blocks"},
        "router_bias": {"quantile_balancing"},
    }


NAMED = [field for field, values in ALTERNATIVES.items() if field not in ("latent_norm_eps", "renormalize_epsilon")]


@pytest.mark.parametrize("value", ["no such thing", 7, None, ["mtp"], 1])
@pytest.mark.parametrize("field", NAMED)
def test_an_unknown_value_is_refused_naming_field_and_value(field, value):
    with pytest.raises(ValueError, match=f"{field} is .*wanted"):
        Choices(**{field: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reduced_target": "renormalized"}, "reduced_target is 'renormalized', which needs head 'reduced'"),
        ({"reduced_target": "renormalized", "head": "own"}, "needs head 'reduced', not 'own'"),
        (
            {"reduced_supervision": "argmax_inside"},
            "'argmax_inside', which needs head 'reduced'",
        ),
        ({"step_weights": []}, "step_weights is"),
        ({"step_weights": [1, -1]}, "step_weights is"),
        ({"step_weights": [float("nan")]}, "step_weights is"),
        ({"step_weights": 3}, "step_weights is 3"),
        ({"latent_norm_eps": "1e-5"}, "latent_norm_eps is '1e-5'"),
        ({"latent_norm_eps": -1e-5}, "latent_norm_eps is -1e-05"),
        ({"latent_norm_eps": float("nan")}, "latent_norm_eps is nan"),
        ({"renormalize_epsilon": True}, "renormalize_epsilon is True"),
        ({"renormalize_epsilon": 2.0}, "renormalize_epsilon is 2.0"),
        ({"feature_tap": "block_sum"}, "feature_tap is 'block_sum'"),
        ({"feature_tap": "output_mixture,block_sum,block_sum"}, "feature_tap is"),
        ({"zero_first_embedding": 1}, "zero_first_embedding is 1"),
    ],
    ids=str,
)
def test_an_impossible_choice_is_refused_with_a_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        Choices(**change)


def test_an_unknown_field_is_refused():
    with pytest.raises(ValueError, match=r"'draft_inputs'.*draft_input"):
        Choices.from_dict({"draft_inputs": "mtp"})


def test_choices_that_the_sizes_cannot_have_are_refused():
    with pytest.raises(ValueError, match="step_weights has 3 entries; wanted num_steps, 7"):
        Choices(step_weights=(1, 1, 1)).check(DraftConfig.tiny())
    smaller = DraftConfig(**{**TINY, "draft_vocab_size": 50})
    for head in ("frozen_target", "own"):
        with pytest.raises(ValueError, match=f"draft_vocab_size is 50 and vocab_size 97.*head 'reduced', not '{head}'"):
            Choices(head=head).check(smaller)
    Choices(head="reduced").check(smaller)


# Parameters


def test_parameter_shapes_of_layout_mtp_are_the_table_of_the_specification():
    d, q, kv, low = 7168, 1536, 512, 3584
    shapes = parameter_shapes(DraftConfig.k3(), Choices())
    experts = {name: shape for name, shape in shapes.items() if ".experts." in name}
    assert {name: shape for name, shape in shapes.items() if name not in experts} == {
        "embed_tokens.weight": (163840, d),
        "fc.weight": (d, 3 * d),
        "enorm.weight": (d,),
        "hnorm.weight": (d,),
        "eh_proj.weight": (d, 2 * d),
        "input_layernorm.weight": (d,),
        "self_attn.q_a_proj.weight": (q, d),
        "self_attn.q_a_layernorm.weight": (q,),
        "self_attn.q_b_proj.weight": (96 * 192, q),
        "self_attn.kv_a_proj_with_mqa.weight": (kv + 64, d),
        "self_attn.kv_a_layernorm.weight": (kv,),
        "self_attn.kv_b_proj.weight": (96 * 256, kv),
        "self_attn.g_proj.weight": (96 * 128, d),
        "self_attn.o_proj.weight": (d, 96 * 128),
        "post_attention_layernorm.weight": (d,),
        "block_sparse_moe.gate.weight": (896, d),
        "block_sparse_moe.gate.e_score_correction_bias": (896,),
        "block_sparse_moe.routed_expert_down_proj.weight": (low, d),
        "block_sparse_moe.routed_expert_norm.weight": (low,),
        "block_sparse_moe.routed_expert_up_proj.weight": (d, low),
        "block_sparse_moe.shared_experts.gate_proj.weight": (6144, d),
        "block_sparse_moe.shared_experts.up_proj.weight": (6144, d),
        "block_sparse_moe.shared_experts.down_proj.weight": (d, 6144),
        "shared_head.norm.weight": (d,),
        "shared_head.head.weight": (163840, d),
    }
    kinds = {"w1": (3072, low), "w3": (3072, low), "w2": (low, 3072)}
    assert experts == {
        f"block_sparse_moe.experts.{e}.{w}.weight": shape for e in range(896) for w, shape in kinds.items()
    }


def test_layout_eagle3_differs_where_the_specification_says():
    d = 7168
    mtp = parameter_shapes(DraftConfig.k3(), Choices())
    eagle3 = parameter_shapes(DraftConfig.k3(), Choices(draft_input="eagle3"))
    gone = {name for name in mtp if name.startswith("block_sparse_moe.")} | {"eh_proj.weight", "input_layernorm.weight"}
    assert set(mtp) - set(eagle3) == gone
    assert {name: shape for name, shape in eagle3.items() if mtp.get(name) != shape} == {
        "self_attn.q_a_proj.weight": (1536, 2 * d),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 2 * d),
        "self_attn.g_proj.weight": (96 * 128, 2 * d),
        "mlp.gate_proj.weight": (33792, d),
        "mlp.up_proj.weight": (33792, d),
        "mlp.down_proj.weight": (d, 33792),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("feature_norm", "names"),
    [
        ("none", {}),
        ("per_chunk", {"fc_norm.0.weight": (80,), "fc_norm.1.weight": (80,), "fc_norm.2.weight": (80,)}),
        ("joint", {"fc_norm.weight": (240,)}),
    ],
)
def test_the_feature_norm_has_its_own_weights(layout, feature_norm, names):
    tiny = DraftConfig.tiny()
    plain = parameter_shapes(tiny, Choices(draft_input=layout))
    normed = parameter_shapes(tiny, Choices(draft_input=layout, feature_norm=feature_norm))
    assert {name: normed[name] for name in set(normed) - set(plain)} == names
    assert normed == plain | names


def test_a_reduced_head_has_the_rows_of_the_draft_vocabulary():
    config = DraftConfig(**{**TINY, "draft_vocab_size": 50})
    shapes = parameter_shapes(config, Choices(head="reduced"))
    assert shapes["shared_head.head.weight"] == (50, 80)
    assert shapes["embed_tokens.weight"] == (97, 80)


ALWAYS_FROZEN = {"embed_tokens.weight", "block_sparse_moe.gate.e_score_correction_bias"}
FROZEN = {
    "default": ({}, ALWAYS_FROZEN | {"shared_head.head.weight"}),
    "own head": ({"head": "own"}, ALWAYS_FROZEN),
    "reduced head": ({"head": "reduced"}, ALWAYS_FROZEN),
    "frozen head norm": ({"head": "own", "trained": "freeze_head_norm"}, ALWAYS_FROZEN | {"shared_head.norm.weight"}),
}


@pytest.mark.parametrize(("change", "frozen"), FROZEN.values(), ids=FROZEN)
def test_what_is_frozen_and_what_is_trained(change, frozen):
    choices, tiny = Choices(**change), DraftConfig.tiny()
    assert frozen_parameters(choices) == frozen
    assert set(trained_parameters(tiny, choices)) == set(parameter_shapes(tiny, choices)) - frozen


def test_an_experts_weight_is_a_place_in_a_stack():
    name = expert_name(12, "w2")
    assert name in parameter_shapes(DraftConfig.k3(), Choices())
    assert expert_of(name) == ("block_sparse_moe.experts.w2.weight", 12)
    assert kind_of(name) == "block_sparse_moe.experts.*.w2.weight"


@pytest.mark.parametrize(
    "name", ["block_sparse_moe.experts.w2.weight", "block_sparse_moe.shared_experts.up_proj.weight", "fc.weight"]
)
def test_what_is_no_experts_weight(name):
    assert expert_of(name) is None
    assert kind_of(name) == name
