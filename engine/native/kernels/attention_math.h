// The inner loops of paged attention: a tile's keys against a few queries, its values weighed for them.
//
// Keys of 16 tokens are packed so that one 4-byte unit of all 16 is one vector: a unit is one fp32 number, or, for
// the bf16 dot product, two neighbouring bf16 numbers.
#pragma once

#include "attention.h"
#include "simd.h"

// Unrolled before registers are given out: else GCC writes the sums back to the stack at every turn.
#define HEADRACE_UNROLL _Pragma("GCC unroll 16")
// Long loops whose turns are short: the fewer turns, the better a processor foresees the last one.
#define HEADRACE_UNROLL_FOUR _Pragma("GCC unroll 4")

namespace {

using headrace::kTile;

// Queries that are computed together: their sums and a pair of values fill the 32 vector registers.
constexpr int kMaxGroup = 6;
// Queries whose scores are computed one after the other, then their probabilities, then their values: while one loop
// runs, all it needs is in a core's nearest cache.
constexpr int kMaxBlock = 8 * kMaxGroup;
constexpr int kColumnsAtOnce = 4 * kLanes;
// Vectors of sums that a query has at once. A vector of AVX2 takes two of 16 registers.
#if defined(__AVX512F__)
constexpr int scores_at_once(int) { return 2; }
constexpr int columns_at_once(int) { return 4; }
#else
constexpr int scores_at_once(int num_queries) { return num_queries <= 3 ? 2 : 1; }
constexpr int columns_at_once(int num_queries) { return num_queries == 1 ? 4 : scores_at_once(num_queries); }
#endif
// Lines of the next tile that are asked for at every 16 packed bytes of 16 tokens, and at every two tokens weighed.
constexpr int kLinesPerChunk = 2;
constexpr int kLinesPerPair = 4;
// Room of a tile's packed values for 16 columns: not a power of two, which would put all panels into the same places
// of a core's cache.
constexpr int64_t kValuePanel = (kTile + 1) * kLanes;

// What the next tile will read, fetched line by line between the arithmetic. A processor drops prefetches that it has
// no buffer for, so each one is followed, some lines later, by a load of the same line: that one waits.
class Ahead {
 public:
  void clear() {
    num_runs_ = 0;
    num_fetched_ = 0;
    fetched_ = touched_ = Cursor();
  }
  void add(const char* begin, int64_t num_bytes) { runs_[num_runs_++] = {begin, begin + num_bytes}; }
  bool is_done() const { return fetched_.place >= fetched_.end && fetched_.next_run >= num_runs_; }

  template <int N>
  void fetch_lines() {
    if (is_done()) return;
    advance<N>(&fetched_, [](const char* line) { prefetch(line); });
    if (num_fetched_ >= kPending) advance<N>(&touched_, [](const char* line) { touch(line); });
    num_fetched_ += N;
  }

 private:
  static constexpr int kMaxRuns = 2 * kTile;
  static constexpr int kPending = 64;
  static constexpr int kLine = 64;
  struct Run {
    const char* begin;
    const char* end;
  };
  struct Cursor {
    const char* place = nullptr;
    const char* end = nullptr;
    int next_run = 0;
  };

  template <int N, typename Function>
  void advance(Cursor* cursor, const Function& function) {
    if (cursor->end - cursor->place >= N * kLine) {
      HEADRACE_UNROLL
      for (int i = 0; i < N; ++i) function(cursor->place + i * kLine);
      cursor->place += N * kLine;
      return;
    }
    for (int i = 0; i < N; ++i, cursor->place += kLine) {
      if (cursor->place >= cursor->end) {
        if (cursor->next_run >= num_runs_) return;
        const Run& run = runs_[cursor->next_run++];
        cursor->place = run.begin;
        cursor->end = run.end;
      }
      function(cursor->place);
    }
  }

