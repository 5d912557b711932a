// Products with packed weights. Each output is one sum over the inputs in order, so a row's result depends on that
// row alone, to the bit, however many rows there are. Compiled once per instruction set; HEADRACE_VARIANT is its name.
//
// Packed: panels of 32 outputs; in a panel, for each unit of the input (a number, or for the bf16 dot product a pair),
// that unit of all 32 outputs.
#include <cstdlib>

#include "linear_avx2.h"
#include "numbers_avx2.h"
#include "rows.h"
#include "variant.h"

namespace {

using headrace::LinearCall;
using headrace::kPanel;

struct Fp32Linear {
  typedef float Stored;
  typedef float Input;
  static constexpr int kInputs = 1;  // of a unit
  static int64_t num_units(int64_t width) { return width; }
  static F16 weights_of(F16 unit, int) { return unit; }
  static F16 multiply_add(F16 sums, F16 weights, F16 input) { return fma(weights, input, sums); }
#if defined(HEADRACE_AVX2_ONLY)
  static constexpr int kFewRows = 6, kRowsOfFew = 3, kRowsOfSome = 3, kPartsOfSome = 4;
  static __m256 weights_of(__m256 unit, int) { return unit; }
#endif
};

#if defined(__AVX512BF16__)
struct Bf16Linear {
  typedef bf16 Stored;
  typedef bf16 Input;
  static constexpr int kInputs = 1;  // a pair
  static int64_t num_units(int64_t width) { return width / 2; }
  static F16 weights_of(F16 unit, int) { return unit; }
  static F16 multiply_add(F16 sums, F16 weights, F16 input) { return DotMath::multiply_add(sums, weights, input); }
};
#elif defined(HEADRACE_AVX2_ONLY)
// Weights are kept in bf16 and widened on their way; inputs are widened before.
struct Bf16Linear {
  typedef bf16 Stored;
  typedef float Input;
  static constexpr int kInputs = 2;
  static int64_t num_units(int64_t width) { return width / 2; }
  static F16 weights_of(F16 unit, int index) { return {weights_of(unit.low, index), weights_of(unit.high, index)}; }
  static F16 multiply_add(F16 sums, F16 weights, F16 input) { return fma(weights, input, sums); }
  static constexpr int kFewRows = 4, kRowsOfFew = 2, kRowsOfSome = 6, kPartsOfSome = 2;
  static __m256 weights_of(__m256 unit, int index) {
    if (index == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(unit), 16));
    return _mm256_and_ps(unit, _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000))));
  }
};
// The same weights with inputs and outputs in fp32: each sum is that of the widened weights, to the bit.
struct KeptBf16Linear : Bf16Linear {
  typedef float Stored;
};
#endif

#if !defined(HEADRACE_AVX2_ONLY)

// The sums of so many rows fill the registers, with all outputs of a panel or, without AVX-512, half of them.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
constexpr int vectors_at_once(int) { return kVectors; }
#else
constexpr int kMaxRows = 6;
constexpr int vectors_at_once(int num_rows) { return num_rows <= 2 ? kVectors : 1; }
#endif

// The next panel's share that is fetched while one group of rows is computed: so many bytes at each unit.
struct NextPanel {
  const char* begin;
  int64_t step;
  int64_t second;  // distance to a second line of the same unit, or 0
};

// The sums of R rows for one panel.
template <typename Math, int R>
inline void panel_sums(const char* in, int64_t row_bytes, const float* panel, int64_t num_units, NextPanel next,
                       F16 (&all_sums)[R][kVectors]) {
  constexpr int kAtOnce = vectors_at_once(R);
  for (int first = 0; first < kVectors; first += kAtOnce) {
    F16 sums[R][kAtOnce];
    HEADRACE_UNROLL
    for (int r = 0; r < R; ++r)
      HEADRACE_UNROLL
      for (int v = 0; v < kAtOnce; ++v) sums[r][v] = splat(0.f);
    for (int64_t u = 0; u < num_units; ++u) {
      prefetch(next.begin + u * next.step + (first ? next.second : 0));
      if (kAtOnce == kVectors) prefetch(next.begin + u * next.step + next.second);
      F16 units[kAtOnce];
      HEADRACE_UNROLL
      for (int v = 0; v < kAtOnce; ++v) units[v] = load(panel + u * kPanel + (first + v) * kLanes);
      HEADRACE_UNROLL
      for (int i = 0; i < Math::kInputs; ++i) {
        F16 weights[kAtOnce];
        HEADRACE_UNROLL
        for (int v = 0; v < kAtOnce; ++v) weights[v] = Math::weights_of(units[v], i);
        HEADRACE_UNROLL
        for (int r = 0; r < R; ++r) {
          const F16 input = splat(*reinterpret_cast<const float*>(in + r * row_bytes + (u * Math::kInputs + i) * 4));
          HEADRACE_UNROLL
          for (int v = 0; v < kAtOnce; ++v) sums[r][v] = Math::multiply_add(sums[r][v], weights[v], input);
        }
      }
    }
    HEADRACE_UNROLL
    for (int r = 0; r < R; ++r)
      HEADRACE_UNROLL
      for (int v = 0; v < kAtOnce; ++v) all_sums[r][first + v] = sums[r][v];
  }
}

