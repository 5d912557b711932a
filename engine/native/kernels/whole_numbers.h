// Sums of products of whole numbers, for weights of eight or four bits: what differs between instruction sets. See
// quantised.cpp for how weights are packed.
#pragma once

#include <type_traits>

#include "rows.h"

namespace {

using headrace::kGroup;
using headrace::WeightKind;

// The sums of so many rows fill the registers, with all outputs of a panel or, with AVX2, half of them.
#if defined(__AVX512VNNI__)
constexpr int kMaxRows = 6;
constexpr int vectors_at_once(int) { return kVectors; }
#define UNROLL_HERE HEADRACE_UNROLL
#define UNROLL_UNITS HEADRACE_UNROLL
#elif defined(HEADRACE_AVX2_ONLY)
constexpr int kMaxRows = 4;
constexpr int vectors_at_once(int num_rows) { return num_rows == 1 ? kVectors : 1; }
#define UNROLL_HERE HEADRACE_UNROLL
// GCC would add the products of several units in another order, for which there are not registers enough.
#define UNROLL_UNITS _Pragma("GCC unroll 1")
#else
constexpr int kMaxRows = 1;  // without such instructions nothing is gained by more
constexpr int vectors_at_once(int) { return kVectors; }
#define UNROLL_HERE
#define UNROLL_UNITS
#endif
constexpr int kUnits = kGroup / 4;
constexpr int kLineBytes = 64;

// A group's inputs of some rows, as they are kept.
struct BytesOfRows {
  const int8_t* bytes;
  int64_t row_bytes;
  int32_t four(int row, int unit) const {
    int32_t inputs;
    std::memcpy(&inputs, bytes + row * row_bytes + 4 * unit, 4);
    return inputs;
  }
};

// What follows for each instruction set: sixteen sums of whole numbers, I16; a group's inputs of some rows; the weights
// of one unit, four inputs, for sixteen outputs; and a unit's inputs for all of them. `sums_of` ends what `start` begins.

#if defined(__AVX512VNNI__)

typedef __m512i I16;
typedef __m512i Unit;
typedef __m512i Inputs;

template <WeightKind Kind, int R>
using GroupInputs = BytesOfRows;
template <WeightKind Kind>
inline Unit unit_of(I16 bytes) {
  return bytes;
}
inline Inputs inputs_of(const BytesOfRows& rows, int row, int unit) { return _mm512_set1_epi32(rows.four(row, unit)); }
inline I16 load_bytes(const char* p) { return _mm512_loadu_si512(p); }
inline I16 low_halves(I16 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline I16 high_halves(I16 a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }

// Weights of eight bits are stored 128 too large, to have no sign.
template <WeightKind Kind>
inline I16 start(int32_t total) {
  return _mm512_set1_epi32(Kind == headrace::kInt8 ? -128 * total : 0);
}
// Four products per lane: bytes of `weights` without a sign, of the input with one.
template <WeightKind Kind>
inline I16 dot_add(I16 sums, Unit weights, Inputs input) {
  return _mm512_dpbusd_epi32(sums, weights, input);
}
template <WeightKind Kind>
inline F16 sums_of(I16 sums) {
  return _mm512_cvtepi32_ps(sums);
}

#elif defined(HEADRACE_AVX2_ONLY)

struct I16 {
  __m256i low, high;
};
inline I16 load_bytes(const char* p) {
  const __m256i* from = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
inline __m256i low_halves(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline I16 low_halves(I16 a) { return {low_halves(a.low), low_halves(a.high)}; }
inline I16 high_halves(I16 a) {
  return {low_halves(_mm256_srli_epi16(a.low, 4)), low_halves(_mm256_srli_epi16(a.high, 4))};
}

// The processor multiplies bytes in 16 bits, where two products of four-bit weights and inputs fit, even those of a whole
// group. Two of eight-bit weights don't: these are multiplied as numbers of 16 bits, in 32.
template <WeightKind Kind>
struct UnitOf {
  I16 bytes;
};
template <>
struct UnitOf<headrace::kInt8> {
  I16 even, odd;
};
template <WeightKind Kind>
struct InputsOf {
  __m256i bytes;
};
template <>
struct InputsOf<headrace::kInt8> {
  __m256i even, odd;
};

// A group's inputs of R rows as numbers of 16 bits: of each unit the first and the third, the second and the fourth.
template <int R>
struct WideInputs {
  explicit WideInputs(const BytesOfRows& rows) {
    UNROLL_HERE
    for (int r = 0; r < R; ++r) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows.bytes + r * rows.row_bytes));
      const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs[r][0]), even);
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs[r][1]), _mm256_srai_epi16(bytes, 8));
    }
  }
  alignas(32) int32_t pairs[R][2][kUnits];
};

