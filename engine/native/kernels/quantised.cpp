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

namespace {

using headrace::kGroup;
using headrace::kPanel;
using headrace::LinearCall;
using headrace::QuantisedRows;
using headrace::WeightKind;

#if defined(__AVX512VNNI__)
constexpr int kMaxRows = 6;  // 6 rows x 2 vectors, of whole and of real sums, fill the registers
#define UNROLL_HERE HEADRACE_UNROLL
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kMaxRows = 4;  // 4 rows x 2 vectors of whole sums, half a panel of them, and what is multiplied
#define UNROLL_HERE HEADRACE_UNROLL
#define HEADRACE_HALF_PANELS
#else
constexpr int kMaxRows = 1;  // without the instruction nothing is gained by more
#define UNROLL_HERE
#endif
constexpr int kUnits = kGroup / 4;
constexpr int kLineBytes = 64;

#if defined(__AVX512VNNI__)

typedef __m512i I16;

inline I16 splat_int(int32_t x) { return _mm512_set1_epi32(x); }
inline F16 to_floats(I16 a) { return _mm512_cvtepi32_ps(a); }
// Four products per lane: bytes of `weights` without a sign, of the input with one.
inline I16 dot_add(I16 sums, I16 weights, I16 input) { return _mm512_dpbusd_epi32(sums, weights, input); }
inline I16 load_bytes(const char* p) { return _mm512_loadu_si512(p); }
inline I16 low_halves(I16 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline I16 high_halves(I16 a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }

#elif !defined(HEADRACE_HALF_PANELS)

struct I16 {
  uint32_t lane[kLanes];
};

inline I16 splat_int(int32_t x) {
  I16 r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = uint32_t(x);
  return r;
}
inline F16 to_floats(I16 a) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = float(int32_t(a.lane[i]));
  return load(lanes);
}
inline I16 dot_add(I16 sums, I16 weights, I16 input) {
  for (int i = 0; i < kLanes; ++i)
    for (int byte = 0; byte < 4; ++byte)
      sums.lane[i] += uint32_t(int32_t((weights.lane[i] >> 8 * byte) & 255) * int8_t(input.lane[i] >> 8 * byte));
  return sums;
}
inline I16 load_bytes(const char* p) {
  I16 r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline I16 low_halves(I16 a) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] &= 0x0f0f0f0fu;
  return a;
}
inline I16 high_halves(I16 a) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] = (a.lane[i] >> 4) & 0x0f0f0f0fu;
  return a;
}

#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
inline F16 load_halves(const char* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}
#elif defined(__AVX512F__)
inline F16 load_halves(const char* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#else
inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
  if (exponent == 0) return (sign ? -1.f : 1.f) * float(fraction) * (1.f / 16777216.f);
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline F16 load_halves(const char* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    uint16_t half;
    std::memcpy(&half, p + 2 * i, 2);
    lanes[i] = half_to_float(half);
  }
  return load(lanes);
}
#endif

constexpr int64_t group_bytes(WeightKind kind) {
  return kind == headrace::kInt8 ? kPanel * 2 + kGroup * kPanel : kPanel * 4 + kGroup * kPanel / 2;
}

#if !defined(HEADRACE_HALF_PANELS)

