"""The fused backward on Hopper GPUs, against the oracle."""

from __future__ import annotations

import functools

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
    poison_memory_like,
    relative_error,
    results_of,
    sharded,
)
from jax.sharding import PartitionSpec as P
from test_gpu_forward import (
    ALL_SIZES,
    BF16,
    GROUPS,
    ODD_SIZES,
    QWEN3_LAYERS,
    bytes_pulled,
    inputs_of_groups,
    places,
    poisoned_ranks,
    rank_attributes,
    rank_operands,
)

from jax_megamoe import MoEConfig, _runtime, moe_mlp
from jax_megamoe._bench.timeline import pulled_tokens

pytestmark = pytest.mark.gpu


def gradients(inputs, **arguments):
    """(dx, d_expert_weights, three dw)."""
    return results_of(functools.partial(moe_mlp, **arguments), inputs)[1:]


def single_gpu(*args):
    return moe_mlp(*args, config=MoEConfig(implementation="ffi"))


@functools.cache
def fused(**config):
    """The jitted gradients on one GPU: inputs -> (dx, d_expert_weights, three dw)."""
    config = MoEConfig(implementation="ffi", **config)
    run = jax.jit(lambda inputs: gradients(inputs, config=config))

    def poisoned(inputs):
        poison_memory_like(inputs.x, inputs.expert_weights, *inputs.args[3:])
        return run(inputs)

    return poisoned


def check(got, inputs, tolerance=1e-2, **config):
    want = oracle(inputs, **config)
    for a, primal in zip(got, (inputs.x, inputs.expert_weights, *inputs.args[3:]), strict=True):
        assert a.dtype == primal.dtype
    assert_close(Results(want.y, *got), want, tolerance, inputs.expert_ids)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_is_the_oracles(routing):
    inputs = make_inputs(Shape(tokens=200, hidden=320, intermediate=192), routing, **BF16)
    got = fused()(inputs)
    check(got, inputs)
    unused = np.bincount(np.asarray(inputs.expert_ids).clip(-1, 8).ravel() + 1, minlength=10)[1:9]
    for dw in got[2:]:
        assert not np.asarray(dw, np.float32)[unused == 0].any()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129])
def test_every_token_count_is_the_oracles(tokens):
    inputs = make_inputs(Shape(tokens=tokens, top_k=2, experts=4), **BF16)
    check(fused()(inputs), inputs)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 1), (8, 8), (32, 32)])
def test_extreme_top_k_is_the_oracles(experts, top_k):
    inputs = make_inputs(Shape(tokens=130, experts=experts, top_k=top_k), **BF16)
    check(fused()(inputs), inputs)


@pytest.mark.parametrize("w_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("hidden", "intermediate"), ODD_SIZES)
def test_odd_sizes_are_the_oracles(hidden, intermediate, w_dtype):
    shape = Shape(hidden=hidden, intermediate=intermediate)
    inputs = make_inputs(shape, x_dtype=jnp.bfloat16, w_dtype=w_dtype)
    check(fused()(inputs), inputs)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("hidden", "intermediate"), ALL_SIZES)
def test_bits_of_all_sizes_do_not_depend_on_ranks(hidden, intermediate, ranks):
    shape = Shape(tokens=320, hidden=hidden, intermediate=intermediate)
    inputs = make_inputs(shape, **BF16)
    key, _ = poisoned_ranks(shape, ranks, 1024)
    assert_same_bits(backward_ranks(shape, ranks, key, 1024)(inputs), fused()(inputs))


def test_own_rows_that_are_copied_and_that_are_pulled():
    """The first 6144 rows of a round are copied if they are the rank's own, the rest is pulled."""
    inputs = make_inputs(
        Shape(tokens=3200, top_k=4, experts=8, hidden=128, intermediate=64), **BF16
    )
    check(fused()(inputs), inputs)


