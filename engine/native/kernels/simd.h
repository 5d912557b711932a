// Sixteen floats at a time: one vector of AVX-512 or two of AVX2 where this file is compiled for them, plain loops
// elsewhere.
//
// Every translation unit that includes this file is compiled for one instruction set; all names here are local
// to it, so that the linker can't take one unit's code for another's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
#define HEADRACE_AVX2_ONLY
#endif

namespace {

constexpr int kLanes = 16;
constexpr float kLog2E = 1.44269504088896341f;

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  // To the nearest, ties to even; a NaN stays one.
  out->bits = is_nan ? uint16_t((bits >> 16) | 0x40u) : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__AVX512F__)

typedef __m512 F16;
typedef __mmask16 M16;

inline F16 splat(float x) { return _mm512_set1_ps(x); }
inline F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
inline F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
// A NaN in `b` comes through; one in `a` alone does not.
inline F16 max_b(F16 a, F16 b) { return _mm512_max_ps(a, b); }
inline F16 select(M16 mask, F16 yes, F16 no) { return _mm512_mask_mov_ps(no, mask, yes); }
inline M16 equal(F16 a, F16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline M16 less(F16 a, F16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline float sum(F16 a) { return _mm512_reduce_add_ps(a); }
inline float greatest(F16 a) { return _mm512_reduce_max_ps(a); }
inline F16 round_even(F16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F16 scale_by_power(F16 a, F16 exponent) { return _mm512_scalef_ps(a, exponent); }
inline F16 absolute(F16 a) { return _mm512_abs_ps(a); }
inline M16 first_lanes(int n) { return n >= kLanes ? M16(0xffff) : (n <= 0 ? M16(0) : M16((1u << n) - 1)); }
inline M16 and_not(M16 a, M16 b) { return M16(a & ~b); }
// Lowest lane that is set, or -1.
inline int first_set(M16 a) { return a ? __builtin_ctz(a) : -1; }

inline F16 load(const float* p) { return _mm512_loadu_ps(p); }
inline F16 load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a); }
inline void store_first(float* p, F16 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }

inline F16 widen(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }
inline F16 load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F16 load_first(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline __m256i narrow(F16 a) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(a);
#else
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const M16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
inline void store(bf16* p, F16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
inline void store_first(bf16* p, F16 a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(a)); }

#elif defined(__AVX2__)

struct F16 {
  __m256 low, high;
};
// All bits of a lane that is set.
struct M16 {
  __m256 low, high;
};

inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// A NaN in `b` comes through; one in `a` alone does not.
inline F16 max_b(F16 a, F16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline F16 select(M16 mask, F16 yes, F16 no) {
  return {_mm256_blendv_ps(no.low, yes.low, mask.low), _mm256_blendv_ps(no.high, yes.high, mask.high)};
}
inline M16 equal(F16 a, F16 b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ)};
}
inline M16 less(F16 a, F16 b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
}
template <typename Function>
inline float across(F16 a, const Function& join) {
  const __m256 eight = join(a.low, a.high);
  const __m256 four = join(eight, _mm256_permute2f128_ps(eight, eight, 1));
  const __m256 two = join(four, _mm256_permute_ps(four, 0x4e));
  return _mm256_cvtss_f32(join(two, _mm256_permute_ps(two, 0xb1)));
}
inline float sum(F16 a) {
  return across(a, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); });
}
inline float greatest(F16 a) {
  return across(a, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); });
}
inline F16 round_even(F16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, kNearest), _mm256_round_ps(a.high, kNearest)};
}
inline __m256 scale_by_power(__m256 a, __m256 exponent) {
  // Two factors, so that what ends below the normal range loses no more than it must.
  const __m256 clamped = _mm256_min_ps(_mm256_max_ps(exponent, _mm256_set1_ps(-252.f)), _mm256_set1_ps(254.f));
  const __m256i whole = _mm256_cvtps_epi32(clamped), half = _mm256_srai_epi32(whole, 1);
  const auto power = [](__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  };
  return _mm256_mul_ps(_mm256_mul_ps(a, power(half)), power(_mm256_sub_epi32(whole, half)));
}
inline F16 scale_by_power(F16 a, F16 exponent) {
  return {scale_by_power(a.low, exponent.low), scale_by_power(a.high, exponent.high)};
}
inline F16 absolute(F16 a) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline M16 first_lanes(int n) {
  const __m256i count = _mm256_set1_epi32(n), places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i further = _mm256_add_epi32(places, _mm256_set1_epi32(8));
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, places)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, further))};
}
inline M16 and_not(M16 a, M16 b) { return {_mm256_andnot_ps(b.low, a.low), _mm256_andnot_ps(b.high, a.high)}; }
// Lowest lane that is set, or -1.
inline int first_set(M16 a) {
  const int bits = _mm256_movemask_ps(a.low) | _mm256_movemask_ps(a.high) << 8;
  return bits ? __builtin_ctz(unsigned(bits)) : -1;
}

inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline __m256 widen(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
inline F16 load(const bf16* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(from)), widen(_mm_loadu_si128(from + 1))};
}
// bf16 in the low halves of eight lanes.
inline __m256i narrow(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan)), 16);
}
inline void store(bf16* p, F16 a) {
  const __m256i packed = _mm256_packus_epi32(narrow(a.low), narrow(a.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
template <typename T>
inline F16 load_first(const T* p, int n) {
  if (n >= kLanes) return load(p);
  T lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <typename T>
inline void store_first(T* p, F16 a, int n) {
  if (n >= kLanes) return store(p, a);
  T lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

#else

struct F16 {
  float lane[kLanes];
};
struct M16 {
  bool lane[kLanes];
};

#define HEADRACE_LANES(expression)          \
  F16 r;                                    \
  for (int i = 0; i < kLanes; ++i) r.lane[i] = (expression); \
  return r

inline F16 splat(float x) { HEADRACE_LANES(x); }
inline F16 add(F16 a, F16 b) { HEADRACE_LANES(a.lane[i] + b.lane[i]); }
inline F16 sub(F16 a, F16 b) { HEADRACE_LANES(a.lane[i] - b.lane[i]); }
inline F16 mul(F16 a, F16 b) { HEADRACE_LANES(a.lane[i] * b.lane[i]); }
inline F16 div(F16 a, F16 b) { HEADRACE_LANES(a.lane[i] / b.lane[i]); }
#if defined(__FMA__) || defined(__aarch64__)
inline F16 fma(F16 a, F16 b, F16 c) { HEADRACE_LANES(__builtin_fmaf(a.lane[i], b.lane[i], c.lane[i])); }
#else
inline F16 fma(F16 a, F16 b, F16 c) { HEADRACE_LANES(a.lane[i] * b.lane[i] + c.lane[i]); }
#endif
inline F16 max_b(F16 a, F16 b) { HEADRACE_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
inline F16 select(M16 mask, F16 yes, F16 no) { HEADRACE_LANES(mask.lane[i] ? yes.lane[i] : no.lane[i]); }
inline F16 round_even(F16 a) { HEADRACE_LANES(__builtin_rintf(a.lane[i])); }
inline F16 absolute(F16 a) { HEADRACE_LANES(__builtin_fabsf(a.lane[i])); }
inline F16 scale_by_power(F16 a, F16 exponent) {
  // Two factors, so that what ends below the normal range loses no more than it must.
  F16 r;
  for (int i = 0; i < kLanes; ++i) {
    const float clamped = exponent.lane[i] < -252.f ? -252.f : (exponent.lane[i] > 254.f ? 254.f : exponent.lane[i]);
    const int whole = clamped == clamped ? int(clamped) : 0;
    const int half = whole / 2;
    const int32_t first_bits = (half + 127) << 23, second_bits = (whole - half + 127) << 23;
    float first, second;
    std::memcpy(&first, &first_bits, 4);
    std::memcpy(&second, &second_bits, 4);
    r.lane[i] = a.lane[i] * first * second;
  }
  return r;
}
inline M16 equal(F16 a, F16 b) {
  M16 r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = a.lane[i] == b.lane[i];
  return r;
}
inline M16 less(F16 a, F16 b) {
  M16 r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = a.lane[i] < b.lane[i];
  return r;
}
inline M16 first_lanes(int n) {
  M16 r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = i < n;
  return r;
}
inline M16 and_not(M16 a, M16 b) {
  M16 r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = a.lane[i] && !b.lane[i];
  return r;
}
inline int first_set(M16 a) {
  for (int i = 0; i < kLanes; ++i)
    if (a.lane[i]) return i;
  return -1;
}
inline float sum(F16 a) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.lane[i] += a.lane[i + width];
  return a.lane[0];
}
inline float greatest(F16 a) {
  float r = a.lane[0];
  for (int i = 1; i < kLanes; ++i) r = r > a.lane[i] ? r : a.lane[i];
  return r;
}
template <typename T>
inline F16 load(const T* p) { HEADRACE_LANES(to_float(p[i])); }
template <typename T>
inline F16 load_first(const T* p, int n) { HEADRACE_LANES(i < n ? to_float(p[i]) : 0.f); }
template <typename T>
inline void store(T* p, F16 a) {
  for (int i = 0; i < kLanes; ++i) from_float(a.lane[i], p + i);
}
template <typename T>
inline void store_first(T* p, F16 a, int n) {
  for (int i = 0; i < kLanes && i < n; ++i) from_float(a.lane[i], p + i);
}

#undef HEADRACE_LANES

#endif

inline void prefetch(const char* p) { __builtin_prefetch(p); }
inline void prefetch_write(const void* p) { __builtin_prefetch(p, 1); }
// A load whose result nobody wants; unlike a prefetch it is never dropped.
inline void touch(const char* p) {
  const char loaded = *static_cast<const volatile char*>(p);
  (void)loaded;
}

// 2^x to the last bit or two (the polynomial is Cephes' exp2f). -inf gives 0, a NaN stays one.
inline F16 exp2_of_fraction(F16 f) {
  F16 p = splat(1.535336188319500e-4f);
  p = fma(p, f, splat(1.339887440266574e-3f));
  p = fma(p, f, splat(9.618437357674640e-3f));
  p = fma(p, f, splat(5.550332471162809e-2f));
  p = fma(p, f, splat(2.402264791363012e-1f));
  p = fma(p, f, splat(6.931472028550421e-1f));
  return fma(p, f, splat(1.f));
}
inline F16 exp2(F16 x) {
  x = max_b(splat(-200.f), x);
  const F16 whole = round_even(x);
  return scale_by_power(exp2_of_fraction(sub(x, whole)), whole);
}

// The same for an x that is no greater than 0, in fewer steps; what would end below the normal range may be 0.
inline F16 exp2_of_negative(F16 x) {
#if defined(HEADRACE_AVX2_ONLY)
  x = max_b(splat(-127.f), x);
  // So great a number has no room for a fraction: its last bits are the power's exponent.
  const F16 shift = splat(float(3 << 22) + 127.f);
  const F16 shifted = add(x, shift), whole = sub(shifted, shift);
  const auto power = [](__m256 n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(n), 23)); };
  return mul(exp2_of_fraction(sub(x, whole)), {power(shifted.low), power(shifted.high)});
#else
  return exp2(x);
#endif
}

// tanh(x); near zero by Cephes' tanhf, since the quotient below would cancel there.
inline F16 tanh(F16 x) {
  const F16 doubled = exp2(mul(x, splat(2.f * kLog2E)));
  const F16 far_off = sub(splat(1.f), div(splat(2.f), add(doubled, splat(1.f))));
  const F16 z = mul(x, x);
  F16 p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const F16 near_zero = fma(mul(p, z), x, x);
  return select(less(absolute(x), splat(0.625f)), near_zero, far_off);
}

}  // namespace
