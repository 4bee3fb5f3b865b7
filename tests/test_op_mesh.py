"""The operation on meshes: replicated arguments, axis and device order, Auto and Explicit axes."""

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    Results,
    Shape,
    assert_close,
    assert_same_bits,
    make_inputs,
    make_mesh,
    oracle,
    relative_error,
    require_ffi,
    results_of,
    sharded,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_megamoe import MoEConfig, moe, moe_mlp, reference
from jax_megamoe._mesh import place

F32 = 1e-5


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", [("data", "expert"), ("expert", "data")])
def test_weights_replicated_over_data(implementation, axes, check_vma):
    # Summed once over the axis that replicates them, whoever sums.
    inputs = make_inputs()
    mesh = make_mesh((2, 4) if axes[0] == "data" else (4, 2), axes)
    f = sharded(mesh, MoEConfig(implementation=implementation), check_vma=check_vma)
    got = jax.jit(functools.partial(results_of, f))(inputs)
    assert_close(got, oracle(inputs), F32)


def test_each_group_has_its_own_experts(implementation):
    # With equal experts in all groups it would not show if ranks of two groups met. Ranks that are
    # not told apart meet in the order they come: ranks 2 and 3 of group 0 come after those of group
    # 1, and ranks 0 and 1 before.
    inputs, others = make_inputs(), make_inputs(seed=1)
    both = jax.tree.map(lambda *a: jnp.concatenate(a), inputs, others)
    everyone = threading.Barrier(8)

    def wait(late, _):
        everyone.wait(60)
        time.sleep(float(np.asarray(late)))
        return np.float32(0)

    def shard(inputs):
        first_ranks, group = lax.axis_index("expert") < 2, lax.axis_index("data")
        late = jnp.where(first_ranks == (group == 1), 1.0, 0.0)

        def hold(a, after):
            return a + jax.pure_callback(wait, jax.typeof(late), late, after[0, 0])

        def experts(x, *rest):
            config = MoEConfig(implementation=implementation)
            return moe_mlp(x, inputs.expert_ids, *rest, axis_name="expert", config=config)

        x, _, *rest = inputs.args
        y, pullback = jax.vjp(experts, hold(x, x), *rest)
        return Results(y, *pullback(hold(inputs.dy, y)))

    everywhere = P(("data", "expert"))
    mesh = make_mesh((2, 4), ("data", "expert"))
    f = jax.shard_map(shard, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    got = jax.jit(f)(both)
    for half, want in enumerate((oracle(inputs), oracle(others))):
        assert_close(Results(*(jnp.split(a, 2)[half] for a in got)), want, F32)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "shape, axes",
    [
        ((2, 4), ("data", "expert")),
        ((4, 2), ("expert", "data")),
        ((2, 2, 2), ("pipe", "expert", "data")),
    ],
)
def test_place_tells_the_groups_apart(shape, axes, check_vma):
    # Whether ranks of two groups that are not told apart do meet is left to the order they come in.
    def one_device():
        return place("expert")[(None,) * len(axes)]

    f = jax.shard_map(
        one_device,
        mesh=make_mesh(shape, axes),
        in_specs=(),
        out_specs=P(*axes),
        check_vma=check_vma,
    )
    group, rank = np.moveaxis(np.moveaxis(jax.jit(f)(), axes.index("expert"), 0), -1, 0)
    ranks = shape[axes.index("expert")]
    assert (rank.reshape(ranks, -1) == np.arange(ranks)[:, None]).all()
    assert (group.reshape(ranks, -1) == np.arange(8 // ranks)).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_arguments_that_are_all_replicated(implementation, check_vma):
    # Nothing varies over the axis but what the operation makes of it: every rank has the same
    # tokens, and its experts are copies of the other's.
    inputs = make_inputs(Shape(16, 2, 8, 64, 64))
    x, ids, weights, *experts = inputs.args
    experts = [w[:4] for w in experts]
    config = MoEConfig(implementation=implementation)
    f = jax.shard_map(
        functools.partial(moe_mlp, axis_name="expert", config=config),
        mesh=make_mesh((2,)),
        in_specs=(P(),) * 6,
        out_specs=P("expert"),
        check_vma=check_vma,
    )

    def copies(x, ids, weights, *experts):
        both = (jnp.concatenate([w, w]) for w in experts)
        return jnp.tile(reference.moe_mlp(x, ids, weights, *both), (2, 1))

    def gradients(f):
        def loss(x, weights, *experts):
            return (f(x, ids, weights, *experts) * jnp.tile(inputs.dy, (2, 1))).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=range(5)))(x, weights, *experts)

    got, want = map(jax.tree.leaves, (gradients(f), gradients(copies)))
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("check_vma", [True, False])
def test_tokens_replicated_over_data(implementation, check_vma):
    inputs = make_inputs()
    config = MoEConfig(implementation=implementation)
    f = jax.shard_map(
        lambda *args: moe_mlp(*args, axis_name="expert", config=config),
        mesh=make_mesh((2, 4), ("data", "expert")),
        in_specs=(P("expert"),) * 6,
        out_specs=P("expert"),
        check_vma=check_vma,
    )
    assert_close(jax.jit(functools.partial(results_of, f))(inputs), oracle(inputs), F32)