// One group of one panel for R rows: adds to `sums`.
template <WeightKind Kind, int R>
inline void add_group(const char* packed, const int8_t* in, int64_t row_bytes, const float* scales,
                      const int32_t* totals, int64_t num_groups, F16 (&sums)[R][kVectors]) {
  const char* weights = packed + (Kind == headrace::kInt8 ? 2 : 4) * kPanel;
  I16 dots[R][kVectors];
  UNROLL_HERE
  for (int r = 0; r < R; ++r) {
    // Weights of eight bits are stored 128 too large, to have no sign.
    const I16 start = splat_int(Kind == headrace::kInt8 ? -128 * totals[r * num_groups] : 0);
    UNROLL_HERE
    for (int v = 0; v < kVectors; ++v) dots[r][v] = start;
  }
  const auto add_unit = [&](int unit, const I16(&w)[kVectors]) {
    UNROLL_HERE
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, in + r * row_bytes + 4 * unit, 4);
      const I16 input = splat_int(four);
      UNROLL_HERE
      for (int v = 0; v < kVectors; ++v) dots[r][v] = dot_add(dots[r][v], w[v], input);
    }
  };
  if (Kind == headrace::kInt8) {
    UNROLL_HERE
    for (int unit = 0; unit < kUnits; ++unit) {
      I16 w[kVectors];
      UNROLL_HERE
      for (int v = 0; v < kVectors; ++v) w[v] = load_bytes(weights + (unit * kVectors + v) * kLineBytes);
      add_unit(unit, w);
    }
  } else {
    UNROLL_HERE
    for (int unit = 0; unit < kUnits / 2; ++unit) {
      I16 low[kVectors], high[kVectors];
      UNROLL_HERE
      for (int v = 0; v < kVectors; ++v) {
        const I16 both = load_bytes(weights + (v * kUnits / 2 + unit) * kLineBytes);
        low[v] = low_halves(both);
        high[v] = high_halves(both);
      }
      add_unit(unit, low);
      add_unit(unit + kUnits / 2, high);
    }
  }
  UNROLL_HERE
  for (int v = 0; v < kVectors; ++v) {
    const F16 scale = load_halves(packed + v * kLanes * 2);
    UNROLL_HERE
    for (int r = 0; r < R; ++r) {
      F16 part = mul(to_floats(dots[r][v]), scale);
      if (Kind == headrace::kInt4)
        part = fma(load_halves(packed + (kPanel + v * kLanes) * 2), splat(float(totals[r * num_groups])), part);
      sums[r][v] = fma(part, splat(scales[r * num_groups]), sums[r][v]);
    }
  }
}

#else

// The same sums by instructions that multiply 8 by 8 bits or 16 by 16 and add neighbours. Products of two numbers of
// eight bits fill 16 bits, so those are multiplied as numbers of 16; with weights of four bits, the sums of all of a
// group fit in.
struct Halves {
  __m256i low, high;  // of 16 outputs
};

inline __m256i load_line_half(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Inputs of a group as numbers of 16 bits: for each unit of four, the first and the third, the second and the fourth.
struct WideGroup {
  int32_t even[kUnits], odd[kUnits];
};

inline void widen_group(const int8_t* in, WideGroup* out) {
  const __m256i bytes = load_line_half(reinterpret_cast<const char*>(in));
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->even), even);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->odd), _mm256_srai_epi16(bytes, 8));
}

template <int R>
inline void dots_of_bytes(const char* weights, const WideGroup (&in)[R], Halves (&dots)[R]) {
  const __m256i low_byte = _mm256_set1_epi16(255);
  UNROLL_HERE
  for (int unit = 0; unit < kUnits; ++unit) {
    const __m256i low = load_line_half(weights + unit * kPanel * 4), high = load_line_half(weights + unit * kPanel * 4 + 32);
    const Halves even = {_mm256_and_si256(low, low_byte), _mm256_and_si256(high, low_byte)};
    const Halves odd = {_mm256_srli_epi16(low, 8), _mm256_srli_epi16(high, 8)};
    UNROLL_HERE
    for (int r = 0; r < R; ++r) {
      const __m256i first = _mm256_set1_epi32(in[r].even[unit]), second = _mm256_set1_epi32(in[r].odd[unit]);
      dots[r].low = _mm256_add_epi32(dots[r].low, _mm256_madd_epi16(even.low, first));
      dots[r].high = _mm256_add_epi32(dots[r].high, _mm256_madd_epi16(even.high, first));
      dots[r].low = _mm256_add_epi32(dots[r].low, _mm256_madd_epi16(odd.low, second));
      dots[r].high = _mm256_add_epi32(dots[r].high, _mm256_madd_epi16(odd.high, second));
    }
  }
}

