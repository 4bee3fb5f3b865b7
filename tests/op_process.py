"""One of the processes of test_op_processes.py: an expert axis that spans processes."""

import functools
import sys

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
address, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, num_processes=2, process_id=process)

import numpy as np  # noqa: E402
from cases import (  # noqa: E402
    Inputs,
    Results,
    Shape,
    make_inputs,
    oracle,
    relative_error,
    results_of,
)
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jax_megamoe import MoEConfig, moe  # noqa: E402


def main():
    devices = np.array(jax.devices())
    assert len(devices) == 4 and len(jax.local_devices()) == 2
    # Devices of both processes in turn: every neighbour on the axis is in the other process.
    mesh = jax.sharding.Mesh(devices[[2, 0, 3, 1]], ("expert",))
    local = make_inputs(Shape(32, 2, 8, 16, 8), "holes")
    spread = NamedSharding(mesh, P("expert"))
    inputs = Inputs(
        *(jax.make_array_from_callback(a.shape, spread, functools.partial(_at, a)) for a in local)
    )
    f = functools.partial(moe, mesh=mesh, expert_axis="expert")
    got = jax.jit(functools.partial(results_of, f))(inputs)
    for name, a, want in zip(Results._fields, got, oracle(local), strict=True):
        for shard in a.addressable_shards:
            assert relative_error(shard.data, np.asarray(want)[shard.index]) < 1e-5, name
    try:
        moe(*inputs.args, mesh=mesh, expert_axis="expert", config=MoEConfig(implementation="ffi"))
    except ValueError as error:
        print("refused:", error)
    print("passed")


def _at(a, index):
    return np.asarray(a)[index]


main()
