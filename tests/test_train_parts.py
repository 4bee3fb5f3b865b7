"""Optimiser, mesh, metrics and checkpoints of the training example, without a model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from training import mesh as meshes
from training import optimizer, report, text
from training.checkpoint import Checkpoints
from training.flops import training_flops_per_token

from jax_megamoe.models.qwen3_moe import Qwen3MoEConfig


def test_mesh_keeps_experts_inside_a_process():
    assert dict(meshes.make_mesh(16).shape) == {"data": 1, "expert": 8}
    assert dict(meshes.make_mesh(12).shape) == {"data": 2, "expert": 4}
    assert dict(meshes.make_mesh(16, 2).shape) == {"data": 4, "expert": 2}
    with pytest.raises(ValueError, match="--expert-parallel is 3; it must divide the 8 devices"):
        meshes.make_mesh(12, 3)
    with pytest.raises(ValueError, match="--expert-parallel is 8.*the 12 experts"):
        meshes.make_mesh(12, 8)


def test_batch_lies_spread_over_all_devices():
    mesh = meshes.make_mesh(8, 4)
    rows = np.arange(16 * 3, dtype=np.int32).reshape(16, 3)
    placed = meshes.put_batch(text.Batch(rows, rows, rows), mesh, accumulate=2).input_ids
    np.testing.assert_array_equal(placed, rows.reshape(2, 8, 3))
    assert {s.data.shape for s in placed.addressable_shards} == {(2, 1, 3)}


def test_schedule_warms_up_and_decays_to_a_tenth():
    rate = optimizer.schedule(1.0, warmup=4, steps=20)
    values = [float(rate(s)) for s in range(21)]
    np.testing.assert_allclose(values[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert all(a > b for a, b in zip(values[4:], values[5:], strict=False))
    assert values[20] == pytest.approx(0.1)
    assert float(optimizer.schedule(1.0, warmup=0, steps=1)(0)) == 1.0


def test_weight_decay_spares_norms_and_biases():
    names = (
        "embed_tokens", "router", "w_gate", "q_proj",
        "norm", "q_norm", "input_layernorm", "q_bias", "expert_bias",
    )  # fmt: skip
    params = {"layers": {0: {name: jnp.ones((2, 2)) for name in names}}}
    tx = optimizer.adamw(lambda _: 0.1, weight_decay=0.5, clip_norm=1.0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    decayed = {n for n, u in updates["layers"][0].items() if np.any(u)}
    assert decayed == set(names[:4])


def test_clipping_of_sharded_gradients_is_that_of_one_device():
    rng = np.random.default_rng(0)
    grads = {"a": rng.normal(size=(16, 8)), "b": rng.normal(size=(8, 4, 4)), "c": np.ones(3)}
    grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), grads)
    norm = np.sqrt(sum(float((np.asarray(x) ** 2).sum()) for x in jax.tree.leaves(grads)))
    tx = optimizer.adamw(lambda _: 1e-3, weight_decay=0.0, clip_norm=0.5)
    mesh = meshes.make_mesh(8, 4)
    specs = {"a": P(("data", "expert")), "b": P("expert", "data"), "c": P()}
    sharded = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in grads.items()}
    _, state = jax.jit(tx.update)(sharded, tx.init(sharded), sharded)
    # The first moment, because AdamW's first step is the same whatever the clipping did.
    for name, moment in optax.tree.get(state, "mu").items():
        np.testing.assert_allclose(moment, 0.1 * 0.5 / norm * grads[name], rtol=1e-5)


def test_flops_of_the_public_shapes():
    """Six for each active weight but the embedding's; the model cards say 3.3 and 22 billion."""
    short = 1
    for name, active in {"qwen3-30b-a3b": 3.04e9, "qwen3-235b-a22b": 21.6e9}.items():
        config = Qwen3MoEConfig.preset(name)
        assert training_flops_per_token(config, short) == pytest.approx(6 * active, rel=0.01)
    layers, width, length = config.num_hidden_layers, 64 * 128, 16384
    attention = training_flops_per_token(config, length) - training_flops_per_token(config, short)
    assert attention == pytest.approx(6 * layers * width * (length - 1))


def test_imbalance():
    assert report.imbalance(np.full((3, 4), 7)) == 1.0
    assert report.imbalance(np.array([[8, 0, 0, 0], [2, 2, 2, 2]])) == 2.5
    assert report.imbalance(np.zeros((2, 4), int)) == 0.0


