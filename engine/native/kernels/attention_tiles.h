// What the ways through a tile share: where its tokens lie, a thread's memory, who sees what, and online softmax
// (arXiv 1805.02867).
#pragma once

#include "attention_math.h"

namespace {

using headrace::AttentionCall;
using headrace::Item;
using headrace::SplitRow;

const float kMinusInfinity = -__builtin_inff();

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

// Blocks that hold whole quads are read quad by quad: so many tokens lie side by side.
constexpr int kQuad = 4;
// Of so many tokens of one KV head few rows are computed together.
constexpr int kUnit = 16;
constexpr int kUnitQuads = kUnit / kQuad;

// Where the tokens of a tile lie. A position that no query of the item sees is never read: a row of zeros
// stands in for it.
struct TileRows {
  int first = 0, last = 0;  // seen positions, from the tile's begin; empty where first >= last
  const char* keys[kTile];
  const char* values[kTile];
  // Instead, where the item's rows are few, each quad, in bytes from the cache's begin. For one that is not seen stands
  // one of its unit that is: what is hidden there has scores, too, but no weight.
  int64_t quads[kTile / kQuad];
  int first_head, num_heads;
  bool is_few;
};

// Of N queries, what one softmax tile gives. Whole vectors are read: past the last query stand minus infinity and 0.
template <int N>
struct Softmax {
  static constexpr int kRoom = (N + kLanes - 1) / kLanes * kLanes;
  float greatest[kRoom];
  float total[kRoom];

  void clear() {
    for (int i = 0; i < kRoom; ++i) greatest[i] = kMinusInfinity, total[i] = 0.f;
  }
};

// How the weighted values of a tile merge with those before it.
template <int N>
struct Factors {
  float keep[Softmax<N>::kRoom];
  float take[Softmax<N>::kRoom];
};

// Merges a tile's maxima and totals of up to N queries into the running ones. These have room for whole vectors.
template <int N>
inline void merge(const Softmax<N>& tile, int count, float* greatest, float* total, Factors<N>* factors) {
  for (int i = 0; i < count; i += kLanes) {
    const F16 old_greatest = load(greatest + i), tile_greatest = load(tile.greatest + i);
    const F16 new_greatest = max_b(old_greatest, tile_greatest);
    const M16 is_empty = equal(tile_greatest, splat(kMinusInfinity));
    const F16 keep = select(is_empty, splat(1.f), exp2(sub(old_greatest, new_greatest)));
    const F16 take = select(is_empty, splat(0.f), exp2(sub(tile_greatest, new_greatest)));
    store(greatest + i, select(is_empty, old_greatest, new_greatest));
    store(total + i, fma(load(tile.total + i), take, mul(load(total + i), keep)));
    store(factors->keep + i, keep);
    store(factors->take + i, take);
  }
}

// A call, and the memory of one thread that works on it.
template <typename Math>
struct Workspace {
  typedef typename Math::Stored Stored;
  typedef typename Math::Query Query;
  typedef typename Math::Prob Prob;

  // Places all arrays in `memory`; with a null pointer it only counts.
  Workspace(const AttentionCall& of_call, void* memory) : call(of_call), begin(static_cast<char*>(memory)) {
    group_size = call.num_heads / call.num_kv_heads;
    num_units = Math::num_units(call.head_dim);
    width = Math::padded_width(call.head_dim);
    head_bytes = int64_t(call.head_dim) * int64_t(sizeof(Stored));
    token_bytes = call.num_kv_heads * head_bytes;
    is_raw = call.soft_cap == 0.f && call.scale > 0.f;
    factor = is_raw ? call.scale * kLog2E : 1.f;
    const int64_t item_rows = call.max_item_rows;
    take(&zeros, token_bytes);
    take(&rows[0], 1);
    take(&rows[1], 1);
    take(&ahead, 1);
    take(&packed_keys, int64_t(kTile) * num_units);
    if (Math::kPacksValues) take(&packed_values, width / kLanes * kValuePanel);
    take(&scores, larger(int(item_rows), kMaxBlock) * int64_t(kTile));
    // Probabilities of the same width take their scores' place.
    if constexpr (sizeof(Prob) == sizeof(float)) probs = scores;
    else take(&probs, int64_t(kMaxBlock) * kTile);
    take(&queries, item_rows * call.head_dim);
    // Whole vectors are read from any row on.
    take(&maxima, item_rows + kLanes);
    take(&totals, item_rows + kLanes);
    take(&sums, larger(int(item_rows), kLanes) * int64_t(width));
    take(&tile_sums, item_rows * width);
    take(&factors, item_rows / kLanes + 1);
  }