  int num_runs_ = 0, num_fetched_ = 0;
  Cursor fetched_, touched_;
  Run runs_[kMaxRuns];
};

// How far a group's result has come, over the tiles so far, or where one tile's part goes.
struct GroupState {
  float* out;  // (rows, padded width)
  int64_t out_stride;
  const float* keep;  // factor on what is there; null: nothing is there yet
  const float* take;  // factor on what comes
};

#if defined(__AVX512F__)

inline __m512i bits_of(F16 a) { return _mm512_castps_si512(a); }
inline F16 from_bits(__m512i a) { return _mm512_castsi512_ps(a); }

// 16 rows of `num_bytes` (a multiple of 16) -> num_bytes / 4 vectors of one unit each.
inline void transpose_units(const char* const* rows, int64_t byte_offset, int num_bytes, float* packed, Ahead* ahead) {
  for (int chunk = 0; chunk < num_bytes; chunk += 16) {
    ahead->fetch_lines<kLinesPerChunk>();
    __m512i quad[4];
    for (int j = 0; j < 4; ++j) {
      // Lane l holds the chunk of row 4 l + j, so that a transposition inside lanes puts all rows in order.
      const auto chunk_of = [&](int row) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + byte_offset + chunk));
      };
      __m512i lanes = _mm512_castsi128_si512(chunk_of(j));
      lanes = _mm512_mask_broadcast_i32x4(lanes, 0x00f0, chunk_of(4 + j));
      lanes = _mm512_mask_broadcast_i32x4(lanes, 0x0f00, chunk_of(8 + j));
      quad[j] = _mm512_mask_broadcast_i32x4(lanes, 0xf000, chunk_of(12 + j));
    }
    const __m512i low_01 = _mm512_unpacklo_epi32(quad[0], quad[1]), high_01 = _mm512_unpackhi_epi32(quad[0], quad[1]);
    const __m512i low_23 = _mm512_unpacklo_epi32(quad[2], quad[3]), high_23 = _mm512_unpackhi_epi32(quad[2], quad[3]);
    float* out = packed + chunk / 4 * kLanes;
    store(out, from_bits(_mm512_unpacklo_epi64(low_01, low_23)));
    store(out + kLanes, from_bits(_mm512_unpackhi_epi64(low_01, low_23)));
    store(out + 2 * kLanes, from_bits(_mm512_unpacklo_epi64(high_01, high_23)));
    store(out + 3 * kLanes, from_bits(_mm512_unpackhi_epi64(high_01, high_23)));
  }
}

#elif defined(__AVX2__)

inline __m256 load_eight(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 load_eight(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// Eight numbers of eight rows, widened -> eight half vectors of one number each.
template <typename T>
inline void transpose_eight(const char* const* rows, int64_t byte_offset, int column, float* packed) {
  __m256 row[8], pair[8], quad[8];
  for (int i = 0; i < 8; ++i) row[i] = load_eight(reinterpret_cast<const T*>(rows[i] + byte_offset) + column);
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      quad[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0x44);
      quad[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(packed + (column + i) * kLanes, _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20));
    _mm256_storeu_ps(packed + (column + i + 4) * kLanes, _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31));
  }
}

#endif

// All arithmetic in fp32, whatever the cache holds.
template <typename T>
struct WideMath {
  typedef T Stored;
  typedef float Query;
  typedef float Prob;

  static constexpr bool kPacksValues = true;

