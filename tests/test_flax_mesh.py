"""The Flax layers on data x expert meshes: placement, gradients, one step equal everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import require_ffi
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_megamoe.linen
import jax_megamoe.nnx
from jax_megamoe import MoEConfig

P = PartitionSpec
H, I, E, K = 16, 32, 8, 2  # noqa: E741
AXES = ("data", "expert")


def mesh_of(data, expert, axis_type=AxisType.Auto, devices=None):
    return jax.make_mesh((data, expert), AXES, axis_types=(axis_type,) * 2, devices=devices)


class Model(nnx.Module):
    """A dense map, the experts, and another dense map."""

    def __init__(self, rngs, **options):
        init = nnx.initializers.lecun_normal()
        self.before = nnx.Param(init(rngs.params(), (H, H)))
        self.moe = jax_megamoe.nnx.MoE(H, I, E, K, rngs=rngs, **options)
        self.after = nnx.Param(init(rngs.params(), (H, H)))

    def __call__(self, x):
        y, aux = self.moe(x @ self.before[...])
        return y @ self.after[...], aux


def loss(model, x, target):
    y, aux = model(x)
    return ((y - target) ** 2).mean() + aux.load_balancing_loss + 0.1 * aux.router_z_loss, aux


@nnx.jit
def sgd_step(model, x, target):
    """One step of plain SGD with rate 1, and what came out."""
    (value, aux), grads = nnx.value_and_grad(loss, has_aux=True)(model, x, target)
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - g, state, grads))
    return value, aux.expert_load, grads


def batch():
    rng = np.random.default_rng(0)
    return (rng.normal(size=(8, 2, H)).astype(np.float32) for _ in range(2))


def flat(state):
    return {".".join(map(str, k)): np.asarray(v[...]) for k, v in nnx.to_flat_state(state)}


def relative_error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@functools.cache
def one_device():
    model = Model(nnx.Rngs(0))
    value, load, grads = sgd_step(model, *batch())
    return float(value), np.asarray(load), flat(grads), flat(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    ("data", "expert", "axis_type"),
    [
        (2, 1, AxisType.Auto),
        (4, 1, AxisType.Explicit),
        (1, 2, AxisType.Explicit),
        (1, 4, AxisType.Auto),
        (2, 2, AxisType.Auto),
        (2, 2, AxisType.Explicit),
    ],
)
def test_one_step_is_that_of_one_device(data, expert, axis_type):
    """Loss with both auxiliary losses, every gradient, every updated parameter and its copies."""
    want_value, want_load, want_grads, want_params = one_device()
    mesh = mesh_of(data, expert, axis_type)
    with jax.set_mesh(mesh):
        model = Model(nnx.Rngs(0), expert_axis="expert")
        assert model.moe.w_gate[...].sharding.spec[0] == "expert"
        for dense in (model.before, model.after):
            dense[...] = jax.device_put(dense[...], NamedSharding(mesh, P()))
        x, target = jax.device_put(tuple(batch()), NamedSharding(mesh, P(AXES)))
        value, load, grads = sgd_step(model, x, target)
    assert value == pytest.approx(want_value, rel=1e-5)
    np.testing.assert_array_equal(load, want_load)
    for name, got in flat(grads).items():
        assert relative_error(got, want_grads[name]) < 1e-5, name
    params = nnx.state(model, nnx.Param)
    for name, got in flat(params).items():
        assert relative_error(got, want_params[name]) < 1e-5, name
    for replicated in (model.moe.router, model.before, model.after):
        copies = [np.asarray(s.data).tobytes() for s in replicated[...].addressable_shards]
        assert len(copies) == mesh.size and len(set(copies)) == 1


def test_one_step_through_the_custom_calls():
    require_ffi()
    want_value, want_load, want_grads, _ = one_device()
    mesh = mesh_of(2, 2)
    with jax.set_mesh(mesh):
        config = MoEConfig(implementation="ffi")
        model = Model(nnx.Rngs(0), expert_axis="expert", config=config)
        x, target = jax.device_put(tuple(batch()), NamedSharding(mesh, P(AXES)))
        value, load, grads = sgd_step(model, x, target)
    assert value == pytest.approx(want_value, rel=1e-5)
    np.testing.assert_array_equal(load, want_load)
    for name, got in flat(grads).items():
        assert relative_error(got, want_grads[name]) < 1e-5, name


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_parameters_are_created_on_the_mesh(axis_type):
    mesh = mesh_of(2, 4, axis_type)
    want = {
        "router": P(None, None),
        "w_gate": P("expert", "data", None),
        "w_up": P("expert", "data", None),
        "w_down": P("expert", None, "data"),
    }

    def check(layer):
        for name, spec in want.items():
            array = getattr(layer, name)[...]
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), name
        assert layer.w_gate[...].addressable_shards[0].data.shape == (2, H // 2, I)

    options = {"expert_axis": "expert", "fsdp_axis": "data"}
    with jax.set_mesh(mesh):
        layer = jax_megamoe.nnx.MoE(H, I, E, K, rngs=nnx.Rngs(0), **options)
        check(layer)
        specs = nnx.get_partition_spec(nnx.state(layer))
        assert {k: v.get_value() for k, v in specs.items()} == want
        check(nnx.jit(lambda: jax_megamoe.nnx.MoE(H, I, E, K, rngs=nnx.Rngs(0), **options))())
        y, _ = nnx.jit(lambda m, x: m(x))(layer, jnp.ones((4, 2, H)))
        assert y.shape == (4, 2, H)
    check(jax_megamoe.nnx.MoE(H, I, E, K, rngs=nnx.Rngs(0), mesh=mesh, **options))


def test_a_mesh_given_to_the_layer_needs_no_context():
    x, _ = batch()
    plain = jax_megamoe.nnx.MoE(H, I, E, K, rngs=nnx.Rngs(0))
    want, _ = plain(jnp.asarray(x))
    layer = jax_megamoe.nnx.MoE(
        H, I, E, K, rngs=nnx.Rngs(0), mesh=mesh_of(2, 4), expert_axis="expert"
    )
    got, aux = nnx.jit(lambda m, x: m(x))(layer, x)
    assert relative_error(np.asarray(got), np.asarray(want)) < 1e-5
    assert aux.expert_load.sum() == 16 * K


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_linen_on_a_mesh(axis_type):
    x, _ = batch()
    plain = jax_megamoe.linen.MoE(H, I, E, K)
    variables = plain.init(jax.random.key(0), jnp.asarray(x))
    want, want_aux = jax.jit(plain.apply)(variables, x)
    mesh = mesh_of(2, 4, axis_type)
    with jax.set_mesh(mesh):
        layer = jax_megamoe.linen.MoE(H, I, E, K, expert_axis="expert")
        boxed = jax.eval_shape(layer.init, jax.random.key(0), jnp.asarray(x))
        specs = linen.get_partition_spec(boxed)
        assert specs["params"]["w_down"] == P("expert", None, None)
        shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
        created = linen.unbox(layer.init(jax.random.key(0), jnp.asarray(x)))["params"]["w_down"]
        assert created.addressable_shards[0].data.shape == (2, I, H)
        variables = jax.device_put(linen.unbox(variables), shardings)
        x = jax.device_put(x, NamedSharding(mesh, P(AXES)))
        got, aux = jax.jit(layer.apply)(variables, x)
    assert relative_error(np.asarray(got), np.asarray(want)) < 1e-5
    np.testing.assert_array_equal(aux.expert_load, want_aux.expert_load)


@pytest.mark.parametrize("fsdp_axis", [None, "data"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_linen_with_a_mesh_argument(axis_type, fsdp_axis):
    x = jnp.asarray(next(batch()))
    plain = jax_megamoe.linen.MoE(H, I, E, K)
    want, _ = plain.apply(plain.init(jax.random.key(0), x), x)
    options = dict(mesh=mesh_of(2, 4, axis_type), expert_axis="expert", fsdp_axis=fsdp_axis)
    layer = jax_megamoe.linen.MoE(H, I, E, K, **options)
    variables = layer.init(jax.random.key(0), x)
    w_up = linen.unbox(variables)["params"]["w_up"]
    assert w_up.sharding.spec == P("expert", fsdp_axis, None)
    for apply in (layer.apply, jax.jit(layer.apply)):
        got, _ = apply(variables, x)
        assert relative_error(np.asarray(got), np.asarray(want)) < 1e-5


def test_stacked_layers_on_a_mesh():
    mesh = mesh_of(2, 4)
    with jax.set_mesh(mesh):

        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def create(key):
            return jax_megamoe.nnx.MoE(H, I, E, K, expert_axis="expert", rngs=nnx.Rngs(key))

        layers = create(jax.random.split(jax.random.key(0), 2))
        specs = nnx.get_partition_spec(nnx.state(layers))
        assert specs["w_gate"].get_value() == P(None, "expert", None, None)
        graphdef, state = nnx.split(layers)

        @jax.jit
        def apply(state, x):
            @functools.partial(jax.checkpoint, policy=jax_megamoe.nnx.save_routing)
            def block(x, state):
                y, aux = nnx.merge(graphdef, state)(x)
                return x + y, aux.expert_load

            return jax.lax.scan(block, x, state)

        x, _ = batch()
        y, load = apply(state, jax.device_put(x, NamedSharding(mesh, P(AXES))))
    for i in range(2):
        one = jax.tree.map(lambda a, i=i: np.asarray(a)[i], nnx.to_pure_dict(state))
        plain = jax_megamoe.nnx.MoE(H, I, E, K, rngs=nnx.Rngs(0))
        plain_state = nnx.state(plain)
        nnx.replace_by_pure_dict(plain_state, one)
        nnx.update(plain, plain_state)
        out, aux = plain(jnp.asarray(x))
        x = x + out
        np.testing.assert_array_equal(load[i], aux.expert_load)
    assert relative_error(np.asarray(y), np.asarray(x)) < 1e-5


def test_wrong_meshes_are_named():
    def make(experts=E, **options):
        jax_megamoe.nnx.MoE(H, I, experts, K, rngs=nnx.Rngs(0), **options)

    mesh = mesh_of(2, 4)
    with pytest.raises(ValueError, match="mesh is None and there is no jax.set_mesh"):
        make(expert_axis="expert")
    with pytest.raises(ValueError, match="expert_axis is 'ep'; the axes are 'data', 'expert'"):
        make(expert_axis="ep", mesh=mesh)
    with pytest.raises(ValueError, match="token_axes names 'batch'; the axes are 'data', 'expert'"):
        make(expert_axis="expert", token_axes=("batch",), mesh=mesh)
    with pytest.raises(ValueError, match="token_axes names 'batch'; the axes are 'data', 'expert'"):
        make(expert_axis="expert", token_axes="batch", mesh=mesh)
    with pytest.raises(ValueError, match="fsdp_axis names 'fsdp'; the axes are 'data', 'expert'"):
        make(expert_axis="expert", fsdp_axis="fsdp", mesh=mesh)
    with pytest.raises(ValueError, match="fsdp_axis is 'expert', which is expert_axis"):
        make(expert_axis="expert", fsdp_axis="expert", mesh=mesh)
    with pytest.raises(ValueError, match="token_axes names 3; it must be a name or a sequence of"):
        make(expert_axis="expert", token_axes=3, mesh=mesh)
    message = f"^hidden is {H + 1}; it must be a multiple of the size of fsdp_axis 'data', 2"
    with pytest.raises(ValueError, match=message):
        options = dict(expert_axis="expert", fsdp_axis="data", mesh=mesh)
        jax_megamoe.nnx.MoE(H + 1, I, E, K, rngs=nnx.Rngs(0), **options)
    for experts in (6, 2):
        message = f"^num_experts is {experts}; it must be a multiple of the size of expert_axis "
        with pytest.raises(ValueError, match=message + "'expert', 4$"):
            make(experts=experts, expert_axis="expert", mesh=mesh)
    for score in ("relu", None, 3):
        with pytest.raises(ValueError, match=f"^score is {score!r}; it must be 'softmax' or"):
            make(score=score)
    with pytest.raises(ValueError, match="expert_axis is None, which is for one device"):
        make(mesh=mesh)
