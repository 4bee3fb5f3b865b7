"""`route`, the balancing losses and the bias update against NumPy, and their edges."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jax_megamoe import routing
from jax_megamoe.routing import update_expert_bias

P = PartitionSpec
GOLDEN = Path(__file__).parent / "data" / "qwen3_moe"
# Compiled as wholes: operation by operation each new shape costs many small compilations.
route = jax.jit(routing.route, static_argnames=("top_k", "score", "norm_topk_prob"))
load_balancing_loss = jax.jit(
    routing.load_balancing_loss, static_argnames=("divide_by_top_k", "layers", "axis_name")
)
router_z_loss = jax.jit(routing.router_z_loss, static_argnames="axis_name")


def gradient_of(f):
    return jax.jit(jax.grad(f))


def relative_error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def random_logits(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numpy_scores(logits, score):
    logits = np.asarray(logits, np.float64)
    if score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def numpy_route(logits, k, score="softmax", norm=True, bias=0.0):
    scores = numpy_scores(logits, score)
    ids = np.argsort(-(scores + bias), axis=-1, kind="stable")[..., :k]
    weights = np.take_along_axis(scores, ids, -1)
    if norm:
        weights = weights / weights.sum(-1, keepdims=True)
    return ids, weights, scores


def numpy_aux(probs, ids, num_experts):
    """Hugging Face's load_balancing_loss_func, with its one-hot mask."""
    one_hot = np.eye(num_experts)[np.asarray(ids).reshape(-1, ids.shape[-1])]
    f = one_hot.mean(0)  # [K, E]
    return num_experts * (f * np.asarray(probs).reshape(-1, num_experts).mean(0)).sum()


# --- route ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_experts", [8, 16, 60, 64, 96, 128, 192, 256])
def test_every_size_equals_the_oracle_with_and_without_bias(num_experts):
    logits = random_logits(64, num_experts, seed=num_experts)
    bias = np.zeros(num_experts, np.float32)
    bias[-1] = 10
    ks, norms = (1, 2, 4, 6, 8), (False, True)

    @jax.jit
    def everything(logits):
        return {
            (k, norm, biased): route(
                logits, k, norm_topk_prob=norm, expert_bias=jnp.asarray(bias) if biased else None
            )
            for k in ks
            for norm in norms
            for biased in (False, True)
        }

    for (k, norm, biased), got in everything(logits).items():
        ids, weights, probs = numpy_route(logits, k, norm=norm, bias=bias if biased else 0.0)
        np.testing.assert_array_equal(got.expert_ids, ids, err_msg=f"{k} {norm} {biased}")
        assert relative_error(got.expert_weights, weights) < 1e-6
        assert relative_error(got.probs, probs) < 1e-6
        if biased:  # always chosen, with its unbiased score
            assert (np.asarray(got.expert_ids)[:, 0] == num_experts - 1).all()


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_a_token_does_not_depend_on_the_number_of_tokens(tokens):
    logits = random_logits(64, 128)
    whole, part = route(logits, 8), route(logits[:tokens], 8)
    np.testing.assert_array_equal(part.expert_ids, whole.expert_ids[:tokens])
    for a, b in zip(part, whole, strict=True):
        np.testing.assert_allclose(a, b[:tokens], rtol=1e-6)


@pytest.mark.parametrize("norm", [False, True])
def test_sigmoid_equals_the_oracle(norm):
    logits, bias = random_logits(32, 16), random_logits(16, seed=1) / 4
    got = route(logits, 4, score="sigmoid", norm_topk_prob=norm, expert_bias=jnp.asarray(bias))
    ids, weights, probs = numpy_route(logits, 4, "sigmoid", norm, bias)
    np.testing.assert_array_equal(got.expert_ids, ids)
    assert relative_error(got.expert_weights, weights) < 1e-6
    assert relative_error(got.probs, probs) < 1e-6


