"""The Qwen3-MoE port against what Hugging Face transformers computes (tests/data/qwen3_moe)."""

import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_megamoe.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig, load_hf, loss

DATA = Path(__file__).parent / "data" / "qwen3_moe"
CASES = ("base", "tied_dense", "sharded")


@functools.cache
def golden(case):
    return dict(np.load(DATA / case / "golden.npz"))


@functools.cache
def model(case):
    return load_hf(DATA / case / "per_expert", dtype=jnp.float32)


def close(got, want, atol=1e-4):
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_every_inner_value_of_a_forward_pass(case):
    g = golden(case)
    logits, inner = model(case)(g["input_ids"], return_intermediates=True)
    close(logits, g["logits"])
    for name in ("hidden_embed", "hidden_layers", "hidden_final", "router_logits"):
        close(inner[name], g[name])
    assert model(case).config.moe_layers == tuple(g["moe_layers"])
    np.testing.assert_array_equal(inner["expert_ids"], g["router_topk_ids"])
    close(inner["expert_weights"], g["router_topk_weights"], atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["fused", "per_expert with config_v4"])
def test_layouts_and_config_spellings_load_the_same_model(case, layout, tmp_path):
    folder = DATA / case / layout.split()[0]
    if "config_v4" in layout:
        folder = shutil.copytree(folder, tmp_path / "model")
        (folder / "config.json").unlink()
        shutil.copy(DATA / case / "config_v4.json", folder / "config.json")
    other = load_hf(folder, dtype=jnp.float32)
    assert other.config == model(case).config
    want, got = nnx.state(model(case), nnx.Param), nnx.state(other, nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case):
    g = golden(case)
    m = model(case)
    (total, metrics), grads = nnx.value_and_grad(loss, has_aux=True)(m, g["input_ids"], g["labels"])
    close(total, g["total_loss"])
    close(metrics["lm_loss"], g["lm_loss"])
    close(metrics["aux_loss"], g["aux_loss"])
    experts = m.config.num_experts
    load = [np.bincount(ids.ravel(), minlength=experts) for ids in g["router_topk_ids"]]
    np.testing.assert_array_equal(metrics["expert_load"], load)
    assert int(metrics["num_labels"]) == (g["labels"][:, 1:] != -100).sum()

    got = hf_gradients(m, grads)
    stored = [name for name in g if name.startswith("grad.")]
    assert len(stored) >= 9
    for name in stored:
        want = g[name]
        np.testing.assert_allclose(
            got[name.removeprefix("grad.")], want, rtol=0, atol=1e-3 * np.abs(want).max()
        )
    norms = {n.removeprefix("gradnorm."): v for n, v in g.items() if n.startswith("gradnorm.")}
    for name, want in norms.items():
        norm = np.linalg.norm(got[name].astype(np.float64))
        np.testing.assert_allclose(norm, want, rtol=1e-3, err_msg=name)


def hf_gradients(m, grads):
    """Gradients under the per-expert and the fused names of a checkpoint."""
    from jax_megamoe.models.qwen3_moe import checkpoint

    arrays = nnx.to_pure_dict(grads)
    named = {}
    for layout in ("fused", "per_expert"):
        named |= dict(checkpoint._hf_tensors(m, arrays, layout))
    return named


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", CASES)
def test_padding(case, side):
    g = golden(case)
    ids, mask, labels = (g[f"{side}_{k}"] for k in ("input_ids", "attention_mask", "labels"))
    logits = np.asarray(model(case)(ids, mask)) * mask[..., None]
    close(logits, g[f"{side}_logits"])
    total, metrics = loss(model(case), ids, labels, mask)
    close(total, g[f"{side}_total_loss"])
    close(metrics["lm_loss"], g[f"{side}_lm_loss"])
    close(metrics["aux_loss"], g[f"{side}_aux_loss"])
    slots = mask.sum() * model(case).config.num_experts_per_tok
    np.testing.assert_array_equal(metrics["expert_load"].sum(axis=1), slots)


def test_labels_that_are_no_tokens():
    m, g = model("base"), golden("base")
    run = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
    for label in (-1, -101, m.config.vocab_size):
        labels = np.array(g["labels"])
        labels[0, 3] = label
        for outside_jit in (labels, jnp.asarray(labels)):
            with pytest.raises(
                ValueError,
                match=f"labels holds {label}; the tokens of the model are 0 to 96, and -100 is ig",
            ):
                loss(m, g["input_ids"], outside_jit)
        (total, metrics), grads = run(m, g["input_ids"], labels)
        assert np.isnan(total) and np.isnan(metrics["lm_loss"])
        assert np.isnan(grads["lm_head"][...]).any()
    with pytest.raises(ValueError, match="labels has .* dtype float32; it must be integers"):
        loss(m, g["input_ids"], g["labels"].astype(np.float32))


def test_input_ids_that_are_no_tokens():
    m, g = model("base"), golden("base")
    clipped = jax.jit(m)
    for wrong, nearest in ((-1, 0), (m.config.vocab_size, m.config.vocab_size - 1)):
        ids, near = np.array(g["input_ids"]), np.array(g["input_ids"])
        ids[0, 3], near[0, 3] = wrong, nearest
        np.testing.assert_array_equal(clipped(ids), clipped(near))
        for call in (m, lambda ids: loss(m, ids, g["labels"])):
            with pytest.raises(ValueError, match=f"input_ids holds {wrong}; .* are 0 to 96$"):
                call(ids)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64"])
def test_tokens_of_any_integer_dtype(dtype):
    # 40000 tokens are more than int16 can count, and unsigned numbers have no -100.
    config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=1, vocab_size=40_000)
    m = Qwen3MoE(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    ids = np.arange(12, dtype=np.int32).reshape(2, 6)
    np.testing.assert_array_equal(
        loss(m, ids.astype(dtype), ids.astype(dtype))[0], loss(m, ids, ids)[0]
    )


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_an_empty_batch_is_refused(shape):
    ids = np.zeros(shape, np.int32)
    for call in (lambda: model("base")(ids), lambda: loss(model("base"), ids, ids)):
        with pytest.raises(ValueError, match=rf"input_ids has no tokens.*\({shape[0]}, {shape[1]}"):
            call()


def test_bf16_checkpoint_holds_the_same_weights_and_runs_in_bf16():
    g = golden("base")
    m = load_hf(DATA / "base" / "per_expert_bf16")
    assert m.embed_tokens.dtype == jnp.bfloat16
    widened = load_hf(DATA / "base" / "per_expert_bf16", dtype=jnp.float32)
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.state(widened, nnx.Param),
        nnx.state(model("base"), nnx.Param),
    )
    logits, inner = m(g["input_ids"], return_intermediates=True)
    np.testing.assert_array_equal(
        np.sort(inner["expert_ids"], axis=-1), np.sort(g["router_topk_ids"], axis=-1)
    )
    rounding = np.linalg.norm(g["bf16_logits"] - g["logits"])
    assert np.linalg.norm(logits - g["logits"]) <= 1.5 * rounding
    assert np.linalg.norm(logits - g["bf16_logits"]) <= 2 * rounding


def test_config_of_the_golden_folders():
    config = Qwen3MoEConfig.from_hf(DATA / "tied_dense" / "fused")
    assert config.moe_layers == (0, 2)
    assert (config.head_dim, config.rope_theta, config.norm_topk_prob) == (12, 1e4, False)
