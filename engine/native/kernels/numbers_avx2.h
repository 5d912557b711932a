// Products of few fp32 rows with the whole numbers that fp32 weights were restored from, for processors with AVX2 and
// no more: few rows wait for weights, and these are a seventh or a quarter of them. Each weight is restored to the fp32
// number that it is, and the sums are those of linear_avx2.h: the same to the bit. See quantised.cpp for how whole
// numbers are packed.
#pragma once

#include "linear_avx2.h"

#if defined(HEADRACE_AVX2_ONLY)

namespace {

using headrace::kGroup;

// Where an input lies in a word has to be known when this is compiled.
#define UNROLL_GROUP _Pragma("GCC unroll 32")
static_assert(kGroup == 32, "UNROLL_GROUP unrolls a group");

// Eight outputs of one group: what their whole numbers mean. A number is at most eight bits long and a scale eleven, so
// one fused multiplication and addition rounds as often as a product, which is exact, and an addition do.
template <bool Is4Bits>
struct KeptOutputs {
  static constexpr int kParts = kPanel / 8;
  static constexpr int64_t kScaleBytes = (Is4Bits ? 4 : 2) * kPanel;
  static constexpr int64_t kGroupBytes = kScaleBytes + kGroup * kPanel / (Is4Bits ? 2 : 1);

  static __m256 halves(const char* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static __m256 scales(const char* group, int part) { return halves(group + part * 16); }
  // What a number of zero means.
  static __m256 least(const char* group, int part, __m256 scale) {
    if (Is4Bits) return halves(group + kPanel * 2 + part * 16);
    return _mm256_mul_ps(scale, _mm256_set1_ps(-128.f));
  }
  // The words with input `i` of a group.
  static const __m256i* words(const char* group, int part, int i) {
    const char* numbers = group + kScaleBytes + part % 2 * 32;
    return reinterpret_cast<const __m256i*>(Is4Bits ? numbers + part / 2 * 256 + i % 16 / 4 * 64
                                                    : numbers + part / 2 * 64 + i / 4 * 128);
  }
  static constexpr int shift(int i) { return Is4Bits ? i % 4 * 8 + i / 16 * 4 : i % 4 * 8; }
  static __m256 weights(__m256i words, int i, __m256 scale, __m256 least) {
    const __m256i numbers = _mm256_and_si256(_mm256_srli_epi32(words, shift(i)), _mm256_set1_epi32(Is4Bits ? 15 : 255));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(numbers), scale, least);
  }
};

// Else GCC keeps the words of four bits that it reads for the first half of a group for the second one, on the stack.
inline void forget_words(int i) {
  if (i == kGroup / 2) asm volatile("" : : : "memory");
}

// One group of a panel as numbers: of each input all 32 outputs.
template <bool Is4Bits>
void restore_group(const char* group, float* out) {
  typedef KeptOutputs<Is4Bits> Outputs;
  for (int part = 0; part < Outputs::kParts; ++part) {
    const __m256 scale = Outputs::scales(group, part), least = Outputs::least(group, part, scale);
    UNROLL_GROUP
    for (int i = 0; i < kGroup; ++i) {
      forget_words(i);
      _mm256_store_ps(out + i * kPanel + part * 8,
                      Outputs::weights(_mm256_loadu_si256(Outputs::words(group, part, i)), i, scale, least));
    }
  }
}

// Adds a group's products to the sums of one row or two, P times eight outputs of them: weights go from register to
// register.
template <bool Is4Bits, int R, int P>
inline __attribute__((always_inline)) void add_kept_group(const char* group, int first_part, const float* in,
                                                          int64_t row_stride, __m256 (&sums)[R][P]) {
  typedef KeptOutputs<Is4Bits> Outputs;
  __m256 scales[P];
  alignas(32) float least[P * 8];
  HEADRACE_UNROLL
  for (int p = 0; p < P; ++p) {
    scales[p] = Outputs::scales(group, first_part + p);
    _mm256_store_ps(least + p * 8, Outputs::least(group, first_part + p, scales[p]));
  }
  UNROLL_GROUP
  for (int i = 0; i < kGroup; ++i) {
    forget_words(i);
    __m256 inputs[R];
    HEADRACE_UNROLL
    for (int r = 0; r < R; ++r) inputs[r] = _mm256_broadcast_ss(in + r * row_stride + i);
    HEADRACE_UNROLL
    for (int p = 0; p < P; ++p) {
      const __m256 weights = Outputs::weights(_mm256_loadu_si256(Outputs::words(group, first_part + p, i)), i,
                                              scales[p], _mm256_load_ps(least + p * 8));
      HEADRACE_UNROLL
      for (int r = 0; r < R; ++r) sums[r][p] = _mm256_fmadd_ps(weights, inputs[r], sums[r][p]);
    }
  }
}

template <bool Is4Bits, typename Out, int R>
void multiply_kept_few(const LinearCall& call, int64_t row, int64_t panel) {
  typedef KeptOutputs<Is4Bits> Outputs;
  constexpr int kAtOnce = R == 1 ? Outputs::kParts : Outputs::kParts / 2;
  const int64_t num_groups = call.width / kGroup;
  const float* in = static_cast<const float*>(call.in) + row * call.in_stride;
  const char* group = reinterpret_cast<const char*>(call.weights) + panel * num_groups * Outputs::kGroupBytes;
  prefetch_rows<float, Out, R>(call, row, panel * kPanel);
  __m256 sums[Outputs::kParts / kAtOnce][R][kAtOnce];
  HEADRACE_UNROLL
  for (int part = 0; part < Outputs::kParts; ++part)
    HEADRACE_UNROLL
    for (int r = 0; r < R; ++r) sums[part / kAtOnce][r][part % kAtOnce] = _mm256_setzero_ps();
  for (int64_t g = 0; g < num_groups; ++g, group += Outputs::kGroupBytes)
    HEADRACE_UNROLL
    for (int part = 0; part < Outputs::kParts; part += kAtOnce)
      add_kept_group<Is4Bits, R, kAtOnce>(group, part, in + g * kGroup, call.in_stride, sums[part / kAtOnce]);
  F16 row_sums[R][kVectors];
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int v = 0; v < kVectors; ++v)
      row_sums[r][v] = F16{sums[2 * v / kAtOnce][r][2 * v % kAtOnce], sums[2 * v / kAtOnce][r][2 * v % kAtOnce + 1]};
  store_rows<float, Out, R>(call, row, panel * kPanel, row_sums);
}