@pytest.mark.parametrize(("hidden", "intermediate", "experts"), QWEN3_LAYERS)
def test_the_qwen3_layers_are_the_oracles(hidden, intermediate, experts):
    shape = Shape(tokens=1024, top_k=8, experts=experts, hidden=hidden, intermediate=intermediate)
    inputs = make_inputs(shape, **BF16)
    check(fused()(inputs), inputs)


@pytest.mark.parametrize(("scale", "dy_scale"), [(1.0, 1.0), (1e-3, 1.0), (1.0, 1e-8)])
@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("w_dtype", [jnp.bfloat16, jnp.float32])
def test_dtypes_and_scales(scale, dy_scale, x_dtype, w_dtype):
    inputs = make_inputs(scale=scale, dy_scale=dy_scale, x_dtype=x_dtype, w_dtype=w_dtype)
    check(fused()(inputs), inputs)


def test_the_errors_are_at_most_half_as_large_again_as_those_of_xla():
    inputs = make_inputs(Shape(tokens=512, hidden=512, intermediate=512), **BF16)
    want = oracle(inputs)[1:]
    xla = jax.jit(lambda i: gradients(i, config=MoEConfig(implementation="xla")))(inputs)
    for name, a, b, c in zip(Results._fields[1:], fused()(inputs), xla, want, strict=True):
        # xla sums the routing weights' gradients in f32 before it rounds anything.
        allowed = 1e-2 if name == "d_expert_weights" else 1.5 * relative_error(b, c)
        assert relative_error(a, c) <= allowed, name


def test_swiglu_limit_stops_gradients():
    inputs = make_inputs(scale=4.0, **BF16)
    check(fused(swiglu_limit=1.5)(inputs), inputs, swiglu_limit=1.5)


@pytest.mark.parametrize("config", [{}, {"swiglu_limit": 1.5}], ids=str)
@pytest.mark.parametrize("argument", ["x", "dy", "expert_weights"])
def test_a_nan_stays_in_its_token_and_its_experts(argument, config):
    inputs = make_inputs(**BF16)
    dirty = inputs._replace(**{argument: getattr(inputs, argument).at[5].set(np.nan)})
    clean, got = ([np.asarray(a, np.float32) for a in fused(**config)(i)] for i in (inputs, dirty))
    used = np.isin(np.arange(len(clean[2])), np.asarray(inputs.expert_ids[5]))
    for name, a, b in zip(("x", "expert_weights"), clean[:2], got[:2], strict=True):
        if (argument, name) != ("expert_weights", "expert_weights"):  # does not depend on itself
            assert np.isnan(b[5]).all()
        assert_same_bits(np.delete(b, 5, axis=0), np.delete(a, 5, axis=0))
    for a, b in zip(clean[2:], got[2:], strict=True):
        assert np.isnan(b[used]).any(axis=(1, 2)).all()
        assert_same_bits(b[~used], a[~used])


@pytest.mark.parametrize("argument", ["x", "dy"])
def test_an_infinity_stays_in_its_token_and_its_experts(argument):
    inputs = make_inputs(**BF16)
    dirty = inputs._replace(**{argument: getattr(inputs, argument).at[5].set(np.inf)})
    clean, got = ([np.asarray(a, np.float32) for a in fused()(i)] for i in (inputs, dirty))
    used = np.isin(np.arange(len(clean[2])), np.asarray(inputs.expert_ids[5]))
    for a, b in zip(clean[:2], got[:2], strict=True):
        assert not np.isfinite(b[5]).any()
        assert_same_bits(np.delete(b, 5, axis=0), np.delete(a, 5, axis=0))
    for a, b in zip(clean[2:], got[2:], strict=True):
        assert not np.isfinite(b[used]).all(axis=(1, 2)).any()
        assert_same_bits(b[~used], a[~used])


