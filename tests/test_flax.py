"""`jax_megamoe.nnx.MoE` and `jax_megamoe.linen.MoE` on one device, against dense experts."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx

import jax_megamoe.linen
import jax_megamoe.nnx
from jax_megamoe import MoEConfig, load_balancing_loss, update_expert_bias

H, I, E, K = 16, 32, 8, 2  # noqa: E741
WEIGHTS = ("router", "w_gate", "w_up", "w_down")


def make(*, experts=E, top_k=K, seed=0, **options):
    return jax_megamoe.nnx.MoE(H, I, experts, top_k, rngs=nnx.Rngs(seed), **options)


def tokens(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*shape, H)), dtype)


def relative_error(got, want):
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def bits(a):
    return np.asarray(a).tobytes()


def params_of(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


@functools.partial(jax.jit, static_argnums=0)
def _run(graphdef, params, rest, x, options):
    return nnx.merge(graphdef, params, rest)(x, **options)


@functools.partial(jax.jit, static_argnums=0)
def _gradients(graphdef, params, rest, x, dy, coef, options):
    def loss(params, x):
        y, aux = nnx.merge(graphdef, params, rest)(x, **options)
        # A zero cotangent, and not zero times a NaN, where dy is 0.
        main = jnp.where(dy == 0, 0.0, y.astype(jnp.float32) * dy).sum()
        return main + coef * (aux.load_balancing_loss + aux.router_z_loss), (y, aux)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)


def run(layer, x, **options):
    return _run(*nnx.split(layer, nnx.Param, ...), x, options)


def gradients(layer, x, dy=None, coef=0.0, **options):
    """(y, aux, gradients by name with "x" among them) of <y, dy> + coef * (both losses)."""
    dy = tokens(*x.shape[:-1], seed=9) if dy is None else dy
    (_, (y, aux)), (dp, dx) = _gradients(*nnx.split(layer, nnx.Param, ...), x, dy, coef, options)
    return y, aux, {**nnx.to_pure_dict(dp), "x": dx}


def dense_experts(params, x, ids, weights):
    """Every expert on every token, in fp32, and then the weighted sum of those chosen."""
    g = jnp.einsum("th,ehi->tei", x, params["w_gate"])
    u = jnp.einsum("th,ehi->tei", x, params["w_up"])
    y = jnp.einsum("tei,eih->teh", jax.nn.silu(g) * u, params["w_down"])
    chosen = jax.nn.one_hot(ids, y.shape[1]) * weights[..., None]
    return jnp.einsum("tke,teh->th", chosen, y)


def dense(params, x, top_k, norm=True, score="softmax"):
    scores = getattr(jax.nn, score)(x.astype(jnp.float32) @ params["router"].astype(jnp.float32))
    weights, ids = jax.lax.top_k(scores, top_k)
    if norm:
        weights = weights / weights.sum(-1, keepdims=True)
    return dense_experts(params, x, ids, weights)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _dense_gradients(params, x, dy, top_k, norm, score):
    def loss(params, x):
        y = dense(params, x, top_k, norm, score)
        return (y.astype(jnp.float32) * dy).sum(), y

    (_, y), (dp, dx) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return y, {**dp, "x": dx}


def check_against_dense(layer, x, **options):
    dy = tokens(*x.shape[:-1], seed=9)
    y, aux, got = gradients(layer, x, dy)
    top_k = layer.layer.top_k
    want_y, want = _dense_gradients(
        params_of(layer),
        x.reshape(-1, H),
        dy.reshape(-1, H),
        top_k,
        options.get("norm_topk_prob", True),
        options.get("score", "softmax"),
    )
    assert y.shape == x.shape and y.dtype == x.dtype
    assert relative_error(y.reshape(-1, H), want_y) < 1e-5
    for name in (*WEIGHTS, "x"):
        assert relative_error(got[name].reshape(want[name].shape), want[name]) < 1e-5, name
    return aux, got


# --- values and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "norm_topk_prob": False}])
def test_layer_equals_dense_experts(options):
    layer, x = make(**options), tokens(2, 5)
    aux, _ = check_against_dense(layer, x, **options)
    ids = np.asarray(aux.routing.expert_ids)
    np.testing.assert_array_equal(aux.expert_load, np.bincount(ids.ravel(), minlength=E))
    assert aux.expert_load.dtype == jnp.int32 and aux.invalid_ids == 0
    assert aux.router_logits.shape == aux.routing.probs.shape == (2, 5, E)
    want = load_balancing_loss(aux.routing.probs, aux.routing.expert_ids)
    assert aux.load_balancing_loss == pytest.approx(float(want), rel=1e-6)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3), (1,)])
def test_leading_axes(shape):
    layer, x = make(), tokens(6)[: np.prod(shape)]
    y, aux = run(layer, x.reshape(*shape, H))
    want, _ = run(layer, x)
    assert y.shape == (*shape, H) and aux.routing.expert_ids.shape == (*shape, K)
    np.testing.assert_allclose(y.reshape(-1, H), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens(shape):
    y, aux, grads = gradients(make(), tokens(*shape), coef=1.0)
    assert y.shape == (*shape, H)
    assert aux.load_balancing_loss == aux.router_z_loss == 0
    assert all((np.asarray(g) == 0).all() for g in grads.values())


def test_linen_is_the_same_layer():
    layer = make(use_expert_bias=True, score="sigmoid")
    module = jax_megamoe.linen.MoE(H, I, E, K, use_expert_bias=True, score="sigmoid")
    x = tokens(2, 5)
    variables = module.init(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(jnp.shape, params_of(layer))
    assert set(variables) == {"params", "expert_bias"}
    bias = jnp.linspace(-1, 1, E)
    layer.expert_bias[...] = bias
    variables = {"params": params_of(layer), "expert_bias": {"expert_bias": bias}}
    got, want = jax.jit(module.apply)(variables, x), run(layer, x)
    assert [bits(a) for a in jax.tree.leaves(got)] == [bits(a) for a in jax.tree.leaves(want)]


# --- routing cases at the level of the layer ------------------------------------------------------


def test_one_expert_per_token_renormalised_warns_and_stops_the_router():
    with pytest.warns(UserWarning, match="top_k=1 with norm_topk_prob=True"):
        layer = make(experts=4, top_k=1)
    y, aux, grads = gradients(layer, tokens(8))
    np.testing.assert_array_equal(aux.routing.expert_weights, np.ones((8, 1)))
    np.testing.assert_array_equal(grads["router"], np.zeros((H, 4)))
    module = jax_megamoe.linen.MoE(H, I, 4, 1)
    with pytest.warns(UserWarning, match="top_k=1"):
        jax.eval_shape(module.init, jax.random.key(0), tokens(8))


def test_one_expert_per_token_trains_the_router():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = make(experts=4, top_k=1, norm_topk_prob=False)
    x = tokens(8)
    _, grads = check_against_dense(layer, x, norm_topk_prob=False)
    assert np.linalg.norm(grads["router"]) > 1e-3
    y, _ = run(layer, x)
    for t in (0, 5):  # no token depends on another
        np.testing.assert_allclose(run(layer, x[t : t + 1])[0][0], y[t], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("count", "experts"), [(3, 2), (4, 8)])
def test_every_expert_for_every_token(count, experts):
    x, options = tokens(count), {"experts": experts, "top_k": experts}
    _, normed = check_against_dense(make(**options), x)
    _, _, raw = gradients(make(**options, norm_topk_prob=False), x)
    for name in raw:
        assert relative_error(normed[name], raw[name]) < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_token_keeps_to_itself(bad):
    layer, x = make(top_k=4, dtype=jnp.bfloat16), tokens(4, dtype=jnp.bfloat16)
    poisoned = x.at[2, 0 if bad == np.inf else slice(None)].set(bad)
    dy = tokens(4, seed=9).at[2].set(0)
    y, aux, grads = gradients(layer, poisoned, dy)
    want, want_aux, want_grads = gradients(layer, x.at[2].set(0), dy)
    ids = np.asarray(aux.routing.expert_ids)
    assert len(set(ids[2])) == 4 and ids.min() >= 0 and ids.max() < E
    others = np.array([0, 1, 3])
    assert bits(y[others]) == bits(want[others])
    assert bits(grads["x"][others]) == bits(want_grads["x"][others])
    assert np.isnan(np.asarray(y[2], np.float32)).all()
    # Its own experts and the router have summed over it; every other expert has not.
    untouched = np.setdiff1d(np.arange(E), np.union1d(ids[2], want_aux.routing.expert_ids[2]))
    assert untouched.size
    for name in ("w_gate", "w_up", "w_down"):
        assert bits(grads[name][untouched]) == bits(want_grads[name][untouched])


def test_close_experts_are_told_apart_in_a_bf16_model():
    layer = jax_megamoe.nnx.MoE(
        256, 8, 2, 1, norm_topk_prob=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    router = np.full((256, 2), 1 / 32, np.float32)
    router[0, 1] = 3 / 64
    layer.router[...] = jnp.asarray(router)
    x = jnp.ones((1, 256), jnp.bfloat16)

    def logits_and_ids():
        with jax.default_matmul_precision("bfloat16"):
            _, aux = run(layer, x)
        return aux.router_logits.tolist(), aux.routing.expert_ids.tolist()

    assert logits_and_ids() == ([[8.0, 8.015625]], [[1]])
    # The same after a policy that casts every parameter, whatever its name.
    nnx.update(layer, jax.tree.map(lambda p: p.astype(jnp.bfloat16), nnx.state(layer, nnx.Param)))
    assert logits_and_ids() == ([[8.0, 8.015625]], [[1]])


def test_router_matmul_is_fp32_whatever_the_precision_preset():
    layer = make(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    assert layer.router[...].dtype == jnp.float32
    with jax.default_matmul_precision("bfloat16"):
        jaxpr = str(jax.make_jaxpr(lambda x: layer(x)[1].router_logits)(tokens(3)))
    (dot,) = [line for line in jaxpr.split("\n") if f"f32[3,{E}] = dot_general" in line]
    assert "HIGHEST" in jaxpr[jaxpr.index(dot) :][:400]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_replayed_ids_with_live_weights(score):
    first, second, x = make(score=score), make(score=score, seed=1), tokens(6)
    ids = run(first, x)[1].routing.expert_ids
    y, aux, grads = gradients(second, x, expert_ids=ids)
    assert bits(aux.routing.expert_ids) == bits(ids)
    assert (np.asarray(ids) != np.asarray(run(second, x)[1].routing.expert_ids)).any()

    @jax.jit
    def oracle(params):
        scores = getattr(jax.nn, score)(x @ params["router"])
        w = jnp.take_along_axis(scores, ids, -1)
        w = w / w.sum(-1, keepdims=True)
        y = dense_experts(params, x, ids, w)
        return (y * tokens(6, seed=9)).sum(), y

    (_, want), want_grads = jax.value_and_grad(oracle, has_aux=True)(params_of(second))
    assert relative_error(y, want) < 1e-5
    for name in WEIGHTS:
        assert relative_error(grads[name], want_grads[name]) < 1e-5, name
    bad = ids.at[0, 0].set(E).at[1, 1].set(-7).at[2, 0].set(-1)
    _, aux = run(second, x, expert_ids=bad)
    assert aux.invalid_ids == 2 and aux.expert_load.sum() == 6 * K - 3


# --- padding ----------------------------------------------------------------------------------


def test_padding_changes_nothing():
    layer = make()
    x, dy = tokens(2, 4), tokens(2, 4, seed=9)
    mask = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    x = x.at[1, 2:].set(np.nan)  # padding may hold anything
    y, aux, got = gradients(layer, x, dy, coef=1.0, token_mask=mask)
    want_y, want_aux, want = gradients(layer, x[mask], dy[mask], coef=1.0)
    assert (np.asarray(y[~mask]) == 0).all()
    assert relative_error(y[mask], want_y) < 1e-6
    np.testing.assert_array_equal(aux.expert_load, want_aux.expert_load)
    for name in ("load_balancing_loss", "router_z_loss"):
        assert getattr(aux, name) == pytest.approx(float(getattr(want_aux, name)), rel=1e-6)
    for name in WEIGHTS:
        assert relative_error(got[name], want[name]) < 1e-5, name
    assert relative_error(got["x"][mask], want["x"]) < 1e-5
    assert (np.asarray(got["x"][~mask]) == 0).all()

    y, aux, got = gradients(layer, x, dy, coef=1.0, token_mask=jnp.zeros_like(mask))
    assert aux.load_balancing_loss == aux.router_z_loss == 0
    assert (np.asarray(y) == 0).all() and (np.asarray(aux.expert_load) == 0).all()
    assert all((np.asarray(g) == 0).all() for g in got.values())


# --- expert bias ------------------------------------------------------------------------------


def test_expert_bias_stays_fp32_and_out_of_the_optimizer(tmp_path):
    layer = make(
        use_expert_bias=True, score="sigmoid", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    layer.expert_bias[...] = jnp.ones(E)
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2, weight_decay=0.5), wrt=nnx.Param)
    moments = [a.shape for a in jax.tree.leaves(nnx.state(optimizer)) if a.ndim]
    assert (E,) not in moments and (H, E) in moments
    starved = jnp.arange(E) * 2  # expert 0 is always below the mean

    @nnx.jit
    def step(layer, optimizer, x):
        grads = nnx.grad(lambda m: m(x)[0].astype(jnp.float32).mean())(layer)
        optimizer.update(layer, grads)
        bias = layer.expert_bias
        bias[...] = update_expert_bias(bias[...], starved, 1e-3)

    for _ in range(10):
        step(layer, optimizer, tokens(4, dtype=jnp.bfloat16))
    bias = layer.expert_bias[...]
    assert bias.dtype == jnp.float32 and bias[0] == pytest.approx(1.010, abs=1e-6)
    assert bias[-1] == pytest.approx(0.990, abs=1e-6)

    state = nnx.to_pure_dict(nnx.state(layer))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", state)
        checkpointer.wait_until_finished()
        loaded = checkpointer.restore(tmp_path / "layer", jax.tree.map(jnp.zeros_like, state))
    fresh = make(use_expert_bias=True, score="sigmoid", param_dtype=jnp.bfloat16, seed=3)
    fresh_state = nnx.state(fresh)
    nnx.replace_by_pure_dict(fresh_state, loaded)
    nnx.update(fresh, fresh_state)
    assert bits(fresh.expert_bias[...]) == bits(bias)


def test_expert_bias_selects_and_does_not_weigh():
    layer, x = make(use_expert_bias=True), tokens(6)
    plain = run(layer, x)[1].routing
    layer.expert_bias[...] = jnp.zeros(E).at[5].set(10.0)
    biased = run(layer, x)[1].routing
    assert (np.asarray(biased.expert_ids)[:, 0] == 5).all()
    assert bits(biased.probs) == bits(plain.probs)
    chosen = np.take_along_axis(np.asarray(plain.probs), np.asarray(biased.expert_ids), -1)
    want = chosen / chosen.sum(-1, keepdims=True)
    assert relative_error(biased.expert_weights, want) < 1e-6


# --- recomputation, scan, dtypes ----------------------------------------------------------------


REMAT = {
    "none": lambda f: f,
    "full": jax.checkpoint,
    "save_routing": lambda f: jax.checkpoint(f, policy=jax_megamoe.nnx.save_routing),
}


def near_ties():
    """64 bf16 tokens whose second and third logits differ by less than a bf16 step."""
    rng = np.random.default_rng(0)
    x = np.zeros((64, H), np.float32)
    x[:, 0] = rng.integers(1, 8, 64)
    x[:, 1:4] = rng.integers(-4, 5, (64, 3)) / 8
    router = np.full((H, E), -2.0, np.float32)
    router[1:] = 0
    router[0, [1, 4, 6]] = 2.0
    router[[1, 2, 3], [1, 4, 6]] = 2.0**-10
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(router)


def scanned_nnx(layers, remat):
    graphdef, state = nnx.split(layers)

    def apply(params, x):
        def block(x, params):
            y, aux = nnx.merge(graphdef, params)(x)
            return x + y, aux

        return jax.lax.scan(REMAT[remat](block), x, params)

    return apply, state


def looped_nnx(layers, remat):
    apply, state = scanned_nnx(layers, remat)
    graphdef, _ = nnx.split(layers)

    def loop(params, x):
        def block(x, params):
            y, aux = nnx.merge(graphdef, params)(x)
            return x + y, aux

        auxes = []
        for i in range(jax.tree.leaves(params)[0].shape[0]):
            x, aux = REMAT[remat](block)(x, jax.tree.map(lambda a, i=i: a[i], params))
            auxes.append(aux)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *auxes)

    return loop, state


def stacked(count, **options):
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
    def create(key):
        return jax_megamoe.nnx.MoE(H, I, E, K, rngs=nnx.Rngs(key), **options)

    return create(jax.random.split(jax.random.key(0), count))


def step(apply, params, x, coef=1.0):
    def loss(params, x):
        y, aux = apply(params, x)
        return (y.astype(jnp.float32) ** 2).mean() + coef * aux.load_balancing_loss.mean(), (y, aux)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)


def test_statistics_are_counted_once_under_recomputation_and_scan():
    layers, x = stacked(2), tokens(4, 8)
    (_, (_, want)), want_grads = step(*scanned_nnx(layers, "none"), x)
    for build in (scanned_nnx, looped_nnx):
        (_, (_, aux)), grads = step(*build(layers, "full"), x)
        np.testing.assert_array_equal(aux.expert_load.sum(-1), [64, 64])
        np.testing.assert_array_equal(aux.expert_load, want.expert_load)
        assert relative_error(aux.load_balancing_loss, want.load_balancing_loss) < 1e-6
        for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
            assert relative_error(got, expected) < 1e-6


def test_near_ties_are_routed_alike_in_every_recomputation():
    x, router = near_ties()
    layer = make(dtype=jnp.bfloat16)
    layer.router[...] = router
    graphdef, params = nnx.split(layer)
    module = jax_megamoe.linen.MoE(H, I, E, K, dtype=jnp.bfloat16)

    def from_nnx(params, x):
        return nnx.merge(graphdef, params)(x)

    def from_linen(params, x):
        return module.apply({"params": nnx.to_pure_dict(params)}, x)

    (_, (_, aux)), grads = step(from_nnx, params, x)
    logits = np.sort(np.asarray(aux.router_logits), -1)
    gap = logits[:, -2] - logits[:, -3]
    assert (gap < 2.0**-8 * np.abs(logits[:, -2])).all() and (gap > 0).mean() > 0.4
    for apply, remat in ((from_nnx, "full"), (from_nnx, "save_routing"), (from_linen, "full")):
        (_, (_, other)), other_grads = step(REMAT[remat](apply), params, x)
        assert bits(other.routing.expert_ids) == bits(aux.routing.expert_ids)
        assert jax.tree.map(bits, other_grads) == jax.tree.map(bits, grads)
    # The experts that have a weight gradient are those of the exported ids.
    used = np.unique(np.asarray(aux.routing.expert_ids))
    dw = np.asarray(nnx.to_pure_dict(grads[0])["w_down"], np.float32)
    np.testing.assert_array_equal(np.flatnonzero(np.abs(dw).sum((1, 2))), used)


@pytest.mark.parametrize(
    ("x_dtype", "param_dtype"),
    [(jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)],
)
def test_scan_over_layers_keeps_every_dtype(x_dtype, param_dtype):
    layers = stacked(3, param_dtype=param_dtype)
    x = tokens(8, dtype=x_dtype)
    scan, params = scanned_nnx(layers, "full")
    (_, (y, _)), (dp, dx) = step(scan, params, x)
    assert y.dtype == dx.dtype == x_dtype
    dp = nnx.to_pure_dict(dp)
    assert dp["router"].dtype == jnp.float32
    assert all(dp[name].dtype == param_dtype for name in WEIGHTS[1:])
    if param_dtype == x_dtype:
        loop, params = looped_nnx(layers, "none")
        (_, (want, _)), (want_dp, want_dx) = step(loop, params, x)
        assert relative_error(y, want) < 2e-2 and relative_error(dx, want_dx) < 2e-2
        for name, want in nnx.to_pure_dict(want_dp).items():
            assert relative_error(dp[name], want) < 2e-2, name


def test_compute_dtype():
    layer, x = make(dtype=jnp.bfloat16), tokens(8)
    y, _, grads = gradients(layer, x)
    want, _ = run(make(), x)
    assert y.dtype == jnp.bfloat16 and 1e-5 < relative_error(y, want) < 2e-2
    assert all(g.dtype == jnp.float32 for g in grads.values())


def test_nnx_remat_and_scan_transforms():
    """Flax's own lifted transforms give what plain jax.checkpoint and lax.scan give."""
    layers, x = stacked(2, use_expert_bias=True, score="sigmoid"), tokens(8)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
    @nnx.remat(policy=jax_megamoe.nnx.save_routing)
    def block(layer, x):
        y, aux = layer(x)
        return x + y, aux.expert_load

    @nnx.jit
    def loss_and_grads(layers, x):
        def loss(layers):
            y, load = block(layers, x)
            return (y**2).mean(), load

        return nnx.value_and_grad(loss, has_aux=True)(layers)

    (_, load), grads = loss_and_grads(layers, x)
    np.testing.assert_array_equal(load.sum(-1), [8 * K] * 2)
    apply, state = scanned_nnx(layers, "none")
    (_, (_, aux)), (want, _) = step(apply, state, x, coef=0.0)
    np.testing.assert_array_equal(load, aux.expert_load)
    want = nnx.to_pure_dict(want)
    for name, got in nnx.to_pure_dict(grads).items():
        assert relative_error(got, want[name]) < 1e-5, name