// A block is two groups of a panel, all 32 outputs of each of their inputs.
constexpr int kBlockGroups = 2, kBlockUnits = kBlockGroups * kGroup, kAside = 2048 / 4;

// A part of a block that is restored while another is computed with: kBlockUnits vectors for each of kPerUnit.
struct Restoring {
  const char* groups;  // packed
  float* out;
  int turn;
};

// Adds a block's products for 16 outputs to the sums of R rows and restores a part of the next block beside it, PerUnit
// vectors at every unit: the two keep different parts of the processor busy.
template <typename Math, bool Is4Bits, int R, int PerUnit>
__attribute__((noinline)) void add_block_restoring(const char* in, int64_t row_bytes, const float* block,
                                                   float* all_sums, Restoring next) {
  typedef KeptOutputs<Is4Bits> Outputs;
  // Blocks come from memory, in order: of the one after the next, so many lines at each half of a turn.
  constexpr int64_t kBlockBytes = kBlockGroups * Outputs::kGroupBytes, kAheadBytes = 2 * kBlockBytes;
  constexpr int kLines = (kBlockBytes / 64 * PerUnit + 7) / 8;
  __m256 sums[R][2];
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int p = 0; p < 2; ++p) sums[r][p] = _mm256_load_ps(all_sums + r * kPanel + p * 8);
  for (int half = 0; half < 2; ++half) {
    // Vectors of a block in the order of turns: of each group its parts.
    const int first = (next.turn * 2 + half) * PerUnit;
    const char* group = next.groups + first / Outputs::kParts * Outputs::kGroupBytes;
    const int part = first % Outputs::kParts;
    alignas(32) float scales[PerUnit][8], least[PerUnit][8];
    HEADRACE_UNROLL
    for (int k = 0; k < PerUnit; ++k) {
      const __m256 scale = Outputs::scales(group, part + k);
      _mm256_store_ps(scales[k], scale);
      _mm256_store_ps(least[k], Outputs::least(group, part + k, scale));
    }
    for (int line = 0; line < kLines; ++line)
      prefetch(next.groups + kAheadBytes + ((next.turn * 2 + half) * kLines + line) * 64);
    float* out = next.out + first / Outputs::kParts * kGroup * kPanel + part * 8;
    UNROLL_GROUP
    for (int i = 0; i < kGroup; ++i) {
      forget_words(i);
      HEADRACE_UNROLL
      for (int k = 0; k < PerUnit; ++k)
        _mm256_store_ps(out + i * kPanel + k * 8,
                        Outputs::weights(_mm256_loadu_si256(Outputs::words(group, part + k, i)), i,
                                         _mm256_load_ps(scales[k]), _mm256_load_ps(least[k])));
      add_unit<Math>(in, row_bytes, block + (half * kGroup + i) * kPanel, half * kGroup + i, sums);
    }
  }
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int p = 0; p < 2; ++p) _mm256_store_ps(all_sums + r * kPanel + p * 8, sums[r][p]);
}

