"""The fused forward on Hopper GPUs, against the oracle, and the matrix core alone.

Ranks of a group that is larger than the number of GPUs run on one GPU, each on a stream of its own,
through the target `jax_megamoe_forward_ranks`.
"""

from __future__ import annotations

import functools
import itertools
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    ROUTINGS,
    Shape,
    assert_close,
    assert_same_bits,
    make_inputs,
    oracle,
    poison_memory_like,
    relative_error,
    results_of,
    run_processes,
    sharded,
)

from jax_megamoe import MoEConfig, _runtime, moe_mlp
from jax_megamoe._bench.timeline import pulled_tokens

pytestmark = pytest.mark.gpu

BF16 = dict(x_dtype=jnp.bfloat16, w_dtype=jnp.bfloat16)
FFI = MoEConfig(implementation="ffi")
# H, I and E of the 30B layer, and of the 235B layer with a quarter of its experts: drawing more
# weights takes the host longer than the rest of the test.
QWEN3_LAYERS = [(2048, 768, 128), (4096, 1536, 32)]
# H and I: the least; no multiples of a tile; rows that are pulled in two pieces, and in three
# uneven ones; H < I.
ODD_SIZES = [(64, 64), (448, 704), (4096, 64), (4160, 64), (192, 1536)]
ALL_SIZES = [*ODD_SIZES, *(layer[:2] for layer in QWEN3_LAYERS)]
# How many, and the ranks of each: at most 8 in all, the streams that are sure to run side by side.
GROUPS = [(2, 2), (2, 4), (4, 2), (4, 1)]
_keys = itertools.count(1 << 40)  # apart from those of jax_megamoe._workspace


@functools.cache
def single(**config):
    """The jitted operation on one GPU, its results in poisoned memory."""
    config = MoEConfig(implementation="ffi", **config)
    run = jax.jit(lambda *args: moe_mlp(*args, config=config, return_stats=True))

    def poisoned(x, *args):
        poison_memory_like(x)
        return run(x, *args)

    return poisoned


def rank_attributes(key, ranks, capacity_rows, swiglu_limit=np.inf):
    """The attributes of the custom calls for ranks on one GPU."""
    return dict(
        workspace=np.int64(key),
        ranks=np.int64(ranks),
        capacity_rows=np.int64(capacity_rows),
        precision="bf16",
        wgrad_precision="bf16",
        swiglu_limit=np.float32(swiglu_limit),
        timeout_s=np.float32(30),
        reserved_sms=np.int64(0),
    )


def places(ranks, groups):
    """int32 [ranks * groups, 2]: {group, rank} of each slice of the operands, groups in turn."""
    rank, group = np.indices((ranks, groups)).reshape(2, -1)
    return jnp.asarray(np.stack([group, rank], 1), jnp.int32)


def rank_operands(args, ranks, groups):
    """Cuts tokens into one slice for each of `places`, and gives it the weights of its rank."""
    tokens = [a.reshape((ranks * groups, -1) + a.shape[1:]) for a in args[:3]]
    weights = [w.reshape((ranks, -1) + w.shape[1:]).repeat(groups, 0) for w in args[3:]]
    return (*tokens, *weights)


def inputs_of_groups(routing, ranks, groups):
    """(shape, inputs, int [groups, tokens of a group]: which tokens of all each group has).

    With the routing "uneven" all tokens of the first group go to one expert, those of the last to
    none: some groups then need one round and others many.
    """
    shape = Shape(tokens=640, top_k=4, experts=16, hidden=256, intermediate=192)
    slices = np.arange(shape.tokens).reshape(ranks, groups, -1)
    groups_tokens = slices.transpose(1, 0, 2).reshape(groups, -1)
    inputs = make_inputs(shape, "random" if routing == "uneven" else routing, **BF16)
    if routing == "uneven":
        ids = inputs.expert_ids.at[groups_tokens[-1]].set(-1)
        inputs = inputs._replace(expert_ids=ids.at[groups_tokens[0]].set(1))
    return shape, inputs, groups_tokens