def test_linen_remat_and_scan_transforms():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            y, aux = jax_megamoe.linen.MoE(H, I, E, K, name="moe")(x)
            return x + y, aux

    def scanned(block):
        return linen.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)

    x = tokens(8)
    rematerialised = linen.remat(Block, policy=jax_megamoe.linen.save_routing)
    variables = scanned(Block)().init(jax.random.key(0), x, None)
    results = [
        step(lambda v, x, b=block: scanned(b)().apply(v, x, None), variables, x)
        for block in (Block, rematerialised)
    ]
    ((_, (_, want)), want_grads), ((_, (_, aux)), grads) = results
    np.testing.assert_array_equal(aux.expert_load.sum(-1), [8 * K] * 2)
    np.testing.assert_array_equal(aux.expert_load, want.expert_load)
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert relative_error(got, expected) < 1e-6


def test_every_checkpoint_name_occurs():
    layer = make()
    jaxpr = str(jax.make_jaxpr(layer)(tokens(4)))
    for name in jax_megamoe.nnx.CHECKPOINT_NAMES:
        assert f"name={name}" in jaxpr, name
    assert set(jax_megamoe.linen.CHECKPOINT_NAMES) == set(jax_megamoe.nnx.CHECKPOINT_NAMES)
    assert len(set(jax_megamoe.nnx.CHECKPOINT_NAMES)) == 4


