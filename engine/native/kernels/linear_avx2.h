// Products of floating-point weights for processors with AVX2 and no more. See linear.cpp for how weights are packed and
// what `Math` is.
#pragma once

#include <type_traits>

#include "rows.h"

#if defined(HEADRACE_AVX2_ONLY)

namespace {

using headrace::kPanel;
using headrace::LinearCall;

// How a panel is gone through: block by block, which the first cache keeps for all rows, some rows after the other, all
// outputs at once or half of them. With few rows the weights come from memory, in order: half of a panel's outputs at a
// time would leave out every second line, at half the memory's pace.
struct FewRows {
  template <typename Math>
  static constexpr int kRows = Math::kRowsOfFew;  // at once
  template <typename Math>
  static constexpr int kParts = kPanel / 8;  // half vectors at once
  static int64_t units(int64_t) { return 16; }  // of a block
  static int64_t ahead_bytes(int64_t) { return 3072; }
};
struct SomeRows {
  template <typename Math>
  static constexpr int kRows = Math::kRowsOfSome;
  template <typename Math>
  static constexpr int kParts = Math::kPartsOfSome;
  static int64_t units(int64_t num_rows) { return num_rows <= 16 ? 64 : 96; }
  static int64_t ahead_bytes(int64_t num_rows) { return units(num_rows) * kPanel * 4; }
};

// Lines that are fetched meanwhile, so many at every kFetchUnits.
struct Coming {
  const char* begin;
  int64_t num_lines;
};
constexpr int64_t kFetchUnits = 8;

// Adds the products of one unit, `u` of the rows, to the sums of R of them.
template <typename Math, int R, int P>
inline __attribute__((always_inline)) void add_unit(const char* in, int64_t row_bytes, const float* unit, int64_t u,
                                                    __m256 (&sums)[R][P]) {
  HEADRACE_UNROLL
  for (int i = 0; i < Math::kInputs; ++i) {
    // Else GCC keeps the unit for its second input, for which there are not registers enough.
    if (i > 0) asm volatile("" : : : "memory");
    const auto input = [&](int r) {
      return _mm256_broadcast_ss(reinterpret_cast<const float*>(in + r * row_bytes) + u * Math::kInputs + i);
    };
    const auto weights = [&](int p) { return Math::weights_of(_mm256_loadu_ps(unit + p * 8), i); };
    const auto add = [](__m256* sum, __m256 weight, __m256 number) {
      *sum = _mm256_fmadd_ps(weight, number, *sum);
      // Else GCC moves sums to the stack and back where it might stay in its register.
      if (Math::kInputs > 1) asm("" : "+x"(*sum));
    };
    // Of inputs and weights, what there is less of is kept in registers, the other comes one by one.
    if constexpr (R < P) {
      __m256 kept[R];
      HEADRACE_UNROLL
      for (int r = 0; r < R; ++r) kept[r] = input(r);
      HEADRACE_UNROLL
      for (int p = 0; p < P; ++p) {
        const __m256 other = weights(p);
        HEADRACE_UNROLL
        for (int r = 0; r < R; ++r) add(&sums[r][p], other, kept[r]);
      }
    } else {
      __m256 kept[P];
      HEADRACE_UNROLL
      for (int p = 0; p < P; ++p) kept[p] = weights(p);
      HEADRACE_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256 other = input(r);
        HEADRACE_UNROLL
        for (int p = 0; p < P; ++p) add(&sums[r][p], kept[p], other);
      }
    }
  }
}

// Adds a block's products to the sums of R rows.
template <typename Math, int R, int P>
void add_block(const char* in, int64_t row_bytes, const float* block, int64_t num_units, float* all_sums,
               Coming coming) {
  __m256 sums[R][P];
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int p = 0; p < P; ++p) sums[r][p] = _mm256_load_ps(all_sums + r * kPanel + p * 8);
  for (int64_t first = 0; first < num_units; first += kFetchUnits) {
    for (int64_t i = 0; i < coming.num_lines; ++i, coming.begin += 64) prefetch(coming.begin);
    const int64_t last = first + kFetchUnits < num_units ? first + kFetchUnits : num_units;
    for (int64_t u = first; u < last; ++u) add_unit<Math>(in, row_bytes, block + u * kPanel, u, sums);
  }
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int p = 0; p < P; ++p) _mm256_store_ps(all_sums + r * kPanel + p * 8, sums[r][p]);
}