@functools.cache
def ranks_on_one_gpu(shape: Shape, ranks: int, capacity_rows: int, groups: int = 1):
    """(workspace key, jitted operation on the operands of `shape`), all on the first GPU.

    The tokens are split over the ranks of all groups. Each group has all experts, split over its
    ranks.
    """
    key = next(_keys)
    local = shape.experts // ranks
    tokens = shape.tokens // (groups * ranks)
    _runtime.load().register_cuda_workspace(
        key,
        ranks=ranks,
        tokens=tokens,
        top_k=shape.top_k,
        local_experts=local,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        capacity_rows=capacity_rows,
        devices=[0] * (groups * ranks),
    )
    results = (
        jax.ShapeDtypeStruct((groups * ranks, tokens, shape.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((groups * ranks, local), jnp.int32),
        jax.ShapeDtypeStruct((groups * ranks, 2), jnp.int32),
    )

    @jax.jit
    def run(*args):
        y, load, counters = jax.ffi.ffi_call("jax_megamoe_forward_ranks", results)(
            *rank_operands(args, ranks, groups),
            places(ranks, groups),
            **rank_attributes(key, ranks, capacity_rows),
        )
        return y.reshape(-1, shape.hidden), load.reshape(-1), counters

    return key, run


def poisoned_ranks(shape, ranks, capacity_rows, groups=1):
    """`ranks_on_one_gpu`, once the workspace is filled with NaN."""
    key, run = ranks_on_one_gpu(shape, ranks, capacity_rows, groups)
    _runtime.load().fill_cuda_workspace(key, 0xFF)
    return key, run


def check_forward(y, inputs, tolerance=1e-2):
    want = oracle(inputs)
    assert y.dtype == inputs.x.dtype
    assert_close(want._replace(y=y), want, tolerance, inputs.expert_ids)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_is_the_oracles(routing):
    inputs = make_inputs(Shape(tokens=200, hidden=320, intermediate=192), routing, **BF16)
    y, stats = single()(*inputs.args)
    check_forward(y, inputs)
    ids = np.asarray(inputs.expert_ids)
    valid = ids[(ids >= 0) & (ids < 8)]
    np.testing.assert_array_equal(stats.expert_load, np.bincount(valid, minlength=8))
    assert stats.invalid_ids == ((ids < -1) | (ids >= 8)).sum()


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 127, 128, 129])
def test_every_token_count_is_the_oracles(tokens):
    inputs = make_inputs(Shape(tokens=tokens, top_k=2, experts=4), **BF16)
    check_forward(single()(*inputs.args)[0], inputs)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 1), (8, 8), (32, 32)])
def test_extreme_top_k_is_the_oracles(experts, top_k):
    inputs = make_inputs(Shape(tokens=130, experts=experts, top_k=top_k), **BF16)
    check_forward(single()(*inputs.args)[0], inputs)


@pytest.mark.parametrize(("hidden", "intermediate"), ODD_SIZES)
def test_odd_sizes_are_the_oracles(hidden, intermediate):
    inputs = make_inputs(Shape(hidden=hidden, intermediate=intermediate), **BF16)
    check_forward(single()(*inputs.args)[0], inputs)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("hidden", "intermediate"), ALL_SIZES)
def test_bits_of_all_sizes_do_not_depend_on_ranks(hidden, intermediate, ranks):
    shape = Shape(tokens=320, hidden=hidden, intermediate=intermediate)
    inputs = make_inputs(shape, **BF16)
    key, run = poisoned_ranks(shape, ranks, 1024)
    assert_same_bits(run(*inputs.args)[0], single()(*inputs.args)[0])