template <typename Math, typename Out, int R>
void multiply_rows(const LinearCall& call, int64_t row, int64_t panel, NextPanel next) {
  typedef typename Math::Stored Stored;
  const int64_t num_units = Math::num_units(call.width);
  const int64_t column = panel * kPanel, row_bytes = call.in_stride * int64_t(sizeof(typename Math::Input));
  const char* in = static_cast<const char*>(call.in) + row * row_bytes;
  prefetch_rows<Stored, Out, R>(call, row, column);
  F16 sums[R][kVectors];
  panel_sums<Math, R>(in, row_bytes, call.weights + panel * kPanel * num_units, num_units, next, sums);
  store_rows<Stored, Out, R>(call, row, column, sums);
}

template <typename Math, typename Out>
void multiply_some(const LinearCall& call, int64_t row, int count, int64_t panel, NextPanel next) {
  switch (count) {
    case 1: return multiply_rows<Math, Out, 1>(call, row, panel, next);
    case 2: return multiply_rows<Math, Out, 2>(call, row, panel, next);
    case 3: return multiply_rows<Math, Out, 3>(call, row, panel, next);
    case 4: return multiply_rows<Math, Out, 4>(call, row, panel, next);
    case 5: return multiply_rows<Math, Out, 5>(call, row, panel, next);
    case 6: return multiply_rows<Math, Out, 6>(call, row, panel, next);
#if defined(__AVX512F__)
    case 7: return multiply_rows<Math, Out, 7>(call, row, panel, next);
    case 8: return multiply_rows<Math, Out, 8>(call, row, panel, next);
    case 9: return multiply_rows<Math, Out, 9>(call, row, panel, next);
    case 10: return multiply_rows<Math, Out, 10>(call, row, panel, next);
    case 11: return multiply_rows<Math, Out, 11>(call, row, panel, next);
    case 12: return multiply_rows<Math, Out, 12>(call, row, panel, next);
#endif
  }
}

// Few rows: the weights come from memory, one panel after the other, the next one on its way.
template <typename Math, typename Out>
void multiply_few(const LinearCall& call, int64_t first_row, int64_t num_rows, int64_t num_groups, int64_t first_panel,
                  int64_t last_panel) {
  const int64_t panel_bytes = Math::num_units(call.width) * kPanel * 4;
  const int64_t share = panel_bytes / num_groups;
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    // Past the last panel, what is there already.
    const int64_t ahead = panel + 1 < last_panel ? panel + 1 : panel;
    const char* next_panel = reinterpret_cast<const char*>(call.weights) + ahead * panel_bytes;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t begin = num_rows * group / num_groups, end = num_rows * (group + 1) / num_groups;
      NextPanel next = {next_panel + share * group, kPanel * 4 / num_groups, num_groups == 1 ? 64 : 0};
      // One or two rows go at the memory's pace, which the processor's own prefetching keeps best.
      if (num_rows <= 2) next = {next_panel, 0, 0};
      multiply_some<Math, Out>(call, first_row + begin, int(end - begin), panel, next);
    }
  }
}