// `add_block` for up to R rows.
template <typename Math, int R, int P>
void add_block_for(int64_t num_rows, const char* in, int64_t row_bytes, const float* block, int64_t num_units,
                   float* sums, Coming coming) {
  if constexpr (R > 1)
    if (num_rows < R) return add_block_for<Math, R - 1, P>(num_rows, in, row_bytes, block, num_units, sums, coming);
  add_block<Math, R, P>(in, row_bytes, block, num_units, sums, coming);
}

template <int N>
using Const = std::integral_constant<int, N>;

// Sums that are kept at once.
constexpr int64_t kMostSums = 96;

// Up to kMostSums rows.
template <typename Math, typename Out, typename Way>
void multiply_rows_in_blocks(const LinearCall& call, int64_t first_row, int64_t num_rows, int64_t panel,
                             bool is_fetching) {
  constexpr int kRows = Way::template kRows<Math>, kParts = Way::template kParts<Math>;
  typedef typename Math::Stored Stored;
  alignas(64) float sums[kMostSums][kPanel];
  const int64_t num_units = Math::num_units(call.width);
  const int64_t row_bytes = call.in_stride * int64_t(sizeof(typename Math::Input));
  const char* in = static_cast<const char*>(call.in) + first_row * row_bytes;
  const float* weights = call.weights + panel * kPanel * num_units;
  // A rest of one or two rows would cost as much as three; it goes with three others, half the outputs at a time.
  const int64_t num_joined = kRows == 3 && num_rows > 2 * kRows && num_rows % kRows ? kRows + num_rows % kRows : 0;
  // The others are of nearly equal size.
  const int64_t num_others = num_rows - num_joined, num_groups = (num_others + kRows - 1) / kRows;
  for (int64_t row = 0; row < num_rows; ++row) {
    prefetch_rows<Stored, Out, 1>(call, first_row + row, panel * kPanel);
    for (float& sum : sums[row]) sum = 0.f;
  }
  const int64_t block_units = Way::units(num_rows);
  for (int64_t unit = 0; unit < num_units; unit += block_units) {
    const int64_t count = num_units - unit < block_units ? num_units - unit : block_units;
    const char* ahead = reinterpret_cast<const char*>(weights + unit * kPanel) + Way::ahead_bytes(num_rows);
    const char* const end = ahead + count * kPanel * 4;
    const int64_t num_steps = (count + kFetchUnits - 1) / kFetchUnits;
    const int64_t num_turns = (num_groups * (kPanel / 8 / kParts) + (num_joined ? 2 : 0)) * num_steps;
    Coming coming = {ahead, is_fetching ? (count * kPanel * 4 / 64 + num_turns - 1) / num_turns : 0};
    const auto add = [&](auto most_rows, auto parts, int64_t begin, int64_t rows, int column) {
      add_block_for<Math, most_rows, parts>(rows, in + begin * row_bytes + unit * Math::kInputs * 4, row_bytes,
                                            weights + unit * kPanel + column, count, sums[begin] + column, coming);
      coming.begin += coming.num_lines * num_steps * 64;
      if (coming.begin >= end) coming.num_lines = 0;
    };
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t begin = num_others * group / num_groups, rows = num_others * (group + 1) / num_groups - begin;
      for (int column = 0; column < kPanel; column += 8 * kParts)
        add(Const<kRows>(), Const<kParts>(), begin, rows, column);
    }
    if (num_joined)
      for (int column = 0; column < kPanel; column += kPanel / 2)
        add(Const<2 * kRows - 1>(), Const<kPanel / 16>(), num_others, num_joined, column);
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const F16 row_sums[1][kVectors] = {{load(sums[row]), load(sums[row] + kLanes)}};
    store_rows<Stored, Out, 1>(call, first_row + row, panel * kPanel, row_sums);
  }
}

template <typename Math, typename Out>
void multiply_block(const LinearCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                    int64_t last_panel) {
  const int64_t num_rows = last_row - first_row;
  if (num_rows <= Math::kFewRows) {
    // One pass goes at the memory's pace, which the processor's own prefetching keeps best.
    const bool is_fetching = num_rows > Math::kRowsOfFew;
    for (int64_t panel = first_panel; panel < last_panel; ++panel)
      multiply_rows_in_blocks<Math, Out, FewRows>(call, first_row, num_rows, panel, is_fetching);
    return;
  }
  // A panel comes from memory once, for the first part of the rows.
  const int64_t num_parts = (num_rows + kMostSums - 1) / kMostSums;
  for (int64_t panel = first_panel; panel < last_panel; ++panel)
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t begin = num_rows * part / num_parts, end = num_rows * (part + 1) / num_parts;
      multiply_rows_in_blocks<Math, Out, SomeRows>(call, first_row + begin, end - begin, panel, part == 0);
    }
}

}  // namespace

#endif
