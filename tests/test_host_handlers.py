"""The custom calls on the host, called directly: ranks, rounds, rendezvous, errors."""

import functools
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    ROUTINGS,
    Inputs,
    Results,
    Shape,
    assert_close,
    assert_same_bits,
    make_inputs,
    make_mesh,
    oracle,
    relative_error,
)
from jax.sharding import PartitionSpec as P

from jax_megamoe import _runtime, _workspace

pytestmark = pytest.mark.skipif(
    _runtime.unavailable() is not None, reason=str(_runtime.unavailable())
)

SMALL = Shape(tokens=64, top_k=3, experts=8, hidden=24, intermediate=40)


def _like(a, shape=None, dtype=None):
    kind = jax.typeof(a)
    return kind.update(shape=kind.shape if shape is None else shape, dtype=dtype or kind.dtype)


def _attributes(
    inputs, ranks, capacity_factor=2.0, timeout_s=60.0, swiglu_limit=None, changes=None
):
    workspace = _workspace.make(
        axis_name="expert",
        ranks=ranks,
        tokens=inputs.x.shape[0],
        top_k=inputs.expert_ids.shape[1],
        local_experts=inputs.w_gate.shape[0],
        hidden=inputs.x.shape[1],
        intermediate=inputs.w_gate.shape[2],
        dtype=inputs.x.dtype,
        capacity_factor=capacity_factor,
        timeout_s=timeout_s,
    )
    attributes = dict(
        workspace=np.int64(workspace.key),
        ranks=np.int64(ranks),
        capacity_rows=np.int64(workspace.capacity_rows),
        precision="bf16",
        wgrad_precision="bf16",
        swiglu_limit=np.float32(np.inf if swiglu_limit is None else swiglu_limit),
        timeout_s=np.float32(timeout_s),
        reserved_sms=np.int64(0),
    )
    return attributes | (changes or {})


def _place(mesh):
    others = [name for name in mesh.axis_names if name != "expert"]
    group = jax.lax.axis_index(others) if others else jnp.int32(0)
    return jnp.stack([group, jax.lax.axis_index("expert")])


def forward(inputs, place, ranks, **options):
    """Returns y, expert_load, counters of one shard."""
    x, w = inputs.x, inputs.w_gate
    results = (_like(x), _like(x, (w.shape[0],), jnp.int32), _like(x, (2,), jnp.int32))
    call = jax.ffi.ffi_call("jax_megamoe_forward", results)
    return call(*inputs.args, place, **_attributes(inputs, ranks, **options))


def backward(inputs, place, ranks, **options):
    """Returns the five gradients of one shard."""
    results = [_like(a) for a in (inputs.x, inputs.expert_weights, *inputs.args[3:])]
    call = jax.ffi.ffi_call("jax_megamoe_backward", results)
    return call(*inputs.args, inputs.dy, place, **_attributes(inputs, ranks, **options))


def sharded(f, mesh):
    """f(inputs, place) under shard_map: tokens over all axes, experts over "expert"."""
    tokens, experts = P(mesh.axis_names), P("expert")
    specs = Inputs(tokens, tokens, tokens, experts, experts, experts, tokens)
    return jax.shard_map(
        lambda inputs: f(inputs, _place(mesh)), mesh=mesh, in_specs=(specs,), out_specs=tokens
    )


@functools.cache
def runner(ranks, **options):
    """The jitted inputs -> (Results, expert_load, counters) on `ranks` devices."""

    def both(inputs, place):
        y, load, counters = forward(inputs, place, ranks, **options)
        return Results(y, *backward(inputs, place, ranks, **options)), load, counters

    return jax.jit(sharded(both, make_mesh((ranks,))))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_on_every_number_of_ranks(routing):
    inputs = make_inputs(SMALL, routing)
    results, load, _ = runner(1)(inputs)
    assert_close(results, oracle(inputs), 1e-5)
    ids = np.asarray(inputs.expert_ids)
    valid = (ids >= 0) & (ids < SMALL.experts)
    np.testing.assert_array_equal(load, np.bincount(ids[valid], minlength=SMALL.experts))
    for expert in np.flatnonzero(np.asarray(load) == 0):
        for gradient in results[3:]:
            assert not np.asarray(gradient[expert]).any()
    for ranks in (2, 4, 8):
        results_r, load_r, counters = runner(ranks)(inputs)
        assert_same_bits(results_r, results)
        assert_same_bits(load_r, load)
        invalid = (ids < -1) | (ids >= SMALL.experts)
        np.testing.assert_array_equal(
            np.asarray(counters)[::2], invalid.reshape(ranks, -1).sum(axis=1)
        )