template <WeightKind Kind, int R>
using GroupInputs = typename std::conditional<Kind == headrace::kInt8, WideInputs<R>, BytesOfRows>::type;

template <int R>
inline InputsOf<headrace::kInt8> inputs_of(const WideInputs<R>& rows, int row, int unit) {
  return {_mm256_set1_epi32(rows.pairs[row][0][unit]), _mm256_set1_epi32(rows.pairs[row][1][unit])};
}
inline InputsOf<headrace::kInt4> inputs_of(const BytesOfRows& rows, int row, int unit) {
  return {_mm256_set1_epi32(rows.four(row, unit))};
}

template <WeightKind Kind>
inline UnitOf<Kind> unit_of(I16 bytes) {
  if constexpr (Kind == headrace::kInt4) {
    return {bytes};
  } else {
    const __m256i low_byte = _mm256_set1_epi16(255);
    return {{_mm256_and_si256(bytes.low, low_byte), _mm256_and_si256(bytes.high, low_byte)},
            {_mm256_srli_epi16(bytes.low, 8), _mm256_srli_epi16(bytes.high, 8)}};
  }
}

// Weights of eight bits are stored 128 too large, to have no sign.
template <WeightKind Kind>
inline I16 start(int32_t total) {
  const __m256i sums = _mm256_set1_epi32(Kind == headrace::kInt8 ? -128 * total : 0);
  return {sums, sums};
}
// Sums stay in their register and are added to in the order of the source.
inline __m256i in_register(__m256i sums) {
  asm("" : "+x"(sums));
  return sums;
}
inline __m256i dot_add(__m256i sums, __m256i even, __m256i odd, const InputsOf<headrace::kInt8>& input) {
  sums = in_register(_mm256_add_epi32(sums, _mm256_madd_epi16(even, input.even)));
  return in_register(_mm256_add_epi32(sums, _mm256_madd_epi16(odd, input.odd)));
}
template <WeightKind Kind>
inline I16 dot_add(I16 sums, const UnitOf<Kind>& weights, const InputsOf<Kind>& input) {
  if constexpr (Kind == headrace::kInt4) {
    return {in_register(_mm256_add_epi16(sums.low, _mm256_maddubs_epi16(weights.bytes.low, input.bytes))),
            in_register(_mm256_add_epi16(sums.high, _mm256_maddubs_epi16(weights.bytes.high, input.bytes)))};
  } else {
    return {dot_add(sums.low, weights.even.low, weights.odd.low, input),
            dot_add(sums.high, weights.even.high, weights.odd.high, input)};
  }
}
template <WeightKind Kind>
inline __m256 sums_of(__m256i sums) {
  static_assert(kUnits * 2 * 15 * 127 < 32768, "a group's sums must fit in 16 bits");
  return _mm256_cvtepi32_ps(Kind == headrace::kInt4 ? _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) : sums);
}
template <WeightKind Kind>
inline F16 sums_of(I16 sums) {
  return {sums_of<Kind>(sums.low), sums_of<Kind>(sums.high)};
}

#else

struct I16 {
  uint32_t lane[kLanes];
};
typedef uint32_t Inputs;

template <WeightKind Kind, int R>
using GroupInputs = BytesOfRows;
template <WeightKind Kind>
inline I16 unit_of(I16 bytes) {
  return bytes;
}
inline Inputs inputs_of(const BytesOfRows& rows, int row, int unit) { return uint32_t(rows.four(row, unit)); }
template <WeightKind Kind>
inline I16 start(int32_t total) {
  I16 r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = Kind == headrace::kInt8 ? 0u - 128u * uint32_t(total) : 0u;
  return r;
}
template <WeightKind Kind>
inline F16 sums_of(I16 sums) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = float(int32_t(sums.lane[i]));
  return load(lanes);
}
template <WeightKind Kind>
inline I16 dot_add(I16 sums, I16 weights, Inputs input) {
  for (int i = 0; i < kLanes; ++i)
    for (int byte = 0; byte < 4; ++byte)
      sums.lane[i] += uint32_t(int32_t((weights.lane[i] >> 8 * byte) & 255) * int8_t(input >> 8 * byte));
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

#if defined(__AVX512F__)
inline F16 load_halves(const char* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#elif defined(HEADRACE_AVX2_ONLY)
inline F16 load_halves(const char* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
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

}  // namespace