def test_axes_left_to_the_compiler():
    # Manual over "expert" alone; the compiler splits the tokens over "data".
    inputs = make_inputs()
    mesh = make_mesh((2, 4), ("data", "expert"))
    f = jax.shard_map(
        functools.partial(moe_mlp, axis_name="expert", config=MoEConfig(implementation="xla")),
        mesh=mesh,
        axis_names={"expert"},
        in_specs=(P("expert"),) * 6,
        out_specs=P("expert"),
    )
    spread = jax.device_put(inputs, NamedSharding(mesh, P(("expert", "data"))))
    spread = inputs._replace(x=spread.x, dy=spread.dy)
    assert_close(jax.jit(functools.partial(results_of, f))(spread), oracle(inputs), F32)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduced", [("data",), ("expert",), ("data", "expert")])
@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean])
def test_loss_reduced_inside_the_shard_map(implementation, reduce, reduced, check_vma):
    # The same loss on every device of the reduced axes: its gradient must not be counted once per
    # device. Over the other axis the losses are summed outside.
    inputs = make_inputs()
    config = MoEConfig(implementation=implementation)
    mesh = make_mesh((2, 2), ("data", "expert"))
    tokens, experts = P(mesh.axis_names), P("expert")
    rest = tuple(axis for axis in mesh.axis_names if axis not in reduced)

    def shard(x, ids, weights, w_gate, w_up, w_down, dy):
        y = moe_mlp(x, ids, weights, w_gate, w_up, w_down, axis_name="expert", config=config)
        return reduce((y * dy).sum(), reduced)[None]

    f = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(tokens,) * 3 + (experts,) * 3 + (tokens,),
        out_specs=P(rest or None),
        check_vma=check_vma,
    )
    of_all = jax.value_and_grad(lambda *args: f(*args).sum(), argnums=(0, 2, 3, 4, 5))
    loss, grads = jax.jit(of_all)(*inputs)
    want = oracle(inputs)
    scale = 1 if reduce is lax.psum else 2 ** len(reduced)
    assert loss * scale == pytest.approx(float((want.y * inputs.dy).sum()), rel=1e-4)
    assert_close((want.y, *(g * scale for g in grads)), want, F32)


def network_loss(params, x, ids, target, experts):
    """A replicated weight before and after the experts, and a router."""
    h = jnp.tanh(x @ params["inner"])
    weights = jnp.take_along_axis(jax.nn.softmax(h @ params["router"]), ids, axis=1)
    y = experts(h, ids, weights, params["w_gate"], params["w_up"], params["w_down"])
    return ((y @ params["outer"] - target) ** 2).sum()


@functools.cache
def sgd_step(implementation, data, ranks, check_vma):
    config = MoEConfig(implementation=implementation)
    mesh = make_mesh((data, ranks), ("data", "expert"))
    tokens = P(mesh.axis_names)
    specs = {name: P("expert") if name.startswith("w_") else P() for name in network_params()}
    experts = functools.partial(moe_mlp, axis_name="expert", config=config)

    def loss(params, x, ids, target):
        total = network_loss(params, x, ids, target, experts)
        return lax.psum(total, mesh.axis_names) / 64

    f = jax.shard_map(
        loss, mesh=mesh, in_specs=(specs, *(tokens,) * 3), out_specs=P(), check_vma=check_vma
    )

    @jax.jit
    def step(params, *batch):
        return jax.tree.map(lambda p, g: p - 10 * g, params, jax.grad(f)(params, *batch))

    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return step(jax.device_put(network_params(), shardings), *network_batch())


@functools.cache
def network_params():
    inputs = make_inputs(Shape(64, 2, 4, 16, 8))
    rng = np.random.default_rng(0)
    square = {n: rng.standard_normal((16, 16), np.float32) / 4 for n in ("inner", "outer")}
    router = {"router": rng.standard_normal((16, 4), np.float32)}
    return square | router | {n: getattr(inputs, n) for n in ("w_gate", "w_up", "w_down")}


@functools.cache
def network_batch():
    inputs = make_inputs(Shape(64, 2, 4, 16, 8))
    return inputs.x, inputs.expert_ids, inputs.dy


