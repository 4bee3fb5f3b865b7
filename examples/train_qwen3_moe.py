"""Trains a Qwen3-MoE with the experts spread over the devices.

    python examples/train_qwen3_moe.py

trains a small model on the source files of Python's standard library, on the GPUs or, where there
are none, on 8 virtual CPU devices. The run's folder gets metrics.jsonl (one object a step),
training.png (loss and expert load), sample.txt, settings.json, summary.json and the checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm
from training import mesh as meshes
from training import optimizer, report, text
from training.checkpoint import Checkpoints
from training.flops import training_flops_per_token
from training.step import TrainState, initial_state, make_step

from jax_megamoe import MoEConfig
from jax_megamoe.models import qwen3_moe

PRESETS = ("tiny", "qwen3-30b-a3b", "qwen3-235b-a22b")

# Arguments that a resumed run must share with its checkpoint to be the same run.
FIXED = (
    "seed", "steps", "batch", "accumulate", "seq_len", "lr", "warmup", "weight_decay", "clip",
    "balance", "aux_coef", "bias_rate", "embedding_std",
)  # fmt: skip

LEAST = {
    "steps": 1, "seq_len": 2, "accumulate": 1, "batch": 1, "warmup": 0, "save_every": 0,
    "sample_tokens": 0, "temperature": 0, "weight_decay": 0, "aux_coef": 0, "bias_rate": 0,
}  # fmt: skip
METRICS = "metrics.jsonl"


def arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument

    add("--data", nargs="+", metavar="PATH", help=".txt or .jsonl files, or folders of them")
    add("--tokenizer", metavar="FILE", help="tokenizer.json; without it, bytes are the tokens")
    add("--model", default="tiny", help=f"a Hugging Face folder, or {', '.join(PRESETS)}")
    add("--layers", type=int, help="use only the first layers of the model")
    # At 1 the tokens of a new model differ enough that the router tells them apart.
    add(
        "--embedding-std",
        type=float,
        help="standard deviation of a new model's embedding (the model's initializer_range)",
    )
    add("--out", type=Path, help="folder of the run (a new one, runs/<time>)")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    add("--seed", type=int, default=0)

    add("--steps", type=int, default=500)
    add("--seq-len", type=int, help="tokens per sequence (tiny: 256, else 16384)")
    add("--batch", type=int, help="sequences per step (one per device; tiny: 8)")
    add("--accumulate", type=int, default=1, help="microbatches per step")
    add("--lr", type=float, help="peak learning rate (tiny: 3e-3, else 1e-4)")
    add("--warmup", type=int, help="steps of warm-up (a tenth of --steps)")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    # The auxiliary loss of Qwen3-MoE pools the layers, which leaves single layers unbalanced.
    add("--balance", choices=("aux", "bias", "none"), help="(aux for a folder, else bias)")
    add("--aux-coef", type=float, help="of --balance aux (the model's own)")
    add("--bias-rate", type=float, help="of --balance bias, per step (tiny: 1e-2, else 1e-3)")

    add("--implementation", choices=("auto", "ffi", "xla"), default="auto")
    add("--precision", choices=("bf16", "fp8", "mxfp8", "fp8_bwd"), default="bf16")
    add("--capacity-factor", type=float, default=2.0, help="of MoEConfig: bounds its memory")
    add("--dtype", choices=("auto", "bf16", "f32"), default="auto", help="of the arithmetic")
    add("--expert-parallel", type=int, help="devices that share the experts of a layer")
    add("--distributed", action="store_true", help="several processes, by jax.distributed")
    add("--coordinator", metavar="HOST:PORT", help="with --distributed, where not found by itself")
    add("--num-processes", type=int, help="with --coordinator")
    add("--process-id", type=int, help="with --coordinator")

    add("--save-every", type=int, default=0, help="steps between checkpoints (only the last)")
    add("--no-checkpoint", action="store_true", help="write none, for measurements")
    add("--sample-tokens", type=int, default=300, help="length of the sample (0: none)")
    add("--prompt", default="def ", help="start of the sample")
    add("--temperature", type=float, default=0.7, help="of the sample")
    args = parser.parse_args(argv)

    if not args.distributed and (args.coordinator, args.num_processes, args.process_id) != (
        None, None, None,
    ):  # fmt: skip
        parser.error("--coordinator, --num-processes and --process-id need --distributed")
    if args.coordinator and not args.coordinator.rpartition(":")[2].isdigit():
        parser.error(f"--coordinator is {args.coordinator!r}; it must be HOST:PORT")
    if args.out is None:
        if args.resume or args.distributed:
            parser.error("--resume and --distributed need --out")
        args.out = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    tiny = args.model == "tiny"
    for name, value in {
        "seq_len": 256 if tiny else 16384,
        "lr": 3e-3 if tiny else 1e-4,
        "balance": "bias" if args.model in PRESETS else "aux",
        "bias_rate": 1e-2 if tiny else 1e-3,
        "warmup": args.steps // 10,
    }.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


class Run(NamedTuple):
    """What the arguments mean: everything that is fixed before the first step."""

    args: argparse.Namespace
    config: qwen3_moe.Qwen3MoEConfig
    tokenizer: text.Tokenizer
    batches: text.Batches
    unigram: float
    mesh: jax.sharding.Mesh
    fixed: dict[str, Any]
    checkpoints: Checkpoints


def prepare(args: argparse.Namespace) -> Run:
    """Reads the data and the model's configuration.

    Raises:
      ValueError: one sentence on what is wrong with the arguments or with what they name.
    """
    check_ranges(args)
    if not args.resume and (args.out / METRICS).exists():
        raise ValueError(
            f"{args.out} holds another run; continue it with --resume or choose another --out"
        )
    folder = Path(args.model) if args.model not in PRESETS else None
    tokenizer_file = args.tokenizer
    if folder and not tokenizer_file and (folder / "tokenizer.json").is_file():
        tokenizer_file = folder / "tokenizer.json"
    tokenizer = text.FileTokenizer(tokenizer_file) if tokenizer_file else text.ByteTokenizer()

    if args.sample_tokens and not len(tokenizer.encode(args.prompt)):
        raise ValueError(f"--prompt is {args.prompt!r}; it must hold at least one token")
    config = model_config(args, folder)
    tiny = args.model == "tiny"
    if tiny:
        config = dataclasses.replace(config, vocab_size=-(-tokenizer.vocab_size // 64) * 64)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens; the model takes at most "
            f"{config.vocab_size}"
        )

    mesh = meshes.make_mesh(config.num_experts, args.expert_parallel)
    if args.batch is None:
        args.batch = mesh.size * args.accumulate * (max(1, 8 // mesh.size) if tiny else 1)
    if args.batch % (mesh.size * args.accumulate):
        raise ValueError(
            f"--batch is {args.batch}; it must be a multiple of {mesh.size} devices times "
            f"--accumulate {args.accumulate}"
        )

    source = text.documents(args.data) if args.data else text.standard_library()
    tokens = text.encode(source, tokenizer)
    batches = text.Batches(tokens, batch=args.batch, seq_len=args.seq_len, seed=args.seed)
    fixed = {
        "model": args.model,
        "layers": config.num_hidden_layers,
        "data": hashlib.sha256(tokens.tobytes()).hexdigest()[:16],
    } | {name: getattr(args, name) for name in FIXED}
    checkpoints = Checkpoints(args.out / "checkpoints", fixed, resume=args.resume)
    unigram = text.unigram_entropy(tokens)
    return Run(args, config, tokenizer, batches, unigram, mesh, fixed, checkpoints)


def check_ranges(args: argparse.Namespace) -> None:
    """Refuses numbers that mean nothing, before anything is read or trained."""
    for name, least in LEAST.items():
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value >= least):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {value}; it must be a finite number, at least {least}")
    for name in ("lr", "clip", "capacity_factor", "embedding_std"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {value}; it must be a finite number above 0")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed is {args.seed}; it must be from 0 to {2**63 - 1}")
    if args.warmup > args.steps:
        raise ValueError(f"--warmup is {args.warmup}; it must be at most --steps, {args.steps}")
    if args.tokenizer == "" or "" in (args.data or ()):
        raise ValueError("--tokenizer or --data is ''; it must name a file or a folder")


def model_config(args: argparse.Namespace, folder: Path | None) -> qwen3_moe.Qwen3MoEConfig:
    """The model's sizes, shortened if asked for, with the coefficient of --balance."""
    if folder and not folder.is_dir():
        raise ValueError(f"--model is {args.model!r}; it must be a folder or {', '.join(PRESETS)}")
    if folder and args.embedding_std is not None:
        raise ValueError(
            f"--embedding-std is {args.embedding_std} and --model {args.model!r}, a folder with an "
            f"embedding of its own; --model must be {', '.join(PRESETS)}"
        )
    config = (
        qwen3_moe.Qwen3MoEConfig.from_hf(folder)
        if folder
        else qwen3_moe.Qwen3MoEConfig.preset(args.model)
    )
    changes = {}
    if args.layers is not None:
        if not 0 < args.layers <= config.num_hidden_layers:
            raise ValueError(
                f"--layers is {args.layers}; the model has {config.num_hidden_layers} layers"
            )
        dense = tuple(layer for layer in config.mlp_only_layers if layer < args.layers)
        changes |= {"num_hidden_layers": args.layers, "mlp_only_layers": dense}
    if args.balance != "aux":
        changes["router_aux_loss_coef"] = 0.0
    elif args.aux_coef is not None:
        changes["router_aux_loss_coef"] = args.aux_coef
    config = dataclasses.replace(config, **changes)
    if not config.moe_layers:
        raise ValueError(f"none of the {config.num_hidden_layers} layers of the model has experts")
    return config


