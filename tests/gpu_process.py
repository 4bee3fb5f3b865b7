"""One of the processes of test_gpu_processes.py: a GPU each, or both on one."""

import functools
import os
import sys
import time

import jax

address, process, scenario = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(
    address,
    num_processes=2,
    process_id=process,
    local_device_ids=[process] if scenario == "late" else None,
)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from cases import Inputs, Shape, assert_same_bits, make_inputs, results_of, sharded  # noqa: E402
from jax._src import distributed  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jax_megamoe import MoEConfig, moe_mlp  # noqa: E402

BF16 = dict(x_dtype=jnp.bfloat16, w_dtype=jnp.bfloat16)
FFI = MoEConfig(implementation="ffi")
SMALL = Shape(tokens=160, top_k=3, experts=8, hidden=64, intermediate=128)
LARGE = Shape(tokens=514, top_k=4, experts=16, hidden=512, intermediate=320)


def main():
    assert len(jax.local_devices()) == 1 and len(jax.devices()) == 2
    {"bits": check_bits, "late": check_late}[scenario]()


def mesh_of(shape=(2,), axes=("expert",), order=(0, 1)):
    return jax.sharding.Mesh(np.array(jax.devices())[list(order)].reshape(shape), axes)


def spread(inputs, mesh):
    """The inputs as global arrays: tokens over all axes, experts over "expert"."""
    tokens, experts = (NamedSharding(mesh, P(a)) for a in (mesh.axis_names, "expert"))
    shardings = Inputs(tokens, tokens, tokens, experts, experts, experts, tokens)
    return Inputs(
        *(
            jax.make_array_from_callback(a.shape, s, functools.partial(_at, np.asarray(a)))
            for a, s in zip(inputs, shardings, strict=True)
        )
    )


@jax.jit
def on_one_gpu(inputs):
    return results_of(functools.partial(moe_mlp, config=FFI), inputs)


def on_two_gpus(mesh):
    operation = functools.partial(moe_mlp, axis_name="expert", config=FFI)
    return jax.jit(
        jax.shard_map(
            functools.partial(results_of, operation),
            mesh=mesh,
            in_specs=P("expert"),
            out_specs=P("expert"),
            check_vma=False,
        )
    )


def check_shards(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        for shard in a.addressable_shards:
            assert_same_bits(shard.data, np.asarray(b)[shard.index])


def check_bits():
    # The ranks of the second mesh are not in the order of the processes.
    layers = [
        (shape, on_two_gpus(mesh := mesh_of(order=order)), mesh)
        for shape, order in ((SMALL, (0, 1)), (LARGE, (1, 0)))
    ]
    for seed, routing in enumerate(("random", "skewed", "holes", "none")):
        for shape, run, mesh in layers:
            inputs = make_inputs(shape, routing, seed=seed, **BF16)
            want, shards = on_one_gpu(inputs), spread(inputs, mesh)
            for _ in range(3):
                check_shards(run(shards), want)
    # Calls that nothing waits for between them, with other operands each time: a rank may not
    # overwrite what it staged while its peer still reads it.
    shape, run, mesh = layers[1]
    many = [make_inputs(shape, "skewed", seed=seed, **BF16) for seed in range(4)]
    want, shards = [on_one_gpu(i) for i in many], [spread(i, mesh) for i in many]
    got = [run(shards[i % 4]) for i in range(100)]
    for i, results in enumerate(got):
        check_shards(results, want[i % 4])
    # Another axis may span the processes without the expert axis doing so.
    inputs = make_inputs(SMALL, **BF16)
    mesh = mesh_of((2, 1), ("data", "expert"))
    y = jax.jit(sharded(mesh, FFI))(*spread(inputs, mesh).args)
    check_shards(y, on_one_gpu(inputs)[0])
    print("passed")


def check_late():
    store = distributed.global_state.client
    mesh = mesh_of()
    run = on_two_gpus(mesh)
    small, large = (make_inputs(shape, **BF16) for shape in (SMALL, LARGE))
    check_shards(run(spread(small, mesh)), on_one_gpu(small))

    # Process 0 is alone with a call, then both make it.
    impatient = MoEConfig(implementation="ffi", timeout_s=5)
    alone = jax.jit(sharded(mesh, impatient))
    shards = spread(large, mesh)
    if process == 0:
        try:
            alone(*shards.args)
        except TimeoutError as error:
            print(error)
        store.key_value_set("alone", "")
    store.blocking_key_value_get("alone", 60_000)
    compiled = alone.lower(*shards.args).compile()
    check_shards(compiled(*shards.args), on_one_gpu(large)[0])

    # Process 1 makes no more calls.
    if process == 0:
        try:
            jax.block_until_ready(compiled(*shards.args))
        except jax.errors.JaxRuntimeError as error:
            print("failed:", error)
        time.sleep(1)  # the message is printed by a thread
        store.key_value_set("done", "")
    else:
        store.blocking_key_value_get("done", 120_000)
        print("passed")
        time.sleep(1)
    # Not the ordinary exit: the GPU of process 0 takes no more work, and process 0 keeps the store.
    sys.stdout.flush()
    time.sleep(3 * (1 - process))
    os._exit(0)


def _at(a, index):
    return a[index]


main()