template <int R>
inline void dots_of_half_bytes(const char* weights, const int8_t* in, int64_t row_bytes, Halves (&dots)[R]) {
  const __m256i low_bits = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const auto add_unit = [&](int unit, __m256i low, __m256i high) {
    UNROLL_HERE
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, in + r * row_bytes + 4 * unit, 4);
      const __m256i input = _mm256_set1_epi32(four);
      dots[r].low = _mm256_add_epi16(dots[r].low, _mm256_maddubs_epi16(low, input));
      dots[r].high = _mm256_add_epi16(dots[r].high, _mm256_maddubs_epi16(high, input));
    }
  };
  UNROLL_HERE
  for (int unit = 0; unit < kUnits / 2; ++unit) {
    const __m256i low = load_line_half(weights + unit * kLineBytes), high = load_line_half(weights + unit * kLineBytes + 32);
    add_unit(unit, _mm256_and_si256(low, low_bits), _mm256_and_si256(high, low_bits));
    add_unit(unit + kUnits / 2, _mm256_and_si256(_mm256_srli_epi16(low, 4), low_bits),
             _mm256_and_si256(_mm256_srli_epi16(high, 4), low_bits));
  }
  UNROLL_HERE
  for (int r = 0; r < R; ++r) {
    dots[r].low = _mm256_madd_epi16(dots[r].low, ones);
    dots[r].high = _mm256_madd_epi16(dots[r].high, ones);
  }
}

// One group of one panel for R rows: adds to `sums`.
template <WeightKind Kind, int R>
inline void add_group(const char* packed, const int8_t* in, int64_t row_bytes, const float* scales,
                      const int32_t* totals, int64_t num_groups, F16 (&sums)[R][kVectors]) {
  const char* weights = packed + (Kind == headrace::kInt8 ? 2 : 4) * kPanel;
  WideGroup wide[R];
  if (Kind == headrace::kInt8)
    for (int r = 0; r < R; ++r) widen_group(in + r * row_bytes, &wide[r]);
  for (int v = 0; v < kVectors; ++v) {
    Halves dots[R];
    UNROLL_HERE
    for (int r = 0; r < R; ++r) {
      // Weights of eight bits are stored 128 too large, to have no sign.
      const __m256i start = _mm256_set1_epi32(Kind == headrace::kInt8 ? -128 * totals[r * num_groups] : 0);
      dots[r] = {start, start};
    }
    if (Kind == headrace::kInt8) dots_of_bytes<R>(weights + v * kLineBytes, wide, dots);
    else dots_of_half_bytes<R>(weights + v * (kUnits / 2) * kLineBytes, in, row_bytes, dots);
    const F16 scale = load_halves(packed + v * kLanes * 2);
    UNROLL_HERE
    for (int r = 0; r < R; ++r) {
      F16 part = mul({_mm256_cvtepi32_ps(dots[r].low), _mm256_cvtepi32_ps(dots[r].high)}, scale);
      if (Kind == headrace::kInt4)
        part = fma(load_halves(packed + (kPanel + v * kLanes) * 2), splat(float(totals[r * num_groups])), part);
      sums[r][v] = fma(part, splat(scales[r * num_groups]), sums[r][v]);
    }
  }
}

#endif

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
#if defined(__AVX512VNNI__) || defined(HEADRACE_HALF_PANELS)
  switch (count) {
    case 2: return multiply_rows<Kind, Stored, Out, 2>(call, row, panel, next);
    case 3: return multiply_rows<Kind, Stored, Out, 3>(call, row, panel, next);
    case 4: return multiply_rows<Kind, Stored, Out, 4>(call, row, panel, next);
#if defined(__AVX512VNNI__)
    case 5: return multiply_rows<Kind, Stored, Out, 5>(call, row, panel, next);
    case 6: return multiply_rows<Kind, Stored, Out, 6>(call, row, panel, next);
#endif
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
#elif defined(HEADRACE_HALF_PANELS)
  const __m256i low = _mm256_cvtps_epi32(x.low), high = _mm256_cvtps_epi32(x.high);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  const __m256i eight = _mm256_add_epi32(low, high);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
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
