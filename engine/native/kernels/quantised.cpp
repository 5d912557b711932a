// Products with weights of eight or four bits. Inputs are quantised for the product: eight bits, with a scale for each
// group of a row. The sums inside a group are of whole numbers, exact; groups are added in order. So a row's result
// depends on that row alone, to the bit. Compiled once per instruction set; HEADRACE_VARIANT is its name.
//
// Packed: panels of 32 outputs; in a panel, for each group of 32 inputs, its scales (of four bits also its least values)
// of all 32 outputs in fp16, then the weights. Of eight bits: for each four inputs, all 32 outputs. Of four bits: for each
// half of the outputs and each four inputs of the group's first half, these in the low and those 16 inputs on in the
// high bits of a byte.
#include "rows.h"
#include "variant.h"
#include "whole_numbers.h"

namespace {

using headrace::kPanel;
using headrace::LinearCall;
using headrace::QuantisedRows;

constexpr int64_t group_bytes(WeightKind kind) {
  return kind == headrace::kInt8 ? kPanel * 2 + kGroup * kPanel : kPanel * 4 + kGroup * kPanel / 2;
}

// One group of one panel for R rows: adds to `all_sums`.
template <WeightKind Kind, int R>
inline void add_group(const char* packed, const int8_t* in, int64_t row_bytes, const float* scales,
                      const int32_t* totals, int64_t num_groups, F16 (&all_sums)[R][kVectors]) {
  constexpr int kAtOnce = vectors_at_once(R);
  const char* weights = packed + (Kind == headrace::kInt8 ? 2 : 4) * kPanel;
  const GroupInputs<Kind, R> inputs(BytesOfRows{in, row_bytes});
  for (int first = 0; first < kVectors; first += kAtOnce) {
    // Else GCC keeps all inputs of one half of the outputs for the other, on the stack.
    if (kAtOnce < kVectors) asm volatile("" : : "r"(&inputs) : "memory");
    I16 dots[R][kAtOnce];
    UNROLL_HERE
    for (int r = 0; r < R; ++r)
      UNROLL_HERE
      for (int v = 0; v < kAtOnce; ++v) dots[r][v] = start<Kind>(totals[r * num_groups]);
    const auto add_unit = [&](int unit, const I16(&bytes)[kAtOnce]) {
      decltype(unit_of<Kind>(bytes[0])) w[kAtOnce];
      UNROLL_HERE
      for (int v = 0; v < kAtOnce; ++v) w[v] = unit_of<Kind>(bytes[v]);
      UNROLL_HERE
      for (int r = 0; r < R; ++r) {
        const auto input = inputs_of(inputs, r, unit);
        UNROLL_HERE
        for (int v = 0; v < kAtOnce; ++v) dots[r][v] = dot_add<Kind>(dots[r][v], w[v], input);
      }
    };
    if (Kind == headrace::kInt8) {
      UNROLL_UNITS
      for (int unit = 0; unit < kUnits; ++unit) {
        I16 w[kAtOnce];
        UNROLL_HERE
        for (int v = 0; v < kAtOnce; ++v) w[v] = load_bytes(weights + (unit * kVectors + first + v) * kLineBytes);
        add_unit(unit, w);
      }
    } else {
      UNROLL_UNITS
      for (int unit = 0; unit < kUnits / 2; ++unit) {
        I16 low[kAtOnce], high[kAtOnce];
        UNROLL_HERE
        for (int v = 0; v < kAtOnce; ++v) {
          const I16 both = load_bytes(weights + ((first + v) * kUnits / 2 + unit) * kLineBytes);
          low[v] = low_halves(both);
          high[v] = high_halves(both);
        }
        add_unit(unit, low);
        add_unit(unit + kUnits / 2, high);
      }
    }
    UNROLL_HERE
    for (int v = 0; v < kAtOnce; ++v) {
      const char* halves = packed + (first + v) * kLanes * 2;
      const F16 scale = load_halves(halves);
      UNROLL_HERE
      for (int r = 0; r < R; ++r) {
        F16 part = mul(sums_of<Kind>(dots[r][v]), scale);
        if (Kind == headrace::kInt4)
          part = fma(load_halves(halves + kPanel * 2), splat(float(totals[r * num_groups])), part);
        F16& sums = all_sums[r][first + v];
        sums = fma(part, splat(scales[r * num_groups]), sums);
      }
    }
  }
}

// What is fetched meanwhile: the groups of the next panel that are this run of rows' share.
struct NextPanel {
  const char* begin;  // null: nothing
  int64_t turn, num_turns;
};

template <WeightKind Kind, typename Stored, typename Out, int R>
void multiply_rows(const LinearCall& call, int64_t row, int64_t panel, NextPanel next) {
  constexpr int64_t kBytes = group_bytes(Kind);
  const QuantisedRows& rows = call.quantised;
  const int64_t num_groups = rows.num_groups, column = panel * kPanel;
  prefetch_rows<Stored, Out, R>(call, row, column);
  F16 sums[R][kVectors];
  UNROLL_HERE
  for (int r = 0; r < R; ++r)
    UNROLL_HERE
    for (int v = 0; v < kVectors; ++v) sums[r][v] = splat(0.f);
  const char* packed = reinterpret_cast<const char*>(call.weights) + panel * num_groups * kBytes;
  for (int64_t group = 0; group < num_groups; ++group) {
    if (next.begin && group % next.num_turns == next.turn)
      for (const char* line = next.begin + group * kBytes; line < next.begin + (group + 1) * kBytes; line += kLineBytes)
        prefetch(line);
    add_group<Kind, R>(packed + group * kBytes, rows.numbers + (row * num_groups + group) * kGroup,
                       num_groups * kGroup, rows.scales + row * num_groups + group,
                       rows.totals + row * num_groups + group, num_groups, sums);
  }
  store_rows<Stored, Out, R>(call, row, column, sums);
}

template <WeightKind Kind, typename Stored, typename Out>
void multiply_some(const LinearCall& call, int64_t row, int count, int64_t panel, NextPanel next) {
#if defined(__AVX512VNNI__) || defined(HEADRACE_AVX2_ONLY)
  switch (count) {
    case 2: return multiply_rows<Kind, Stored, Out, 2>(call, row, panel, next);
    case 3: return multiply_rows<Kind, Stored, Out, 3>(call, row, panel, next);
    case 4: return multiply_rows<Kind, Stored, Out, 4>(call, row, panel, next);
  }
#endif
#if defined(__AVX512VNNI__)
  switch (count) {
    case 5: return multiply_rows<Kind, Stored, Out, 5>(call, row, panel, next);
    case 6: return multiply_rows<Kind, Stored, Out, 6>(call, row, panel, next);
  }
#endif
  if (count == 1) multiply_rows<Kind, Stored, Out, 1>(call, row, panel, next);
}

template <WeightKind Kind, typename Stored, typename Out>
void multiply_block(const LinearCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                    int64_t last_panel) {
  // With many rows some panels stay in the core's cache for all of them.
  constexpr int64_t kPanelsBytes = 160 * 1024;
  const int64_t num_rows = last_row - first_row;
  const int64_t num_runs = (num_rows + kMaxRows - 1) / kMaxRows;
  const int64_t panel_bytes = call.quantised.num_groups * group_bytes(Kind);
  const int64_t step = num_runs <= 4 || panel_bytes >= kPanelsBytes ? 1 : kPanelsBytes / panel_bytes;
  for (int64_t first = first_panel; first < last_panel; first += step) {
    const int64_t last = first + step < last_panel ? first + step : last_panel;
    for (int64_t run = 0; run < num_runs; ++run) {
      const int64_t begin = num_rows * run / num_runs, end = num_rows * (run + 1) / num_runs;
      for (int64_t panel = first; panel < last; ++panel) {
        NextPanel next = {nullptr, run, num_runs};
        // One or two rows go at the memory's pace, which the processor's own prefetching keeps best.
        if (num_rows > 2 && panel + step < last_panel)
          next.begin = reinterpret_cast<const char*>(call.weights) + (panel + step) * panel_bytes;
        multiply_some<Kind, Stored, Out>(call, first_row + begin, int(end - begin), panel, next);
      }
    }
  }
}

template <WeightKind Kind, typename Stored>
void multiply_typed(const LinearCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                    int64_t last_panel) {
  if (call.is_out_fp32) return multiply_block<Kind, Stored, float>(call, first_row, last_row, first_panel, last_panel);
  multiply_block<Kind, Stored, Stored>(call, first_row, last_row, first_panel, last_panel);
}

// The whole numbers nearest to `x`, as bytes; returns their total.
inline int32_t store_bytes(F16 x, int8_t* out) {
#if defined(__AVX512F__)
  const __m512i whole = _mm512_cvtps_epi32(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(whole));
  return _mm512_reduce_add_epi32(whole);
#elif defined(HEADRACE_AVX2_ONLY)
  const __m256i low = _mm256_cvtps_epi32(x.low), high = _mm256_cvtps_epi32(x.high);
  // What comes of a NaN keeps its lowest byte, zero.
  const __m256i lowest = _mm256_set1_epi32(255), pairs = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(low, lowest), _mm256_and_si256(high, lowest));
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, words), pairs);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(bytes));
  __m256i total = _mm256_add_epi32(low, high);
  total = _mm256_hadd_epi32(total, total);
  total = _mm256_hadd_epi32(total, total);
  return int32_t(uint32_t(_mm256_extract_epi32(total, 0)) + uint32_t(_mm256_extract_epi32(total, 4)));
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) {
    const float nearest = __builtin_rintf(x.lane[i]);
    out[i] = nearest == nearest ? int8_t(nearest) : int8_t(0);
    total += out[i];
  }
  return total;
