"""The routing plan against a NumPy model, over shapes, skews, repeated and invalid ids; the order
in which tiles are claimed."""

import numpy as np
import pytest

from jax_megamoe import _runtime

pytestmark = pytest.mark.skipif(
    _runtime.unavailable() is not None, reason=str(_runtime.unavailable())
)

TILE = 128


def model(ids, rank, local_experts, capacity_rows, copied_rows):
    """The plan's definition, written with sorts and loops."""
    ranks, tokens, top_k = ids.shape
    experts = ranks * local_experts
    flat = ids.reshape(-1)
    token, slot = np.divmod(np.arange(flat.size), top_k)
    local = flat.astype(np.int64) - rank * local_experts
    ours = np.flatnonzero((local >= 0) & (local < local_experts))
    ours = ours[np.argsort(local[ours], kind="stable")]  # by expert, then source, token, slot
    expert_rows = np.bincount(local[ours], minlength=local_experts)
    expert_start = np.concatenate([[0], np.cumsum(-(-expert_rows // TILE) * TILE)])
    position = np.arange(ours.size) - np.repeat(np.cumsum(expert_rows) - expert_rows, expert_rows)
    row = expert_start[local[ours]] + position
    row_of = np.full(flat.size, -1)
    row_of[ours] = row
    rows = np.full((expert_start[-1], 2), -1)
    rows[row] = np.stack([token[ours], slot[ours]], axis=1)
    tile_expert = np.repeat(np.arange(local_experts), np.diff(expert_start) // TILE)

    pulls = []
    for begin in range(0, int(expert_start[-1]), capacity_rows):
        first_use = {}
        for r in range(begin, min(begin + capacity_rows, len(rows))):
            copied = r < begin + copied_rows and rows[r, 0] // tokens == rank
            if rows[r, 0] >= 0 and not copied:
                first_use.setdefault(int(rows[r, 0]), int(tile_expert[r // TILE]))
        pulls.append(sorted(first_use, key=lambda t: (first_use[t], t)))

    own = ids[rank]
    return dict(
        expert_rows=expert_rows,
        invalid_ids=int(((own < -1) | (own >= experts)).sum()),
        expert_start=expert_start,
        row_of=row_of,
        rows=rows,
        pulls=pulls,
    )


def check(ids, local_experts, capacity_rows, copied_rows=0):
    for rank in range(ids.shape[0]):
        got = _runtime.load().plan(
            ids,
            rank=rank,
            local_experts=local_experts,
            capacity_rows=capacity_rows,
            copied_rows=copied_rows,
        )
        want = model(ids, rank, local_experts, capacity_rows, copied_rows)
        assert got.keys() == want.keys()
        assert got["pulls"] == want["pulls"]
        for name in want.keys() - {"pulls"}:
            expected = np.asarray(want[name])
            np.testing.assert_array_equal(
                np.asarray(got[name], np.int64).reshape(expected.shape), expected, err_msg=name
            )


def draw_ids(rng, ranks, tokens, top_k, experts):
    """Ids [R, T, K] of a random kind: balanced, skewed, repeated, unrouted, invalid."""
    size = (ranks, tokens, top_k)
    popularity = rng.random(experts) ** rng.choice([0.0, 1.0, 8.0]) + 1e-9
    ids = rng.choice(experts, size, p=popularity / popularity.sum())
    if rng.random() < 0.5 and top_k <= experts:  # distinct in each token, as top-k gives them
        keys = rng.random((ranks, tokens, experts)) ** (1 / popularity)
        ids = np.argsort(-keys, axis=-1)[..., :top_k]
    unrouted = rng.random(size) < rng.choice([0.0, 0.3, 1.0], p=[0.5, 0.4, 0.1])
    ids = np.where(unrouted, -1, ids)
    bad = rng.choice(np.array([-2, experts, experts + 1, 2**31 - 1, -(2**31)]), size)
    return np.where(rng.random(size) < rng.choice([0.0, 0.1]), bad, ids).astype(np.int32)


@pytest.mark.parametrize("seed", range(8))
def test_random_plans(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        ranks = int(rng.choice([1, 2, 3, 4, 8]))
        local_experts = int(rng.choice([1, 2, 3, 16, 40]))
        tokens = int(rng.choice([0, 1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 200]))
        top_k = int(rng.integers(1, 9))
        capacity_rows = TILE * int(rng.choice([1, 2, 5, 1000]))
        ids = draw_ids(rng, ranks, tokens, top_k, ranks * local_experts)
        copied_rows = rng.choice([0, TILE, 3 * TILE, capacity_rows])
        check(ids, local_experts, capacity_rows, int(copied_rows))


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 255, 256, 257])
def test_segment_edges(count):
    ids = np.full((1, 300, 1), -1, np.int32)
    ids[0, :count] = 1
    check(ids, 3, TILE)


@pytest.mark.parametrize("top_k", [2, 8])
def test_every_number_of_tokens(top_k):
    rng = np.random.default_rng(top_k)
    for tokens in (*range(1, 131), 255, 256, 257):
        ids = np.argsort(rng.random((2, tokens, 8)), axis=-1)[..., :top_k]
        check(ids.astype(np.int32), 4, 2 * TILE)


@pytest.mark.parametrize("top_k", [1, 8])
def test_all_rows_on_one_expert(top_k):
    check(np.full((4, 100, top_k), 5, np.int32), 2, 2 * TILE)


def test_every_expert_in_every_token():
    ids = np.tile(np.arange(16, dtype=np.int32)[::-1], (2, 70, 1))
    check(ids, 8, 3 * TILE)


def test_repeated_expert_beside_ordinary_tokens():
    ids = np.tile(np.array([[0, 1]], np.int32), (1, 64, 1))
    ids[0, 5] = [1, 1]
    ids[0, 6] = [0, 0]
    check(ids, 2, TILE)


@pytest.mark.parametrize("capacity_rows", [0, 100, -128])
def test_capacity_must_be_whole_tiles(capacity_rows):
    with pytest.raises(
        ValueError, match=f"capacity_rows is {capacity_rows}; it must be a positive"
    ):
        _runtime.load().plan(
            np.zeros((1, 1, 1), np.int32), rank=0, local_experts=1, capacity_rows=capacity_rows
        )


def tiles_in_order(starts, columns):
    """Tiles (group, m, n) of a product in the order in which they are claimed."""
    return [
        (g, m, n)
        for g in range(len(starts) - 1)
        for block in range(starts[g], starts[g + 1], 16)
        for n in range(columns)
        for m in range(block, min(block + 16, starts[g + 1]))
    ]


@pytest.mark.parametrize("seed", range(4))
def test_claims_of_two_products(seed):
    """Every tile is claimed once, each product's in order, and what a tile needs before it."""
    rng = np.random.default_rng(seed)
    for _ in range(100):
        sizes = rng.choice([0, 0, 1, 2, 20, 40], int(rng.integers(17))).tolist()
        starts = np.cumsum([0, *sizes]).tolist()
        first, second, ctas = (int(rng.integers(1, high)) for high in (5, 12, 10))
        lead = int(rng.choice([0, 1, ctas, 40]))
        claims = _runtime.load().tile_claims(
            starts, first, second, lead, ctas, int(rng.integers(2**32))
        )
        wanted = [tiles_in_order(starts, columns) for columns in (first, second)]
        assert [tile[2:] for tile in claims if not tile[1]] == wanted[0]
        # A CTA may hold a tile of the second product while it works on the first.
        assert sorted(tile[2:] for tile in claims if tile[1]) == sorted(wanted[1])
        number = {tile: i for i, tile in enumerate(wanted[0])}
        claimed = 0
        for cta, is_second, *tile in claims:
            if not is_second:
                claimed += 1
                continue
            g, m, _ = tile
            needs = max(number[g, m, n] for n in range(first)) + 1
            assert claimed >= min(needs + (lead if cta % 3 == 0 else 0), len(wanted[0]))
            # Those that do not prefer the second product come to it when the first is given out.
            assert cta % 3 == 0 or claimed == len(wanted[0])


@pytest.mark.parametrize("ctas", [1, 2, 3])
def test_second_product_is_claimed_as_soon_as_it_may_be(ctas):
    """CTA 0 alone prefers it: its next tile, once the first is `lead` tiles beyond its block."""
    rng = np.random.default_rng(ctas)
    for _ in range(100):
        starts = np.cumsum([0, *rng.choice([0, 1, 2, 20, 40], int(rng.integers(9)))]).tolist()
        first, second = (int(rng.integers(1, high)) for high in (5, 12))
        lead = int(rng.choice([0, 1, 40]))
        claims = _runtime.load().tile_claims(
            starts, first, second, lead, ctas, int(rng.integers(2**32))
        )
        firsts, seconds = (tiles_in_order(starts, columns) for columns in (first, second))
        claimed = taken = 0
        for cta, is_second, *_ in claims:
            if claimed == len(firsts):
                break
            if cta == 0:
                ready = taken < len(seconds)
                if ready:
                    g, m, _ = seconds[taken]
                    block_end = min(m + 16 - (m - starts[g]) % 16, starts[g + 1])
                    ready = claimed >= block_end * first + lead
                assert is_second == ready
            claimed += not is_second
            taken += is_second


def test_no_cta_ends_while_the_first_product_has_tiles():
    """Not even those that find no tile of the second, which they prefer."""
    claims = _runtime.load().tile_claims([0, 1], 1000, 1, 0, 10, 0)
    assert {cta for cta, *_ in claims} == set(range(10))


def test_down_does_not_wait_for_all_of_gate_up():
    """Most tiles of the second product are claimed while there are some of the first."""
    claims = _runtime.load().tile_claims(list(range(0, 1001, 10)), 4, 11, 24, 12, 0)
    last_first = max(i for i, tile in enumerate(claims) if not tile[1])
    assert sum(tile[1] for tile in claims[:last_first]) > 1000