def make_model(run: Run) -> qwen3_moe.Qwen3MoE:
    """The model on the mesh: new parameters, or those of a Hugging Face folder."""
    args = run.args
    gpu = jax.default_backend() == "gpu"
    dtype = {"bf16": jnp.bfloat16, "f32": jnp.float32, "auto": jnp.bfloat16 if gpu else jnp.float32}
    options = {
        "mesh": run.mesh,
        "expert_axis": meshes.EXPERT,
        "dtype": dtype[args.dtype],
        "param_dtype": jnp.float32,
        "moe": MoEConfig(
            precision=args.precision,
            implementation=args.implementation,
            capacity_factor=args.capacity_factor,
        ),
        "remat": "full",
        "expert_bias": args.balance == "bias",
    }
    if args.model in PRESETS:
        model = qwen3_moe.Qwen3MoE(run.config, rngs=nnx.Rngs(args.seed), **options)
        if args.embedding_std is not None:
            value = model.embed_tokens.get_value()
            scaled = value * (args.embedding_std / run.config.initializer_range)
            model.embed_tokens.set_value(jax.device_put(scaled, value.sharding))
        return model
    arrays = qwen3_moe.load_hf(args.model, **options).arrays()
    arrays["layers"] = first_layers(arrays["layers"], run.config.num_hidden_layers)
    return qwen3_moe.Qwen3MoE(run.config, arrays=arrays, **options)