  static int num_units(int head_dim) { return head_dim; }
  static int padded_width(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

  static void load_query(const T* in, float* out, int head_dim) {
    for (int d = 0; d < head_dim; ++d) out[d] = to_float(in[d]);
  }

  static void pack_keys(const char* const* rows, int64_t byte_offset, int head_dim, float* packed,
                        Ahead* ahead) {
#if defined(__AVX512F__)
    if (sizeof(T) == 4) return transpose_units(rows, byte_offset, head_dim * 4, packed, ahead);
#elif defined(__AVX2__)
    if (head_dim % 8 == 0) {
      for (int d = 0; d < head_dim; d += 8) {
        ahead->fetch_lines<kLinesPerChunk>();
        for (int half = 0; half < kLanes; half += 8)
          transpose_eight<T>(rows + half, byte_offset, d, packed + half);
      }
      return;
    }
#endif
    for (int lane = 0; lane < kLanes; ++lane) {
      const T* row = reinterpret_cast<const T*>(rows[lane] + byte_offset);
      for (int d = 0; d < head_dim; ++d) packed[d * kLanes + lane] = to_float(row[d]);
      for (int byte = 0; byte < 2 * head_dim * int(sizeof(T)); byte += 64) ahead->fetch_lines<1>();
    }
  }

  static F16 multiply_add(F16 sums, F16 keys, F16 query) { return fma(keys, query, sums); }

  // Values of the positions first .. last - 1 of a tile: of all of them 16 columns, then the next 16.
  static void pack_values(const char* const* rows, int64_t byte_offset, int head_dim, int first, int last,
                          float* packed, Ahead* ahead) {
    for (int t = first; t < last; ++t) {
      ahead->fetch_lines<kLinesPerPair>();
      const T* row = reinterpret_cast<const T*>(rows[t] + byte_offset);
      float* out = packed + t * kLanes;
      for (int d = 0; d < head_dim; d += kLanes, out += kValuePanel) store(out, load_first(row + d, head_dim - d));
    }
  }

  // Adds prob * value over the positions first .. last - 1 of a tile, to the columns begin .. end - 1.
  template <int R>
  static void weigh(const float* probs, const float* packed, int begin, int end, int first, int last,
                    const GroupState& state) {
    constexpr int kAtOnce = columns_at_once(R);
    int d = begin;
    for (; d + kAtOnce * kLanes <= end; d += kAtOnce * kLanes)
      weigh_columns<R, kAtOnce>(probs, packed, d, first, last, state);
    for (; d < end; d += kLanes) weigh_columns<R, 1>(probs, packed, d, first, last, state);
  }

  static void finish(const float* in, float factor, T* out, int head_dim) {
    for (int d = 0; d < head_dim; d += kLanes)
      store_first(out + d, mul(load(in + d), splat(factor)), head_dim - d);
  }

 private:
  template <int R, int C>
  static void weigh_columns(const float* probs, const float* packed, int column, int first, int last,
                            const GroupState& state) {
    F16 sums[R][C];
    HEADRACE_UNROLL
    for (int r = 0; r < R; ++r)
      HEADRACE_UNROLL
      for (int c = 0; c < C; ++c) sums[r][c] = splat(0.f);
    const float* panels = packed + column / kLanes * kValuePanel;
    HEADRACE_UNROLL_FOUR
    for (int t = first; t < last; ++t) {
      F16 values[C];
      HEADRACE_UNROLL
      for (int c = 0; c < C; ++c) values[c] = load(panels + c * kValuePanel + t * kLanes);
      HEADRACE_UNROLL
      for (int r = 0; r < R; ++r) {
        const F16 prob = splat(probs[r * kTile + t]);
        HEADRACE_UNROLL
        for (int c = 0; c < C; ++c) sums[r][c] = fma(prob, values[c], sums[r][c]);
      }
    }
    HEADRACE_UNROLL
    for (int r = 0; r < R; ++r)
      HEADRACE_UNROLL
      for (int c = 0; c < C; ++c) {
        float* out = state.out + r * state.out_stride + column + c * kLanes;
        store(out, state.keep ? fma(sums[r][c], splat(state.take[r]), mul(load(out), splat(state.keep[r])))
                              : sums[r][c]);
      }
  }
};

#if defined(__AVX512BF16__)

// Products of bf16 pairs, summed in fp32. Sums of the values' product lie in the order that interleaving two rows
// gives: per 32 columns, first columns 0-3, 8-11, 16-19, 24-27, then the others.
struct DotMath {
  typedef bf16 Stored;
  typedef bf16 Query;
  typedef bf16 Prob;

  static constexpr bool kPacksValues = false;

