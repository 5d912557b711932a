// A tile against few query rows, as when one token is decoded: nothing is packed, and what comes next is fetched unit
// by unit. There is such a way for processors with AVX2 and no more.
#pragma once

#include "attention_avx2.h"
#include "attention_tiles.h"

namespace {

#if defined(HEADRACE_AVX2_ONLY)

// A unit of a tile with few rows: first the keys of all its units and heads, then their values.
struct UnitCursor {
  const TileRows* rows = nullptr;  // null: nothing is known
  int unit = 0, head = 0;
  bool is_values = false;

  void begin(const TileRows* tile) {
    const bool has_units = tile->is_few && tile->first < tile->last;
    *this = UnitCursor();
    if (has_units) rows = tile, unit = tile->first / kUnit;
  }
  // Past the tile's last one comes `next_tile`, if any.
  void advance(const TileRows* next_tile) {
    if (++head < rows->num_heads) return;
    head = 0;
    if (++unit * kUnit < rows->last) return;
    unit = rows->first / kUnit;
    if (!is_values) is_values = true;
    else if (next_tile && next_tile != rows) begin(next_tile);
    else rows = nullptr;
  }
};

template <typename Math>
class FewRows {
 public:
  explicit FewRows(Workspace<Math>& work) : work_(work), call_(work.call) {}

  bool takes(const Item& item) const {
    return item.num_queries * work_.group_size <= kMostFewRows && call_.block_size % kQuad == 0 &&
           call_.head_dim % 8 == 0 && work_.head_bytes <= kMostFewHeadBytes;
  }

  // Fetches the first of all units; later ones are on their way when their tile begins.
  void begin() {
    coming_ = UnitCursor();
    coming_.begin(work_.rows[0]);
    for (int64_t bytes = 0; coming_.rows && bytes < kBytesAhead; bytes += kUnit * work_.head_bytes)
      next_coming(nullptr).fetch_all(int(work_.head_bytes));
  }

  // Another way went through a tile: what comes next was fetched there.
  void skip() { coming_ = UnitCursor(); }

  // The current tile against all the item's heads, each of few rows: all scores, then all values.
  void run_tile(const Item& item, int tile, int num_rows) {
    if (!coming_.rows) coming_.begin(work_.rows[1]);
    switch (num_rows) {
      case 1: return run_tile_of<1>(item, tile);
      case 2: return run_tile_of<2>(item, tile);
      case 3: return run_tile_of<3>(item, tile);
      case 4: return run_tile_of<4>(item, tile);
      case 5: return run_tile_of<5>(item, tile);
      case 6: return run_tile_of<6>(item, tile);
      case 7: return run_tile_of<7>(item, tile);
      default: return run_tile_of<8>(item, tile);
    }
  }

 private:
  typedef typename Math::Stored Stored;

  // Keys and values that are on their way while a unit is computed.
  static constexpr int64_t kBytesAhead = 16 * 1024;

  // Of the heads that the unit's item has.
  const char* place_of_heads(const UnitCursor& cursor) const {
    return (cursor.is_values ? call_.values : call_.keys) + cursor.rows->first_head * work_.head_bytes;
  }

  UnitPlace place_of(const UnitCursor& cursor) const {
    const char* begin = place_of_heads(cursor) + cursor.head * work_.head_bytes;
    UnitPlace place;
    for (int q = 0; q < kUnitQuads; ++q) place.quads[q] = begin + cursor.rows->quads[cursor.unit * kUnitQuads + q];
    return place;
  }

  // What to fetch while the next unit is computed. The heads of a unit share its tokens' memory out between them, each
  // a run of it.
  Coming next_coming(const TileRows* next_tile) {
    Coming coming;
    const int num_runs = int(kUnit * work_.head_bytes / Coming::kRunBytes);
    if (!coming_.rows) {
      for (int i = 0; i < num_runs; ++i) coming.run(i) = reinterpret_cast<const char*>(work_.scores);
      return coming;
    }
    const TileRows& rows = *coming_.rows;
    const char* begin = place_of_heads(coming_);
    const int64_t* quads = rows.quads + coming_.unit * kUnitQuads;
    // Pieces that lie in one: the unit or its quads of all heads, or tokens of some.
    const bool is_whole = rows.num_heads == call_.num_kv_heads;
    const int64_t quad_bytes = kQuad * work_.token_bytes;
    bool is_one = is_whole;
    for (int q = 1; q < kUnitQuads; ++q) is_one &= quads[q] - quads[q - 1] == quad_bytes;
    int at = coming_.head * num_runs * Coming::kRunBytes;
    if (is_one) {
      for (int i = 0; i < num_runs; ++i) coming.run(i) = begin + quads[0] + at + i * Coming::kRunBytes;
    } else {
      const int piece_bytes = int(is_whole ? quad_bytes : rows.num_heads * work_.head_bytes);
      int piece = at / piece_bytes;
      at -= piece * piece_bytes;
      for (int i = 0; i < num_runs; ++i) {
        const int64_t quad = is_whole ? quads[piece] : quads[piece / kQuad] + piece % kQuad * work_.token_bytes;
        coming.run(i) = begin + quad + at;
        for (at += Coming::kRunBytes; at >= piece_bytes; at -= piece_bytes) ++piece;
      }
    }
    coming_.advance(next_tile);
    return coming;
  }

