"""The operation under jit, scan, checkpoint and vmap; compilations and memory."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    Shape,
    assert_close,
    assert_same_bits,
    make_inputs,
    make_mesh,
    oracle,
    relative_error,
    require_ffi,
    results_of,
    runner,
    sharded,
)
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_megamoe import MoEConfig, moe_mlp, reference

SMALL = Shape(32, 2, 4, 64, 64)


def stack(layers=3, dtype="bfloat16"):
    """x and ids, and the routing weights and expert weights of several layers."""
    inputs = [make_inputs(SMALL, w_dtype=dtype, x_dtype=dtype, seed=i) for i in range(layers)]
    params = [(i.expert_weights, i.w_gate, i.w_up, i.w_down) for i in inputs]
    return inputs[0].x, inputs[0].expert_ids, jax.tree.map(lambda *a: jnp.stack(a), *params)


def residual_block(f, x, ids, params):
    return x + f(x, ids, *params)


def stack_loss(f, wrap, x, ids, params, *, scan):
    """Mean square of the last layer's output; `wrap` rematerialises a block, or does not."""
    block = wrap(functools.partial(residual_block, f))
    if scan:
        x, _ = lax.scan(lambda x, p: (block(x, ids, p), None), x, params)
    else:
        for i in range(params[0].shape[0]):
            x = block(x, ids, jax.tree.map(lambda a, i=i: a[i], params))
    return (x.astype(jnp.float32) ** 2).mean()


@pytest.mark.parametrize("check_vma", [True, False])
def test_scan_over_rematerialised_layers(implementation, check_vma):
    # bf16 parameters: a cotangent in another dtype, or one that lost the axes over which it varies,
    # would not fit the carry.
    x, ids, params = stack()
    f = sharded(make_mesh((2,)), MoEConfig(implementation=implementation), check_vma=check_vma)
    loss = functools.partial(stack_loss, f, jax.checkpoint, scan=True)
    got = jax.jit(jax.grad(loss, argnums=(0, 2)))(x, ids, params)
    f32 = jax.tree.map(lambda a: a.astype(jnp.float32), (x, params))
    want_loss = functools.partial(stack_loss, reference.moe_mlp, lambda b: b, scan=False)
    want = jax.jit(jax.grad(want_loss, argnums=(0, 2)))(f32[0], ids, f32[1])
    for a, b, primal in zip(*map(jax.tree.leaves, (got, want, (x, params))), strict=True):
        assert a.dtype == primal.dtype
        assert relative_error(a, b) < 2e-2


def test_scan_inside_the_shard_map(implementation):
    x, ids, params = stack(dtype="float32")
    config = MoEConfig(implementation=implementation)
    f = functools.partial(moe_mlp, axis_name="expert", config=config)
    mesh = make_mesh((2, 2), ("data", "expert"))

    def shard(x, ids, params):
        loss = stack_loss(f, jax.checkpoint, x, ids, params, scan=True)
        return lax.pmean(loss, mesh.axis_names)

    tokens, layers = P(mesh.axis_names), P(None, "expert")
    specs = (tokens, tokens, (P(None, mesh.axis_names), layers, layers, layers))
    loss = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P())
    got = jax.jit(jax.grad(loss, argnums=(0, 2)))(x, ids, params)
    want_loss = functools.partial(stack_loss, reference.moe_mlp, lambda b: b, scan=False)
    want = jax.jit(jax.grad(want_loss, argnums=(0, 2)))(x, ids, params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("wrap", [lambda b: b, jax.checkpoint], ids=["saved", "rematerialised"])
def test_recomputation_runs_no_forward_call(wrap, scan):
    # The residuals are the layer's inputs: one forward and one backward call for each layer, with
    # and without rematerialisation. A block's output is not needed to recompute the block.
    require_ffi()
    x, ids, params = stack(dtype="float32")
    f = sharded(make_mesh((2,)), MoEConfig(implementation="ffi"))
    loss = functools.partial(stack_loss, f, wrap, scan=scan)
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 2)))
    text = run.lower(x, ids, params).compile().as_text()
    layers = 1 if scan else 3
    assert text.count('custom_call_target="jax_megamoe_forward"') == layers
    assert text.count('custom_call_target="jax_megamoe_backward"') == layers


def test_rematerialisation_changes_no_bit(implementation):
    x, ids, params = stack(dtype="bfloat16")
    f = functools.partial(moe_mlp, config=MoEConfig(implementation=implementation))

    def gradients(wrap):
        loss = functools.partial(stack_loss, f, wrap, scan=False)
        return jax.jit(jax.grad(loss, argnums=(0, 2)))(x, ids, params)

    assert_same_bits(gradients(jax.checkpoint), gradients(lambda b: b))


