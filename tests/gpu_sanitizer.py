"""Both passes on one GPU, small enough for compute-sanitizer, which finds races and bad accesses:

  for tool in racecheck memcheck; do
    XLA_PYTHON_CLIENT_PREALLOCATE=false compute-sanitizer --tool $tool --kernel-regex kns=megamoe \
        python tests/gpu_sanitizer.py
  done

In the first shape a CTA has about one tile, in the second its rings turn over.
"""

import jax
import jax.numpy as jnp
from cases import Shape, make_inputs, runner

SHAPES = (
    Shape(tokens=152, top_k=3, experts=8, hidden=128, intermediate=192),
    Shape(tokens=300, top_k=8, experts=16, hidden=448, intermediate=448),
)


def main():
    for shape in SHAPES:
        inputs = make_inputs(shape, "holes", x_dtype=jnp.bfloat16, w_dtype=jnp.bfloat16)
        for rounds, capacity_factor in (("one round", 2.0), ("several rounds", 0.3)):
            results = runner("ffi", 1, capacity_factor=capacity_factor)(inputs)
            finite = all(bool(jnp.isfinite(a.astype(jnp.float32)).all()) for a in results)
            print(f"{shape}, {rounds}: {'finite' if finite else 'NOT FINITE'}", flush=True)


if __name__ == "__main__":
    assert jax.default_backend() == "gpu"
    main()