@pytest.mark.parametrize(("hidden", "intermediate", "experts"), QWEN3_LAYERS)
def test_the_qwen3_layers_are_the_oracles(hidden, intermediate, experts):
    shape = Shape(tokens=1024, top_k=8, experts=experts, hidden=hidden, intermediate=intermediate)
    inputs = make_inputs(shape, **BF16)
    check_forward(single()(*inputs.args)[0], inputs)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_dtypes_and_scales(scale):
    for x_dtype, w_dtype in itertools.product([jnp.bfloat16, jnp.float32], repeat=2):
        inputs = make_inputs(scale=scale, x_dtype=x_dtype, w_dtype=w_dtype)
        check_forward(single()(*inputs.args)[0], inputs)


def test_the_error_is_close_to_that_of_xla_in_bf16():
    inputs = make_inputs(Shape(tokens=512, hidden=512, intermediate=512), **BF16)
    want = oracle(inputs).y
    xla = jax.jit(lambda *a: moe_mlp(*a, config=MoEConfig(implementation="xla")))(*inputs.args)
    assert relative_error(single()(*inputs.args)[0], want) <= 1.5 * relative_error(xla, want)


def test_swiglu_limit_clamps():
    inputs = make_inputs(scale=4.0, **BF16)
    want = oracle(inputs, swiglu_limit=1.5).y
    assert relative_error(single(swiglu_limit=1.5)(*inputs.args)[0], want) <= 1e-2
    assert relative_error(single()(*inputs.args)[0], want) > 0.1