def test_fifty_calls_give_the_same_bits():
    inputs = make_inputs(
        Shape(tokens=512, top_k=8, experts=16, hidden=512, intermediate=256), **BF16
    )
    first = fused()(inputs)
    for seed in range(50):
        fused()(
            make_inputs(
                Shape(tokens=512, top_k=8, experts=16, hidden=512, intermediate=256),
                "skewed",
                seed=seed + 1,
                **BF16,
            )
        )
        assert_same_bits(fused()(inputs), first)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_no_bit_depends_on_ranks_capacity_or_what_memory_held(ranks, routing):
    shape = Shape(tokens=640, top_k=4, experts=16, hidden=256, intermediate=192)
    inputs = make_inputs(shape, routing, **BF16)
    want = fused()(inputs)
    # With 256 and 384 an expert whose rows span rounds may end where another one begins.
    for capacity_rows in (128, 256, 384, 8192):
        key, _ = poisoned_ranks(shape, ranks, capacity_rows)
        poison_memory_like(*want)
        assert_same_bits(backward_ranks(shape, ranks, key, capacity_rows)(inputs), want)


@pytest.mark.parametrize("routing", ["random", "skewed", "holes"])
def test_the_link_carries_each_token_and_its_gradient_once(routing):
    shape, ranks = Shape(tokens=640, top_k=4, experts=16, hidden=256), 4
    inputs = make_inputs(shape, routing, **BF16)
    key, _ = poisoned_ranks(shape, ranks, 8192)
    run = backward_ranks(shape, ranks, key, 8192)
    pulled = bytes_pulled(_runtime.load().backward_pulled_bytes, lambda: run(inputs))
    tokens = pulled_tokens(np.asarray(inputs.expert_ids), ranks, shape.experts).sum()
    assert pulled == 2 * tokens * shape.hidden * 2


@pytest.mark.parametrize("capacity_rows", [256, 8192])
@pytest.mark.parametrize("config", [{}, {"swiglu_limit": 1.0}], ids=str)
@pytest.mark.parametrize("intermediate", [64, 320, 448])
def test_every_number_of_rows_whatever_lies_behind_them(intermediate, config, capacity_rows):
    """Weight gradients contract over whole sixteens of rows, other products are in 64s."""
    counts = [0, 1, 15, 16, 17, 31, 48, 63, 64, 65, 79, 127, 128, 129, 145, 192]
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(16), counts))[:, None]
    shape = Shape(len(ids), top_k=1, experts=16, hidden=128, intermediate=intermediate)
    inputs = make_inputs(shape, **BF16)._replace(expert_ids=jnp.asarray(ids, jnp.int32))
    key, _ = poisoned_ranks(shape, 1, capacity_rows)
    check(backward_ranks(shape, 1, key, capacity_rows, **config)(inputs), inputs, **config)


def backward_ranks(shape, ranks, key, capacity_rows, swiglu_limit=np.inf, groups=1):
    """The jitted gradients of what `ranks_on_one_gpu` computes, in its workspace `key`.

    Those of the weights are [ranks, groups, E / ranks] experts, the three flattened to one.
    """
    tokens, local = shape.tokens // (ranks * groups), shape.experts // ranks
    h, i = shape.hidden, shape.intermediate
    bf16 = jnp.bfloat16
    results = (
        jax.ShapeDtypeStruct((ranks * groups, tokens, h), bf16),
        jax.ShapeDtypeStruct((ranks * groups, tokens, shape.top_k), jnp.float32),
        jax.ShapeDtypeStruct((ranks * groups, local, h, i), bf16),
        jax.ShapeDtypeStruct((ranks * groups, local, h, i), bf16),
        jax.ShapeDtypeStruct((ranks * groups, local, i, h), bf16),
    )

    @jax.jit
    def run(inputs):
        out = jax.ffi.ffi_call("jax_megamoe_backward_ranks", results)(
            *rank_operands(inputs.args, ranks, groups),
            inputs.dy.reshape(ranks * groups, tokens, h),
            places(ranks, groups),
            **rank_attributes(key, ranks, capacity_rows, swiglu_limit),
        )
        return tuple(a.reshape((-1,) + a.shape[2:]) for a in out)

    return run