template <typename Math, bool Is4Bits, int PerUnit, int R>
void add_block_restoring_for(int64_t num_rows, const char* in, int64_t row_bytes, const float* block, float* sums,
                             Restoring next) {
  if constexpr (R > 1)
    if (num_rows < R)
      return add_block_restoring_for<Math, Is4Bits, PerUnit, R - 1>(num_rows, in, row_bytes, block, sums, next);
  add_block_restoring<Math, Is4Bits, R, PerUnit>(in, row_bytes, block, sums, next);
}

// At most so many rows at once: beside the sums of more there are no registers to restore with.
constexpr int64_t kRestoring = 4;

// Up to twice as many rows: block by block is restored into the first cache for all of them, the next one while one is
// computed with.
template <typename Math, bool Is4Bits, typename Out>
void multiply_kept_some(const LinearCall& call, int64_t first_row, int64_t num_rows, int64_t first_panel,
                        int64_t last_panel) {
  typedef KeptOutputs<Is4Bits> Outputs;
  alignas(64) float sums[2 * kRestoring][kPanel];
  // A block's numbers are stored half a page away from where others are read meanwhile: a load waits for a store before
  // it whose address ends in the same twelve bits.
  alignas(64) float blocks[2][kBlockUnits * kPanel + kAside];
  const int64_t num_groups = call.width / kGroup, row_bytes = call.in_stride * 4;
  const char* in = static_cast<const char*>(call.in) + first_row * row_bytes;
  const char* group = reinterpret_cast<const char*>(call.weights) + first_panel * num_groups * Outputs::kGroupBytes;
  const char* end = reinterpret_cast<const char*>(call.weights) + last_panel * num_groups * Outputs::kGroupBytes;
  const int64_t num_runs = num_rows <= kRestoring ? 1 : 2;
  int now = 0;
  const auto restore_now = [&] {
    for (int64_t i = 0; i < kBlockGroups; ++i)
      if (group + i * Outputs::kGroupBytes < end)
        restore_group<Is4Bits>(group + i * Outputs::kGroupBytes, blocks[now] + i * kGroup * kPanel);
  };
  restore_now();
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    for (int64_t row = 0; row < num_rows; ++row) {
      prefetch_rows<float, Out, 1>(call, first_row + row, panel * kPanel);
      for (float& sum : sums[row]) sum = 0.f;
    }
    for (int64_t g = 0; g < num_groups; g += kBlockGroups) {
      const int64_t count = num_groups - g < kBlockGroups ? num_groups - g : kBlockGroups;
      const char* next_group = group + count * Outputs::kGroupBytes;
      const bool is_restoring = count == kBlockGroups && next_group + kBlockGroups * Outputs::kGroupBytes <= end;
      const char* block_in = in + g * kGroup * 4;
      const float* block = blocks[now];
      int turn = 0;
      for (int64_t run = 0; run < num_runs; ++run) {
        const int64_t begin = num_rows * run / num_runs;
        const int64_t rows = num_rows * (run + 1) / num_runs - begin;
        const char* run_in = block_in + begin * row_bytes;
        for (int column = 0; column < kPanel; column += kLanes, ++turn) {
          const Restoring next = {next_group, blocks[1 - now], turn};
          float* run_sums = sums[begin] + column;
          if (!is_restoring)
            add_block_for<Math, kRestoring, 2>(rows, run_in, row_bytes, block + column, count * kGroup, run_sums,
                                               Coming{nullptr, 0});
          else if (num_runs == 1)
            add_block_restoring_for<Math, Is4Bits, 2, kRestoring>(rows, run_in, row_bytes, block + column, run_sums,
                                                                  next);
          else
            add_block_restoring_for<Math, Is4Bits, 1, kRestoring>(rows, run_in, row_bytes, block + column, run_sums,
                                                                  next);
        }
      }
      group = next_group;
      now = 1 - now;
      if (!is_restoring) restore_now();
    }
    for (int64_t row = 0; row < num_rows; ++row) {
      const F16 row_sums[1][kVectors] = {{load(sums[row]), load(sums[row] + kLanes)}};
      store_rows<float, Out, 1>(call, first_row + row, panel * kPanel, row_sums);
    }
  }
}

// As many rows as are computed with sooner so than with numbers of fp32. `Math` is that of fp32.
constexpr int64_t kMostKept = 2 * kRestoring;

template <typename Math, bool Is4Bits, typename Out>
void multiply_kept(const LinearCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                   int64_t last_panel) {
  const int64_t num_rows = last_row - first_row;
  if (num_rows > 2)
    return multiply_kept_some<Math, Is4Bits, Out>(call, first_row, num_rows, first_panel, last_panel);
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    if (num_rows == 1) multiply_kept_few<Is4Bits, Out, 1>(call, first_row, panel);
    if (num_rows == 2) multiply_kept_few<Is4Bits, Out, 2>(call, first_row, panel);
  }
}

}  // namespace

#endif