def first_layers(groups: dict[int, dict[str, jax.Array]], count: int):
    """The first `count` layers of parameters that are stacked in groups of equal layers."""
    shortened = {}
    for i in sorted(groups):
        size = min(count, groups[i]["q_proj"].shape[0])
        if size:
            shortened[i] = {name: value[:size] for name, value in groups[i].items()}
        count -= size
    return shortened


def train(run: Run) -> tuple[TrainState, nnx.GraphDef, list[dict], np.ndarray]:
    """Trains from the start or the newest checkpoint; writes metrics and checkpoints.

    Returns:
      the last state, the model's structure, the lines of the metrics file, and the load of each
      expert int [steps of this process, layers, experts].
    """
    args, mesh = run.args, run.mesh
    schedule = optimizer.schedule(args.lr, warmup=args.warmup, steps=args.steps)
    tx = optimizer.adamw(schedule, weight_decay=args.weight_decay, clip_norm=args.clip)
    try:
        graphdef, state, shardings = initial_state(make_model(run), tx)
        step_fn = make_step(
            graphdef,
            qwen3_moe.loss,
            tx,
            schedule,
            shardings,
            bias_rate=args.bias_rate if args.balance == "bias" else 0.0,
        )
        if args.resume:
            state = run.checkpoints.restore(state)
        first = int(state.step)
        if first < args.steps:
            # What cannot run on this machine says so when it is traced.
            step_fn.trace(state, meshes.put_batch(run.batches[first], mesh, args.accumulate))
    except (ValueError, OSError) as error:
        fail(error)
    chief = jax.process_index() == 0
    if chief:
        print(describe(run, state))
        (args.out / "settings.json").write_text(json.dumps(settings(run, state), indent=1))
    metrics_file = report.MetricsFile(args.out / METRICS, first) if chief else None
    loads = []

    with (
        stop_signal() as stop,
        tqdm(total=args.steps, initial=first, unit="step", disable=not chief) as bar,
    ):
        started = time.perf_counter()

        def log(step: int, metrics) -> None:
            """Waits for the step to end."""
            nonlocal started
            metrics = jax.device_get(metrics)
            now = time.perf_counter()
            seconds, started = now - started, now
            if not np.isfinite((metrics["total"], metrics["grad_norm"])).all():
                run.checkpoints.close()
                fail(
                    f"at step {step} the loss is {metrics['total']} and the norm of its gradient "
                    f"{metrics['grad_norm']}, with --lr {args.lr} and --clip {args.clip}; the "
                    "checkpoints are those of earlier steps"
                )
            loads.append(metrics.pop("expert_load"))
            record = {
                "step": step,
                **{name: float(value) for name, value in metrics.items()},
                "imbalance": report.imbalance(loads[-1]),
                "step_s": seconds,
                "tokens_per_s": args.batch * args.seq_len / seconds,
                "peak_bytes": peak_bytes(),
            }
            if metrics_file:
                metrics_file.write(record)
            bar.set_postfix_str(
                f"loss {record['lm_loss']:.3f}, {record['tokens_per_s']:,.0f} tokens/s, "
                f"imbalance {record['imbalance']:.2f}"
            )
            bar.update()

        running = None
        for step in range(first, args.steps):
            batch = meshes.put_batch(run.batches[step], mesh, args.accumulate)
            state, metrics = step_fn(state, batch)
            # The devices are busy with this step while the previous one is written down.
            if running:
                log(*running)
            running = step, metrics
            stopped = stop.is_set()
            due = args.save_every and (step + 1) % args.save_every == 0
            if due or stopped or step + 1 == args.steps:
                # First: a state that is not finite is never saved.
                log(*running)
                running = None
                if not args.no_checkpoint:
                    run.checkpoints.save(step + 1, state)
            if stopped:
                break
    run.checkpoints.close()
    if metrics_file:
        metrics_file.close()
    return state, graphdef, metrics_file.records if chief else [], np.asarray(loads)