def test_the_ready_policy_keeps_the_routing_and_nothing_else(capsys):
    layer, x = make(), tokens(4)
    graphdef, state = nnx.split(layer)

    def loss(state, x):
        return (nnx.merge(graphdef, state)(x)[0] ** 2).sum()

    jax.ad_checkpoint.print_saved_residuals(
        jax.checkpoint(loss, policy=jax_megamoe.nnx.save_routing), state, x
    )
    kept = [s for s in capsys.readouterr().out.splitlines() if "from the argument" not in s]
    kept = [s for s in kept if "from a constant" not in s]
    shapes = sorted(s.split(" ")[0] for s in kept)
    assert shapes == [f"f32[4,{K}]", f"f32[4,{E}]", f"i32[4,{K}]"], kept


def test_the_ready_policy_routes_once():
    layer, x = make(), tokens(4)
    graphdef, state = nnx.split(layer)

    def count(remat):
        def loss(state, x):
            return (REMAT[remat](lambda s, x: nnx.merge(graphdef, s)(x)[0])(state, x) ** 2).sum()

        text = jax.jit(jax.grad(loss)).lower(state, x).as_text()
        return text.count("chlo.top_k")

    assert {remat: count(remat) for remat in REMAT} == {"none": 1, "full": 2, "save_routing": 1}