  static int num_units(int head_dim) { return head_dim / 2; }
  static int padded_width(int head_dim) { return (head_dim + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

  static void load_query(const bf16* in, bf16* out, int head_dim) { std::memcpy(out, in, size_t(head_dim) * 2); }

  static void pack_keys(const char* const* rows, int64_t byte_offset, int head_dim, float* packed,
                        Ahead* ahead) {
    transpose_units(rows, byte_offset, head_dim * 2, packed, ahead);
  }

  static F16 multiply_add(F16 sums, F16 keys, F16 query) {
    return _mm512_dpbf16_ps(sums, (__m512bh)bits_of(keys), (__m512bh)bits_of(query));
  }

  template <int R>
  static void weigh(const bf16* probs, const char* const* rows, int64_t byte_offset, int head_dim, int first,
                    int last, const GroupState& state, Ahead* ahead) {
    int d = 0;
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes)
      weigh_columns<R, 2>(probs, rows, byte_offset, d, 4 * kLanes, first, last, state, ahead);
    for (; d < head_dim; d += 2 * kLanes)
      weigh_columns<R, 1>(probs, rows, byte_offset, d, head_dim - d, first, last, state, ahead);
  }

  static void finish(const float* in, float factor, bf16* out, int head_dim) {
    const __m512i low_columns = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high_columns = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int d = 0; d < head_dim; d += 2 * kLanes) {
      const F16 first = mul(load(in + d), splat(factor)), second = mul(load(in + d + kLanes), splat(factor));
      store_first(out + d, _mm512_permutex2var_ps(first, low_columns, second), head_dim - d);
      store_first(out + d + kLanes, _mm512_permutex2var_ps(first, high_columns, second), head_dim - d - kLanes);
    }
  }

 private:
  // C: runs of 32 columns.
  template <int R, int C>
  static void weigh_columns(const bf16* probs, const char* const* rows, int64_t byte_offset, int column,
                            int num_columns, int first, int last, const GroupState& state, Ahead* ahead) {
    F16 sums[R][2 * C];
    HEADRACE_UNROLL
    for (int r = 0; r < R; ++r)
      HEADRACE_UNROLL
      for (int c = 0; c < 2 * C; ++c) sums[r][c] = splat(0.f);
    const __mmask32 existing = num_columns >= 2 * kLanes ? __mmask32(~0u) : __mmask32((1u << num_columns) - 1);
    for (int t = first & ~1; t < last; t += 2) {
      const bf16* even = reinterpret_cast<const bf16*>(rows[t] + byte_offset) + column;
      const bf16* odd = reinterpret_cast<const bf16*>(rows[t + 1] + byte_offset) + column;
      ahead->fetch_lines<kLinesPerPair>();
      __m512i pairs[2 * C];
      HEADRACE_UNROLL
      for (int c = 0; c < C; ++c) {
        const __m512i a = _mm512_maskz_loadu_epi16(existing, even + c * 2 * kLanes);
        const __m512i b = _mm512_maskz_loadu_epi16(existing, odd + c * 2 * kLanes);
        pairs[2 * c] = _mm512_unpacklo_epi16(a, b);
        pairs[2 * c + 1] = _mm512_unpackhi_epi16(a, b);
      }
      HEADRACE_UNROLL
      for (int r = 0; r < R; ++r) {
        int32_t prob_pair;
        std::memcpy(&prob_pair, probs + r * kTile + t, 4);
        const __m512bh prob = (__m512bh)_mm512_set1_epi32(prob_pair);
        HEADRACE_UNROLL
        for (int c = 0; c < 2 * C; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], (__m512bh)pairs[c], prob);
      }
    }
    HEADRACE_UNROLL
    for (int r = 0; r < R; ++r)
      HEADRACE_UNROLL
      for (int c = 0; c < 2 * C; ++c) {
        float* out = state.out + r * state.out_stride + column + c * kLanes;
        store(out, state.keep ? fma(sums[r][c], splat(state.take[r]), mul(load(out), splat(state.keep[r])))
                              : sums[r][c]);
      }
  }
};

#endif

// Scores of R queries against V packed groups of 16 tokens.
template <typename Math, int R, int V>
inline void score_groups(const float* queries, int num_units, const float* packed, float* scores) {
  F16 sums[R][V];
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int v = 0; v < V; ++v) sums[r][v] = splat(0.f);
  HEADRACE_UNROLL_FOUR
  for (int u = 0; u < num_units; ++u) {
    F16 keys[V];
    HEADRACE_UNROLL
    for (int v = 0; v < V; ++v) keys[v] = load(packed + (v * num_units + u) * kLanes);
    HEADRACE_UNROLL
    for (int r = 0; r < R; ++r) {
      const F16 query = splat(queries[r * num_units + u]);
      HEADRACE_UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] = Math::multiply_add(sums[r][v], keys[v], query);
    }
  }
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int v = 0; v < V; ++v) store(scores + r * kTile + v * kLanes, sums[r][v]);
}

}  // namespace