@contextlib.contextmanager
def stop_signal():
    """An event that the first Ctrl-C or SIGTERM sets, so that the run can end with a checkpoint.

    A second one ends the process at once. With several processes also the first: they could not
    agree on the step to stop at.
    """
    stop, before = threading.Event(), {}

    def restore():
        while before:
            signal.signal(*before.popitem())

    def handle(*_):
        stop.set()
        restore()

    if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()


def sample_text(run: Run, graphdef: nnx.GraphDef, state: TrainState) -> str:
    """The prompt, and how the trained model goes on."""
    args, tokenizer = run.args, run.tokenizer
    prompt = np.asarray([tokenizer.encode(args.prompt)], np.int32)
    tokens = qwen3_moe.generate(
        nnx.merge(graphdef, state.params, state.others),
        prompt,
        args.sample_tokens,
        temperature=args.temperature,
        eos_ids=(tokenizer.end_id,),
        rng=jax.random.key(args.seed),
    )
    tokens = np.asarray(meshes.local_copy(tokens, run.mesh))[0].tolist()
    if tokenizer.end_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.end_id)]
    return args.prompt + tokenizer.decode(tokens)


def parameter_count(state: TrainState) -> int:
    return sum(x.size for x in jax.tree.leaves(state.params))


def describe(run: Run, state: TrainState) -> str:
    config, shape = run.config, run.mesh.shape
    return (
        f"Qwen3-MoE, {parameter_count(state) / 1e6:,.1f} M parameters, "
        f"{config.num_hidden_layers} layers, {config.num_experts} experts over "
        f"{shape[meshes.EXPERT]} {jax.default_backend().upper()} devices"
        + (f", {shape[meshes.DATA]} such groups" if shape[meshes.DATA] > 1 else "")
    )


