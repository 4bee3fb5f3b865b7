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

// The tiles of two products on the same row tiles, the second of which (down) needs the first
// (gate/up). They go in waves of groups: those of the second product of a wave come after those of
// the first of the next wave.
class Waves {
 public:
  // A wave ends with the group with which it reaches `wave_tiles` row tiles.
  MEGAMOE_HD Waves(const int* tile_start, int groups, int first_columns, int second_columns,
                   int wave_tiles)
      : tile_start_(tile_start),
        groups_(groups),
        first_columns_(first_columns),
        second_columns_(second_columns),
        wave_tiles_(wave_tiles) {
    next_wave();
  }

  // Finds tile `index`, a larger one from call to call; false: there are no more.
  MEGAMOE_HD bool find(int index, bool* second, TilePlace* place) {
    while (index >= first_columns_ * end_ + second_columns_ * (second_ ? begin_ : before_)) {
      if (second_) {
        if (begin_ == tile_start_[groups_]) return false;
        next_wave();
      }
      second_ = !second_;
    }
    *second = second_;
    *place =
        second_
            ? place_tile(tile_start_, groups_, second_columns_, index - first_columns_ * end_)
            : place_tile(tile_start_, groups_, first_columns_, index - second_columns_ * before_);
    return true;
  }

 private:
  MEGAMOE_HD void next_wave() {
    before_ = begin_;
    begin_ = end_;
    while (group_ < groups_ && end_ - begin_ < wave_tiles_) end_ = tile_start_[++group_];
  }

  const int* tile_start_;
  int groups_, first_columns_, second_columns_, wave_tiles_;
  // At the first product's tiles of wave s or the second's of wave s - 1.
  bool second_ = false;
  int before_ = 0, begin_ = 0, end_ = 0;  // row tiles before waves s - 1, s and s + 1
  int group_ = 0;                         // the first of wave s + 1
};

}  // namespace megamoe

#endif  // JAX_MEGAMOE_FFI_PLAN_TILE_ORDER_H_