@pytest.mark.parametrize(
    "x_dtype, w_dtype", [("f4", "f4"), ("bfloat16", "bfloat16"), ("f4", "bfloat16")]
)
def test_rounds_change_no_bit(x_dtype, w_dtype):
    shape = Shape(tokens=512, top_k=3, experts=4, hidden=8, intermediate=16)
    inputs = make_inputs(shape, "skewed", x_dtype=x_dtype, w_dtype=w_dtype)
    want = oracle(inputs)
    once, _, counters = runner(1, capacity_factor=4.0)(inputs)
    np.testing.assert_array_equal(counters, [0, 1])
    assert_close(once, want, 1e-5 if x_dtype == w_dtype == "f4" else 4e-3)
    for ranks in (1, 4):
        # The padding of the pool leaves room for 128 rows per local expert.
        many, _, counters = runner(ranks, capacity_factor=1e-6)(inputs)
        assert np.asarray(counters)[1::2].max() >= 3
        assert_same_bits(many, once)


@pytest.mark.parametrize(
    "tokens, top_k, experts", [(4, 1, 4), (4, 4, 4), (4, 8, 8), (516, 2, 4), (132, 1, 12)]
)
def test_sizes(tokens, top_k, experts):
    inputs = make_inputs(Shape(tokens, top_k, experts, hidden=17, intermediate=33))
    results, _, _ = runner(4)(inputs)
    assert_close(results, oracle(inputs), 1e-5)


def test_no_tokens():
    # Cut inside the shard_map: XLA of jax 0.11.2 crashes on sharded operands without elements.
    def f(inputs, place):
        none = Inputs(*(a if n.startswith("w_") else a[:0] for n, a in inputs._asdict().items()))
        y, load, counters = forward(none, place, 4)
        dx, d_expert_weights, *d_weights = backward(none, place, 4)
        assert y.shape == dx.shape == (0, SMALL.hidden)
        assert d_expert_weights.shape == (0, SMALL.top_k)
        return load, counters, *d_weights

    load, counters, *d_weights = jax.jit(sharded(f, make_mesh((4,))))(make_inputs(SMALL))
    assert not np.asarray(load).any() and not np.asarray(counters).any()
    for gradient in d_weights:
        assert gradient.shape[0] == SMALL.experts and not np.asarray(gradient).any()


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_small_values_survive(scale):
    inputs = make_inputs(SMALL, scale=scale, dy_scale=1e-6)
    assert_close(runner(4)(inputs)[0], oracle(inputs), 1e-5)