def test_norm_topk_prob_values():
    logits = jnp.array([[2.0, 1.0, 0.0, -1.0]])
    np.testing.assert_allclose(route(logits, 2).expert_weights, [[0.73106, 0.26894]], atol=1e-5)
    raw = route(logits, 2, norm_topk_prob=False).expert_weights
    np.testing.assert_allclose(raw, [[0.64391, 0.23688]], atol=1e-5)


def test_softmax_is_over_all_experts_unless_renormalised():
    logits = random_logits(64, 128)
    normed, raw = route(logits, 8), route(logits, 8, norm_topk_prob=False)
    chosen = np.take_along_axis(logits, np.asarray(raw.expert_ids), -1)
    assert relative_error(normed.expert_weights, jax.nn.softmax(chosen)) < 1e-6
    gathered = np.take_along_axis(np.asarray(raw.probs), np.asarray(raw.expert_ids), -1)
    np.testing.assert_array_equal(raw.expert_weights, gathered)
    assert (np.asarray(raw.expert_weights).sum(-1) < 1).all()


@pytest.mark.parametrize("tokens", [1, 5])
def test_one_expert_per_token_keeps_its_axis(tokens):
    logits = jnp.zeros((tokens, 4)).at[:, 0].set(jnp.arange(tokens))
    normed, raw = route(logits, 1), route(logits, 1, norm_topk_prob=False)
    assert normed.expert_weights.shape == raw.expert_ids.shape == (tokens, 1)
    np.testing.assert_array_equal(normed.expert_weights, np.ones((tokens, 1)))
    assert relative_error(raw.expert_weights[:, 0], numpy_scores(logits, "softmax").max(-1)) < 1e-6


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_gradient_of_one_expert_per_token(score):
    logits = random_logits(8, 4)

    def gradient(norm):
        return gradient_of(
            lambda z: (
                route(z, 1, score=score, norm_topk_prob=norm).expert_weights[:, 0] * jnp.arange(8.0)
            ).sum()
        )(logits)

    def oracle(z):
        scores = jax.nn.softmax(z) if score == "softmax" else jax.nn.sigmoid(z)
        return (scores.max(-1) * jnp.arange(8.0)).sum()

    np.testing.assert_array_equal(gradient(True), np.zeros((8, 4)))
    assert relative_error(gradient(False), gradient_of(oracle)(logits)) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 2), (3, 2), (4, 8)])
def test_every_expert_chosen(tokens, num_experts, dtype):
    logits = jnp.asarray(random_logits(tokens, num_experts), dtype)
    direction = random_logits(tokens, num_experts, seed=1)

    def dense_weights(z, norm):
        r = route(z, num_experts, norm_topk_prob=norm)
        return jnp.zeros_like(r.probs).at[jnp.arange(tokens)[:, None], r.expert_ids].set(
            r.expert_weights
        ), r

    gradients = []
    for norm in (False, True):
        weights, r = dense_weights(logits, norm)
        assert r.expert_weights.dtype == jnp.float32
        np.testing.assert_array_equal(np.sort(r.expert_ids, -1), [range(num_experts)] * tokens)
        assert relative_error(weights, numpy_scores(logits.astype(jnp.float32), "softmax")) < 1e-6
        gradients.append(
            gradient_of(lambda z, norm=norm: (dense_weights(z, norm)[0] * direction).sum())(logits)
        )
    want = gradient_of(lambda z: (jax.nn.softmax(z.astype(jnp.float32)) * direction).sum())(logits)
    for got in gradients:
        assert got.dtype == dtype
        assert relative_error(got, want) < (1e-5 if dtype == jnp.float32 else 1e-2)