def test_a_bf16_token_is_not_kept_in_fp32(capsys):
    layer, x = make(dtype=jnp.bfloat16), tokens(4, dtype=jnp.bfloat16)
    graphdef, state = nnx.split(layer)
    jax.ad_checkpoint.print_saved_residuals(
        lambda s, x: nnx.merge(graphdef, s)(x)[0].astype(jnp.float32).sum(), state, x
    )
    out = capsys.readouterr().out
    assert f"bf16[4,{H}]" in out and f"f32[4,{H}]" not in out


def test_stages_are_named():
    layer = make()
    text = jax.jit(lambda x: layer(x)[0]).lower(tokens(4)).as_text(debug_info=True)
    assert "moe_router" in text and "moe_experts" in text
    text = jax.jit(lambda x: layer(x)[1]).lower(tokens(4)).as_text(debug_info=True)
    assert "moe_aux" in text


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0, 9, 2.0, True])
def test_top_k_out_of_range(top_k):
    with pytest.raises(ValueError, match=f"top_k is {top_k}; it must be an integer from 1 to"):
        make(top_k=top_k)


def test_wrong_sizes_and_formats_are_named_at_construction():
    for size, value in (("hidden", 0), ("intermediate", -1), ("num_experts", 2.5)):
        options = {"hidden": H, "intermediate": I, "num_experts": E, size: value}
        message = f"^{size} is {value}; it must be an integer of at least 1"
        with pytest.raises(ValueError, match=message):
            jax_megamoe.nnx.MoE(**options, top_k=1, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=message):
            jax_megamoe.linen.MoE(**options, top_k=1).init(jax.random.key(0), tokens(3))
    for name in ("dtype", "param_dtype"):
        with pytest.raises(ValueError, match=f"^{name} is float16; it must be bfloat16 or float32"):
            make(**{name: jnp.float16})
        with pytest.raises(ValueError, match=f"^{name} is 'bf16'; it must be bfloat16 or float32"):
            make(**{name: "bf16"})
    assert make(top_k=np.int64(2))(tokens(3))[0].shape == (3, H)
    with pytest.raises(TypeError, match="^config is a NoneType; it must be a jax_megamoe.MoECon"):
        make(config=None)


def test_wrong_calls_are_named():
    layer = make()
    with pytest.raises(ValueError, match=r"x has shape \(16,\); .* at least one leading dimension"):
        layer(jnp.ones(16))
    with pytest.raises(ValueError, match=r"x has shape \(3, 15\); it must be \[..., 16\]"):
        layer(jnp.ones((3, 15)))
    with pytest.raises(ValueError, match=r"token_mask has shape \(2,\); it must be \(3,\)"):
        layer(tokens(3), token_mask=jnp.ones(2, bool))
    with pytest.raises(TypeError, match="token_mask has dtype int32; it must be bool"):
        layer(tokens(3), token_mask=jnp.ones(3, jnp.int32))
    with pytest.raises(TypeError, match="float16"):
        layer(tokens(3, dtype=jnp.float16))
    with pytest.raises(ValueError, match="precision is 'fp8'"):
        make(config=MoEConfig(precision="fp8", implementation="xla"))(tokens(3))
