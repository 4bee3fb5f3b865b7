"""Training of a tiny Qwen3-MoE by examples/train_qwen3_moe.py and its step."""

import dataclasses
import functools
import json
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_qwen3_moe
from cases import run_processes
from flax import nnx
from training import mesh as meshes
from training import report, text
from training.step import initial_state, make_step, update_biases

from jax_megamoe import MoEConfig, _runtime
from jax_megamoe.models import qwen3_moe

EXAMPLES = Path(train_qwen3_moe.__file__).parent
CONFIG = qwen3_moe.Qwen3MoEConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    norm_topk_prob=True,
    router_aux_loss_coef=0.1,
    initializer_range=0.2,
)
SGD = optax.sgd(1.0)


def mesh_of(data, expert, order=None):
    devices = [jax.devices()[i] for i in (order or range(data * expert))]
    return meshes.make_mesh(CONFIG.num_experts, expert, devices)


@functools.cache
def trainer(mesh, config=CONFIG, tx=SGD, bias_rate=0.0, dtype=jnp.float32, moe=MoEConfig()):
    """The compiled step, and a function that makes the state before the first one."""

    def start():
        model = qwen3_moe.Qwen3MoE(
            config, rngs=nnx.Rngs(1), mesh=mesh, dtype=dtype, moe=moe, expert_bias=bool(bias_rate)
        )
        return initial_state(model, tx)

    graphdef, _, shardings = start()
    loss = qwen3_moe.loss
    step = make_step(graphdef, loss, tx, lambda _: 1.0, shardings, bias_rate=bias_rate)
    return step, lambda: start()[1]


def one_step(mesh, batch, accumulate=1, **kwargs):
    step, start = trainer(mesh, **kwargs)
    return step(start(), meshes.put_batch(batch, mesh, accumulate))


def random_batch(rows, length=16, padding=(), seed=0):
    ids = np.random.default_rng(seed).integers(1, 64, (rows, length)).astype(np.int32)
    mask = np.ones_like(ids)
    for row, tokens in padding:
        mask[row, tokens:] = 0
    return text.Batch(ids, np.where(mask == 1, ids, text.IGNORED_LABEL), mask)


