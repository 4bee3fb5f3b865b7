"""Grouped matrix products against a loop over the groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import _grouped
from jax_megamoe._grouped import grouped_matmul, grouped_outer


def reference(lhs, rhs, outer_rhs, sizes):
    """fp32 products per group: [M, N] with zero rows beyond the groups, and [G, K, N']."""
    lhs, rhs, outer_rhs = (np.asarray(a, np.float32) for a in (lhs, rhs, outer_rhs))
    out = np.zeros((lhs.shape[0], rhs.shape[2]), np.float32)
    outer = np.zeros((len(sizes), lhs.shape[1], outer_rhs.shape[1]), np.float32)
    start = 0
    for g, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows] = lhs[rows] @ rhs[g]
        outer[g] = lhs[rows].T @ outer_rhs[rows]
        start += size
    return out, outer


def make(sizes, rows, k=64, n=32, dtype="float32"):
    rng = np.random.default_rng(0)
    lhs, rhs, outer_rhs = (
        jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        for shape in ((rows, k), (len(sizes), k, n), (rows, n))
    )
    return lhs, rhs, outer_rhs, jnp.array(sizes, jnp.int32)


@jax.jit
def products(lhs, rhs, outer_rhs, sizes):
    zeros = jnp.zeros(rhs.shape, jnp.float32)
    return grouped_matmul(lhs, rhs, sizes), grouped_outer(lhs, outer_rhs, sizes, zeros)


@jax.jit
def products_on_gpus(lhs, rhs, outer_rhs, sizes):
    """What runs there without tokamax: the same loops with larger tiles."""
    zeros = jnp.zeros(rhs.shape, jnp.float32)
    return _grouped._matmul_loop(lhs, rhs, sizes), _grouped._outer_loop(
        lhs, outer_rhs, sizes, zeros
    )


# Empty groups at the start, in the middle and at the end; sizes around the row tile; fewer rows
# than the array has; all rows in one group.
@pytest.mark.parametrize(
    "sizes, rows, k, n, dtype",
    [
        ([8, 0, 8, 0], 16, 64, 32, "bfloat16"),
        ([3, 1, 0, 2, 0, 7] + [0] * 12, 13, 64, 43, "bfloat16"),
        ([0, 5, 3, 0], 8, 64, 32, "float32"),
        ([1, 7, 129, 0, 255, 257], 700, 64, 32, "float32"),
        ([1, 7, 129, 0, 255, 257], 649, 64, 32, "bfloat16"),
        ([0, 130, 0], 130, 64, 32, "float32"),
        ([0, 0, 0], 9, 64, 32, "float32"),
        ([1], 1, 64, 32, "float32"),
        ([300, 0, 600, 100], 1000, 64, 32, "float32"),  # tiles of 256 rows on GPUs
        ([0, 2400], 2500, 64, 32, "float32"),  # and of the most that they have
    ],
)
@pytest.mark.parametrize("loop", [products, products_on_gpus])
def test_equals_a_loop_over_groups(loop, sizes, rows, k, n, dtype):
    args = make(sizes, rows, k, n, dtype)
    got, want = loop(*args), reference(*args[:3], sizes)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    assert not np.asarray(got[0])[sum(sizes) :].any()
    assert not np.asarray(got[1])[np.array(sizes) == 0].any()


@pytest.mark.parametrize("fill", [np.nan, 1e4])
@pytest.mark.parametrize("sizes", [[96], [40, 0, 56, 0]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_beyond_the_groups_do_not_matter(fill, sizes, dtype):
    lhs, rhs, outer_rhs, group_sizes = make(sizes, 256, dtype=dtype)
    clean = products(lhs.at[96:].set(0), rhs, outer_rhs.at[96:].set(0), group_sizes)
    dirty = products(lhs.at[96:].set(fill), rhs, outer_rhs.at[96:].set(fill), group_sizes)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loop_equals_ragged_dot(dtype):
    # What runs instead of the loop where there is neither a CPU nor a GPU.
    lhs, rhs, outer_rhs, sizes = make([5, 0, 130, 1], 150, dtype=dtype)
    lhs = lhs.at[136:].set(np.nan)
    init = jnp.ones(rhs.shape)
    got = _grouped._matmul_ragged(lhs, rhs, sizes)
    np.testing.assert_allclose(got, grouped_matmul(lhs, rhs, sizes), rtol=1e-5, atol=1e-4)
    got = _grouped._outer_ragged(lhs, outer_rhs, sizes, init)
    want = grouped_outer(lhs, outer_rhs, sizes, init)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_one_row_changes_only_its_own_result():
    lhs, rhs, outer_rhs, sizes = make([5, 33, 1], 40)
    clean = products(lhs, rhs, outer_rhs, sizes)
    for value in (np.nan, 1e30, 0):
        out, outer = products(lhs.at[7].set(value), rhs, outer_rhs, sizes)
        np.testing.assert_array_equal(np.delete(out, 7, 0), np.delete(clean[0], 7, 0))
        np.testing.assert_array_equal(np.asarray(outer)[[0, 2]], np.asarray(clean[1])[[0, 2]])


def test_outer_adds_to_what_is_there():
    lhs, _, rhs, sizes = make([3, 0, 5], 8)
    init = jnp.full((3, 64, 32), 2.0)
    got = grouped_outer(lhs, rhs, sizes, init)
    np.testing.assert_allclose(got, 2 + grouped_outer(lhs, rhs, sizes, 0 * init), rtol=1e-6)


def test_nothing_is_expanded_to_groups_times_rows():
    groups, rows = 64, 512
    args = make([rows // groups] * groups, rows, k=32, n=16)
    compiled = products.lower(*args).compile()
    lines = compiled.as_text()
    assert f"[{groups},{rows}," not in lines
    dense = groups * rows * 32 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < dense / 4