@pytest.mark.parametrize(
    "data, ranks, check_vma",
    [(2, 1, True), (1, 2, True), (2, 2, True), (1, 4, True), (2, 2, False)],
)
def test_a_step_is_the_same_on_every_mesh(implementation, data, ranks, check_vma):
    # SGD, for Adam hides a wrong scale. Experts must not be averaged over their own axis, and the
    # copies of a replicated weight must not drift apart.
    got = sgd_step(implementation, data, ranks, check_vma)
    want = sgd_step(implementation, 1, 1, True)
    for name, p in got.items():
        before = network_params()[name]
        assert relative_error(p - before, want[name] - before) <= F32, name
        if not name.startswith("w_"):
            first, *others = (s.data for s in p.addressable_shards)
            for other in others:
                assert_same_bits(other, first)


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [2, 0, 3, 1]])
def test_device_order(implementation, order):
    inputs = make_inputs()
    config = MoEConfig(implementation=implementation)
    devices = jax.devices()
    mesh = make_mesh((4,), devices=[devices[i] for i in order])
    got = jax.jit(functools.partial(results_of, sharded(mesh, config)))(inputs)
    assert_close(got, oracle(inputs), F32)
    mesh = make_mesh((2, 2), ("data", "expert"), devices=[devices[i] for i in order])
    y = jax.jit(sharded(mesh, config))(*inputs.args)
    assert relative_error(y, oracle(inputs).y) <= F32


@pytest.mark.timeout(60)
@pytest.mark.parametrize("who", ["rank 2 sends none", "rank 3 receives none", "rank 0 alone sends"])
def test_idle_ranks_do_not_hang_the_others(implementation, who):
    inputs = make_inputs(Shape(64, 2, 8, 16, 8))
    ids = np.array(inputs.expert_ids)
    if who == "rank 2 sends none":
        ids[32:48] = -1
    elif who == "rank 3 receives none":
        ids[ids >= 6] = -1
    else:
        ids[16:] = -1
    inputs = inputs._replace(expert_ids=jnp.asarray(ids))
    run = idle_runner(implementation)
    for _ in range(20):
        got = run(inputs)
    assert_close(got, oracle(inputs), F32)


@functools.cache
def idle_runner(implementation):
    f = sharded(make_mesh((4,)), MoEConfig(implementation=implementation))
    return jax.jit(functools.partial(results_of, f))


def test_uneven_exchange(implementation):
    # Rank s sends its row to rank (s + 1) * (d + 2) mod 5: uneven, and rank 3 receives none.
    # Buffers are longer than what is valid, and NaN there.
    rows, ranks = 9, 4
    valid = np.arange(rows) < np.array([9, 8, 7, 6])[:, None]
    sender, row = np.meshgrid(np.arange(ranks), np.arange(rows), indexing="ij")
    ids = np.where(valid, (sender + 1) * (row + 2) % 5 % 3, -1).reshape(-1, 1)
    inputs = make_inputs(Shape(ranks * rows, 1, ranks, 16, 8))
    x = (1000 * sender + row).reshape(-1, 1) * 1e-3 + inputs.x
    inputs = inputs._replace(x=jnp.asarray(x), expert_ids=jnp.asarray(ids, jnp.int32))
    want = oracle(inputs)
    flat = jnp.asarray(valid.reshape(-1, 1))
    poisoned = inputs._replace(x=jnp.where(flat, x, np.nan))
    got = idle_runner(implementation)(poisoned)
    assert_close(got, want, F32)
    assert not np.asarray(got.dx)[~valid.reshape(-1)].any()


def run_moe(implementation, mesh, shape, inputs, *, token_axes=None, jit=True):
    """The Results of `moe` on tokens of the given leading shape, under jax.set_mesh."""
    config = MoEConfig(implementation=implementation)

    def f(x, ids, weights, *experts):
        x, ids, weights = (a.reshape(*shape, a.shape[-1]) for a in (x, ids, weights))
        kwargs = dict(expert_axis="expert", token_axes=token_axes, config=config)
        y = moe(x, ids, weights, *experts, **kwargs)
        assert y.shape == x.shape
        return y.reshape(-1, x.shape[-1])

    run = functools.partial(results_of, f)
    with jax.set_mesh(mesh):
        return (jax.jit(run) if jit else run)(jax.device_put(inputs, NamedSharding(mesh, P())))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("axes", [("data", "expert"), ("expert", "data")])
def test_moe(implementation, axes, explicit):
    inputs = make_inputs()
    mesh = make_mesh((2, 4), axes, explicit=explicit)
    assert_close(run_moe(implementation, mesh, (2, 80), inputs), oracle(inputs), F32)


