"""The parts of `python -m jax_megamoe.bench`."""
