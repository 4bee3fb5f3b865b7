"""Qwen3MoEConfig: both spellings of config.json, which layers have experts, what is refused."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe.models.qwen3_moe import Qwen3MoEConfig
from jax_megamoe.models.qwen3_moe.layers import rope_table
from jax_megamoe.models.qwen3_moe.parameters import parameters

# What both spellings share.
COMMON = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
}
OLD = {
    **COMMON,
    "num_experts": 8,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}
NEW = {
    **COMMON,
    "num_local_experts": 8,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "dtype": "bfloat16",
}


@pytest.fixture
def read(tmp_path):
    def read(raw, generation=None):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return Qwen3MoEConfig.from_hf(tmp_path)

    return read


def test_both_spellings_mean_the_same(read):
    old, new = read(OLD), read(NEW)
    assert old == new
    assert (old.num_experts, old.rope_theta, old.dtype) == (8, 1e6, "bfloat16")
    assert hash(old) == hash(new)


@pytest.mark.parametrize("spelling", [OLD, NEW])
def test_rope_base_is_never_silently_the_default(read, spelling):
    config = read({**spelling, "head_dim": 128})
    cos, sin = rope_table(config, jnp.array([1, 3000]))
    frequency = 1e6 ** (-np.arange(64) / 64)
    np.testing.assert_allclose(np.arctan2(sin, cos)[0, 0, 1], 0.80584, atol=1e-5)
    np.testing.assert_allclose(cos[1, 0], np.cos(3000 * frequency), atol=5e-4)
    np.testing.assert_allclose(sin[1, 0], np.sin(3000 * frequency), atol=5e-4)


def test_a_missing_rope_base_is_that_of_transformers(read):
    raw = {k: v for k, v in OLD.items() if k != "rope_theta"}
    assert read(raw).rope_theta == 10000.0


def test_layers_with_experts(read):
    mixed = read({**OLD, "mlp_only_layers": [1], "decoder_sparse_step": 2})
    assert mixed.moe_layers == (3, 5)
    assert read({**OLD, "mlp_only_layers": [3], "decoder_sparse_step": 2}).moe_layers == (1, 5)
    assert read(OLD).moe_layers == (0, 1, 2, 3, 4, 5)
    assert read({**OLD, "num_experts": 0}).moe_layers == ()

    groups = parameters(mixed)["layers"]
    assert [sorted(g.keys() & {"router", "gate_proj"}) for g in groups.values()] == [
        ["gate_proj"],
        ["router"],
        ["gate_proj"],
        ["router"],
    ]
    assert groups[0]["gate_proj"].shape == (3, 64, 48)
    assert groups[1]["w_gate"].shape == (1, 8, 64, 24)


def test_head_dim_is_not_hidden_size_over_heads(read):
    layer = parameters(read({**OLD, "head_dim": 32}))["layers"][0]
    assert layer["q_proj"].shape[1:] == (64, 128)
    assert layer["k_proj"].shape[1:] == layer["v_proj"].shape[1:] == (64, 64)
    assert layer["o_proj"].shape[1:] == (128, 64)
    assert layer["q_norm"].shape[1:] == layer["k_norm"].shape[1:] == (32,)
    assert read(OLD).head_dim == 16
    assert read({**OLD, "head_dim": None}).head_dim == 16


def test_attention_bias_has_parameters(read):
    layer = parameters(read({**OLD, "attention_bias": True}))["layers"][0]
    assert layer["q_bias"].shape[1:] == layer["o_bias"].shape[1:] == (64,)
    assert "q_bias" not in parameters(read(OLD))["layers"][0]


def test_sliding_window_counts_only_if_it_is_used(read):
    assert read({**OLD, "sliding_window": 4, "use_sliding_window": False}) == read(OLD)
    assert read({**OLD, "sliding_window": None, "use_sliding_window": True}) == read(OLD)
    with pytest.raises(ValueError, match="sliding_window 4.*not supported"):
        read({**OLD, "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2})


def test_end_tokens(read):
    assert read(OLD).eos_token_ids == ()
    assert read({**OLD, "eos_token_id": 5}).eos_token_ids == (5,)
    assert read({**OLD, "eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert read({**OLD, "eos_token_id": 5}, {"eos_token_id": [5, 3]}).eos_token_ids == (5, 3)
    assert read({**OLD, "eos_token_id": 5}, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert read({**OLD, "eos_token_id": 5}, {"eos_token_id": None}).eos_token_ids == (5,)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.*'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.*'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters.*'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "mixtral"}, "model_type is 'mixtral'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'.*not supported"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'; it must be an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object or null"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object or null"),
        ({"mlp_only_layers": "01"}, "mlp_only_layers is '01'; it must be a list"),
        ({"mlp_only_layers": [1.5]}, "mlp_only_layers holds 1.5"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob is 'false'; it must be true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"num_experts": None}, "has no num_experts"),
        ({"moe_intermediate_size": None}, "has no moe_intermediate_size"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9.*num_experts, 8"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4.*num_key_value_heads, 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_size": 66}, "hidden_size is 66.*num_attention_heads, 4"),
        ({"mlp_only_layers": [6]}, "mlp_only_layers holds 6"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most"),
        ({"torch_dtype": "float8"}, "dtype is 'float8'"),
        ({"head_dim": "16"}, "head_dim is '16'.*integer"),
        ({"num_experts": -8}, "num_experts is -8.*at least 1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'.*finite number above 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06.*above 0"),
        ({"rope_theta": [1e6]}, r"rope_theta is \[1000000.0\].*finite number above 0"),
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef is -0.1.*at least 0"),
        ({"router_aux_loss_coef": True}, "router_aux_loss_coef is True.*finite number"),
        ({"eos_token_id": "</s>"}, "config.json: eos_token_id is '</s>'.*integer"),
        ({"eos_token_id": [5, -1]}, r"config.json: eos_token_id is \[5, -1\].*at least 0"),
    ],
)
def test_what_cannot_be_computed_is_refused(read, change, message):
    with pytest.raises(ValueError, match=message):
        read({**OLD, **change})


def test_lists_are_taken_and_single_numbers_are_not(read):
    config = read(OLD, {})
    listed = dataclasses.replace(config, mlp_only_layers=[1], eos_token_ids=[5])
    assert hash(listed) == hash(
        dataclasses.replace(config, mlp_only_layers=(1,), eos_token_ids=(5,))
    )
    for name in ("mlp_only_layers", "eos_token_ids"):
        with pytest.raises(ValueError, match=f"^{name} is 1; it must be a tuple of integers$"):
            dataclasses.replace(config, **{name: 1})


def test_end_tokens_of_the_generation_config_are_checked(read):
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id is 5.5"):
        read(OLD, {"eos_token_id": 5.5})
    with pytest.raises(ValueError, match="eos_token_ids holds -1"):
        dataclasses.replace(read(OLD, {}), eos_token_ids=(5, -1))


@pytest.mark.parametrize(
    "text, message", [("{'a': 1}", "is not JSON"), ("[]", "holds a list; .* JSON object")]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_without_a_json_object_is_named(read, tmp_path, name, text, message):
    read(OLD)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"/{name} {message}"):
        Qwen3MoEConfig.from_hf(tmp_path)


def test_missing_config_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        Qwen3MoEConfig.from_hf(tmp_path)


def test_one_expert_with_renormalised_weights_warns(read):
    with pytest.warns(UserWarning, match="the router learns from the load balancing loss alone"):
        read({**OLD, "num_experts_per_tok": 1, "norm_topk_prob": True})


def test_written_config_reads_back(read):
    changes = {"mlp_only_layers": [1], "eos_token_id": [5, 3], "norm_topk_prob": True}
    config = read({**NEW, **changes})
    raw = config.to_hf()
    assert read(json.loads(json.dumps(raw))) == config
    assert raw["torch_dtype"] == "bfloat16" and raw["num_experts"] == 8


def test_presets_are_the_public_models():
    small = Qwen3MoEConfig.preset("qwen3-30b-a3b")
    large = Qwen3MoEConfig.preset("qwen3-235b-a22b")
    assert _count(small) == pytest.approx(30.5e9, rel=0.005)
    assert _count(large) == pytest.approx(235e9, rel=0.005)
    assert len(Qwen3MoEConfig.preset("qwen3-235b-a22b", num_hidden_layers=2).moe_layers) == 2
    with pytest.raises(ValueError, match="'small'.*'tiny', 'qwen3-30b-a3b', 'qwen3-235b-a22b'"):
        Qwen3MoEConfig.preset("small")


def _count(config):
    tree = parameters(config)
    flat = [tree["embed_tokens"], tree["lm_head"], *tree["layers"][0].values()]
    return sum(np.prod(p.shape, dtype=np.int64) for p in flat)