# Leading dimensions that one axis, two axes or none divides; tokens that no split makes even.
@pytest.mark.parametrize(
    "shape, explicit",
    [((160,), False), ((1, 160), True), ((4, 5, 8), True), ((1, 1), False), ((3, 5), True)],
)
def test_moe_leading_dimensions(shape, explicit):
    inputs = make_inputs(Shape(tokens=int(np.prod(shape)), hidden=16, intermediate=8))
    mesh = make_mesh((2, 4), ("data", "expert"), explicit=explicit)
    assert_close(run_moe("xla", mesh, shape, inputs), oracle(inputs), F32)


@pytest.mark.parametrize("token_axes", [(), "data", ("expert",), ("expert", "data")])
@pytest.mark.parametrize("implementation_", ["xla", "ffi"])
def test_moe_token_axes(implementation_, token_axes):
    # Tokens replicated over the expert axis are computed by every rank, and count once.
    if implementation_ == "ffi":
        require_ffi()
    inputs = make_inputs(Shape(32, 2, 8, 16, 8))
    mesh = make_mesh((2, 4), ("data", "expert"))
    got = run_moe(implementation_, mesh, (32,), inputs, token_axes=token_axes)
    assert_close(got, oracle(inputs), F32)


@pytest.mark.parametrize("axes", [("data", "expert"), ("expert", "data")])
@pytest.mark.parametrize("kinds", [("Auto", "Explicit"), ("Explicit", "Auto")])
@pytest.mark.parametrize("tokens", [32, 15])  # 15: padded
def test_moe_on_auto_beside_explicit_axes(implementation, tokens, kinds, axes):
    inputs = make_inputs(Shape(tokens, 2, 8, 16, 8))
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, axes, axis_types=tuple(AxisType[kind] for kind in kinds))
    got = run_moe(implementation, mesh, (tokens,), inputs)
    assert_close(got, oracle(inputs), F32)


def test_moe_without_tokens(implementation):
    mesh = make_mesh((2, 4), ("data", "expert"))
    for shape in ((0,), (2, 0)):
        inputs = make_inputs(Shape(tokens=0, hidden=16, intermediate=8))
        got = run_moe(implementation, mesh, shape, inputs)
        assert got.y.shape == (0, 16)
        assert not any(np.asarray(dw).any() for dw in got[3:])


@pytest.mark.parametrize("explicit", [False, True])
def test_moe_with_a_mesh_argument(explicit):
    # Arrays that lie elsewhere, or otherwise, are moved.
    inputs = make_inputs(Shape(32, 2, 8, 16, 8))
    mesh = make_mesh((2, 4), ("data", "expert"), explicit=explicit)
    f = functools.partial(moe, mesh=mesh, expert_axis="expert")
    x = jax.device_put(inputs.x, NamedSharding(mesh, P(None, "data")))
    for run in (f, jax.jit(f)):
        assert relative_error(run(x, *inputs.args[1:]), oracle(inputs).y) <= F32


def test_moe_moves_arrays_from_other_devices():
    inputs = make_inputs(Shape(32, 2, 8, 16, 8))
    mesh = make_mesh((4,), devices=jax.devices()[4:])
    args = jax.device_put(inputs.args, jax.devices()[0])
    y = moe(*args, mesh=mesh, expert_axis="expert")
    assert set(y.devices()) == set(mesh.devices.flat)
    assert relative_error(y, oracle(inputs).y) <= F32


def test_moe_returns_the_sharding_of_x_over_explicit_axes():
    inputs = make_inputs(Shape(32, 2, 8, 16, 8))
    mesh = make_mesh((2, 4), ("data", "expert"), explicit=True)
    with jax.set_mesh(mesh):
        x = jax.device_put(inputs.x, P("data"))
        y = jax.jit(lambda x, *rest: x + moe(x, *rest, expert_axis="expert"))(x, *inputs.args[1:])
    assert y.sharding.spec[0] == "data"


def test_moe_outside_jit(implementation):
    inputs = make_inputs(Shape(32, 2, 8, 16, 8))
    mesh = make_mesh((2, 4), ("data", "expert"))
    assert_close(run_moe(implementation, mesh, (32,), inputs, jit=False), oracle(inputs), F32)


def test_custom_calls_gather_nothing():
    # A custom call on a sharded array outside a shard_map would make XLA gather it.
    require_ffi()
    inputs = make_inputs(Shape(32, 2, 8, 16, 8))
    mesh = make_mesh((2, 4), ("data", "expert"))
    config = MoEConfig(implementation="ffi")
    f = functools.partial(moe, mesh=mesh, expert_axis="expert", config=config)
    specs = (P(("data", "expert")),) * 3 + (P("expert"),) * 3
    args = (
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(inputs.args, specs, strict=True)
    )
    text = jax.jit(f).lower(*args).compile().as_text()
    assert "jax_megamoe_forward" in text
    assert "all-gather" not in text