@pytest.mark.parametrize("config", [{}, {"swiglu_limit": 1.5}], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("argument", ["x", "expert_weights"])
def test_what_is_not_finite_stays_in_its_token(argument, value, config):
    inputs = make_inputs(**BF16)
    dirty = inputs._replace(**{argument: getattr(inputs, argument).at[5].set(value)})
    clean, got = (np.asarray(single(**config)(*i.args)[0], np.float32) for i in (inputs, dirty))
    assert not np.isfinite(got[5]).any()  # clamping leaves a NaN, which infinities sum up to
    assert_same_bits(np.delete(got, 5, axis=0), np.delete(clean, 5, axis=0))


def test_a_nan_in_a_token_that_is_not_routed_goes_nowhere():
    inputs = make_inputs(**BF16)
    inputs = inputs._replace(expert_ids=inputs.expert_ids.at[5].set(-1))
    clean, _ = single()(*inputs.args)
    dirty, _ = single()(inputs.x.at[5].set(np.nan), *inputs.args[1:])
    assert not np.asarray(dirty[5], np.float32).any()
    assert_same_bits(dirty, clean)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_no_bit_depends_on_ranks_capacity_or_what_memory_held(ranks, routing):
    shape = Shape(tokens=640, top_k=4, experts=16, hidden=256, intermediate=192)
    inputs = make_inputs(shape, routing, **BF16)
    want, want_stats = single()(*inputs.args)
    for capacity_rows in (128, 1024, 8192):
        key, run = poisoned_ranks(shape, ranks, capacity_rows)
        y, load, counters = run(*inputs.args)
        assert_same_bits(y, want)
        np.testing.assert_array_equal(load, want_stats.expert_load)
        tiles = -(-np.asarray(load).reshape(ranks, -1) // 128).sum(axis=1)
        np.testing.assert_array_equal(counters[:, 1], -(-tiles * 128 // capacity_rows))


@pytest.mark.parametrize(("groups", "ranks"), GROUPS)
@pytest.mark.parametrize("routing", ["random", "holes", "uneven"])
def test_groups_of_ranks_keep_to_themselves(routing, groups, ranks):
    """As on a mesh of data x experts."""
    shape, inputs, groups_tokens = inputs_of_groups(routing, ranks, groups)
    want, _ = single()(*inputs.args)
    ids = np.asarray(inputs.expert_ids)[groups_tokens].reshape(groups, -1)
    loads = [np.bincount(i[(i >= 0) & (i < 16)], minlength=16) for i in ids]
    loads = np.stack(loads).reshape(groups, ranks, -1).transpose(1, 0, 2)
    tiles = -(-loads // 128).sum(axis=2)
    for capacity_rows in (128, 8192):
        _, run = poisoned_ranks(shape, ranks, capacity_rows, groups)
        for _ in range(3):
            y, load, counters = run(*inputs.args)
            assert_same_bits(y, want)
            np.testing.assert_array_equal(load, loads.ravel())
            rounds = -(-tiles * 128 // capacity_rows)
            np.testing.assert_array_equal(counters[:, 1], rounds.ravel())


def test_fifty_calls_give_the_same_bits_and_counts_may_change_between_calls():
    a = make_inputs(Shape(tokens=512, top_k=8, experts=16, hidden=512, intermediate=256), **BF16)
    b = make_inputs(Shape(tokens=77, top_k=3, experts=8), "skewed", **BF16)
    first_a, first_b = single()(*a.args)[0], single()(*b.args)[0]
    for seed in range(50):
        other = make_inputs(
            Shape(tokens=512, top_k=8, experts=16, hidden=512, intermediate=256),
            "skewed",
            seed=seed + 1,
            **BF16,
        )
        single()(*other.args)
        assert_same_bits(single()(*a.args)[0], first_a)
        assert_same_bits(single()(*b.args)[0], first_b)


def test_layers_of_two_sizes_interleave_in_a_program():
    a = make_inputs(Shape(tokens=160, intermediate=128), **BF16)
    b = make_inputs(Shape(tokens=160, intermediate=192, experts=4), seed=1, **BF16)

    def layers(x):
        for inputs in (a, b, a, b):
            x = moe_mlp(x, *inputs.args[1:], config=FFI)
        return x

    want = a.x
    for inputs in (a, b, a, b):
        want = single()(want, *inputs.args[1:])[0]
    assert_same_bits(jax.jit(layers)(a.x), want)
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, x: x * 0.5 + layers(x), x))
    assert_same_bits(looped(a.x), looped(a.x))


def test_gradients_are_the_oracles():
    inputs = make_inputs(x_dtype=jnp.bfloat16, w_dtype=jnp.float32)
    got = jax.jit(lambda i: results_of(functools.partial(moe_mlp, config=FFI), i))(inputs)
    assert got.dw_gate.dtype == jnp.float32
    assert_close(got, oracle(inputs), 1e-2)


def test_peers_that_never_arrive_end_in_errors_that_name_them(tmp_path):
    """Three processes a pass share the GPU and stop at once: none may miss that it did."""
    program = """
        import pathlib, sys, time, jax, jax.numpy as jnp, numpy as np
        from jax_megamoe import _runtime
        ffi = _runtime.load()
        sizes = dict(ranks=2, tokens=8, top_k=1, local_experts=1, hidden=64, intermediate=64)
        ffi.register_cuda_workspace(7, **sizes, capacity_rows=256, devices=[0, 0])
        x, w = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((1, 64, 64), jnp.bfloat16)
        ids, weights = jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1))
        place = jnp.zeros(2, jnp.int32)
        pass_, number, ready = sys.argv[1:]
        if pass_ == "forward":
            args = (x, ids, weights, w, w, w, place)
            results = (x, jnp.zeros(1, jnp.int32), jnp.zeros(2, jnp.int32))
        else:
            args = (x, ids, weights, w, w, w, x, place)
            results = (x, weights, w, w, w)
        results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results]
        call = jax.ffi.ffi_call(f"jax_megamoe_{pass_}", results)
        run = jax.jit(lambda *a: call(
            *a, workspace=np.int64(7), ranks=np.int64(2), capacity_rows=np.int64(256),
            precision="bf16", wgrad_precision="bf16", swiglu_limit=np.float32(np.inf),
            timeout_s=np.float32(2), reserved_sms=np.int64(0))).lower(*args).compile()
        ready = pathlib.Path(ready)
        (ready / number).touch()
        waiting = time.perf_counter()
        while len(list(ready.iterdir())) < 6:
            assert time.perf_counter() - waiting < 40, "another process did not get here"
            time.sleep(0.01)
        start = time.perf_counter()
        for name in ("failed", "failed again"):
            try:
                jax.block_until_ready(run(*args))
            except Exception as error:
                print(f"{name} after {time.perf_counter() - start:.1f} s:", error)
            time.sleep(1)  # the message is printed by a thread
    """
    program = ["-c", textwrap.dedent(program)]
    outputs = run_processes(
        lambda _, i: [*program, ("forward", "backward")[i % 2], str(i), str(tmp_path)],
        timeout=90,
        env=lambda _: {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        count=6,
    )
    for output in outputs:
        after = re.search(r"^failed after (\S+) s:", output, re.M)
        assert after and 2 <= float(after[1]) < 10, output
        assert "failed again after" in output
        assert "rank 0 of 2 waited too long in phase 'dispatch' for rank 1" in output


PRODUCTS = ("gate_up", "down", "down_grad", "input_grad", "weight_grad")


@pytest.mark.parametrize("product", range(5), ids=PRODUCTS)
def test_the_matrix_core_is_right_in_every_product(product):
    hidden, intermediate, counts = 256, 192, np.array([130, 0, 64, 1, 257, 300])
    starts = np.concatenate([[0], np.cumsum(-(-counts // 128))])
    rows = int(starts[-1]) * 128
    rng = np.random.default_rng(product)

    def normal(*size):
        return rng.standard_normal(size, np.float32).astype(jnp.bfloat16)

    valid = np.zeros((rows, 1), bool)
    for start, count in zip(starts, counts, strict=False):
        valid[start * 128 : start * 128 + count] = True
    x = np.where(valid, normal(rows, hidden), 0).astype(jnp.bfloat16)
    g, u = (np.where(valid, normal(rows, intermediate), 0).astype(jnp.bfloat16) for _ in "gu")
    gate, up = normal(6, hidden, intermediate), normal(6, hidden, intermediate)
    down = normal(6, intermediate, hidden)
    operands = (
        (x, x, gate, up),
        (g, g, down, down),
        (x, x, down, down),
        (g, u, gate, up),
        (x, x, g, g),
    )[product]
    out = (
        (rows, intermediate),
        (rows, hidden),
        (rows, intermediate),
        (rows, hidden),
        (6, hidden, intermediate),
    )[product]
    results = (jax.ShapeDtypeStruct(out, jnp.bfloat16), jax.ShapeDtypeStruct((1,), jnp.int32))
    _runtime.load()
    got = jax.jit(
        lambda *a: jax.ffi.ffi_call("jax_megamoe_product", results)(
            *a,
            product=np.int64(product),
            hidden=np.int64(hidden),
            intermediate=np.int64(intermediate),
        )[0]
    )(*operands, starts.astype(np.int32))
    got = np.asarray(got, np.float32)
    f = np.float32
    for e, (start, count) in enumerate(zip(starts, counts, strict=False)):
        r = slice(start * 128, start * 128 + count)
        if product == 0:
            gated = x[r].astype(f) @ gate[e].astype(f)
            want = gated / (1 + np.exp(-gated)) * (x[r].astype(f) @ up[e].astype(f))
        elif product == 1:
            want = g[r].astype(f) @ down[e].astype(f)
        elif product == 2:
            want = x[r].astype(f) @ down[e].astype(f).T
        elif product == 3:
            want = g[r].astype(f) @ gate[e].astype(f).T + u[r].astype(f) @ up[e].astype(f).T
        else:
            want = x[r].astype(f).T @ g[r].astype(f)
        assert relative_error(got[e] if product == 4 else got[r], want) <= 4e-3


@pytest.mark.multigpu
class TestTwoGpus:
    """One process, two GPUs, each a rank."""

    @staticmethod
    def run(inputs, devices=None, **config):
        devices = np.array(jax.devices("gpu")[:2] if devices is None else devices)
        mesh = jax.sharding.Mesh(devices, ("expert",))
        config = MoEConfig(implementation="ffi", **config)
        return jax.jit(sharded(mesh, config, return_stats=True))(*inputs.args)

    @pytest.mark.parametrize("routing", ROUTINGS)
    def test_bits_are_those_of_one_gpu(self, routing):
        shape = Shape(tokens=514, top_k=4, experts=16, hidden=512, intermediate=320)
        inputs = make_inputs(shape, routing, **BF16)
        want, stats = single()(*inputs.args)
        check_forward(want, inputs)
        for _ in range(3):
            y, (load, _, _) = self.run(inputs)
            assert_same_bits(np.asarray(y), np.asarray(want))
            np.testing.assert_array_equal(load, stats.expert_load)

    def test_the_order_of_the_devices_does_not_matter(self):
        inputs = make_inputs(**BF16)
        want = np.asarray(single()(*inputs.args)[0])
        y, _ = self.run(inputs, jax.devices("gpu")[1::-1])
        assert_same_bits(np.asarray(y), want)

    def test_more_than_one_round(self):
        shape = Shape(tokens=2048, top_k=4, experts=16)
        inputs = make_inputs(shape, "first_experts", **BF16)
        y, (_, _, rounds) = self.run(inputs, capacity_factor=0.25)
        assert max(np.asarray(rounds)) > 1
        assert_same_bits(np.asarray(y), np.asarray(single()(*inputs.args)[0]))

    def test_a_thousand_calls_beside_other_collectives(self):
        """Both passes while NCCL gathers on another stream: each holds SMs that the other wants."""
        inputs = make_inputs(Shape(tokens=512, hidden=256), **BF16)
        mesh = jax.sharding.Mesh(np.array(jax.devices("gpu")[:2]), ("expert",))
        config = MoEConfig(implementation="ffi", reserved_sms=16)
        axis = jax.sharding.PartitionSpec("expert")

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)
        def step(inputs, big):
            results = results_of(
                functools.partial(moe_mlp, axis_name="expert", config=config), inputs
            )
            return results, jax.lax.all_gather(big, "expert").sum(0) * 0.5

        big = jnp.ones((2, 1 << 22), jnp.float32)
        options = {"xla_gpu_enable_latency_hiding_scheduler": True}
        run = jax.jit(step).lower(inputs, big).compile(compiler_options=options)
        calls = re.findall(
            r" (all-gather-start|all-gather-done|custom-call)\(.*?(jax_megamoe_\w+|\n)",
            run.as_text(),
        )
        order = [target.strip() or name for name, target in calls]
        order = [name for name in order if name != "custom-call"]
        gathering = order[order.index("all-gather-start") : order.index("all-gather-done")]
        assert any(name.startswith("jax_megamoe") for name in gathering), order
        want = None
        for i in range(1000):
            got, big = run(inputs, big)
            if i % 100 == 0:
                got = jax.tree.map(np.asarray, got)
                want = got if want is None else want
                assert_same_bits(got, want)
        np.testing.assert_array_equal(big, np.ones_like(big))


@pytest.mark.parametrize("routing", ["random", "skewed", "holes"])
def test_the_link_carries_each_token_once(routing):
    shape, ranks = Shape(tokens=640, top_k=4, experts=16, hidden=256), 4
    inputs = make_inputs(shape, routing, **BF16)
    _, run = poisoned_ranks(shape, ranks, 8192)
    pulled = bytes_pulled(_runtime.load().forward_pulled_bytes, lambda: run(*inputs.args))
    tokens = pulled_tokens(np.asarray(inputs.expert_ids), ranks, shape.experts).sum()
    assert pulled == tokens * shape.hidden * 2


def bytes_pulled(count, run):
    """What the ranks read from each other, which a build with JAX_MEGAMOE_TIMELINE counts."""
    if not _runtime.load().forward_timeline():
        pytest.skip("the module was built without JAX_MEGAMOE_TIMELINE")
    count()
    jax.block_until_ready(run())
    return count()
