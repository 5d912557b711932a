// Attention of few query rows, as when one token is decoded, for processors with AVX2 and no more: keys and values are
// read once, in the order of memory, and keys are turned in registers instead of being packed. Sums are the same, in
// the same order, as with packed keys.
#pragma once

#include "attention_tiles.h"

namespace {

#if defined(HEADRACE_AVX2_ONLY)

// Query rows per KV head up to which turning keys for each of them costs less than packing them.
constexpr int kMostFewRows = 8;
constexpr int kMostFewHeadBytes = 2048;

// Where one head's keys or values of a unit's tokens lie.
struct UnitPlace {
  const char* quads[kUnitQuads];
};

// What is fetched while a unit is computed: as many lines as it has itself, in the order of memory. The processor's own
// prefetching sees a stream.
class Coming {
 public:
  static constexpr int kRunLines = 4;
  static constexpr int kRunBytes = 64 * kRunLines;

  const char*& run(int index) { return runs_[index]; }

  // N lines, 1, 2 or 4; `line` is a multiple of N.
  template <int N>
  void fetch(int64_t line) const {
    HEADRACE_UNROLL
    for (int i = 0; i < N; ++i) prefetch(runs_[line / kRunLines] + (line % kRunLines + i) * 64);
  }
  void fetch_all(int head_bytes) const {
    for (int64_t run = 0; run < kUnit * head_bytes / kRunBytes; ++run) fetch<kRunLines>(run * kRunLines);
  }

 private:
  const char* runs_[kUnit * kMostFewHeadBytes / kRunBytes];
};

// Four bytes' width of eight tokens is one half vector: the first four tokens of one quad, the others of another.
inline void turn_quads(__m256 a, __m256 b, __m256 c, __m256 d, __m256* units) {
  const __m256d low_ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
  const __m256d low_cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
  const __m256d high_ab = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
  const __m256d high_cd = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
  units[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(low_ab, low_cd));
  units[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low_ab, low_cd));
  units[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high_ab, high_cd));
  units[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high_ab, high_cd));
}

inline __m256i two_rows(const char* low, const char* high) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(first),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}

// Sixteen bytes of each of eight tokens -> half vectors of one number each.
inline void turn_chunk(const char* low, const char* high, int64_t stride, __m256 (&units)[4], float) {
  __m256 rows[4];
  HEADRACE_UNROLL
  for (int i = 0; i < 4; ++i) rows[i] = _mm256_castsi256_ps(two_rows(low + i * stride, high + i * stride));
  turn_quads(rows[0], rows[1], rows[2], rows[3], units);
}
inline void turn_chunk(const char* low, const char* high, int64_t stride, __m256 (&units)[8], bf16) {
  __m256 first[4], second[4];
  const __m256i zero = _mm256_setzero_si256();
  HEADRACE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m256i row = two_rows(low + i * stride, high + i * stride);
    first[i] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, row));
    second[i] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, row));
  }
  turn_quads(first[0], first[1], first[2], first[3], units);
  turn_quads(second[0], second[1], second[2], second[3], units + 4);
}

// Scores of R queries against 8 * O tokens, each a sum over the head's width in order. Fetches what comes from
// `coming_line` on.
template <typename T, int R, int O>
inline void score_octets(const float* queries, int head_dim, const char* const* quads, int64_t stride, float* scores,
                         const Coming& coming, int64_t coming_line) {
  constexpr int kChunk = 16 / int(sizeof(T));
  constexpr int kLines = 2 * O;
  __m256 sums[R][O];
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int o = 0; o < O; ++o) sums[r][o] = _mm256_setzero_ps();
  const char* places[2 * O];
  HEADRACE_UNROLL
  for (int q = 0; q < 2 * O; ++q) places[q] = quads[q];
  for (int d = 0; d < head_dim; d += kChunk, coming_line += kLines) {
    coming.fetch<kLines>(coming_line);
    __m256 units[O][kChunk];
    HEADRACE_UNROLL
    for (int o = 0; o < O; ++o) turn_chunk(places[2 * o], places[2 * o + 1], stride, units[o], T());
    HEADRACE_UNROLL
    for (int q = 0; q < 2 * O; ++q) places[q] += 16;
    HEADRACE_UNROLL
    for (int u = 0; u < kChunk; ++u)
      HEADRACE_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256 query = _mm256_broadcast_ss(queries + r * head_dim + d + u);
        HEADRACE_UNROLL
        for (int o = 0; o < O; ++o) sums[r][o] = _mm256_fmadd_ps(units[o][u], query, sums[r][o]);
      }
  }
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int o = 0; o < O; ++o) _mm256_storeu_ps(scores + r * kTile + o * 8, sums[r][o]);
}