def named(tree):
    """Leaves by path, on the host."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(meshes.path_names(path)): np.asarray(leaf) for path, leaf in leaves}


def assert_close(a, b, tolerance=1e-5):
    a, b = named(a), named(b)
    assert a.keys() == b.keys()
    for name in a:
        error = np.linalg.norm(a[name] - b[name]) / max(np.linalg.norm(b[name]), 1e-6)
        assert error <= tolerance, (name, error)


@pytest.fixture(scope="module")
def single_device():
    """One SGD step of 8 rows, some of them padded, on one device."""
    batch = random_batch(8, padding=[(1, 5), (6, 11)])
    return batch, *one_step(mesh_of(1, 1), batch)


@pytest.mark.parametrize(
    ("data", "expert", "order"),
    [(2, 1, None), (1, 2, None), (2, 2, None), (1, 4, None), (2, 2, [2, 0, 3, 1])],
)
def test_every_mesh_makes_the_step_of_one_device(single_device, data, expert, order):
    batch, state, metrics = single_device
    mesh = mesh_of(data, expert, order)
    other, other_metrics = one_step(mesh, batch)
    assert_close(other.params, state.params)
    assert_close(other_metrics, metrics)
    # Every device holds the same bits of what is replicated, the norms among them.
    for leaf in jax.tree.leaves(other.params):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for same in copies.values():
            assert all((same[0] == copy).all() for copy in same)


def test_compiled_module_makes_the_same_step(single_device):
    if reason := _runtime.unavailable():
        pytest.skip(reason)
    batch, state, metrics = single_device
    fused = MoEConfig(implementation="ffi")
    other, other_metrics = one_step(mesh_of(2, 2), batch, moe=fused)
    assert_close(other.params, state.params)
    assert_close(other_metrics, metrics)


def test_total_is_the_language_loss_and_the_auxiliary_loss_once(single_device):
    _, _, metrics = single_device
    expected = metrics["lm_loss"] + CONFIG.router_aux_loss_coef * metrics["aux_loss"]
    np.testing.assert_allclose(metrics["total"], expected, rtol=1e-6)
    tokens = 8 * 16 - 11 - 5  # padding is not routed
    assert metrics["expert_load"].sum(axis=1).tolist() == [2 * tokens] * 2


def test_four_equal_microbatches_make_the_step_of_one():
    quarter = random_batch(8)
    whole = text.Batch(*(np.tile(x, (4, 1)) for x in quarter))
    mesh = mesh_of(2, 2)
    state, metrics = one_step(mesh, quarter)
    accumulated, sums = one_step(mesh, whole, accumulate=4)
    assert_close(accumulated.params, state.params)
    for name in ("lm_loss", "aux_loss", "total", "grad_norm"):
        np.testing.assert_allclose(sums[name], metrics[name], rtol=1e-5)
    np.testing.assert_array_equal(sums["expert_load"], 4 * metrics["expert_load"])


def test_microbatches_count_by_their_tokens():
    """Without the auxiliary loss, which is not linear, any split gives the same step."""
    config = dataclasses.replace(CONFIG, router_aux_loss_coef=0.0)
    batch = random_batch(8, padding=[(0, 2), (1, 0), (2, 3), (5, 9)])
    mesh = mesh_of(1, 2)
    state, metrics = one_step(mesh, batch, config=config)
    accumulated, sums = one_step(mesh, batch, accumulate=4, config=config)
    assert_close(accumulated.params, state.params)
    np.testing.assert_allclose(sums["lm_loss"], metrics["lm_loss"], rtol=1e-5)
    np.testing.assert_array_equal(sums["expert_load"], metrics["expert_load"])


def test_padded_tokens_change_nothing():
    batch = random_batch(8, padding=[(0, 7), (3, 12), (4, 0)])
    noise = random_batch(8, seed=9).input_ids
    other = batch._replace(input_ids=np.where(batch.attention_mask == 1, batch.input_ids, noise))
    state, _ = one_step(mesh_of(2, 2), batch)
    same, _ = one_step(mesh_of(2, 2), other)
    for name, value in named(state.params).items():
        np.testing.assert_array_equal(value, named(same.params)[name], err_msg=name)


def test_bias_balancing_moves_only_the_biases_by_the_rate():
    config = dataclasses.replace(CONFIG, router_aux_loss_coef=0.0)
    decay = optax.adamw(1e-3, weight_decay=0.5)
    step, start = trainer(mesh_of(1, 2), config, decay, bias_rate=1e-3)
    state = start()
    batch = meshes.put_batch(random_batch(8), mesh_of(1, 2), 2)
    expected = np.zeros((2, 4), np.float32)
    for _ in range(3):
        state, metrics = step(state, batch)
        assert metrics["total"] == metrics["lm_loss"]
        load = np.asarray(metrics["expert_load"])
        expected += np.float32(1e-3) * np.sign(load.mean(1, keepdims=True) - load)
    (bias,) = jax.tree.leaves(state.others)
    assert bias.dtype == jnp.float32
    np.testing.assert_allclose(bias, expected, atol=1e-7)
    assert not any("bias" in name for name in named(state.opt_state))


def test_biases_follow_the_order_of_the_layers():
    load = jnp.array([[4, 0], [0, 4], [4, 0], [2, 2]], jnp.int32)
    biases = {
        "layers": {0: {"expert_bias": jnp.zeros((1, 2))}, 2: {"expert_bias": jnp.ones((3, 2))}}
    }
    moved = update_biases(biases, load, 0.5)["layers"]
    assert moved[0]["expert_bias"].tolist() == [[-0.5, 0.5]]
    assert moved[2]["expert_bias"].tolist() == [[1.5, 0.5], [0.5, 1.5], [1, 1]]


def test_one_compilation_no_growth_and_f32_parameters_under_bf16():
    mesh = mesh_of(1, 2)
    step, start = trainer(mesh, tx=optax.adamw(1e-3), dtype=jnp.bfloat16)
    state, live = start(), {}
    for i in range(12):  # new routing each step
        before = state
        state, metrics = step(state, meshes.put_batch(random_batch(4, seed=i), mesh, 1))
        live[i] = sum(x.nbytes for x in jax.live_arrays())
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert step._cache_size() == 1
    assert live[3] == live[11]
    assert np.isfinite(metrics["total"])
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_router_stays_f32_under_bf16():
    """Logits rounded to bf16 would choose other experts where they nearly tie."""
    model = qwen3_moe.Qwen3MoE(CONFIG, rngs=nnx.Rngs(1), dtype=jnp.bfloat16)
    _, inner = model(random_batch(2).input_ids, return_intermediates=True)
    logits = inner["router_logits"]
    assert (logits == logits.astype(jnp.bfloat16).astype(jnp.float32)).mean() < 0.1


def test_parameters_and_moments_are_spread_over_all_devices():
    _, start = trainer(mesh_of(2, 2), tx=optax.adamw(1e-3))
    state = start()
    adam = state.opt_state[0]
    for params in (state.params, adam.mu, adam.nu):
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        for path, leaf in leaves:
            name = meshes.path_names(path)[-1]
            parts = leaf.size // leaf.addressable_shards[0].data.size
            assert parts == (1 if "norm" in name else 4), name


SENTENCES = [f"the {a} {b} and the {c}\n" for a in "abcdef" for b in "ghijkl" for c in "mnopqr"]
SHORT_RUN = (
    "--layers 2 --seq-len 32 --batch 8 --steps 8 --save-every 4 --lr 1e-2 --warmup 1 --seed 3 "
    "--prompt the --sample-tokens 8 --accumulate 1"
).split()


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A whole run of the script, and the arguments that it had."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("".join(SENTENCES))
    arguments = [*SHORT_RUN, "--data", str(folder / "text.txt")]
    records = train_qwen3_moe.main([*arguments, "--out", str(folder / "out")])
    return folder / "out", arguments, records


def test_loss_falls_and_the_run_leaves_its_files(finished_run):
    out, _, records = finished_run
    assert records[-1]["lm_loss"] < records[0]["lm_loss"] - 1.0
    assert [json.loads(line) for line in (out / "metrics.jsonl").open()] == records
    assert [r["step"] for r in records] == list(range(8))
    names = "lm_loss aux_loss total grad_norm lr tokens_per_s imbalance step_s peak_bytes".split()
    assert set(records[0]) == {"step", *names}
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text().startswith("the")
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["4", "8"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["tflops_per_device"] > 0
    assert summary["unigram"] == pytest.approx(
        text.unigram_entropy(text.encode(["".join(SENTENCES)], text.ByteTokenizer()))
    )


def test_interrupted_run_resumes_to_the_losses_of_the_unbroken_one(
    finished_run, tmp_path, monkeypatch
):
    _, arguments, records = finished_run
    arguments = [*arguments, "--out", str(tmp_path / "out")]
    write = report.MetricsFile.write

    def interrupt(self, record):
        write(self, record)
        if record["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(report.MetricsFile, "write", interrupt)
        with pytest.raises(SystemExit, match="stopped after 5 of 8 steps; --resume --out .* goes"):
            train_qwen3_moe.main(arguments)
    assert sorted(p.name for p in (tmp_path / "out/checkpoints").iterdir()) == ["4", "5"]
    before = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").open()]
    with pytest.raises(SystemExit, match="holds another run; continue it with --resume or"):
        train_qwen3_moe.main(arguments)

    resumed = train_qwen3_moe.main([*arguments, "--resume"])
    times = ("tokens_per_s", "step_s")
    for a, b in zip(resumed, records, strict=True):
        assert {k: v for k, v in a.items() if k not in times} == {
            k: v for k, v in b.items() if k not in times
        }
    assert resumed[:5] == before


def test_state_that_is_not_finite_is_not_saved(finished_run, tmp_path):
    _, arguments, _ = finished_run
    arguments = [*arguments, "--out", str(tmp_path / "out"), "--save-every", "1"]
    with pytest.raises(SystemExit, match="at step 1 the loss is .* with --lr 1e[+]30"):
        train_qwen3_moe.main([*arguments, "--lr", "1e30", "--clip", "1e30"])
    assert [p.name for p in (tmp_path / "out/checkpoints").iterdir()] == ["1"]


def test_resume_refuses_another_run(finished_run, tmp_path, capsys):
    out, arguments, _ = finished_run
    with pytest.raises(SystemExit, match="made with seed = 3, this run has 4"):
        train_qwen3_moe.main([*arguments, "--out", str(out), "--resume", "--seed", "4"])
    with pytest.raises(SystemExit, match="made with embedding_std = None, this run has 1.0"):
        train_qwen3_moe.main([*arguments, "--out", str(out), "--resume", "--embedding-std", "1"])
    with pytest.raises(SystemExit, match="found no checkpoint"):
        train_qwen3_moe.main([*arguments, "--out", str(tmp_path), "--resume"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "empty.txt"], "empty.txt is empty; it must hold text"),
        (["--data", "folder"], "--data is folder, a folder that has no .txt or .jsonl file"),
        (["--data", "missing.txt"], "--data is missing.txt, which does not exist; it must name"),
        (["--model", "no-such-folder"], "it must be a folder or tiny, qwen3-30b-a3b"),
        (["--model", "."], "config.json does not exist"),
        (["--layers", "9"], "--layers is 9; the model has 4 layers"),
        (["--batch", "12"], "--batch is 12; it must be a multiple of 8 devices"),
        (["--layers", "0"], "--layers is 0; the model has 4 layers"),
        (["--batch", "-8"], "--batch is -8; it must be a finite number, at least 1"),
        (["--lr", "inf"], "--lr is inf; it must be a finite number above 0"),
        (["--seed", "-1"], "--seed is -1; it must be from 0 to"),
        (["--seed", str(2**70)], f"--seed is {2**70}; it must be from 0 to"),
        (["--capacity-factor", "0"], "--capacity-factor is 0.0; it must be a finite number"),
        (["--embedding-std", "0"], "--embedding-std is 0.0; it must be a finite number above 0"),
        (
            ["--embedding-std", "1", "--model", "folder"],
            "--embedding-std is 1.0 and --model 'folder', a folder with an embedding of its own",
        ),
        (["--save-every", "-1"], "--save-every is -1; it must be a finite number, at least"),
        (["--prompt", ""], "--prompt is ''; it must hold at least one token"),
        (["--seq-len", "1"], "--seq-len is 1; it must be a finite number, at least 2"),
        (["--expert-parallel", "3"], "--expert-parallel is 3; it must divide"),
        (["--tokenizer", "missing.json"], "missing.json does not exist"),
        (["--tokenizer", ""], "--tokenizer or --data is ''; it must name a file or a folder"),
        (["--data", ""], "--tokenizer or --data is ''; it must name a file or a folder"),
        (["--steps", "4", "--warmup", "5"], "--warmup is 5; it must be at most --steps, 4"),
    ],
)
def test_wrong_arguments_end_in_one_sentence(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("folder").mkdir()
    with pytest.raises(SystemExit) as error:
        train_qwen3_moe.main(["--out", "out", *arguments])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path("out").exists()


def test_a_coordinator_without_a_port_is_named(capsys):
    with pytest.raises(SystemExit):
        train_qwen3_moe.arguments(["--distributed", "--out", "out", "--coordinator", "host"])
    assert "--coordinator is 'host'; it must be HOST:PORT" in capsys.readouterr().err


def test_starts_from_the_first_layers_of_a_folder(tmp_path):
    config = dataclasses.replace(
        CONFIG, vocab_size=256, num_hidden_layers=3, mlp_only_layers=(1,), router_aux_loss_coef=0.3
    )
    model = qwen3_moe.Qwen3MoE(config, rngs=nnx.Rngs(2))
    qwen3_moe.save_hf(model, tmp_path / "model")
    (tmp_path / "text.txt").write_text("abc")
    arguments = ["--model", tmp_path / "model", "--layers", 2, "--data", tmp_path / "text.txt"]
    arguments += ["--out", tmp_path / "out", "--seq-len", 8, "--expert-parallel", 2]
    run = train_qwen3_moe.prepare(train_qwen3_moe.arguments([*map(str, arguments)]))
    assert run.args.balance == "aux"
    assert run.config.router_aux_loss_coef == 0.3
    short = train_qwen3_moe.make_model(run).arrays()
    whole = model.arrays()
    assert sorted(short["layers"]) == [0, 1]
    for i, group in short["layers"].items():
        for name, value in group.items():
            np.testing.assert_array_equal(value, whole["layers"][i][name])
    np.testing.assert_array_equal(short["embed_tokens"], whole["embed_tokens"])

    with pytest.raises(
        SystemExit, match="the tokenizer has 256 tokens; the model takes at most 64"
    ):
        qwen3_moe.save_hf(qwen3_moe.Qwen3MoE(CONFIG, rngs=nnx.Rngs(0)), tmp_path / "small")
        train_qwen3_moe.main(["--model", str(tmp_path / "small"), "--out", str(tmp_path / "o")])


def test_the_embedding_of_a_new_model_has_the_deviation_asked_for(tmp_path):
    (tmp_path / "text.txt").write_text("abc")
    arguments = ["--data", str(tmp_path / "text.txt"), "--layers", "1", "--seq-len", "8"]

    def new_model(name, *more):
        given = train_qwen3_moe.arguments([*arguments, "--out", str(tmp_path / name), *more])
        return train_qwen3_moe.make_model(train_qwen3_moe.prepare(given))

    plain, wide = new_model("plain").arrays(), new_model("wide", "--embedding-std", "1").arrays()
    before, after = plain.pop("embed_tokens"), wide.pop("embed_tokens")
    assert after.dtype == before.dtype and after.sharding == before.sharding
    assert np.std(after) == pytest.approx(1, rel=0.02)
    np.testing.assert_allclose(after, before / 0.02, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, wide, plain)


@pytest.mark.parametrize("content", [None, b"{}"])
def test_a_folder_without_whole_weights_ends_in_one_sentence(tmp_path, content):
    config = dataclasses.replace(CONFIG, vocab_size=256)
    qwen3_moe.save_hf(qwen3_moe.Qwen3MoE(config, rngs=nnx.Rngs(2)), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(content) if content else weights.unlink()
    (tmp_path / "text.txt").write_text("abc")
    arguments = ["--model", tmp_path / "model", "--data", tmp_path / "text.txt", "--seq-len", 8]
    with pytest.raises(SystemExit, match="model.safetensors") as error:
        train_qwen3_moe.main([*map(str, arguments), "--out", str(tmp_path / "out")])
    assert "\n" not in str(error.value)


def test_two_processes_train_as_one(finished_run, tmp_path):
    """Two processes of 2 and 2 CPU devices; the 8 devices of the other run are one process."""
    _, arguments, records = finished_run
    command = [str(EXAMPLES / "train_qwen3_moe.py"), *arguments, "--out", str(tmp_path / "out")]
    command += ["--implementation", "xla", "--distributed", "--num-processes", "2"]
    run_processes(
        lambda address, i: [*command, "--coordinator", address, "--process-id", str(i)], timeout=240
    )
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").open()]
    np.testing.assert_allclose(
        [r["lm_loss"] for r in lines], [r["lm_loss"] for r in records], rtol=1e-3
    )
    assert (tmp_path / "out/training.png").exists()
    assert (tmp_path / "out/sample.txt").read_text().startswith("the")
    assert sorted(p.name for p in (tmp_path / "out/checkpoints").iterdir()) == ["4", "8"]