def test_equal_calls_and_calls_in_flight_together(implementation):
    # The compiler may merge calls with equal operands, and start independent ones in an order that
    # differs from device to device.
    inputs = [make_inputs(SMALL, seed=i) for i in range(4)]
    f = sharded(make_mesh((4,)), MoEConfig(implementation=implementation))

    @jax.jit
    def run(inputs):
        once = [f(*i.args) for i in inputs]
        again = [f(*i.args) for i in reversed(inputs)]
        return once, again[::-1]

    want = [oracle(i).y for i in inputs]
    for _ in range(10):
        for ys in run(inputs):
            for y, w in zip(ys, want, strict=True):
                assert relative_error(y, w) < 1e-5


@pytest.mark.timeout(120)
def test_many_calls_between_other_collectives(implementation):
    inputs = make_inputs(SMALL)
    mesh = make_mesh((4,))
    config = MoEConfig(implementation=implementation)

    def shard(x, *rest):
        def body(_, now):
            y = moe_mlp(now, *rest, axis_name="expert", config=config)
            mean = lax.pmean(lax.all_gather(y, "expert").mean(0), "expert")
            return x + jnp.tanh(0.01 * (y - mean))

        return lax.fori_loop(0, 100, body, x)

    specs = (P("expert"),) * 6
    f = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P("expert"), check_vma=False)
    got = jax.jit(f)(*inputs.args)

    @jax.jit
    def one_device(x, *rest):
        def body(_, now):
            y = moe_mlp(now, *rest, config=config)
            mean = y.reshape(4, -1, x.shape[1]).mean(0)
            return x + jnp.tanh(0.01 * (y - jnp.tile(mean, (4, 1))))

        return lax.fori_loop(0, 100, body, x)

    assert relative_error(got, one_device(*inputs.args)) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_vmap(implementation, ranks):
    # Over tokens and ids with shared weights, and over everything; gradients of shared weights sum.
    inputs = [make_inputs(Shape(16, 2, 4, 16, 8), seed=i) for i in range(3)]
    batch = jax.tree.map(lambda *a: jnp.stack(a), *inputs)
    f = sharded(make_mesh((ranks,)), MoEConfig(implementation=implementation))
    got = jax.jit(jax.vmap(functools.partial(results_of, f)))(batch)
    for i, one in enumerate(inputs):
        assert_close(jax.tree.map(lambda a, i=i: a[i], got), oracle(one), 1e-5)

    def shared(experts, batch):
        y = jax.vmap(f, in_axes=(0, 0, 0, None, None, None))(*batch.args[:3], *experts)
        return (y * batch.dy).sum()

    grads = jax.jit(jax.grad(shared))(inputs[0].args[3:], batch)
    same = [oracle(i._replace(**dict(zip(NAMES, inputs[0].args[3:], strict=True)))) for i in inputs]
    for got_dw, *want in zip(grads, *(s[3:] for s in same), strict=True):
        assert relative_error(got_dw, sum(want)) < 1e-5


NAMES = ("w_gate", "w_up", "w_down")


def test_axis_of_vmap():
    inputs = make_inputs(Shape(16, 2, 4, 16, 8))
    args = [a.reshape(4, -1, *a.shape[1:]) for a in inputs.args]
    f = functools.partial(moe_mlp, axis_name="expert", config=MoEConfig(implementation="xla"))
    y = jax.jit(jax.vmap(f, axis_name="expert"))(*args)
    assert relative_error(y.reshape(16, 16), oracle(inputs).y) < 1e-5


def test_jacobian_of_the_routing_weights(implementation):
    # Linear in them: row t of the Jacobian is the output of each expert.
    inputs = make_inputs(Shape(3, 2, 4, 16, 8))
    f = functools.partial(moe_mlp, config=MoEConfig(implementation=implementation))
    x, ids, weights, *experts = inputs.args
    jacobian = jax.jit(jax.jacrev(lambda w: f(x, ids, w, *experts)))(weights)
    y = jnp.einsum("thuk,uk->th", jacobian, weights)
    assert relative_error(y, oracle(inputs).y) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_second_derivative(implementation, ranks):
    config = MoEConfig(implementation=implementation)
    f = sharded(make_mesh((2,)), config) if ranks > 1 else functools.partial(moe_mlp, config=config)
    x, *rest = make_inputs(SMALL).args
    gradient = jax.grad(lambda x: (f(x, *rest) ** 2).sum())
    message = "^moe_mlp is differentiable once and in reverse mode; what was asked for is the deriv"
    with pytest.raises(TypeError, match=message):
        jax.jit(jax.grad(lambda x: gradient(x).sum()))(x)


