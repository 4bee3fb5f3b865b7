"""Both passes on one GPU, small enough for compute-sanitizer, which finds races and bad accesses:

  for tool in racecheck memcheck; do
    XLA_PYTHON_CLIENT_PREALLOCATE=false compute-sanitizer --tool $tool --kernel-regex kns=megamoe \
        python tests/gpu_sanitizer.py
  done

In the first shape a CTA has about one tile, in the second its rings turn over. In two rounds an
expert's rows span both, in either shape.
"""

import functools

import jax
import jax.numpy as jnp
from cases import Shape, make_inputs, results_of

from jax_megamoe import MoEConfig, moe_mlp

SHAPES = (
    Shape(tokens=228, top_k=2, experts=2, hidden=128, intermediate=192),
    Shape(tokens=300, top_k=8, experts=16, hidden=448, intermediate=448),
)


def main():
    for shape in SHAPES:
        for routing, capacity_factor, wanted in (("holes", 2.0, 1), ("random", 0.01, 2)):
            config = MoEConfig(implementation="ffi", capacity_factor=capacity_factor)
            layer = functools.partial(moe_mlp, config=config)
            inputs = make_inputs(shape, routing, x_dtype=jnp.bfloat16, w_dtype=jnp.bfloat16)
            _, stats = jax.jit(functools.partial(layer, return_stats=True))(*inputs.args)
            assert stats.rounds == wanted, stats
            results = jax.jit(functools.partial(results_of, layer))(inputs)
            finite = all(bool(jnp.isfinite(a.astype(jnp.float32)).all()) for a in results)
            print(f"{shape}, {wanted} round(s): {'finite' if finite else 'NOT FINITE'}", flush=True)


if __name__ == "__main__":
    assert jax.default_backend() == "gpu"
    main()
