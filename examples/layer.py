"""The Flax layer on a mesh of all devices: forward, gradients, expert load.

    python examples/layer.py

runs on the GPUs or, where there are none, on 8 virtual CPU devices, and draws the expert load.
"""

import argparse
import math
import os
from pathlib import Path

# Before jax is imported. Concerns the CPU only; the user's own flag, coming later, wins.
DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{DEVICES} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from jax_megamoe.nnx import MoE  # noqa: E402


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=size, default=16)
    parser.add_argument("--seq-len", type=size, default=128)
    parser.add_argument("--hidden", type=size, default=256)
    parser.add_argument("--intermediate", type=size, default=128)
    parser.add_argument("--experts", type=size, default=16)
    parser.add_argument("--top-k", type=size, default=2)
    parser.add_argument("--expert-parallel", type=size, help="devices that share the experts")
    parser.add_argument("--picture", type=picture, default=Path("expert_load.png"))
    args = parser.parse_args()

    # The experts are split over the axis "expert", the tokens over both axes.
    devices = jax.device_count()
    ranks = args.expert_parallel or math.gcd(devices, 4)
    if devices % ranks:
        parser.error(f"--expert-parallel is {ranks}; it must divide the {devices} devices")
    if args.batch % devices:
        parser.error(f"--batch is {args.batch}; it must be a multiple of the {devices} devices")
    if args.experts % ranks:
        parser.error(
            f"--experts is {args.experts}; it must be a multiple of the {ranks} devices that share "
            "them"
        )
    if args.top_k > args.experts:
        parser.error(f"--top-k is {args.top_k}; it must be at most --experts, {args.experts}")
    mesh = jax.make_mesh((devices // ranks, ranks), ("data", "expert"))
    print(f"{devices} {jax.devices()[0].device_kind} devices, mesh {dict(mesh.shape)}")

    with jax.set_mesh(mesh):
        layer = MoE(
            args.hidden,
            args.intermediate,
            args.experts,
            args.top_k,
            expert_axis="expert",
            rngs=nnx.Rngs(0),
        )
        x = jax.random.normal(jax.random.key(1), (args.batch, args.seq_len, args.hidden))
        x = jax.device_put(x.astype(jnp.bfloat16), NamedSharding(mesh, P(("data", "expert"))))
        (loss, (y, aux)), (grads, dx) = forward_and_gradients(layer, x)

    print(f"x {describe(x)}")
    print(f"y {describe(y)}")
    print(f"loss {loss:.4f}")
    print(f"load balancing loss {aux.load_balancing_loss:.4f} (balanced: {args.top_k})")
    for name, gradient in {**nnx.to_pure_dict(grads), "x": dx}.items():
        norm = jnp.linalg.norm(gradient.astype(jnp.float32).ravel())
        print(f"gradient of {name:7} {describe(gradient)}, norm {norm:.3e}")

    load = jax.device_get(aux.expert_load)
    print("tokens per expert:")
    for expert, count in enumerate(load):
        print(f"{expert:4} {count:6} {'#' * round(40 * count / load.max())}")
    try:
        draw(load, args.picture)
    except OSError as error:
        parser.error(f"--picture is {args.picture}: {error}")
    print(f"wrote {args.picture}")


def size(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def picture(text):
    path, formats = Path(text), (".pdf", ".png", ".svg")
    if path.suffix.lower() not in formats:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(formats)}")
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file in a folder that is there")
    return path


@nnx.jit
def forward_and_gradients(layer, x):
    def loss(layer, x):
        y, aux = layer(x)
        # Nothing is kept in the layer: the losses come out of it and are added here, once.
        total = jnp.square(y.astype(jnp.float32)).mean() + 0.01 * aux.load_balancing_loss
        return total, (y, aux)

    return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)


def describe(array):
    return f"{array.dtype}{list(array.shape)} {array.sharding.spec}"


def draw(load, path):
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(len(load)), load)
    axes.axhline(load.mean(), color="black", linewidth=1, linestyle="--", label="balanced")
    axes.set(xlabel="expert", ylabel="tokens", title="Expert load")
    axes.margins(x=0.01)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
