// Sixteen floats at a time: AVX-512 where this file is compiled for it, plain loops elsewhere.
//
// Every translation unit that includes this file is compiled for one instruction set; all names here are local
// to it, so that the linker can't take one unit's code for another's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
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
inline F16 exp2(F16 x) {
  x = max_b(splat(-200.f), x);
  const F16 whole = round_even(x);
  const F16 f = sub(x, whole);
  F16 p = splat(1.535336188319500e-4f);
  p = fma(p, f, splat(1.339887440266574e-3f));
  p = fma(p, f, splat(9.618437357674640e-3f));
  p = fma(p, f, splat(5.550332471162809e-2f));
  p = fma(p, f, splat(2.402264791363012e-1f));
  p = fma(p, f, splat(6.931472028550421e-1f));
  return scale_by_power(fma(p, f, splat(1.f)), whole);
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
