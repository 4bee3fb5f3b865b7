"""The Qwen3-MoE on meshes: same loss and gradients everywhere, remat, precision, padding."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import require_ffi
from flax import nnx
from jax.sharding import AxisType, Mesh

import jax_megamoe.nnx
from jax_megamoe import MoEConfig
from jax_megamoe.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig, layers, load_hf, loss
from jax_megamoe.models.qwen3_moe.cross_entropy import cross_entropy_sum

DATA = Path(__file__).parent / "data" / "qwen3_moe"
BASE = DATA / "base" / "fused"
# Optimised code would take longer to make than it saves in these sizes.
QUICK = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _value_and_grad(graph, state, *batch):
    return nnx.value_and_grad(loss, has_aux=True)(nnx.merge(graph, state), *batch)


def value_and_grad(model, *batch):
    return _value_and_grad(*nnx.split(model), *batch)


@functools.cache
def golden():
    return dict(np.load(DATA / "base" / "golden.npz"))


def batch():
    """Four rows, the second padded on the right and the fourth on the left."""
    g = golden()
    sides = ("right", "left")
    return [
        np.concatenate([g[f"{side}_{name}"] for side in sides])
        for name in ("input_ids", "labels", "attention_mask")
    ]


@functools.cache
def single():
    """Loss, metrics and gradients of the batch on one device."""
    return run(load_hf(BASE))


def run(model):
    (total, metrics), grads = value_and_grad(model, *batch())
    return jax.tree.map(np.asarray, (total, metrics, nnx.to_pure_dict(grads)))


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def assert_same(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got[0], want[0], rtol=tolerance)
    for name in ("lm_loss", "aux_loss"):
        np.testing.assert_allclose(got[1][name], want[1][name], rtol=tolerance)
    np.testing.assert_array_equal(got[1]["expert_load"], want[1]["expert_load"])
    for path, value in jax.tree_util.tree_leaves_with_path(want[2]):
        other = functools.reduce(lambda tree, key: tree[key.key], path, got[2])
        assert relative(other, value) < tolerance, path


MESHES = {
    # Four rows on eight devices: the batch is filled up.
    "data x expert": lambda: jax.make_mesh((2, 4), ("data", "expert")),
    "expert x data, auto, permuted devices": lambda: Mesh(
        np.array(jax.devices())[[2, 0, 3, 1]].reshape(2, 2),
        ("expert", "data"),
        axis_types=(AxisType.Auto,) * 2,
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_loss_and_gradients_do_not_depend_on_the_mesh(name):
    mesh = MESHES[name]()
    model = load_hf(BASE, mesh=mesh)
    assert_same(run(model), single())
    logits = model(golden()["input_ids"])
    np.testing.assert_allclose(logits, golden()["logits"], rtol=0, atol=1e-4)


def test_three_axes_and_a_set_mesh():
    mesh = jax.make_mesh((2, 2, 2), ("replica", "expert", "data"))
    with jax.set_mesh(mesh):
        assert_same(run(load_hf(BASE)), single())


def test_gradients_lie_as_their_parameters_do_and_replicas_agree():
    model = load_hf(BASE, mesh=MESHES["data x expert"]())
    _, grads = value_and_grad(model, *batch())
    wanted, got = (nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (model, grads))
    for p, g in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        assert g.sharding.is_equivalent_to(p.sharding, p.ndim)
        by_index = {}
        for shard in g.addressable_shards:
            first = by_index.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(first, shard.data)


def test_no_gradient_is_summed_over_an_axis_of_one_device():
    mesh = jax.make_mesh((1, 2), ("data", "expert"), (AxisType.Auto,) * 2)
    model = load_hf(BASE, mesh=mesh)
    assert_same(run(model), single())
    graph, state = nnx.split(model)
    text = _value_and_grad.lower(graph, state, *batch()).as_text()
    summed = re.findall(r"all_reduce.*?\}\) : \(tensor<(.*?)>\)", text, re.DOTALL)
    # Vectors of all layers, and not their matrices.
    assert summed and max(kind.count("x") for kind in summed) == 2


@pytest.mark.parametrize("remat", ["none", "save_routing"])
def test_remat_changes_no_gradient_and_counts_nothing_twice(remat):
    policy = jax_megamoe.nnx.save_routing if remat == "save_routing" else remat
    got = run(load_hf(BASE, remat=policy))
    assert_same(got, single(), tolerance=1e-6)
    tokens = batch()[2].sum()
    np.testing.assert_array_equal(got[1]["expert_load"].sum(axis=1), 2 * tokens)


def test_full_remat_keeps_one_activation_a_layer():
    config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=8, num_experts=0)
    ids = np.zeros((4, 256), np.int32)

    def temporaries(remat):
        model = Qwen3MoE(config, rngs=nnx.Rngs(0), dtype=jnp.float32, remat=remat)
        graph, params = nnx.split(model)

        def f(params):
            return loss(nnx.merge(graph, params), ids, ids)[0]

        compiled = jax.jit(jax.grad(f)).lower(params).compile(QUICK)
        return compiled.memory_analysis().temp_size_in_bytes

    activation = ids.size * config.hidden_size * 4
    assert temporaries("none") - temporaries("full") > 8 * 6 * activation


def test_full_remat_chooses_the_experts_once():
    """A choice made anew may differ where experts nearly tie, and its gradients be of another."""
    config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=2)
    ids = np.zeros((1, 8), np.int32)

    def choices(remat):
        graph, params = nnx.split(Qwen3MoE(config, rngs=nnx.Rngs(0), remat=remat))
        grad = jax.jit(jax.grad(lambda params: loss(nnx.merge(graph, params), ids, ids)[0]))
        return grad.lower(params).as_text().count("chlo.top_k")

    assert choices(jax.checkpoint_policies.nothing_saveable) == 2
    assert choices("none") == choices("full") == 1


def test_padding_counts_in_nothing():
    ids, labels, mask = batch()
    model = load_hf(BASE)
    clean = run(model)
    changed = np.where(mask == 1, ids, 50)
    (total, metrics), grads = value_and_grad(model, changed, labels, mask)
    np.testing.assert_array_equal(total, clean[0])
    np.testing.assert_array_equal(metrics["expert_load"], clean[1]["expert_load"])
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(grads), clean[2])

    (total, metrics), grads = value_and_grad(
        model, ids, np.full_like(labels, -100), np.zeros_like(mask)
    )
    assert float(total) == float(metrics["aux_loss"]) == float(metrics["num_labels"]) == 0.0
    assert not metrics["expert_load"].any()
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_bf16_compute_with_fp32_masters():
    model = load_hf(
        BASE, mesh=MESHES["data x expert"](), dtype=jnp.bfloat16, param_dtype=jnp.float32
    )
    got = run(model)
    want = single()
    assert all(g.dtype == np.float32 for g in jax.tree.leaves(got[2]))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-2)
    for path, value in jax.tree_util.tree_leaves_with_path(want[2]):
        other = functools.reduce(lambda tree, key: tree[key.key], path, got[2])
        assert relative(other, value) < 8e-2, path


def test_auxiliary_loss_is_added_once_and_linear_in_its_coefficient():
    model = load_hf(BASE)
    total, metrics = loss(model, *batch())
    added = float(total) - float(metrics["lm_loss"])
    np.testing.assert_allclose(added, 0.05 * float(metrics["aux_loss"]), rtol=1e-4)


def test_expert_bias_chooses_but_does_not_weigh_and_is_no_parameter():
    model = load_hf(BASE, expert_bias=True)
    assert len(jax.tree.leaves(nnx.state(model, nnx.Param))) == len(
        jax.tree.leaves(nnx.state(load_hf(BASE), nnx.Param))
    )
    ids = golden()["input_ids"]
    np.testing.assert_allclose(model(ids), golden()["logits"], rtol=0, atol=1e-4)
    bias = model.layers[0].expert_bias
    bias[...] = bias[...].at[:, 7].set(10.0)
    _, inner = model(ids, return_intermediates=True)
    chosen = np.asarray(inner["expert_ids"])
    assert (chosen == 7).any(axis=-1).all()
    p = np.take_along_axis(np.asarray(jax.nn.softmax(inner["router_logits"])), chosen, axis=-1)
    np.testing.assert_allclose(
        inner["expert_weights"], p / p.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6
    )


def test_training_steps_compile_once_and_learn():
    config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=2, mlp_only_layers=(0,))
    mesh = jax.make_mesh((2, 2), ("data", "expert"))
    model = Qwen3MoE(config, rngs=nnx.Rngs(0), mesh=mesh, dtype=jnp.float32)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    traces = []

    @nnx.jit
    def step(model, optimizer, ids):
        traces.append(None)
        (total, _), grads = nnx.value_and_grad(loss, has_aux=True)(model, ids, ids)
        optimizer.update(model, grads)
        return total

    ids = np.tile(np.arange(16, dtype=np.int32), (4, 1))
    losses = [float(step(model, optimizer, (ids + i) % 32)) for i in range(8)]
    # Twice, because the first step moves the optimizer's counters onto the mesh.
    assert len(traces) == 2
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cross_entropy_in_chunks(dtype, monkeypatch):
    monkeypatch.setattr("jax_megamoe.models.qwen3_moe.cross_entropy._CHUNK_BYTES", 4 * 50 * 7)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (23, 16), dtype)
    matrix = jax.random.normal(keys[1], (50, 16))
    targets = jax.random.randint(keys[2], (23,), 0, 50).at[jnp.array([0, 9])].set(-100)

    def whole(hidden, matrix, targets):
        logits = hidden.astype(jnp.float32) @ matrix.astype(dtype).astype(jnp.float32).T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
        return -jnp.where(targets == -100, 0.0, picked).sum()

    got, want = (
        jax.value_and_grad(lambda *a, f=f: 3.0 * f(*a, targets), argnums=(0, 1))(hidden, matrix)
        for f in (cross_entropy_sum, whole)
    )
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for a, b in zip(got[1], want[1], strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        assert relative(a, b) < tolerance


def test_memory_of_the_loss_is_that_of_one_chunk():
    hidden = jax.ShapeDtypeStruct((16384, 64), jnp.bfloat16)
    matrix = jax.ShapeDtypeStruct((151936, 64), jnp.float32)
    targets = jax.ShapeDtypeStruct((16384,), jnp.int32)
    compiled = jax.jit(jax.grad(cross_entropy_sum, argnums=(0, 1))).lower(hidden, matrix, targets)
    temporaries = compiled.compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 16384 * 151936 * 4 / 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((np.zeros(3, np.int32),) * 2, r"input_ids has shape \(3,\)"),
        ((np.zeros((1, 3), np.float32), np.zeros((1, 3), np.int32)), "dtype float32"),
        ((np.zeros((1, 3), np.int32), np.zeros((1, 4), np.int32)), r"labels has shape \(1, 4\)"),
        (
            (np.zeros((1, 3), np.int32),) * 2 + (np.ones((3, 1)),),
            r"attention_mask has shape \(3, 1\); it must be that of input_ids, \(1, 3\)",
        ),
    ],
)
def test_shapes_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        loss(load_hf(BASE), *arguments)


def test_custom_calls_give_the_same_and_run_once_in_each_direction():
    require_ffi()
    config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=2)
    mesh = jax.make_mesh((2, 2), ("data", "expert"))
    ids = np.random.default_rng(0).integers(0, 256, (4, 8), np.int32)

    def compiled(implementation):
        model = Qwen3MoE(
            config,
            rngs=nnx.Rngs(0),
            mesh=mesh,
            dtype=jnp.float32,
            moe=MoEConfig(implementation=implementation),
        )
        graph, params = nnx.split(model)
        f = jax.value_and_grad(lambda params: loss(nnx.merge(graph, params), ids, ids)[0])
        with jax.set_mesh(mesh):
            f = jax.jit(f).lower(params).compile(QUICK)
            return f.as_text(), jax.tree.map(np.asarray, f(params))

    text, got = compiled("ffi")
    # Under full remat the recomputation of a layer stops before its experts.
    for direction in ("forward", "backward"):
        assert text.count(f'custom_call_target="jax_megamoe_{direction}"') == 1
    assert text.count('custom_call_target="TopK"') == 1  # and does not choose again
    want = compiled("xla")[1]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_in_blocks_of_queries(dtype, monkeypatch):
    keys = jax.random.split(jax.random.key(0), 4)
    q, dy = (jax.random.normal(key, (2, 37, 4, 16), dtype) for key in keys[:2])
    k, v = (jax.random.normal(key, (2, 37, 2, 16), dtype) for key in keys[2:])

    def attention(*operands):
        return jax.nn.dot_product_attention(*operands, is_causal=True, implementation="xla")

    f32 = [a.astype(jnp.float32) for a in (q, k, v, dy)]
    y, pullback = jax.vjp(attention, *f32[:3])
    want = y, *pullback(f32[3])
    monkeypatch.setattr(layers, "_LOGITS_BYTES", 4 * 2 * 4 * 37 * 5)
    y, pullback = jax.vjp(layers._plain_attention, q, k, v)
    for a, b in zip((y, *pullback(dy)), want, strict=True):
        assert a.dtype == dtype
        assert relative(np.asarray(a, np.float32), b) < (1e-5 if dtype == jnp.float32 else 1e-2)


def test_attention_without_cudnn_says_why():
    layers._cudnn_takes.cache_clear()
    with pytest.warns(UserWarning, match="attention runs as plain JAX, more slowly: cuDNN says"):
        assert not layers._cudnn_takes((1, 16, 4, 12), (1, 16, 2, 12))  # no multiple of 8
    layers._cudnn_takes.cache_clear()