// Many rows: some panels stay in the core's cache for all of them, the next ones on their way.
template <typename Math, typename Out>
void multiply_many(const LinearCall& call, int64_t first_row, int64_t num_rows, int64_t num_groups, int64_t first_panel,
                   int64_t last_panel) {
  constexpr int64_t kPanelsBytes = 160 * 1024;
  const int64_t panel_bytes = Math::num_units(call.width) * kPanel * 4;
  const int64_t step = panel_bytes < kPanelsBytes ? kPanelsBytes / panel_bytes : 1;
  for (int64_t first = first_panel; first < last_panel; first += step) {
    const int64_t last = first + step < last_panel ? first + step : last_panel;
    const int64_t ahead = last < last_panel ? last : first;
    const char* next_panels = reinterpret_cast<const char*>(call.weights) + ahead * panel_bytes;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t begin = num_rows * group / num_groups, end = num_rows * (group + 1) / num_groups;
      for (int64_t panel = first; panel < last; ++panel) {
        const int64_t part = group * (last - first) + panel - first;
        multiply_some<Math, Out>(call, first_row + begin, int(end - begin), panel,
                                 {next_panels + part * (panel_bytes / num_groups), kPanel * 4 / num_groups, 0});
      }
    }
  }
}

template <typename Math, typename Out>
void multiply_block(const LinearCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                    int64_t last_panel) {
  const int64_t num_rows = last_row - first_row;
  // Of nearly equal size: a rest of one row would cost as much as half a group.
  const int64_t num_groups = (num_rows + kMaxRows - 1) / kMaxRows;
  const auto multiply = num_groups <= 4 ? multiply_few<Math, Out> : multiply_many<Math, Out>;
  multiply(call, first_row, num_rows, num_groups, first_panel, last_panel);
}

#endif

template <typename Math>
void multiply_typed(const LinearCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                    int64_t last_panel) {
  if (call.is_out_fp32) return multiply_block<Math, float>(call, first_row, last_row, first_panel, last_panel);
  multiply_block<Math, typename Math::Stored>(call, first_row, last_row, first_panel, last_panel);
}

#if defined(HEADRACE_AVX2_ONLY)

// Kept by each thread: fresh memory would be mapped and unmapped at each call.
struct WideRows {
  ~WideRows() { std::free(numbers); }
  float* at_least(int64_t count) {
    if (count > size) {
      std::free(numbers);
      size = (count + 1023) / 1024 * 1024;
      numbers = static_cast<float*>(std::aligned_alloc(64, size_t(size) * 4));
    }
    return numbers;
  }
  float* numbers = nullptr;
  int64_t size = 0;
};

thread_local WideRows wide_rows;

void multiply_widened(LinearCall call, int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel) {
  const int64_t num_rows = last_row - first_row, width = call.width;
  float* wide = wide_rows.at_least(num_rows * width);
  for (int64_t row = 0; row < num_rows; ++row) {
    const bf16* from = static_cast<const bf16*>(call.in) + (first_row + row) * call.in_stride;
    for (int64_t i = 0; i < width; i += kLanes)
      store_first(wide + row * width + i, load_first(from + i, int(width - i)), int(width - i));
  }
  // Rows are found from the first of all.
  call.in = wide - first_row * width;
  call.in_stride = width;
  multiply_typed<Bf16Linear>(call, first_row, last_row, first_panel, last_panel);
}

#endif

}  // namespace

namespace HEADRACE_VARIANT {

bool can_multiply(headrace::DType dtype) {
#if defined(__AVX512BF16__) || defined(HEADRACE_AVX2_ONLY)
  return dtype == headrace::kFloat32 || dtype == headrace::kBfloat16;
#else
  return dtype == headrace::kFloat32;
#endif
}

void multiply(const LinearCall& call, int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel) {
#if defined(__AVX512BF16__)
  if (call.dtype == headrace::kBfloat16)
    return multiply_typed<Bf16Linear>(call, first_row, last_row, first_panel, last_panel);
#elif defined(HEADRACE_AVX2_ONLY)
  if (call.dtype == headrace::kBfloat16) return multiply_widened(call, first_row, last_row, first_panel, last_panel);
  if (call.kind == headrace::kKeptBf16)
    return multiply_typed<KeptBf16Linear>(call, first_row, last_row, first_panel, last_panel);
  const bool has_numbers = call.kind == headrace::kWithInt8 || call.kind == headrace::kWithInt4;
  if (has_numbers && last_row - first_row <= kMostKept) {
    LinearCall few = call;
    // They lie behind the weights.
    few.weights += (call.num_outputs + kPanel - 1) / kPanel * kPanel * call.width;
    const auto multiply_few = call.kind == headrace::kWithInt8 ? multiply_kept<Fp32Linear, false, float>
                                                               : multiply_kept<Fp32Linear, true, float>;
    return multiply_few(few, first_row, last_row, first_panel, last_panel);
  }
#endif
  multiply_typed<Fp32Linear>(call, first_row, last_row, first_panel, last_panel);
}

}  // namespace HEADRACE_VARIANT
