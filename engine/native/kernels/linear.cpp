// Products with packed weights. Each output is one sum over the inputs in order, so a row's result depends on that
// row alone, to the bit, however many rows there are. Compiled once per instruction set; HEADRACE_VARIANT is its name.
//
// Packed: panels of 32 outputs; in a panel, for each unit of the input (a number, or for the bf16 dot product a pair),
// that unit of all 32 outputs.
#include "rows.h"
#include "variant.h"

namespace {

using headrace::LinearCall;
using headrace::kPanel;

constexpr int kMaxRows = 12;  // 12 rows x 2 vectors of sums fill the registers

struct Fp32Linear {
  typedef float Stored;
  static int64_t num_units(int64_t width) { return width; }
  static F16 multiply_add(F16 sums, F16 weights, F16 input) { return fma(weights, input, sums); }
};

#if defined(__AVX512BF16__)
struct Bf16Linear {
  typedef bf16 Stored;
  static int64_t num_units(int64_t width) { return width / 2; }
  static F16 multiply_add(F16 sums, F16 weights, F16 input) { return DotMath::multiply_add(sums, weights, input); }
};
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
                       F16 (&sums)[R][kVectors]) {
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r)
    HEADRACE_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = splat(0.f);
  for (int64_t u = 0; u < num_units; ++u) {
    prefetch(next.begin + u * next.step);
    prefetch(next.begin + u * next.step + next.second);
    F16 weights[kVectors];
    HEADRACE_UNROLL
    for (int v = 0; v < kVectors; ++v) weights[v] = load(panel + u * kPanel + v * kLanes);
    HEADRACE_UNROLL
    for (int r = 0; r < R; ++r) {
      const F16 input = splat(*reinterpret_cast<const float*>(in + r * row_bytes + u * 4));
      HEADRACE_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Math::multiply_add(sums[r][v], weights[v], input);
    }
  }
}

template <typename Math, typename Out, int R>
void multiply_rows(const LinearCall& call, int64_t row, int64_t panel, NextPanel next) {
  typedef typename Math::Stored Stored;
  const int64_t num_units = Math::num_units(call.width);
  const int64_t column = panel * kPanel;
  const char* in = static_cast<const char*>(call.in) + row * call.in_stride * int64_t(sizeof(Stored));
  prefetch_rows<Stored, Out, R>(call, row, column);
  F16 sums[R][kVectors];
  panel_sums<Math, R>(in, call.in_stride * int64_t(sizeof(Stored)), call.weights + panel * kPanel * num_units,
                      num_units, next, sums);
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
    case 7: return multiply_rows<Math, Out, 7>(call, row, panel, next);
    case 8: return multiply_rows<Math, Out, 8>(call, row, panel, next);
    case 9: return multiply_rows<Math, Out, 9>(call, row, panel, next);
    case 10: return multiply_rows<Math, Out, 10>(call, row, panel, next);
    case 11: return multiply_rows<Math, Out, 11>(call, row, panel, next);
    default: return multiply_rows<Math, Out, 12>(call, row, panel, next);
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

template <typename Math>
void multiply_typed(const LinearCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                    int64_t last_panel) {
  if (call.is_out_fp32) return multiply_block<Math, float>(call, first_row, last_row, first_panel, last_panel);
  multiply_block<Math, typename Math::Stored>(call, first_row, last_row, first_panel, last_panel);
}

}  // namespace

namespace HEADRACE_VARIANT {

bool can_multiply(headrace::DType dtype) {
#if defined(__AVX512BF16__)
  return dtype == headrace::kFloat32 || dtype == headrace::kBfloat16;
#else
  return dtype == headrace::kFloat32;
#endif
}

void multiply(const LinearCall& call, int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel) {
#if defined(__AVX512BF16__)
  if (call.dtype == headrace::kBfloat16)
    return multiply_typed<Bf16Linear>(call, first_row, last_row, first_panel, last_panel);
#endif
  multiply_typed<Fp32Linear>(call, first_row, last_row, first_panel, last_panel);
}

}  // namespace HEADRACE_VARIANT