  // Where the tile's weighted values of a head go, and before them, of a split row, its maxima and totals.
  template <int R>
  float* raw_part(const Item& item, int tile, int h) const {
    return work_.part(call_.splits[item.split], item.first_tile + tile, item.first_head + h, R);
  }

  template <int R>
  float* tile_sums(const Item& item, int tile, int h) const {
    return item.split < 0 ? work_.tile_sums + int64_t(h) * R * work_.width : raw_part<R>(item, tile, h) + 2 * R;
  }

  template <int R>
  void run_tile_of(const Item& item, int tile) {
    const TileRows& rows = *work_.rows[0];
    if (rows.first >= rows.last) {
      for (int h = 0; item.split >= 0 && h < item.num_heads; ++h) work_.clear_part(raw_part<R>(item, tile, h), R, 0, R);
      return;
    }
    UnitCursor cursor;
    cursor.begin(&rows);
    for (; !cursor.is_values; cursor.advance(nullptr))
      score_unit<Stored, R>(work_.queries + int64_t(cursor.head) * R * call_.head_dim, call_.head_dim,
                            place_of(cursor), work_.token_bytes,
                            work_.scores + cursor.head * R * kTile + cursor.unit * kUnit,
                            next_coming(work_.rows[1]));
    for (int first = 0; first < item.num_heads * R; first += kLanes)
      find_probs<R>(item, tile, first, smaller(kLanes, item.num_heads * R - first));
    for (int h = 0; h < item.num_heads; ++h)
      std::memset(tile_sums<R>(item, tile, h), 0, size_t(R) * size_t(work_.width) * 4);
    for (; cursor.rows; cursor.advance(nullptr)) {
      const int unit_begin = cursor.unit * kUnit;
      weigh_unit<Stored, R>(work_.scores + cursor.head * R * kTile + unit_begin, call_.head_dim,
                            larger(0, rows.first - unit_begin), smaller(kUnit, rows.last - unit_begin),
                            place_of(cursor), work_.token_bytes, tile_sums<R>(item, tile, cursor.head), work_.width,
                            next_coming(work_.rows[1]));
    }
    if (item.split < 0) add_tile(item.num_heads * R);
  }

  // Scores of all heads' rows, from `first` on -> probabilities in their place.
  template <int R>
  void find_probs(const Item& item, int tile, int first, int count) {
    const TileRows& rows = *work_.rows[0];
    Softmax<kLanes> softmax;
    softmax.clear();
    for (int i = 0; i < count; ++i)
      softmax.greatest[i] =
          work_.find_peak(work_.scores + (first + i) * kTile, item, tile,
                          item.first_query + (first + i) % R / work_.group_size, rows.first, rows.last);
    for (int i = 0; i < count; ++i) {
      float* scores = work_.scores + (first + i) * kTile;
      softmax.total[i] = work_.to_probs(scores, scores, rows.first, rows.last, softmax.greatest[i]);
    }
    if (item.split < 0)
      return merge(softmax, count, work_.maxima + first, work_.totals + first, &work_.factors[first / kLanes]);
    for (int i = 0; i < count; ++i) {
      float* raw = raw_part<R>(item, tile, (first + i) / R) + (first + i) % R;
      raw[0] = softmax.greatest[i];
      raw[R] = softmax.total[i];
    }
  }

  void add_tile(int num_rows) {
    for (int r = 0; r < num_rows; ++r) {
      const Factors<kLanes>& factors = work_.factors[r / kLanes];
      for (int d = 0; d < work_.width; d += kLanes) {
        float* out = work_.sums + int64_t(r) * work_.width + d;
        const F16 kept = mul(load(out), splat(factors.keep[r % kLanes]));
        store(out, fma(load(work_.tile_sums + int64_t(r) * work_.width + d), splat(factors.take[r % kLanes]), kept));
      }
    }
  }

  Workspace<Math>& work_;
  const AttentionCall& call_;
  UnitCursor coming_;  // what is fetched next
};

#else

template <typename Math>
class FewRows {
 public:
  explicit FewRows(Workspace<Math>&) {}
  bool takes(const Item&) const { return false; }
  void begin() {}
  void skip() {}
  void run_tile(const Item&, int, int) {}
};

#endif

}  // namespace