def test_a_gradient_that_is_a_constant_is_part_of_a_loss(implementation):
    config = MoEConfig(implementation=implementation)
    x, *rest = make_inputs(SMALL).args

    def loss(x):
        return (moe_mlp(x, *rest, config=config) ** 2).sum()

    def after_a_step(x, step):
        return loss(x - 0.1 * step)

    got = jax.jit(jax.grad(lambda x: after_a_step(x, lax.stop_gradient(jax.grad(loss)(x)))))(x)
    want = jax.jit(jax.grad(after_a_step))(x, jax.jit(jax.grad(loss))(x))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_new_routing_neither_recompiles_nor_keeps_memory(implementation):
    f = sharded(make_mesh((2,)), MoEConfig(implementation=implementation))
    run = jax.jit(functools.partial(results_of, f))
    inputs = make_inputs(SMALL)
    rng = np.random.default_rng(0)
    live = {}
    for step in range(50):
        ids = jnp.asarray(rng.integers(-1, 4, inputs.expert_ids.shape), jnp.int32)
        jax.block_until_ready(run(inputs._replace(expert_ids=ids)))
        live[step] = sum(a.nbytes for a in jax.live_arrays())
    assert run._cache_size() == 1
    assert live[49] == live[5]
    other = make_inputs(Shape(24, 2, 4, 64, 64))
    for _ in range(2):
        run(other), run(inputs)
    assert run._cache_size() == 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_lowers_for_gpus(implementation, check_vma):
    f = sharded(make_mesh((4,)), MoEConfig(implementation=implementation), check_vma=check_vma)
    traced = jax.jit(functools.partial(results_of, f)).trace(make_inputs(SMALL))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    if implementation == "xla":
        assert "ragged_dot" not in text  # XLA would multiply every row by every expert
    else:
        for target in ("jax_megamoe_forward", "jax_megamoe_backward"):
            (line,) = [line for line in text.splitlines() if f"custom_call @{target}(" in line]
            assert "has_side_effect" not in line  # it could not be rematerialised


@pytest.mark.parametrize("tokens", [0, 32])
def test_with_64_bit_types_enabled(implementation, tokens):
    inputs = make_inputs(Shape(tokens, 2, 4, 64, 64), x_dtype="bfloat16")
    config = MoEConfig(implementation=implementation, capacity_factor=0.5)
    f = sharded(make_mesh((2,)), config, return_stats=True)
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")  # a type that is not what it was will be an error of JAX
        y, stats = jax.jit(f)(*inputs.args)
        results = jax.jit(functools.partial(results_of, sharded(make_mesh((2,)), config)))(inputs)
    assert [a.dtype for a in (y, *stats)] == ["bfloat16", "int32", "int32", "int32"]
    assert [a.dtype for a in results] == ["bfloat16"] * 2 + ["float32"] * 4


def test_donated_arguments(implementation):
    inputs = make_inputs(SMALL)
    f = jax.jit(
        functools.partial(moe_mlp, config=MoEConfig(implementation=implementation)),
        donate_argnums=0,
    )
    x = jnp.array(inputs.x)
    assert relative_error(f(x, *inputs.args[1:]), oracle(inputs).y) < 1e-5


def test_memory_is_a_small_multiple_of_the_rows(implementation):
    # One device with many experts: anything of size [experts, tokens, ...] would be far above.
    shape = Shape(tokens=512, top_k=2, experts=64, hidden=64, intermediate=32)
    inputs = make_inputs(shape)
    compiled = runner(implementation).lower(inputs).compile()
    rows = shape.tokens * shape.top_k * (shape.hidden + 3 * shape.intermediate) * 4
    weights = sum(w.nbytes for w in inputs.args[3:])
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * rows + 2 * weights
    text = compiled.as_text()
    for tokens in (shape.tokens, shape.tokens * shape.top_k, 2 * shape.tokens * shape.top_k):
        assert f"[{shape.experts},{tokens}," not in text
        assert f"[{tokens},{shape.experts}," not in text


def test_memory_does_not_grow_with_the_ranks_work(implementation):
    # All tokens of 8 ranks on one of them: the shapes, and so the memory, are those of any routing.
    inputs = make_inputs(Shape(1024, 4, 8, 64, 32))
    compiled = runner(implementation, 8).lower(inputs).compile()
    rows = 1024 // 8 * 4 * (64 + 3 * 32) * 4
    gathered = 1024 * 64 * 4
    weights = sum(w.nbytes for w in inputs.args[3:])
    limit = 6 * rows + 4 * gathered + 2 * weights
    assert compiled.memory_analysis().temp_size_in_bytes < limit


def test_sizes_beyond_int32():
    # tokens * experts per token * hidden passes 2^31; equal tokens get equal results.
    if _free_bytes() < 8e9:
        pytest.skip("needs 8 GB of free memory")
    tokens, top_k, hidden = 131073, 8, 2048
    assert tokens * top_k * hidden > 2**31
    one = make_inputs(Shape(1, top_k, top_k, hidden, 8), x_dtype="bfloat16", w_dtype="bfloat16")
    x, ids, weights, *experts = one.args
    config = MoEConfig(implementation="xla", capacity_factor=1 / 32)
    f = jax.jit(functools.partial(moe_mlp, config=config))
    y = f(*(jnp.tile(a, (tokens, 1)) for a in (x, ids, weights)), *experts)
    assert_same_bits(y[-1], y[0])
    assert relative_error(y[0], f(x, ids, weights, *experts)[0]) < 2e-2


def _free_bytes():
    try:
        with open("/proc/meminfo") as f:
            return int(dict(line.split(":") for line in f)["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return math.inf
