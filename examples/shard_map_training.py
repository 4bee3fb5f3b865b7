"""A training loop around `moe_mlp` inside your own `jax.shard_map`.

    python examples/shard_map_training.py

trains a small model to predict the next byte of Python source text. The tokens are split over both
axes of a mesh (data, expert), the experts over "expert"; everything else is replicated.

The pattern: inside the shard_map, differentiate the loss of the whole batch, the `pmean` of the
devices' losses. Under check_vma=True (the default) JAX knows which parameters are replicated over
which axes and sums their gradients there: those of the router over both axes, those of the experts
over "data" only, since moe_mlp has brought them the tokens of all ranks. No other reduction is
needed or right. Under check_vma=False JAX knows nothing of replication: differentiate the same loss
divided by the number of devices, and `psum` each gradient over the axes that the spec of its
parameter does not name.
"""

import argparse
import math
import os
import time
from pathlib import Path

# Before jax is imported. Concerns the CPU only; the user's own flag, coming later, wins.
DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{DEVICES} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jax_megamoe import load_balancing_loss, moe_mlp, route  # noqa: E402

CONTEXT, EMBED, INTERMEDIATE, EXPERTS, TOP_K = 8, 16, 64, 16, 2
HIDDEN = CONTEXT * EMBED
AXES = ("data", "expert")
SPECS = {
    "embed": P(),
    "router": P(),
    "head": P(),
    "w_gate": P("expert"),
    "w_up": P("expert"),
    "w_down": P("expert"),
}


def init(key):
    shapes = {
        "embed": (256, EMBED),
        "router": (HIDDEN, EXPERTS),
        "head": (HIDDEN, 256),
        "w_gate": (EXPERTS, HIDDEN, INTERMEDIATE),
        "w_up": (EXPERTS, HIDDEN, INTERMEDIATE),
        "w_down": (EXPERTS, INTERMEDIATE, HIDDEN),
    }
    keys = jax.random.split(key, len(shapes))
    params = {
        name: jax.random.normal(k, shape) / math.sqrt(shape[-2])
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {"embed": params["embed"] * 16}  # unit rows


def loss_of_shard(params, windows):
    """Loss of the whole batch, on every device. windows: [tokens of this device, CONTEXT + 1]."""
    h = params["embed"][windows[:, :-1]].reshape(-1, HIDDEN)
    routing = route(h @ params["router"], TOP_K)
    experts = (params["w_gate"], params["w_up"], params["w_down"])
    y, stats = moe_mlp(
        h,
        routing.expert_ids,
        routing.expert_weights,
        *experts,
        axis_name="expert",
        return_stats=True,
    )
    logits = (h + y) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1])
    # Over all tokens already, by axis_name: a mean of the shards' losses would be another value.
    aux = load_balancing_loss(routing.probs, routing.expert_ids, axis_name=AXES)
    lm_loss = jax.lax.pmean(losses.mean(), AXES)
    return lm_loss + 0.01 * aux, (lm_loss, jax.lax.psum(stats.expert_load, "data"))


def make_step(mesh, optimizer):
    gradients = jax.shard_map(
        jax.value_and_grad(loss_of_shard, has_aux=True),
        mesh=mesh,
        in_specs=(SPECS, P(AXES)),
        out_specs=((P(), (P(), P("expert"))), SPECS),
    )

    # Outside the shard_map arrays are global, so the norm that the optimizer clips is the true one.
    @jax.jit
    def step(params, state, windows):
        (_, (lm_loss, load)), grads = gradients(params, windows)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, lm_loss, load

    return step


def size(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def rate(text):
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return float(text)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=size, default=200)
    parser.add_argument("--tokens", type=size, default=2048, help="per step, over all devices")
    parser.add_argument("--lr", type=rate, default=3e-3)
    parser.add_argument("--expert-parallel", type=size, help="devices that share the experts")
    args = parser.parse_args()

    devices = jax.device_count()
    ranks = args.expert_parallel or math.gcd(devices, 4)
    if devices % ranks or EXPERTS % ranks:
        parser.error(
            f"--expert-parallel is {ranks}; it must divide the {devices} devices and the {EXPERTS} "
            "experts"
        )
    if args.tokens % devices:
        parser.error(f"--tokens is {args.tokens}; it must be a multiple of the {devices} devices")
    mesh = jax.make_mesh((devices // ranks, ranks), AXES)
    print(f"{devices} devices, mesh {dict(mesh.shape)}")
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(map(Path.read_bytes, sources)), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
    rng = np.random.default_rng(0)

    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.device_put(init(jax.random.key(0)), shardings)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(args.lr))
    state = optimizer.init(params)
    step = make_step(mesh, optimizer)
    shown, since = 0, time.perf_counter()
    for i in range(1, args.steps + 1):
        batch = windows[rng.integers(len(windows), size=args.tokens)]
        batch = jax.device_put(batch.astype(np.int32), NamedSharding(mesh, P(AXES)))
        params, state, loss, load = step(params, state, batch)
        if i == 1 or i % 20 == 0 or i == args.steps:
            loss, imbalance = float(loss), float(load.max() / load.mean())
            speed = (i - shown) * args.tokens / (time.perf_counter() - since)
            shown, since = i, time.perf_counter()
            print(
                f"step {i:5}  loss {loss:.3f} nats/byte  {speed:8.0f} tokens/s  "
                f"fullest expert {imbalance:.2f}x the mean",
                flush=True,
            )


if __name__ == "__main__":
    main()