def test_swiglu_limit():
    inputs = make_inputs(SMALL, scale=2.0)
    clamped = oracle(inputs, swiglu_limit=0.7)
    assert relative_error(clamped.y, oracle(inputs).y) > 0.1
    assert_close(runner(2, swiglu_limit=0.7)(inputs)[0], clamped, 1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_token_stays_alone(value):
    inputs = make_inputs(SMALL)
    clean = runner(4)(inputs)[0]
    token, others = 11, np.arange(SMALL.tokens) != 11
    expert = int(inputs.expert_ids[token, 0])
    for name, bad in (
        ("x", inputs.x.at[token, 3].set(value)),
        ("dy", inputs.dy.at[token].set(value)),
    ):
        dirty = runner(4)(inputs._replace(**{name: bad}))[0]
        for a, b in zip(dirty[:3], clean[:3], strict=True):
            assert_same_bits(np.asarray(a)[others], np.asarray(b)[others])
        assert not np.isfinite(dirty.dx[token]).all()
        # It does reach the weight gradients of its experts, and no other's.
        reached = np.isin(np.arange(SMALL.experts), np.asarray(inputs.expert_ids[token]))
        assert not np.isfinite(dirty.dw_down[expert]).all()
        assert_same_bits(np.asarray(dirty.dw_gate)[~reached], np.asarray(clean.dw_gate)[~reached])


def test_nothing_stale_is_read():
    inputs = make_inputs(SMALL, "holes")
    clean = runner(4)(inputs)
    everything = make_inputs(SMALL, "first_experts")
    runner(4)(jax.tree.map(lambda a: a if a.dtype == jnp.int32 else a * np.nan, everything))
    assert_same_bits(runner(4)(inputs), clean)
    # Weights and rows of slots that are not routed are not read either.
    unrouted = np.asarray(inputs.expert_ids) < 0
    poisoned = jnp.where(unrouted, np.nan, inputs.expert_weights)
    assert_same_bits(runner(4)(inputs._replace(expert_weights=poisoned)), clean)


@pytest.mark.parametrize("axes", [("data", "expert"), ("expert", "data")])
@pytest.mark.parametrize("order", [range(8), [2, 0, 3, 1, 7, 6, 5, 4]])
def test_groups_on_any_order_of_axes_and_devices(axes, order):
    devices = np.array(jax.devices())[np.array(order)]
    shape = (2, 4) if axes[0] == "data" else (4, 2)
    mesh = make_mesh(shape, axes, devices=devices)
    inputs = make_inputs(SMALL)
    y = jax.jit(sharded(lambda i, place: forward(i, place, 4)[0], mesh))(inputs)
    # Each token's y depends on it alone, so it has the bits of one device.
    assert_same_bits(y, runner(1)(inputs)[0].y)


def test_repeats_have_the_same_bits():
    inputs = make_inputs(SMALL, "skewed")
    first = runner(8)(inputs)
    for _ in range(40):
        assert_same_bits(runner(8)(inputs), first)


def test_independent_calls_of_one_program():
    """Two calls that XLA may start in either order, among them one jaxpr used twice."""
    mesh = make_mesh((8,))
    inputs = make_inputs(SMALL)
    other = inputs._replace(x=inputs.x[::-1] * 0.5)

    @jax.jit
    def layer(inputs, place):
        return forward(inputs, place, 8, timeout_s=100.0)[0]

    @jax.jit
    def program(inputs, other):
        def both(pair, place):
            a, b = layer(pair[0], place), layer(pair[1], place)
            c = forward(pair[0]._replace(x=pair[1].x * 2), place, 8, timeout_s=100.0)[0]
            # A collective after them: a device must not wait for it on another's thread.
            return a, b, c, jax.lax.psum(a + b, "expert") + jax.lax.psum(c, "expert")

        specs = Inputs(*[P("expert")] * 7)
        return jax.shard_map(
            lambda *pair: both(pair, _place(mesh)),
            mesh=mesh,
            in_specs=(specs, specs),
            out_specs=(P("expert"),) * 3 + (P(),),
        )(inputs, other)

    want = [runner(1)(i)[0].y for i in (inputs, other, inputs._replace(x=other.x * 2))]
    for _ in range(50):
        *got, total = program(inputs, other)
        assert_same_bits(got, want)
        parts = sum(np.asarray(y).reshape(8, -1, SMALL.hidden).sum(axis=0) for y in want)
        np.testing.assert_allclose(total, parts, rtol=1e-4, atol=1e-4)


def test_scan_and_while_loop():
    mesh = make_mesh((4,))
    inputs = make_inputs(SMALL)

    def step(inputs, place):
        return inputs.x + 0.1 * forward(inputs, place, 4)[0]

    def scanned(inputs, place):
        body = lambda x, _: (step(inputs._replace(x=x), place), None)  # noqa: E731
        return jax.lax.scan(body, inputs.x, length=5)[0]

    def looped(inputs, place):
        def body(state):
            n, x = state
            return n + 1, step(inputs._replace(x=x), place)

        return jax.lax.while_loop(lambda state: state[0] < 5, body, (0, inputs.x))[1]

    def unrolled(inputs, place):
        for _ in range(5):
            inputs = inputs._replace(x=step(inputs, place))
        return inputs.x

    want = jax.jit(sharded(unrolled, mesh))(inputs)
    for _ in range(5):
        assert_same_bits(jax.jit(sharded(scanned, mesh))(inputs), want)
    assert_same_bits(jax.jit(sharded(looped, mesh))(inputs), want)


def test_many_programs_in_flight():
    """From several threads, on all devices and on two halves of them."""
    inputs = make_inputs(SMALL)
    want = runner(1)(inputs)[0].y
    meshes = [make_mesh((8,)), make_mesh((4,)), make_mesh((4,), devices=jax.devices()[4:])]
    programs = [
        jax.jit(sharded(lambda i, place, n=mesh.size: forward(i, place, n)[0], mesh))
        for mesh in meshes
    ]
    for program in programs:
        jax.block_until_ready(program(inputs))
    failures = []

    def work(program):
        # XLA:CPU of jax 0.10.2 itself stops when more than 32 executions of a device wait.
        try:
            for _ in range(10):
                for y in [program(inputs) for _ in range(3)]:
                    assert_same_bits(y, want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(p,), daemon=True) for p in programs * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


def test_missing_or_late_peer_is_an_error_and_no_hang():
    code = """
        import sys; sys.path.insert(0, {tests!r})
        import conftest, jax
        from test_host_handlers import *
        mesh = make_mesh((4,))
        inputs = make_inputs(SMALL)

        def missing(inputs, place):
            call = lambda: forward(inputs, place, 4, timeout_s=1.5)[0]
            return jax.lax.cond(place[1] == 1, lambda: inputs.x, call)

        def late(inputs, place):
            def wait(rank):
                time.sleep(4.0 if rank == 1 else 0.0)
                return rank
            rank = jax.pure_callback(wait, jax.typeof(place[1]), place[1])
            return forward(inputs, jnp.stack([place[0], rank]), 4, timeout_s=1.5)[0]

        def report(f):
            y = jax.jit(sharded(f, mesh))(inputs)
            begin = time.monotonic()
            for shard in y.addressable_shards:
                try:
                    jax.block_until_ready(shard.data)
                except jax.errors.JaxRuntimeError as error:
                    print(error)
            print("seconds", time.monotonic() - begin)

        report(missing)
        report(late)
        # Nothing is left behind: another program works.
        assert_same_bits(runner(4)(inputs)[0].y, runner(1)(inputs)[0].y)
        print("fine")
    """
    code = textwrap.dedent(code).format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    for rank in (0, 2, 3):
        message = f"rank {rank} of 4 waited 1.5 s in phase 'dispatch' for rank 1;"
        assert done.stdout.count(f"DEADLINE_EXCEEDED: {message}") == 2, done.stdout
    assert "rank 1 of 4 came to phase 'dispatch' after the call had failed: rank 0" in done.stdout
    assert all(
        float(line.split()[1]) < 20 for line in done.stdout.splitlines() if "seconds" in line
    )
    assert "fine" in done.stdout


def test_failing_rank_fails_its_peers_at_once():
    mesh = make_mesh((4,))

    def f(inputs, place):
        place = jnp.where(place[1] == 2, jnp.array([0, 9], jnp.int32), place)
        return forward(inputs, place, 4, timeout_s=60.0)[0]

    program = jax.jit(sharded(f, mesh))
    begin = time.monotonic()
    for _ in range(3):
        y = program(make_inputs(SMALL))
        for shard in y.addressable_shards:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank is 9; .* \[0, 4\)"):
                jax.block_until_ready(shard.data)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(precision="fp8"), "precision is 'fp8'; the host handlers .* accept only 'bf16'"),
        (dict(workspace=np.int64(5)), "workspace 5 does not exist in this process"),
        (dict(ranks=np.int64(2)), "ranks and capacity_rows are 2 and "),
    ],
)
def test_attributes_are_checked(changes, message):
    inputs, place = make_inputs(SMALL), jnp.zeros(2, jnp.int32)
    program = jax.jit(lambda i: forward(i, place, 1, changes=changes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(program(inputs))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(expert_ids=jnp.zeros((64, 2), jnp.int32)), r"expert_ids is \[64, 2\]; .* \[64, 3\]"),
        (dict(expert_ids=jnp.zeros((64, 3), jnp.float32)), "expert_ids .* expected int32"),
        (dict(x=jnp.zeros((64, 24), jnp.float16)), "x has the wrong element type"),
        (dict(w_up=jnp.zeros((8, 24, 40), jnp.bfloat16)), "w_up .* expected that of w_gate"),
    ],
)
def test_operands_are_checked(changes, message):
    inputs, place = make_inputs(SMALL), jnp.zeros(2, jnp.int32)
    attributes = _attributes(inputs, 1)

    def run(inputs):
        x, w = inputs.x, inputs.w_gate
        results = (_like(x), _like(x, (w.shape[0],), jnp.int32), _like(x, (2,), jnp.int32))
        return jax.ffi.ffi_call("jax_megamoe_forward", results)(*inputs.args, place, **attributes)

    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: {message}"):
        jax.block_until_ready(jax.jit(run)(inputs._replace(**changes)))