@pytest.mark.parametrize(("groups", "ranks"), GROUPS)
@pytest.mark.parametrize("routing", ["random", "holes", "uneven"])
def test_groups_of_ranks_keep_to_themselves(routing, groups, ranks):
    """As on a mesh of data x experts."""
    shape, inputs, groups_tokens = inputs_of_groups(routing, ranks, groups)
    dx, d_expert_weights, *_ = fused()(inputs)
    alone = [fused()(tokens_of(inputs, tokens))[2:] for tokens in groups_tokens]
    for capacity_rows in (128, 8192):
        key, _ = poisoned_ranks(shape, ranks, capacity_rows, groups)
        poison_memory_like(dx, d_expert_weights, *(jnp.tile(a, (groups, 1, 1)) for a in alone[0]))
        got = backward_ranks(shape, ranks, key, capacity_rows, groups=groups)(inputs)
        assert_same_bits(got[:2], (dx, d_expert_weights))
        for a, *want in zip(got[2:], *alone, strict=True):
            a = np.asarray(a).reshape((ranks, groups, -1) + a.shape[1:])
            for g in range(groups):
                assert_same_bits(a[:, g].reshape(want[g].shape), want[g])


@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 64), (448, 704), (4160, 64)])
def test_no_bit_of_any_size_depends_on_rounds(hidden, intermediate):
    shape = Shape(tokens=640, top_k=4, experts=16, hidden=hidden, intermediate=intermediate)
    inputs = make_inputs(shape, "first_experts", **BF16)
    key, _ = poisoned_ranks(shape, 1, 256)
    assert_same_bits(backward_ranks(shape, 1, key, 256)(inputs), fused()(inputs))


def test_no_bit_depends_on_rounds_of_f32_gradients():
    shape = Shape(tokens=640, top_k=4, experts=16, hidden=256, intermediate=192)
    inputs = make_inputs(shape, "skewed", x_dtype=jnp.bfloat16, w_dtype=jnp.float32)
    assert_same_bits(fused(capacity_factor=0.01)(inputs), fused()(inputs))


@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("routing", "capacity_factor"), [*((r, 2.0) for r in ROUTINGS), ("first_experts", 0.25)]
)
def test_bits_on_two_gpus_are_those_of_one(routing, capacity_factor):
    shape = Shape(tokens=514, top_k=4, experts=16, hidden=512, intermediate=320)
    inputs = make_inputs(shape, routing, **BF16)
    mesh = make_mesh((2,), devices=jax.devices("gpu"))
    config = MoEConfig(implementation="ffi", capacity_factor=capacity_factor)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False
    )
    def run(inputs):
        return gradients(inputs, axis_name="expert", config=config)

    for a, b in zip(run(inputs), fused()(inputs), strict=True):
        assert_same_bits(np.asarray(a), np.asarray(b))


def test_offsets_beyond_int32():
    """Slots x hidden is past 2**31 elements; of tokens, which are independent, the last suffice."""
    shape = Shape(tokens=131073, top_k=8, experts=8, hidden=2112, intermediate=64)
    inputs = make_inputs(shape, "skewed", **BF16)
    assert shape.tokens * shape.top_k * shape.hidden > 2**31
    got = jax.jit(lambda i: results_of(single_gpu, i))(inputs)
    sums = [0.0, 0.0, 0.0]
    for part in np.array_split(np.arange(shape.tokens), 9):
        want = oracle(tokens_of(inputs, slice(part[0], part[-1] + 1)))
        sums = [a + np.asarray(b, np.float64) for a, b in zip(sums, want[3:], strict=True)]
    for a, b in zip(got[:3], want[:3], strict=True):  # of the last part
        assert relative_error(a[-len(part) :], b) <= 1e-2
    for a, b in zip(got[3:], sums, strict=True):
        assert relative_error(a, b) <= 1e-2