def test_metrics_file_drops_what_is_run_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = report.MetricsFile(path, 0)
    for step in range(5):
        first.write({"step": step, "run": 1})
    first.close()
    second = report.MetricsFile(path, 3)
    second.write({"step": 3, "run": 2})
    second.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["run"]) for r in lines] == [(0, 1), (1, 1), (2, 1), (3, 2)]
    assert second.records == lines
    with path.open("a") as file:
        file.write('{"step": 4, "ru')  # a process that was killed while it wrote
    assert report.MetricsFile(path, 5).records == lines
    with pytest.raises(FileExistsError):
        report.MetricsFile(path, 0).write({"step": 0})
    assert path.read_text().startswith('{"step": 0, "run": 1}')


def test_summary_leaves_out_the_first_steps():
    records = [{"step_s": 60.0, "tokens_per_s": 1.0, "imbalance": 9.0}]
    records += [{"step_s": 2.0, "tokens_per_s": 50.0, "imbalance": i} for i in (1.5, 3.0, 2.0)]
    out = report.summary(records, flops_per_token=4e12, devices=2, skip=1)
    assert (out["step_s"], out["steps_timed"], out["tokens_per_s_per_device"]) == (2.0, 3, 25.0)
    assert (out["tflops_per_device"], out["imbalance"]) == (100.0, 2.0)
    short = report.summary(records[:2], flops_per_token=1.0, devices=1)
    assert (short["step_s"], short["steps_timed"]) == (2.0, 1)
    assert report.summary(records[:1], flops_per_token=1.0, devices=1)["step_s"] == 60.0


def test_picture_of_short_and_of_resumed_runs(tmp_path):
    records = [{"step": s, "lm_loss": 3.0 - s, "imbalance": 1.5} for s in range(3)]
    for count in (1, 3):
        loads = np.random.default_rng(0).integers(0, 9, (count, 2, 4))
        report.plot(
            tmp_path / "p.png", records[:3], loads, first_step=3 - count, unigram=3.2, title="t"
        )
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_checkpoint_keeps_bits_and_shardings(tmp_path):
    mesh = meshes.make_mesh(8, 4)
    place = NamedSharding(mesh, P("expert"))
    values = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    state = {"w": nnx.State({"m": nnx.Param(jax.device_put(values, place))}), "step": jnp.int32(7)}
    folder = tmp_path / "checkpoints"
    writer = Checkpoints(folder, {"seed": 1}, resume=False)
    writer.save(7, state)
    writer.close()

    like = jax.tree.map(jnp.zeros_like, state)
    like["w"]["m"].set_value(jax.device_put(like["w"]["m"].get_value(), place))
    restored = Checkpoints(folder, {"seed": 1}, resume=True).restore(like)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    np.testing.assert_array_equal(restored["w"]["m"].get_value(), values)
    assert restored["w"]["m"].get_value().sharding == place
    assert int(restored["step"]) == 7

    # On other devices, in another order, cut along another axis.
    other = NamedSharding(meshes.make_mesh(8, 2, jax.devices()[5:1:-1]), P("data"))
    like["w"]["m"].set_value(jax.device_put(jnp.zeros_like(values), other))
    moved = Checkpoints(folder, {"seed": 1}, resume=True).restore(like)["w"]["m"].get_value()
    np.testing.assert_array_equal(moved, values)
    assert moved.sharding == other

    with pytest.raises(ValueError, match="made with seed = 1, this run has 2"):
        Checkpoints(folder, {"seed": 2}, resume=True)
    with pytest.raises(ValueError, match="found no checkpoint"):
        Checkpoints(tmp_path / "other", {"seed": 1}, resume=True)
    with pytest.raises(ValueError, match="holds the checkpoints of another run"):
        Checkpoints(folder, {"seed": 1}, resume=False)

    for file in (folder / "7/state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match="cannot read the checkpoint .*/7 .*; delete it") as error:
        Checkpoints(folder, {"seed": 1}, resume=True).restore(like)
    assert "\n" not in str(error.value)
    (folder / "7/fixed/metadata").unlink()
    with pytest.raises(ValueError, match="cannot read the checkpoint .*/7 "):
        Checkpoints(folder, {"seed": 1}, resume=True)