def test_gradient_of_logits_through_weights_equals_the_oracle():
    logits, direction = random_logits(16, 12), random_logits(16, 3, seed=1)
    ids = numpy_route(logits, 3)[0]
    for score in ("softmax", "sigmoid"):
        for norm in (False, True):

            def oracle(z, score=score, norm=norm):
                s = jax.nn.softmax(z) if score == "softmax" else jax.nn.sigmoid(z)
                w = jnp.take_along_axis(s, ids, -1)
                return ((w / w.sum(-1, keepdims=True) if norm else w) * direction).sum()

            def ours(z, score=score, norm=norm):
                r = route(z, 3, score=score, norm_topk_prob=norm)
                return (r.expert_weights * direction).sum()

            got, want = gradient_of(ours)(logits), gradient_of(oracle)(logits)
            assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, slice(None)])
def test_a_bad_row_keeps_to_itself(bad, where):
    logits = jnp.asarray(random_logits(4, 8), jnp.bfloat16)
    poisoned = logits.at[2, where].set(bad)
    for kwargs in ({}, {"norm_topk_prob": False}, {"score": "sigmoid"}, {"expert_bias": "ramp"}):
        if "expert_bias" in kwargs:
            kwargs = {"expert_bias": jnp.arange(8) / 8}
        fine, got = route(logits, 4, **kwargs), route(poisoned, 4, **kwargs)
        row = np.asarray(got.expert_ids[2])
        assert len(set(row)) == 4 and row.min() >= 0 and row.max() < 8
        for a, b in zip(got, fine, strict=True):
            np.testing.assert_array_equal(np.delete(a, 2, 0), np.delete(b, 2, 0))

        def loss(z, kwargs=kwargs):  # the cotangent of the bad row is 0
            w = route(z, 4, **kwargs).expert_weights
            return (jnp.delete(w, 2, 0) * jnp.arange(4.0)).sum()

        others = np.delete(np.asarray(gradient_of(loss)(poisoned), np.float32), 2, 0)
        assert np.isfinite(others).all() and (others != 0).any()
    if np.isnan(bad):
        assert np.isnan(np.asarray(route(poisoned, 4).expert_weights[2])).all()


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_nan_comes_last_whatever_its_sign(biased, k):
    # Of itself top_k takes a NaN for larger than all numbers, or with a sign for smaller.
    logits, rng = random_logits(64, 8), np.random.default_rng(1)
    nan = np.where(rng.random(logits.shape) < 0.5, np.float32(np.nan), np.float32(-np.nan))
    poisoned = np.where(rng.random(logits.shape) < 0.5, nan, logits)
    poisoned[0], poisoned[1, :7] = nan[0], nan[1, :7]
    # One NaN makes the whole softmax NaN: with a bias, which is added to scores, sigmoid.
    kwargs = {"score": "sigmoid", "expert_bias": jnp.zeros(8)} if biased else {}
    ids = np.asarray(route(poisoned, k, **kwargs).expert_ids)
    assert ids.min() >= 0 and ids.max() < 8
    assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()
    last = np.where(np.isnan(poisoned), -np.inf, poisoned)
    np.testing.assert_array_equal(ids, np.argsort(-last, axis=1, kind="stable")[:, :k])


def test_equal_scores_go_to_the_lower_expert():
    ties = jnp.array([[1.0, 1, 1, 1, 1, 1], [0, 2, 0, 2, 0, 2], [-0.0, 0.0, -0.0, 0.0, -1, -1]])
    want = [[0, 1, 2, 3], [1, 3, 5, 0], [0, 1, 2, 3]]
    np.testing.assert_array_equal(route(ties, 4).expert_ids, want)
    bias = jnp.zeros(6)
    got = route(ties, 4, score="sigmoid", expert_bias=bias).expert_ids
    np.testing.assert_array_equal(got, want)


def test_close_logits_are_told_apart():
    """Softmax in fp32 rounds these to one value; the larger logit still wins."""
    logits = jnp.array([[-120.0, -119.0, 0.0, -110.0]])
    np.testing.assert_array_equal(route(logits, 3).expert_ids, [[2, 3, 1]])
    step = jnp.array([[8.0, np.nextafter(np.float32(8), np.float32(9))]])
    np.testing.assert_array_equal(route(step, 1).expert_ids, [[1]])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm", [False, True])