// Scores of R queries against a unit's keys.
template <typename T, int R>
inline void score_unit(const float* queries, int head_dim, const UnitPlace& keys, int64_t stride, float* scores,
                       const Coming& coming) {
  constexpr int kOctets = R <= 4 ? 2 : 1;
  const int64_t octet_lines = head_dim * int(sizeof(T)) / 8;
  for (int o = 0; o < kUnit / 8; o += kOctets)
    score_octets<T, R, kOctets>(queries, head_dim, keys.quads + 2 * o, stride, scores + o * 8, coming, o * octet_lines);
}

// Adds prob * value over the unit's tokens first .. last - 1, in order, to 8 * C columns of R sums.
template <typename T, int R, int C>
inline void weigh_columns_of_unit(const float* probs, int column, int first, int last, const UnitPlace& values,
                                  int64_t stride, float* all_sums, int64_t sums_stride, const Coming& coming) {
  constexpr int kRowBytes = C * 8 * int(sizeof(T));
  const int64_t at = column * int64_t(sizeof(T));
  __m256 sums[R][C];
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int c = 0; c < C; ++c) sums[r][c] = _mm256_loadu_ps(all_sums + r * sums_stride + c * 8);
  for (int t = first; t < last; ++t) {
    const T* row = reinterpret_cast<const T*>(values.quads[t / kQuad] + (t % kQuad) * stride + at);
    const int64_t coming_byte = at * kUnit + t * kRowBytes;
    if (kRowBytes >= 64 || coming_byte % 64 == 0) coming.fetch<(kRowBytes + 63) / 64>(coming_byte / 64);
    // Whichever are fewer wait in registers: there is none to spare.
    if constexpr (R < C) {
      __m256 token_probs[R];
      HEADRACE_UNROLL
      for (int r = 0; r < R; ++r) token_probs[r] = _mm256_broadcast_ss(probs + r * kTile + t);
      HEADRACE_UNROLL
      for (int c = 0; c < C; ++c) {
        const __m256 numbers = load_eight(row + c * 8);
        HEADRACE_UNROLL
        for (int r = 0; r < R; ++r) sums[r][c] = _mm256_fmadd_ps(token_probs[r], numbers, sums[r][c]);
      }
    } else {
      __m256 numbers[C];
      HEADRACE_UNROLL
      for (int c = 0; c < C; ++c) numbers[c] = load_eight(row + c * 8);
      HEADRACE_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256 prob = _mm256_broadcast_ss(probs + r * kTile + t);
        HEADRACE_UNROLL
        for (int c = 0; c < C; ++c) sums[r][c] = _mm256_fmadd_ps(prob, numbers[c], sums[r][c]);
      }
    }
  }
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int c = 0; c < C; ++c) _mm256_storeu_ps(all_sums + r * sums_stride + c * 8, sums[r][c]);
}

// Adds prob * value over the unit's tokens first .. last - 1, in order, to R sums.
template <typename T, int R>
inline void weigh_unit(const float* probs, int head_dim, int first, int last, const UnitPlace& values, int64_t stride,
                       float* sums, int64_t sums_stride, const Coming& coming) {
  constexpr int kColumns = R == 1 ? 8 : (R <= 3 ? 4 : (R <= 6 ? 2 : 1));
  // Else each token fetches its share.
  if (last - first < kUnit) coming.fetch_all(head_dim * int(sizeof(T)));
  int d = 0;
  for (; d + 8 * kColumns <= head_dim; d += 8 * kColumns)
    weigh_columns_of_unit<T, R, kColumns>(probs, d, first, last, values, stride, sums + d, sums_stride, coming);
  for (; d < head_dim; d += 8)
    weigh_columns_of_unit<T, R, 1>(probs, d, first, last, values, stride, sums + d, sums_stride, coming);
}

#endif

}  // namespace