def settings(run: Run, state: TrainState) -> dict[str, Any]:
    """What a measurement of the run depends on."""
    names = ("implementation", "precision", "dtype")
    return {
        "parameters": parameter_count(state),
        "unigram": run.unigram,
        **run.fixed,
        **{name: getattr(run.args, name) for name in names},
        "devices": run.mesh.size,
        "device": jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
        "flops_per_token": training_flops_per_token(run.config, run.args.seq_len),
    }


def peak_bytes() -> int | None:
    """The most that JAX's allocator held on a device; None where it does not count (CPUs).

    What the custom calls share between GPUs, their workspace, comes on top.
    """
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def finish(run: Run, state: TrainState, graphdef, records: list[dict], loads: np.ndarray) -> None:
    """Writes the sample, the picture and the summary; prints what matters of them."""
    args, config, mesh = run.args, run.config, run.mesh
    if not len(loads):
        print(f"all {args.steps} steps were done before")
        return
    sample = sample_text(run, graphdef, state) if args.sample_tokens else ""
    if jax.process_index():
        return
    if sample:
        (args.out / "sample.txt").write_text(sample)

    report.plot(
        args.out / "training.png",
        records,
        loads,
        first_step=records[-len(loads)]["step"],
        unigram=run.unigram,
        title=describe(run, state),
    )
    summary = settings(run, state) | report.summary(
        records[-len(loads) :],
        flops_per_token=training_flops_per_token(config, args.seq_len),
        devices=mesh.size,
    )
    summary["peak_bytes"] = records[-1].get("peak_bytes")
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1))

    last = report.final([r["lm_loss"] for r in records])
    print(f"\nloss {last:.3f}; token frequencies alone would give {run.unigram:.3f} nats per token")
    print(
        f"{summary['step_s']:.3f} s per step, {summary['tokens_per_s_per_device']:,.0f} tokens/s "
        f"and {summary['tflops_per_device']:.3g} TFLOP/s per device"
    )
    written = ["metrics", "picture", *(["sample"] if sample else [])]
    written += [] if args.no_checkpoint else ["checkpoint"]
    print(f"{', '.join(written[:-1])} and {written[-1]} in {args.out}\n\n{sample}".rstrip())


def set_cpu_flags() -> None:
    """Makes 8 devices of a CPU, unless XLA_FLAGS says otherwise; GPUs are not concerned.

    XLA reads the flags when JAX first looks for devices. Virtual devices share the cores, and on a
    busy machine one may reach a collective much later than another: XLA would give up after 40 s.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for flag in (
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ):
        if flag.split("=")[0] not in flags:
            flags += f" {flag}"
    os.environ["XLA_FLAGS"] = flags


def fail(reason: object) -> NoReturn:
    sys.exit(f"{Path(__file__).name}: {reason}")


def main(argv=None) -> list[dict]:
    """Trains as the arguments say; returns the lines of the metrics file."""
    args = arguments(argv)
    set_cpu_flags()
    if args.distributed:
        try:
            jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            fail(f"--distributed with --coordinator {args.coordinator} cannot start: {reason}")
    try:
        run = prepare(args)
    except (ValueError, OSError) as error:
        fail(error)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        state, graphdef, records, loads = train(run)
    except FileExistsError as error:  # two runs that started at the same time
        fail(f"{error.filename} is of another run; choose another --out")
    if int(state.step) < args.steps:
        saved = "nothing was saved" if args.no_checkpoint else f"--resume --out {args.out} goes on"
        fail(f"stopped after {int(state.step)} of {args.steps} steps; {saved}")
    finish(run, state, graphdef, records, loads)
    return records


if __name__ == "__main__":
    main()