def test_masked_tokens_are_not_routed_and_carry_no_gradient(score, norm):
    logits = jnp.asarray(random_logits(2, 4, 8))
    mask = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    logits = logits.at[1, 2].set(np.nan)  # padding may hold anything
    options = {"score": score, "norm_topk_prob": norm}
    got = route(logits, 2, token_mask=mask, **options)
    valid = route(logits[mask], 2, **options)
    for a, b in zip(got, valid, strict=True):
        np.testing.assert_array_equal(a[mask], b)
    assert (np.asarray(got.expert_ids[~mask]) == -1).all()
    assert (np.asarray(got.expert_weights[~mask]) == 0).all()
    assert (np.asarray(got.probs[~mask]) == 0).all()

    def loss(z):
        r = route(z, 2, token_mask=mask, **options)
        return (r.expert_weights * jnp.arange(2.0)).sum() + (r.probs**2).sum()

    gradient = np.asarray(gradient_of(loss)(logits))
    assert (gradient[~mask] == 0).all() and np.isfinite(gradient).all()
    assert (gradient[mask] != 0).any()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm", [False, True])
def test_replayed_ids_get_live_weights(score, norm):
    old, new = random_logits(6, 8), random_logits(6, 8, seed=1)
    direction = jnp.asarray(random_logits(6, 3, seed=2))
    ids = route(old, 3).expert_ids.at[0, 1].set(-1).at[1].set(-1).at[2, 0].set(8)
    valid = (ids >= 0) & (ids < 8)

    def ours(z):
        return route(z, 3, score=score, norm_topk_prob=norm, expert_ids=ids)

    def oracle(z):
        s = jax.nn.softmax(z) if score == "softmax" else jax.nn.sigmoid(z)
        w = jnp.where(valid, jnp.take_along_axis(s, jnp.clip(ids, 0, 7), -1), 0.0)
        total = w.sum(-1, keepdims=True)
        return w / jnp.where(total == 0, 1.0, total) if norm else w

    np.testing.assert_array_equal(ours(new).expert_ids, ids)
    assert relative_error(ours(new).expert_weights, oracle(new)) < 1e-6
    got = gradient_of(lambda z: (ours(z).expert_weights * direction).sum())(new)
    want = gradient_of(lambda z: (oracle(z) * direction).sum())(new)
    assert np.isfinite(got).all() and relative_error(got, want) < 1e-5
    masked = route(
        new, 3, score=score, norm_topk_prob=norm, expert_ids=ids, token_mask=jnp.arange(6) != 5
    )
    assert (np.asarray(masked.expert_ids[5]) == -1).all()
    np.testing.assert_array_equal(masked.expert_ids[:5], ids[:5])


def test_replayed_experts_with_vanishing_scores_stay_finite():
    logits = jnp.array([[0.0, -300.0, -301.0]])
    for score in ("softmax", "sigmoid"):
        r = route(logits - 200, 2, score=score, expert_ids=jnp.array([[1, 2]]))
        np.testing.assert_allclose(r.expert_weights, [[0.7310586, 0.2689414]], rtol=1e-4)


def test_leading_axes_and_vmap_are_the_same_as_flat():
    logits = random_logits(3, 5, 8)
    flat = route(logits.reshape(15, 8), 2)
    for got in (route(logits, 2), jax.vmap(lambda z: route(z, 2))(logits)):
        for a, b in zip(got, flat, strict=True):
            np.testing.assert_array_equal(a.reshape(b.shape), b)
    single = route(logits[0, 0], 2)
    np.testing.assert_array_equal(single.expert_ids, flat.expert_ids[0])


def test_bias_takes_no_gradient():
    logits = jnp.asarray(random_logits(4, 8))
    got = gradient_of(lambda b: route(logits, 2, expert_bias=b).expert_weights[:, 0].sum())(
        jnp.ones(8)
    )
    np.testing.assert_array_equal(got, np.zeros(8))