def tokens_of(inputs, part):
    """The inputs of some tokens alone."""
    return inputs._replace(
        x=inputs.x[part],
        expert_ids=inputs.expert_ids[part],
        expert_weights=inputs.expert_weights[part],
        dy=inputs.dy[part],
    )


@pytest.mark.parametrize("checkpoint", [False, True])
def test_layers_in_a_scan_are_those_of_a_loop(checkpoint):
    layers = [make_inputs(seed=seed, scale=0.5, **BF16) for seed in range(3)]
    stacked = [jnp.stack(a) for a in zip(*(i.args[1:] for i in layers), strict=True)]

    def layer(x, args):
        return x + single_gpu(x, *args), None

    def loop(x, ids, *rest):
        for i in range(3):
            x, _ = layer(x, [a[i] for a in (ids, *rest)])
        return x

    def scan(x, *args):
        return jax.lax.scan(jax.checkpoint(layer) if checkpoint else layer, x, args)[0]

    x, dy = layers[0].x, layers[0].dy
    got, want = (
        jax.jit(lambda x, ids, *rest, f=f: jax.vjp(lambda x, *r: f(x, ids, *r), x, *rest)[1](dy))(
            x, *stacked
        )
        for f in (scan, loop)
    )
    assert_same_bits(got, want)


@pytest.mark.multigpu
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_a_mesh_of_data_and_experts(shape):
    inputs = make_inputs(Shape(tokens=258, top_k=3, experts=8), **BF16)
    mesh = make_mesh(shape, ("data", "expert"), devices=jax.devices("gpu"))
    got = jax.jit(lambda i: results_of(sharded(mesh, MoEConfig(implementation="ffi")), i))(inputs)
    assert_close(got, oracle(inputs), 1e-2)
    one = jax.jit(lambda i: results_of(single_gpu, i))(inputs)
    assert_same_bits([np.asarray(a) for a in got[:3]], [np.asarray(a) for a in one[:3]])


@pytest.mark.parametrize(
    ("argument", "step"),
    [("x", 0.03), ("expert_weights", 0.5), ("w_gate", 0.02), ("w_up", 0.5), ("w_down", 0.5)],
)
def test_finite_differences(argument, step):
    """Along a random direction; y is linear in all of these but x and w_gate."""
    inputs = make_inputs(
        Shape(tokens=128, hidden=128, intermediate=64, experts=4), x_dtype=jnp.float32
    )
    value = getattr(inputs, argument)
    direction = jax.random.normal(jax.random.key(1), value.shape, value.dtype)

    def loss(value):
        y = single_gpu(*inputs._replace(**{argument: value}).args)
        return jnp.vdot(y.astype(jnp.float32), inputs.dy.astype(jnp.float32))

    there, back = (jax.jit(loss)(value + s * direction) for s in (step, -step))
    want = (there - back) / (2 * step)
    got = jnp.vdot(jax.jit(jax.grad(loss))(value), direction)
    norm = jnp.linalg.norm(jax.jit(jax.grad(loss))(value).astype(jnp.float32))
    assert abs(got - want) <= 0.05 * norm


def test_gradients_of_micro_batches_add_up():
    inputs = make_inputs(Shape(tokens=256), x_dtype=jnp.bfloat16, w_dtype=jnp.float32)
    whole = fused()(inputs)
    halves = [fused()(tokens_of(inputs, part)) for part in (slice(0, 128), slice(128, 256))]
    for a, b, c in zip(whole[:2], *(h[:2] for h in halves), strict=True):
        assert_same_bits(a, jnp.concatenate([b, c]))
    for a, b, c in zip(whole[2:], *(h[2:] for h in halves), strict=True):
        assert relative_error(b + c, a) <= 1e-5