  template <typename U>
  void take(U** place, int64_t count) {
    *place = begin ? reinterpret_cast<U*>(begin + used_bytes) : nullptr;
    used_bytes += round_up(count * int64_t(sizeof(U)), 64);
  }

  int query_len(int row) const { return call.cu_seqlens_q[row + 1] - call.cu_seqlens_q[row]; }
  // Positions that a query sees: first_seen .. last_seen - 1.
  int last_seen(int row, int query) const { return call.seq_lens[row] - query_len(row) + query + 1; }
  int first_seen(int row, int query) const {
    return call.window ? larger(0, last_seen(row, query) - call.window) : 0;
  }

  // A part of a split row: maxima, totals, weighted values of one tile and one KV head.
  float* part(const SplitRow& split, int tile, int head, int num_rows) const {
    const int64_t part_floats = int64_t(num_rows) * (width + 2);
    return call.parts + split.offset + (int64_t(tile) * call.num_kv_heads + head) * part_floats;
  }

  void clear_part(float* raw, int num_rows, int r, int count) const {
    for (int i = r; i < r + count; ++i) raw[i] = kMinusInfinity, raw[num_rows + i] = 0.f;
    std::memset(raw + 2 * num_rows + int64_t(r) * width, 0, size_t(count) * size_t(width) * 4);
  }

  // Greatest score of one of the item's queries, of a tile's positions first .. last - 1, as an exponent of two. Where
  // the query may not look, the score becomes minus infinity.
  float find_peak(float* row_scores, const Item& item, int tile, int query, int first, int last) const {
    const int tile_begin = (item.first_tile + tile) * kTile;
    const int first_visible = first_seen(item.row, query) - tile_begin;
    const int last_visible = last_seen(item.row, query) - tile_begin;
    F16 greatest_lanes = splat(kMinusInfinity);
    for (int t = first / kLanes * kLanes; t < last; t += kLanes) {
      F16 score = load(row_scores + t);
      const bool is_whole = t >= first_visible && t + kLanes <= last_visible;
      if (!is_raw) score = finish_score(score);
      if (!is_whole) {
        const M16 visible = and_not(first_lanes(last_visible - t), first_lanes(first_visible - t));
        score = select(visible, score, splat(kMinusInfinity));
      }
      if (!is_whole || !is_raw) store(row_scores + t, score);
      greatest_lanes = max_b(greatest_lanes, score);
    }
    return greatest(greatest_lanes) * factor;
  }

  F16 finish_score(F16 score) const {
    if (call.soft_cap == 0.f) return mul(score, splat(call.scale * kLog2E));
    return mul(tanh(mul(score, splat(call.scale / call.soft_cap))), splat(call.soft_cap * kLog2E));
  }

  // Scores of one query -> probabilities relative to the tile's peak, exact zeros where it may not look. Returns their
  // sum.
  float to_probs(const float* row_scores, Prob* row_probs, int first, int last, float peak) const {
    const F16 reference = splat(peak == kMinusInfinity ? 0.f : -peak), factors = splat(factor);
    F16 total = splat(0.f);
    for (int t = first / kLanes * kLanes; t < last; t += kLanes) {
      const F16 prob = exp2_of_negative(fma(load(row_scores + t), factors, reference));
      total = add(total, prob);
      store(row_probs + t, prob);
    }
    return sum(total);
  }

  const AttentionCall& call;
  char* begin;
  int64_t used_bytes = 0;
  int group_size, num_units, width;
  int64_t token_bytes, head_bytes;
  // Scores become exponents of two as they become probabilities, by this factor; else both is done before.
  bool is_raw;
  float factor;
  char* zeros;
  TileRows* rows[2];  // of the current tile, and of the one that comes after it
  Ahead* ahead;
  float* packed_keys;
  float* packed_values;
  float* scores;
  Prob* probs;
  Query* queries;
  float* maxima;  // of the tiles so far, as are the next two
  float* totals;
  float* sums;
  float* tile_sums;
  Factors<kLanes>* factors;  // of that many rows each
};

}  // namespace