@pytest.mark.parametrize(
    ("error", "message", "kwargs"),
    [
        (ValueError, "top_k is 9; it must be an integer from 1 to the 8 experts", {"top_k": 9}),
        (ValueError, "top_k is 0", {"top_k": 0}),
        (ValueError, "score is 'tanh'; it must be 'softmax' or 'sigmoid'", {"score": "tanh"}),
        (ValueError, r"expert_bias has shape \(7,\); it must be \(8,\)", {"expert_bias": (7,)}),
        (ValueError, r"token_mask has shape \(5,\); it must be \(4,\)", {"token_mask": (5,)}),
        (TypeError, "token_mask has dtype float32; it must be bool", {"token_mask": (4,)}),
        (TypeError, "expert_ids has dtype float32; it must be integers", {"expert_ids": (4, 2)}),
        (ValueError, r"expert_ids has shape \(4, 3\).*must be \(4, 2\)", {"expert_ids": "[4,3]"}),
        (TypeError, "logits has shape .* and dtype int32; it must be floating", {"logits": 1}),
        (TypeError, "norm_topk_prob is 'no'; it must be True or False", {"norm_topk_prob": "no"}),
    ],
)
def test_route_names_what_is_wrong(error, message, kwargs):
    arrays = {
        k: jnp.zeros(v) if isinstance(v, tuple) else jnp.zeros((4, 3), jnp.int32)
        for k, v in kwargs.items()
        if k in ("expert_bias", "token_mask", "expert_ids")
    }
    logits = jnp.zeros((4, 8), jnp.int32 if "logits" in kwargs else jnp.float32)
    options = {k: v for k, v in kwargs.items() if k not in ("logits", *arrays)}
    with pytest.raises(error, match=message):
        route(logits, options.pop("top_k", 2), **options, **arrays)


def test_route_names_what_is_no_array_and_takes_the_integers_of_numpy():
    logits = jnp.asarray(random_logits(4, 8))
    with pytest.raises(TypeError, match="^logits is a list; it must be an array"):
        route([[0.0, 1.0]], 1)
    for name in ("expert_bias", "token_mask", "expert_ids"):
        with pytest.raises(TypeError, match=f"^{name} is a list; it must be an array"):
            route(logits, 2, **{name: [0]})
    for top_k in ("2", True, 2.0):
        with pytest.raises(ValueError, match=f"^top_k is {top_k!r}; it must be an integer"):
            route(logits, top_k)
    jax.tree.map(np.testing.assert_array_equal, route(logits, np.int64(2)), route(logits, 2))


def test_ids_of_numpy_are_replayed():
    logits = jnp.asarray(random_logits(4, 8))
    first = routing.route(logits, 2)
    for dtype in ("int64", "uint8"):
        again = routing.route(logits, 2, expert_ids=np.asarray(first.expert_ids, dtype))
        jax.tree.map(np.testing.assert_array_equal, again, first)
        assert isinstance(again.expert_ids, jax.Array)


@pytest.mark.parametrize(
    "strict",
    [{"jax_numpy_dtype_promotion": "strict"}, {"jax_numpy_rank_promotion": "raise"}],
    ids=str,
)
def test_nothing_relies_on_promotion(strict):
    logits, mask = jnp.asarray(random_logits(4, 8)), jnp.arange(4) > 0
    bias, load = jnp.zeros(8), jnp.arange(8, dtype=jnp.int32)

    def all_functions(logits):
        r = route(logits, 2, expert_bias=bias, token_mask=mask)
        loss = load_balancing_loss(r.probs, r.expert_ids, token_mask=mask)
        return loss + router_z_loss(logits, token_mask=mask) + r.expert_weights.sum()

    old = {name: getattr(jax.config, name) for name in strict}
    try:
        for name, value in strict.items():
            jax.config.update(name, value)
        assert np.isfinite(jax.jit(jax.grad(all_functions))(logits)).all()
        update_expert_bias(bias, load, 1e-3)
    finally:
        for name, value in old.items():
            jax.config.update(name, value)