def test_workspace_registry():
    sizes = dict(
        axis_name="expert",
        ranks=4,
        tokens=1000,
        top_k=2,
        local_experts=3,
        hidden=8,
        intermediate=16,
        dtype=jnp.bfloat16,
        capacity_factor=1.5,
        timeout_s=60.0,
    )
    first = _workspace.make(**sizes)
    assert _workspace.make(**sizes) == first
    assert first.capacity_rows == 27 * 128  # 3000 rows and 3 x 127 of padding
    for name, value in (("axis_name", "other"), ("tokens", 1001), ("dtype", jnp.float32)):
        assert _workspace.make(**sizes | {name: value}).key != first.key
    # Never more than every rank sending everything.
    assert _workspace.make(**sizes | {"capacity_factor": 100.0}).capacity_rows == 66 * 128
    with pytest.raises(ValueError, match=r"ranks x tokens x top_k is 2147483648; .* below 2\*\*31"):
        _workspace.make(**sizes | {"tokens": 2**28})


def test_workspace_bytes_follow_the_documented_formula():
    ffi = _runtime.load()
    sizes = dict(ranks=2, tokens=256, top_k=4, local_experts=8, hidden=128, intermediate=64)
    bytes_of = functools.partial(
        ffi.workspace_bytes, **sizes, staged_bytes=2, pool_bytes=2, return_bytes=2
    )
    # One more tile of capacity: its rows of x, dy, gate, up and act.
    step = bytes_of(capacity_rows=512) - bytes_of(capacity_rows=384)
    assert step == 128 * (2 * 128 + 3 * 64) * 2
    with pytest.raises(ValueError, match="capacity_rows is 100; it must be a positive multiple"):
        bytes_of(capacity_rows=100)