#endif
}

template <typename Stored>
void quantise_typed(const Stored* in, int64_t stride, int64_t width, const QuantisedRows& rows, int64_t first,
                    int64_t last) {
  for (int64_t row = first; row < last; ++row)
    for (int64_t group = 0; group < rows.num_groups; ++group) {
      const Stored* from = in + row * stride + group * kGroup;
      const int count = int(width - group * kGroup < kGroup ? width - group * kGroup : kGroup);
      const F16 low = count >= kLanes ? load(from) : load_first(from, count);
      const F16 high = count == kGroup ? load(from + kLanes) : load_first(from + kLanes, count - kLanes);
      // A NaN in either half has to come out: the scale carries it into the row's results.
      const F16 magnitudes = max_b(absolute(low), absolute(high));
      const float greatest_one = greatest(magnitudes);
      const float poison = sum(mul(add(low, high), splat(0.f)));
      // So small a group counts as nothing: 127 over it might be infinite.
      const float inverse = greatest_one > 1e-30f ? 127.f / greatest_one : 0.f;
      const int64_t place = row * rows.num_groups + group;
      int8_t* to = rows.numbers + place * kGroup;
      rows.totals[place] = store_bytes(mul(low, splat(inverse)), to) + store_bytes(mul(high, splat(inverse)), to + kLanes);
      rows.scales[place] = greatest_one / 127.f + poison;
    }
}

}  // namespace

namespace HEADRACE_VARIANT {

void quantise(headrace::DType dtype, const void* in, int64_t stride, int64_t width, const QuantisedRows& rows,
              int64_t first, int64_t last) {
  if (dtype == headrace::kBfloat16)
    return quantise_typed(static_cast<const bf16*>(in), stride, width, rows, first, last);
  quantise_typed(static_cast<const float*>(in), stride, width, rows, first, last);
}

void multiply_quantised(const LinearCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                        int64_t last_panel) {
  const bool is_narrow = call.dtype == headrace::kBfloat16;
  if (call.kind == headrace::kInt8) {
    const auto multiply = is_narrow ? multiply_typed<headrace::kInt8, bf16> : multiply_typed<headrace::kInt8, float>;
    return multiply(call, first_row, last_row, first_panel, last_panel);
  }
  const auto multiply = is_narrow ? multiply_typed<headrace::kInt4, bf16> : multiply_typed<headrace::kInt4, float>;
  multiply(call, first_row, last_row, first_panel, last_panel);
}

}  // namespace HEADRACE_VARIANT