# --- losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [8, 64])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_uniform_routing_gives_k_or_one(tokens, k):
    probs = jnp.full((tokens, 8), 1 / 8)
    ids = (jnp.arange(tokens * k, dtype=jnp.int32) % 8).reshape(tokens, k)
    assert load_balancing_loss(probs, ids) == pytest.approx(k, rel=1e-6)
    assert load_balancing_loss(probs, ids, divide_by_top_k=True) == pytest.approx(1, rel=1e-6)


def test_layers_pooled_or_averaged():
    logits = jnp.stack(
        [jnp.tile(jnp.array([20.0, -20.0]), (6, 1)), jnp.tile(jnp.array([-20.0, 20.0]), (6, 1))]
    )
    r = route(logits, 1, norm_topk_prob=False)
    assert load_balancing_loss(r.probs, r.expert_ids) == pytest.approx(1.0, rel=1e-6)
    mean = load_balancing_loss(r.probs, r.expert_ids, layers="mean", divide_by_top_k=True)
    assert mean == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_loss_is_hugging_faces_on_random_routing(score):
    r = route(random_logits(3, 2, 13, 8), 2, score=score)
    probs = np.asarray(r.probs, np.float64)
    probs /= probs.sum(-1, keepdims=True)
    want = numpy_aux(probs, r.expert_ids, 8)
    assert load_balancing_loss(r.probs, r.expert_ids) == pytest.approx(want, rel=1e-5)
    layers = [numpy_aux(probs[i], r.expert_ids[i], 8) for i in range(3)]
    got = load_balancing_loss(r.probs, r.expert_ids, layers="mean")
    assert got == pytest.approx(np.mean(layers), rel=1e-5)


@pytest.mark.parametrize("model", ["base", "tied_dense", "sharded"])
def test_hugging_faces_routing_and_loss(model):
    """Qwen3-MoE of transformers, from the router's logits on. tied_dense does not renormalise."""
    golden = np.load(GOLDEN / model / "golden.npz")
    config = json.loads((GOLDEN / model / "config_v4.json").read_text())
    options = {"norm_topk_prob": config["norm_topk_prob"]}
    logits, top_k = golden["router_logits"], config["num_experts_per_tok"]
    r = route(logits, top_k, **options)
    np.testing.assert_array_equal(r.expert_ids, golden["router_topk_ids"])
    assert relative_error(r.expert_weights, golden["router_topk_weights"]) < 1e-6
    aux = load_balancing_loss(r.probs, r.expert_ids)
    assert aux == pytest.approx(float(golden["aux_loss"]), rel=1e-5)


def test_padding_is_left_out_of_the_losses():
    logits = jnp.asarray(random_logits(2, 4, 8)).at[1, 2:].set(np.nan)
    mask = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)

    def losses(z, mask):
        r = route(z, 2, token_mask=mask)
        aux = load_balancing_loss(r.probs, r.expert_ids, token_mask=mask)
        assert mask is None or aux == load_balancing_loss(r.probs, r.expert_ids)
        if mask is not None:  # also where the routing knew nothing of the padding
            r = route(jnp.where(jnp.isnan(z), 0.0, z), 2)
            assert aux == load_balancing_loss(r.probs, r.expert_ids, token_mask=mask)
        return aux + 0.1 * router_z_loss(z, token_mask=mask)

    value, gradient = jax.value_and_grad(losses)(logits, mask)
    want, want_gradient = jax.value_and_grad(losses)(logits[mask], None)
    assert value == pytest.approx(float(want), rel=1e-6)
    assert relative_error(gradient[mask], want_gradient) < 1e-5
    assert (np.asarray(gradient[~mask]) == 0).all()
    value, gradient = jax.value_and_grad(losses)(logits, jnp.zeros_like(mask))
    assert value == 0 and (np.asarray(gradient) == 0).all()


