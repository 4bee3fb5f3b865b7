"""The output and the five gradients against the fp32 oracle, for every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    ROUTINGS,
    Results,
    Shape,
    assert_close,
    assert_same_bits,
    make_inputs,
    make_mesh,
    oracle,
    relative_error,
    require_ffi,
    runner,
    sharded,
)

from jax_megamoe import MoEConfig

F32, BF16 = 1e-5, 1e-2

# Less than the balanced load: every routing with work needs several rounds on some rank.
SMALL = 0.4


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_equals_oracle(implementation, ranks, routing):
    inputs = make_inputs(routing=routing)
    got = runner(implementation, ranks, capacity_factor=SMALL)(inputs)
    assert_close(got, oracle(inputs), F32)


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("w_dtype", ["float32", "bfloat16"])
def test_each_gradient_has_its_primals_dtype(implementation, x_dtype, w_dtype):
    inputs = make_inputs(x_dtype=x_dtype, w_dtype=w_dtype)
    got = runner(implementation, 2)(inputs)
    assert [a.dtype for a in got] == [x_dtype, x_dtype, "float32"] + [w_dtype] * 3
    assert_close(got, oracle(inputs), F32 if x_dtype == w_dtype == "float32" else BF16)


def test_f32_weights_get_gradients_that_were_never_bf16(implementation):
    dw = runner(implementation, 2)(make_inputs(x_dtype="bfloat16")).dw_down
    rounded = dw.astype(jnp.bfloat16).astype(jnp.float32)
    assert float((dw == rounded).mean()) < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_values_survive(implementation, dtype):
    # An absolute tolerance hides anything at this size, a dropped cotangent of the routing weights
    # included: they are the inner products <dy[t], expert output>.
    inputs = make_inputs(scale=1e-3, dy_scale=1e-8, x_dtype=dtype, w_dtype=dtype)
    got = runner(implementation, 2)(inputs)
    assert_close(got, oracle(inputs), F32 if dtype == "float32" else BF16)
    assert 0 < np.abs(np.asarray(got.d_expert_weights)).max() < 1e-9


# Sizes around the row tile and the chunk of a team, and one and no token.
@pytest.mark.parametrize("tokens", [0, 1, 31, 63, 64, 65, 127, 128, 129, 257])
def test_token_counts(implementation, tokens):
    inputs = make_inputs(Shape(tokens=tokens, top_k=2, experts=4, intermediate=64), seed=tokens)
    got = runner(implementation)(inputs)
    if tokens == 0:
        assert got.y.shape == (0, 64)
        assert not any(np.asarray(dw).any() for dw in got[3:])
    else:
        assert_close(got, oracle(inputs), F32)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(16, 1, 8),  # one expert per token
        Shape(16, 8, 8),  # all experts
        Shape(2, 8, 8),
        Shape(16, 2, 4, 320, 192),  # sizes that are multiples of 64 and not of 128
        Shape(16, 2, 4, 24, 40),  # and of neither
    ],
)
def test_sizes(implementation, shape):
    inputs = make_inputs(shape)
    assert_close(runner(implementation, 2)(inputs), oracle(inputs), F32)


@pytest.mark.parametrize("routing", ["random", "one_expert"])
def test_swiglu_limit(implementation, routing):
    inputs = make_inputs(routing=routing)
    got = runner(implementation, 2, swiglu_limit=0.7)(inputs)
    assert_close(got, oracle(inputs, swiglu_limit=0.7), F32)
    assert relative_error(got.y, oracle(inputs).y) > 0.1


def test_a_value_equal_to_the_limit_passes_its_gradient(implementation):
    inputs = make_inputs()
    # Gate and up are 0.5 everywhere.
    inputs = inputs._replace(
        x=jnp.zeros_like(inputs.x).at[:, 0].set(1.0),
        **{name: getattr(inputs, name).at[:, 0].set(0.5) for name in ("w_gate", "w_up")},
    )
    free, limited = (runner(implementation, 1, **c)(inputs) for c in ({}, {"swiglu_limit": 0.5}))
    assert np.asarray(free.dx).any()
    assert_same_bits(limited, free)
    assert_close(limited, oracle(inputs, swiglu_limit=0.5), F32)


def test_experts_without_rows_get_exact_zeros(implementation):
    # First, last and middle experts empty; memory that was NaN before.
    shape = Shape(experts=8)
    inputs = make_inputs(shape)
    ids = jnp.where(jnp.isin(inputs.expert_ids, jnp.array([0, 3, 4, 7])), -1, inputs.expert_ids)
    inputs = inputs._replace(expert_ids=ids)
    poison_memory()
    got = runner(implementation, 2)(inputs)
    assert_close(got, oracle(inputs), F32)
    for dw in got[3:]:
        assert not np.asarray(dw)[[0, 3, 4, 7]].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_token_stays_alone(implementation, value):
    run = runner(implementation, 2)
    clean = make_inputs(Shape(tokens=80, top_k=2))
    bad_token, good = 13, np.arange(80) != 13
    ids = clean.expert_ids
    dirty = clean._replace(x=clean.x.at[bad_token, 5].set(value))
    want, got = run(clean), run(dirty)
    assert not np.isfinite(np.asarray(got.y[bad_token])).all()
    for name in ("y", "dx", "d_expert_weights"):
        assert_same_bits(getattr(got, name)[good], getattr(want, name)[good])
    reached = np.isin(np.arange(8), np.asarray(ids[bad_token]))
    for name in ("dw_gate", "dw_up", "dw_down"):
        assert_same_bits(getattr(got, name)[~reached], getattr(want, name)[~reached])


def test_a_bad_token_that_is_not_routed_changes_nothing(implementation):
    # 0 * NaN is NaN: masks must select, on the inputs of the weight gradient too.
    run = runner(implementation, 2)
    clean = make_inputs(routing="last_eighth_silent")
    dirty = clean._replace(
        x=clean.x.at[-20:].set(np.nan),
        dy=clean.dy.at[-20:].set(np.nan),
        expert_weights=clean.expert_weights.at[-20:].set(np.nan),
    )
    assert_same_bits(run(dirty), run(clean))


@pytest.mark.parametrize("field", Results._fields[1:])
def test_finite_differences(implementation, field):
    argument = field.removeprefix("d").removeprefix("_")
    inputs = make_inputs(Shape(tokens=6, top_k=2, experts=4, hidden=64, intermediate=64), seed=3)
    run = runner(implementation)
    value = getattr(inputs, argument)
    direction = np.random.default_rng(1).standard_normal(value.shape).astype(np.float32)

    def loss(step):
        y = run(inputs._replace(**{argument: value + step * direction})).y
        return float((np.asarray(y, np.float64) * np.asarray(inputs.dy, np.float64)).sum())

    step = 2e-3
    want = (loss(step) - loss(-step)) / (2 * step)
    got = float((np.asarray(getattr(run(inputs), field), np.float64) * direction).sum())
    assert got == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("field", Results._fields)
def test_the_comparison_sees_one_wrong_tile(field):
    # As small as the values are, and in one expert of eight.
    want = oracle(make_inputs(scale=1e-3, dy_scale=1e-8))
    array = np.array(getattr(want, field))
    array[-1, ..., :8] *= 1.5
    with pytest.raises(AssertionError, match=f"^{field}"):
        assert_close(want._replace(**{field: array}), want, BF16)


def test_stats(implementation):
    inputs = make_inputs(routing="holes")
    config = MoEConfig(implementation=implementation)
    f = jax.jit(sharded(make_mesh((4,)), config, return_stats=True))
    y, (load, invalid, rounds) = f(*inputs.args)
    ids = np.asarray(inputs.expert_ids)
    valid = ids[(ids >= 0) & (ids < 8)]
    np.testing.assert_array_equal(load, np.bincount(valid, minlength=8))
    per_rank = ((ids < -1) | (ids >= 8)).reshape(4, -1).sum(axis=1)
    np.testing.assert_array_equal(invalid, per_rank)
    assert invalid.dtype == load.dtype == rounds.dtype == "int32"
    assert (np.asarray(rounds) == 1).all()
    assert_close_output(y, inputs)


@pytest.mark.parametrize("routing", ["first_experts", "one_expert", "skewed"])
def test_no_row_is_lost_on_one_full_rank(implementation, routing):
    # K = 8 slots on one of 8 ranks, whose single expert is named by all of them or by one.
    inputs = make_inputs(Shape(tokens=128, top_k=8, experts=8), routing)
    config = MoEConfig(implementation=implementation)
    f = jax.jit(sharded(make_mesh((8,)), config, return_stats=True))
    y, (load, _, rounds) = f(*inputs.args)
    if routing == "first_experts":
        assert rounds[0] > 1 and not np.asarray(rounds[1:]).any()
    ids = np.asarray(inputs.expert_ids)
    np.testing.assert_array_equal(load, np.bincount(ids[ids >= 0], minlength=8))
    assert_close(runner(implementation, 8)(inputs), oracle(inputs), F32)
    assert_close_output(y, inputs)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_on_every_run(implementation, dtype, ranks):
    # Eight contributions to every token, so that an order that varies would show.
    shape = Shape(tokens=512, top_k=8, experts=64, hidden=64, intermediate=32)
    inputs = make_inputs(shape, "skewed", x_dtype=dtype, w_dtype=dtype)
    run = runner(implementation, ranks)
    want = run(inputs)
    for _ in range(40):
        poison_memory()
        assert_same_bits(run(inputs), want)


def test_same_bits_for_every_number_of_ranks():
    # Row order and order of summation do not depend on it, nor on the number of rounds.
    require_ffi()
    inputs = make_inputs(x_dtype="bfloat16", w_dtype="bfloat16", routing="skewed")
    want = runner("ffi", 1)(inputs)
    for ranks in (2, 4, 8):
        assert_same_bits(runner("ffi", ranks)(inputs), want)
        assert_same_bits(runner("ffi", ranks, capacity_factor=SMALL)(inputs), want)


def assert_close_output(y, inputs):
    assert relative_error(y, oracle(inputs).y) <= F32


def poison_memory():
    """Fills freed memory of the sizes in use with NaN, so that unwritten results show."""
    for size in (2**12, 2**14, 2**16, 2**18):
        arrays = [jnp.full((size,), np.nan) for _ in range(4)]
        jax.block_until_ready(arrays)
        del arrays
