"""Generation: the golden greedy tokens, end tokens, padding, sampling, and who is routed."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_megamoe.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig, generate, layers, load_hf

DATA = Path(__file__).parent / "data" / "qwen3_moe"
NEW = 12


@functools.cache
def golden(case):
    return dict(np.load(DATA / case / "golden.npz"))


@functools.cache
def model(case="base"):
    return load_hf(DATA / case / "fused")


@pytest.mark.parametrize("case", ["base", "tied_dense", "sharded"])
def test_greedy_tokens_and_their_logits(case):
    g = golden(case)
    tokens, logits = generate(model(case), g["prompt_ids"][None], NEW, return_logits=True)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, g["gen_ids"][None])
    np.testing.assert_allclose(logits[0], g["gen_logits"], rtol=0, atol=1e-4)


def test_expert_parallel_mesh_with_left_padding_and_rows_that_do_not_divide():
    g = golden("base")
    mesh = jax.make_mesh((2, 4), ("data", "expert"))
    sharded = load_hf(DATA / "base" / "fused", mesh=mesh)
    prompts = np.zeros((3, 8), np.int32)
    mask = np.zeros((3, 8), np.int32)
    for row, length in enumerate((5, 5, 8)):
        prompts[row, -length:] = [*g["prompt_ids"], *g["gen_ids"]][:length]
        mask[row, -length:] = 1
    tokens = np.asarray(generate(sharded, prompts, 6, attention_mask=mask))
    np.testing.assert_array_equal(tokens[0], g["gen_ids"][:6])
    np.testing.assert_array_equal(tokens[1], g["gen_ids"][:6])
    np.testing.assert_array_equal(tokens[2], g["gen_ids"][3:9])


def test_64_bit_types_change_nothing():
    g = golden("base")
    with jax.enable_x64(True):
        tokens = generate(model(), g["prompt_ids"][None], 4)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, g["gen_ids"][None, :4])


@functools.cache
def counting_model(eos_ids=(), vocab=16):
    """A model that follows t by t + 1: the layers add nothing, and lm_head is the
    embedding moved by one."""
    config = Qwen3MoEConfig.preset(
        "tiny", vocab_size=vocab, hidden_size=vocab, num_hidden_layers=1, eos_token_ids=eos_ids
    )
    counting = Qwen3MoE(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    counting.embed_tokens[...] = jnp.eye(vocab)
    counting.lm_head[...] = jnp.roll(jnp.eye(vocab), 1, axis=0)
    stack = counting.layers[0]
    stack.o_proj[...] = jnp.zeros_like(stack.o_proj[...])
    stack.w_down[...] = jnp.zeros_like(stack.w_down[...])
    return counting


PROMPT = np.array([[3], [7], [1]], np.int32)


def test_rows_stop_at_any_end_token_and_are_padded():
    want = [[4, 5, 6, 0, 0, 0], [8, 9, 0, 0, 0, 0], [2, 3, 4, 5, 6, 0]]
    tokens = generate(counting_model(), PROMPT, 6, eos_ids=(6, 9))
    np.testing.assert_array_equal(tokens, want)


def test_end_tokens_come_from_the_model_unless_they_are_given():
    counting = counting_model(eos_ids=(5, 9))
    want = np.array([[4, 5, 6, 7, 8, 9], [8, 9, 10, 11, 12, 13], [2, 3, 4, 5, 6, 7]])
    np.testing.assert_array_equal(generate(counting, PROMPT, 6, eos_ids=None), want)
    np.testing.assert_array_equal(generate(counting, PROMPT, 6, eos_ids=3)[2], [2, 3, 0, 0, 0, 0])
    np.testing.assert_array_equal(
        generate(counting, PROMPT, 6, pad_id=15),
        [[4, 5, 15, 15, 15, 15], [8, 9, 15, 15, 15, 15], [2, 3, 4, 5, 15, 15]],
    )


def test_numbers_and_arrays_of_end_tokens():
    want = [[4, 5, 6, 0], [8, 9, 10, 11], [2, 3, 4, 5]]
    for eos_ids in (6, [6], np.int64(6), np.array([6, 14]), jnp.array([6])):
        tokens = generate(counting_model(), PROMPT, np.int64(4), eos_ids=eos_ids)
        np.testing.assert_array_equal(tokens, want)


def test_rows_that_have_ended_are_not_routed_and_the_loop_ends_with_the_last(monkeypatch):
    routed = []

    def counted(x, expert_ids, *args, **kwargs):
        jax.debug.callback(lambda ids: routed.append(int((ids >= 0).sum())), expert_ids)
        return moe_mlp(x, expert_ids, *args, **kwargs)

    moe_mlp = layers.moe_mlp
    monkeypatch.setattr(layers, "moe_mlp", counted)
    # A size of its own, so that nothing compiled before is reused.
    counting = counting_model(vocab=24)
    tokens = generate(counting, PROMPT, 9, eos_ids=(6, 9), pad_id=14)
    jax.effects_barrier()
    np.testing.assert_array_equal(
        tokens[:, :5], [[4, 5, 6, 14, 14], [8, 9, 14, 14, 14], [2, 3, 4, 5, 6]]
    )
    assert (np.asarray(tokens[:, 5:]) == 14).all()
    # Two slots a token: the prompt, then the rows still running before each later token.
    assert sorted(routed, reverse=True) == [2 * rows for rows in (3, 3, 2, 1, 1)]


def test_sampling_follows_the_distribution_and_the_key():
    g = golden("base")
    prompt = np.tile(g["prompt_ids"], (512, 1))
    draw = functools.partial(generate, model(), prompt, 1, temperature=2.0)
    tokens = np.asarray(draw(rng=jax.random.key(0)))[:, 0]
    np.testing.assert_array_equal(tokens, np.asarray(draw(rng=jax.random.key(0)))[:, 0])
    assert (tokens != np.asarray(draw(rng=jax.random.key(1)))[:, 0]).any()
    p = np.asarray(jax.nn.softmax(g["gen_logits"][0] / 2.0))
    expected = 512 * p[p > 0.02]
    observed = np.bincount(tokens, minlength=97)[p > 0.02]
    assert len(expected) > 5
    assert ((observed - expected) ** 2 / expected).sum() < 4 * len(expected)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt_ids": np.zeros((1, 0), np.int32)}, "prompt_ids has no tokens"),
        ({"prompt_ids": np.zeros((0, 3), np.int32)}, r"prompt_ids has no tokens.*\(0, 3\)"),
        ({"prompt_ids": np.zeros(3, np.int32)}, r"prompt_ids has shape \(3,\)"),
        ({"prompt_ids": np.array([[3, 97]])}, "prompt_ids holds 97; .* of the model are 0 to 96"),
        ({"prompt_ids": np.array([[3, -1]])}, "prompt_ids holds -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": 2**31}, "max_new_tokens is 2147483648"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"eos_ids": "x"}, "eos_ids holds 'x'"),
        ({"eos_ids": [2, 3.5]}, "eos_ids holds 2.0"),
        ({"eos_ids": 2**40}, "eos_ids holds 1099511627776"),
        ({"pad_id": -1}, "pad_id is -1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan; it must be a finite number"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1.0}, "temperature is 1.0; sampling needs rng"),
        ({"attention_mask": np.ones((1, 2))}, r"attention_mask has shape \(1, 2\)"),
        ({"attention_mask": np.array([[1, 1, 0]])}, "attention_mask.* row 0.* on the left"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    arguments = {"prompt_ids": np.zeros((1, 3), np.int32), "max_new_tokens": 2, **change}
    with pytest.raises(ValueError, match=message):
        generate(model(), **arguments)


def test_what_is_no_array_is_named():
    ids = np.zeros((1, 3), np.int32)
    with pytest.raises(TypeError, match="^prompt_ids is a list; it must be an array"):
        generate(model(), [[1, 2]], 2)
    with pytest.raises(TypeError, match="^attention_mask is a list; it must be an array"):
        generate(model(), ids, 2, attention_mask=[[1, 1, 1]])
    with pytest.raises(TypeError, match="^input_ids is a list; it must be an array"):
        model()([[1, 2]])
