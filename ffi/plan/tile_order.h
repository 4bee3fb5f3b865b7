// Order in which the output tiles of the grouped products are worked on. The same text runs on the
// device and, for tests, on the host.
#ifndef JAX_MEGAMOE_FFI_PLAN_TILE_ORDER_H_
#define JAX_MEGAMOE_FFI_PLAN_TILE_ORDER_H_

#include <cstdint>

#include "ffi/plan/plan.h"

namespace megamoe {

// Row tiles of a group that are walked before the next column tile. Within such a block m runs
// fastest, so that the CTAs at work at one time share few weight tiles and few row tiles; an
// unbounded block would re-read all rows of a very large group for every column tile.
constexpr int kBlockTiles = 16;

struct TilePlace {
  int group;
  int m;  // row tile, counted through all groups
  int n;  // column tile
};

// Place of tile `index` of a product with `column_tiles` column tiles; group g has the row tiles
// [tile_start[g], tile_start[g + 1]).
MEGAMOE_HD inline TilePlace place_tile(const int* tile_start, int groups, int column_tiles,
                                       int index) {
  const int m_before = index / column_tiles;
  int low = 0, high = groups;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tile_start[middle] <= m_before) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int first = tile_start[low];
  const int tiles = tile_start[low + 1] - first;
  const int in_group = index - first * column_tiles;
  const int block = in_group / (kBlockTiles * column_tiles);
  const int in_block = in_group - block * kBlockTiles * column_tiles;
  const int left = tiles - block * kBlockTiles;
  const int block_tiles = left < kBlockTiles ? left : kBlockTiles;
  return {low, first + block * kBlockTiles + in_block % block_tiles, in_block / block_tiles};
}

constexpr int kSecondShare = 3;  // down has a third of the multiplications

// What a CTA claims of the tiles of two products on the same row tiles, the second of which (down)
// needs the first (gate/up). One CTA in kSecondShare prefers tiles of the second product: it takes
// one once `lead` more tiles of the first have been claimed than that one needs, so that they are
// likely to be done. So both products are at work at all times: sending the results is spread over
// the whole kernel, and what is between the products is read while it is in L2. (Going from one
// product to the other often would cost a CTA time at each turn: in waves of experts that all CTAs
// work on, it was measured to.)
//
// `Counters` has first() and second(), each of which claims a tile by its number, and
// first_claimed(), a number of the first product's tiles that have been claimed; it may be old.
//
// No wait can be circular: when a tile of the second product is given out, all that it needs has
// been claimed before.
template <class Counters>
class Claims {
 public:
  MEGAMOE_HD Claims(Counters counters, const int* tile_start, int groups, int first_columns,
                    int second_columns, int lead, bool prefers_second)
      : counters_(counters),
        tile_start_(tile_start),
        groups_(groups),
        first_columns_(first_columns),
        second_columns_(second_columns),
        lead_(lead),
        prefers_second_(prefers_second) {}

  // The next tile; false: there are no more.
  MEGAMOE_HD bool next(bool* second, TilePlace* place) {
    if (prefers_second_) hold();
    if (first_left_ && !may_go()) {
      const int index = counters_.first();
      note(index + 1);
      first_left_ = index < firsts();
      if (first_left_) {
        *second = false;
        *place = place_tile(tile_start_, groups_, first_columns_, index);
        return true;
      }
    }
    hold();
    if (held_ >= seconds()) return false;
    *second = true;
    *place = held_place_;
    held_ = -1;
    return true;
  }

 private:
  MEGAMOE_HD int firsts() const { return tile_start_[groups_] * first_columns_; }
  MEGAMOE_HD int seconds() const { return tile_start_[groups_] * second_columns_; }

  // Has a tile of the second product, or knows that there are no more.
  MEGAMOE_HD void hold() {
    if (held_ >= 0) return;
    held_ = counters_.second();
    if (held_ >= seconds()) return;
    held_place_ = place_tile(tile_start_, groups_, second_columns_, held_);
    // It needs the first product's tiles of its block of row tiles, see place_tile().
    const int start = tile_start_[held_place_.group], end = tile_start_[held_place_.group + 1];
    const int block_end = start + ((held_place_.m - start) / kBlockTiles + 1) * kBlockTiles;
    needed_ = (block_end < end ? block_end : end) * first_columns_ + lead_;
    if (needed_ > firsts()) needed_ = firsts();
  }

  // Whether a tile of the second product is held and the first is far enough ahead.
  MEGAMOE_HD bool may_go() {
    if (held_ < 0 || held_ >= seconds()) return false;
    if (claimed_ < needed_) note(counters_.first_claimed());
    return claimed_ >= needed_;
  }

  MEGAMOE_HD void note(int claimed) {
    if (claimed_ < claimed) claimed_ = claimed;
  }

  Counters counters_;
  const int* tile_start_;
  int groups_, first_columns_, second_columns_, lead_;
  bool prefers_second_;
  bool first_left_ = true;
  int claimed_ = 0;  // tiles of the first product, as far as is known
  int held_ = -1;    // number of a tile of the second product that this CTA has claimed
  int needed_ = 0;   // tiles of the first product that must have been claimed before it
  TilePlace held_place_{};
};

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_PLAN_TILE_ORDER_H_