def test_no_tokens_give_zero_losses():
    r = route(jnp.zeros((0, 8)), 2)
    assert load_balancing_loss(r.probs, r.expert_ids) == 0
    assert router_z_loss(jnp.zeros((0, 8))) == 0


def test_z_loss_value_and_bf16_logits():
    logits = random_logits(9, 8)
    want = (np.log(np.exp(np.float64(logits)).sum(-1)) ** 2).mean()
    assert router_z_loss(logits) == pytest.approx(want, rel=1e-5)
    assert router_z_loss(jnp.asarray(logits, jnp.bfloat16)).dtype == jnp.float32


@functools.cache
def _single_device_losses():
    x, w = random_logits(64, 16), random_logits(16, 8, seed=1)
    mask = jnp.asarray(np.random.default_rng(2).random(64) < 0.7)
    return x, w, mask, jax.value_and_grad(_losses)(w, x, mask)


def _losses(w, x, mask, axis_name=None, coef=1.0):
    logits = x @ w
    r = route(logits, 2, token_mask=mask)
    aux = load_balancing_loss(r.probs, r.expert_ids, token_mask=mask, axis_name=axis_name)
    return coef * (aux + router_z_loss(logits, token_mask=mask, axis_name=axis_name))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_losses_do_not_depend_on_the_number_of_devices(devices):
    x, w, mask, (want, want_gradient) = _single_device_losses()
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.NamedSharding(mesh, P("data"))
    x, mask = jax.device_put((x, mask), sharded)

    def check(result, factor=1.0):
        value, gradient = result
        assert value == pytest.approx(factor * float(want), rel=1e-5)
        assert relative_error(gradient, factor * want_gradient) < 1e-5

    check(jax.jit(jax.value_and_grad(_losses))(w, x, mask))  # global view
    for check_vma in (False, True):
        shard = functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), check_vma=check_vma
        )
        local = functools.partial(_losses, axis_name="data")
        check(jax.jit(jax.value_and_grad(shard(local, out_specs=P())))(w, x, mask))

        def inside(w, x, mask, check_vma=check_vma):
            value, gradient = jax.value_and_grad(_losses)(w, x, mask, "data", 2.0)
            return value, gradient if check_vma else jax.lax.pmean(gradient, "data")

        check(jax.jit(shard(inside, out_specs=P()))(w, x, mask), factor=2.0)


def test_routing_under_explicit_axes():
    x, w, mask, (want, want_gradient) = _single_device_losses()
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        sharded = jax.NamedSharding(mesh, P(("data", "expert")))
        x, mask = jax.device_put((x, mask), sharded)
        w = jax.device_put(w, jax.NamedSharding(mesh, P()))
        value, gradient = jax.jit(jax.value_and_grad(_losses))(w, x, mask)
    assert value == pytest.approx(float(want), rel=1e-5)
    assert relative_error(gradient, want_gradient) < 1e-5


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("probs has shape .* and expert_ids", lambda p, i: load_balancing_loss(p, i[:2])),
        ("layers is 'sum'", lambda p, i: load_balancing_loss(p, i, layers="sum")),
        ("layers='mean' needs", lambda p, i: load_balancing_loss(p, i, layers="mean")),
        (
            r"token_mask has shape \(3,\); it must be \(4,\)",
            lambda p, i: load_balancing_loss(p, i, token_mask=jnp.ones(3, bool)),
        ),
        (
            r"token_mask has shape \(3,\); it must be \(4,\)",
            lambda p, i: router_z_loss(p, token_mask=jnp.ones(3, bool)),
        ),
    ],
)
def test_losses_name_what_is_wrong(message, call):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((4, 8)), jnp.zeros((4, 2), jnp.int32))


# --- bias balancing ---------------------------------------------------------------------------


def test_bias_moves_against_the_load():
    bias = update_expert_bias(jnp.zeros(4), jnp.array([5, 3, 4, 4], jnp.int32), 0.5)
    np.testing.assert_array_equal(bias, [-0.5, 0.5, 0, 0])  # the mean is 4: exactly met by two
    bias = update_expert_bias(jnp.zeros(3), jnp.array([4, 3, 3], jnp.int32), 0.5)
    np.testing.assert_array_equal(bias, [-0.5, 0.5, 0.5])  # the mean is 10/3
    bias = update_expert_bias(jnp.ones(3), jnp.zeros(3, jnp.int32), 0.5)
    np.testing.assert_array_equal(bias, [1, 1, 1])


def test_bias_sees_a_difference_of_one_in_large_counts():
    load = np.full(8, 100_000_001, np.int32)
    load[3] += 1
    bias = np.asarray(update_expert_bias(jnp.zeros(8), jnp.asarray(load), 1.0))
    assert bias[3] == -1 and (np.delete(bias, 3) == 1).all()


def test_bias_stays_fp32_over_small_steps():
    bias, load = jnp.ones(2, jnp.bfloat16), jnp.array([0, 4], jnp.int32)
    for _ in range(10):
        bias = update_expert_bias(bias, load, 1e-3)
    assert bias.dtype == jnp.float32
    assert bias[0] == pytest.approx(1.010, abs=1e-6) and bias[1] == pytest.approx(0.990, abs=1e-6)


def test_bias_balances_a_skewed_router():
    logits = random_logits(256, 8) + np.linspace(0, 3, 8, dtype=np.float32)
    bias = jnp.zeros(8)

    @jax.jit
    def step(bias):
        ids = route(logits, 2, score="sigmoid", expert_bias=bias).expert_ids
        load = (ids[..., None] == jnp.arange(8)).sum((0, 1), dtype=jnp.int32)
        return update_expert_bias(bias, load, 0.01), load

    bias, first = step(bias)
    for _ in range(200):
        bias, load = step(bias)
    assert first.max() > 1.8 * first.mean() and load.max() < 1.3 * load.mean()


def test_ids_that_are_no_integers_have_no_loss():
    with pytest.raises(TypeError, match="expert_ids has dtype float32; it must be integers"):
        load_balancing_loss(jnp.ones((3, 4)), jnp.zeros((3, 2)))


def test_losses_and_bias_name_what_is_no_array():
    probs, ids = jnp.ones((4, 8)), jnp.zeros((4, 2), jnp.int32)
    for name, call in (
        ("probs", lambda: load_balancing_loss([[1.0]], ids)),
        ("expert_ids", lambda: load_balancing_loss(probs, [[0]])),
        ("token_mask", lambda: load_balancing_loss(probs, ids, token_mask=[True] * 4)),
        ("logits", lambda: router_z_loss([[0.0]])),
        ("bias", lambda: update_expert_bias([0.0], jnp.zeros(1, jnp.int32), 0.1)),
        ("expert_load", lambda: update_expert_bias(jnp.zeros(1), [0], 0.1)),
    ):
        with pytest.raises(TypeError, match=f"^{name} is a list; it must be an array"):
            call()


def test_bias_update_names_what_is_wrong():
    with pytest.raises(ValueError, match="both must be"):
        update_expert_bias(jnp.zeros(4), jnp.zeros(3, jnp.int32), 1e-3)
    with pytest.raises(TypeError, match="expert_load has dtype float32; it must be integers"):
        update_expert_bias(jnp.zeros(4), jnp.zeros(4), 1e-3)
    for rate in (None, "x", jnp.ones(3)):
        with pytest.raises(TypeError, match="^rate is .*; it must be a number$"):
            update_expert_bias(jnp.zeros(4), jnp.zeros(4, jnp.int32), rate)
    update_expert_bias(jnp.zeros(4), jnp.zeros(4, jnp.int32), jnp.float32(1e-3))
    with pytest.raises(TypeError, match="^expert_bias has dtype bool; it must be floating"):
        route(jnp.zeros((2, 4)), 2, expert_bias=jnp.zeros(4, bool))
