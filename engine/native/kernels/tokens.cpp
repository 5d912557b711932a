// Token-wise operations, each one pass over memory, in fp32 with one rounding at the end. Compiled once per
// instruction set; HEADRACE_VARIANT is its name.
#include "attention.h"
#include "simd.h"
#include "variant.h"

namespace {

using headrace::DType;

template <typename T>
void norm_tokens(const T* in, int64_t in_stride, const float* gain, float eps, T* out, int64_t width, int64_t first,
                 int64_t last) {
  for (int64_t token = first; token < last; ++token) {
    const T* from = in + token * in_stride;
    T* to = out + token * width;
    // Four sums, so that one addition need not wait for the other.
    F16 squares[4] = {splat(0.f), splat(0.f), splat(0.f), splat(0.f)};
    int64_t d = 0;
    for (; d + 4 * kLanes <= width; d += 4 * kLanes)
      for (int i = 0; i < 4; ++i) {
        const F16 x = load(from + d + i * kLanes);
        squares[i] = fma(x, x, squares[i]);
      }
    for (; d < width; d += kLanes) {
      const F16 x = load_first(from + d, int(width - d));
      squares[0] = fma(x, x, squares[0]);
    }
    const float mean = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / float(width);
    const F16 scale = splat(1.f / __builtin_sqrtf(mean + eps));
    for (d = 0; d + kLanes <= width; d += kLanes) store(to + d, mul(mul(load(from + d), scale), load(gain + d)));
    if (d < width) {
      const int rest = int(width - d);
      store_first(to + d, mul(mul(load_first(from + d, rest), scale), load_first(gain + d, rest)), rest);
    }
  }
}

template <typename T>
void gate_tokens(const T* in, int64_t in_stride, T* out, int64_t width, int64_t first, int64_t last) {
  const F16 one = splat(1.f), minus_log2e = splat(-kLog2E);
  for (int64_t token = first; token < last; ++token) {
    const T* gate = in + token * in_stride;
    const T* up = gate + width;
    T* to = out + token * width;
    const auto gated = [&](F16 g, F16 u) { return mul(div(g, add(one, exp2(mul(g, minus_log2e)))), u); };
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) store(to + d, gated(load(gate + d), load(up + d)));
    if (d < width) {
      const int rest = int(width - d);
      store_first(to + d, gated(load_first(gate + d, rest), load_first(up + d, rest)), rest);
    }
  }
}

template <typename T>
void rotate_tokens(const headrace::Rotation& r, int64_t first, int64_t last) {
  const int64_t half = r.head_dim / 2;
  for (int64_t token = first; token < last; ++token) {
    const T* cosine = static_cast<const T*>(r.cosine) + token * r.cosine_stride;
    const T* sine = static_cast<const T*>(r.sine) + token * r.sine_stride;
    for (int64_t head = 0; head < r.num_heads; ++head) {
      T* x = static_cast<T*>(r.heads) + token * r.heads_stride + head * r.head_dim;
      for (int64_t d = 0; d < half; d += kLanes) {
        const int n = half - d >= kLanes ? kLanes : int(half - d);
        const F16 left = load_first(x + d, n), right = load_first(x + half + d, n);
        const F16 c = load_first(cosine + d, n), s = load_first(sine + d, n);
        store_first(x + d, sub(mul(left, c), mul(right, s)), n);
        store_first(x + half + d, fma(right, c, mul(left, s)), n);
      }
    }
  }
}

// Numbers that are looked through again once it is known that the greatest is among them.
constexpr int64_t kArgmaxRun = 64 * kLanes;

// The lowest index among the greatest; a NaN counts as the greatest of all, as in torch.
template <typename T>
void argmax_rows(const T* in, int64_t in_stride, int64_t width, int64_t* out, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const T* from = in + row * in_stride;
    // Of each run the greatest, and where the first run lies that holds the greatest of all.
    float peak = -__builtin_inff();
    int64_t place = 0, d = 0;
    F16 checksum = splat(0.f);
    while (d + kLanes <= width) {
      const int64_t begin = d;
      F16 lanes = splat(-__builtin_inff());
      for (; d + kLanes <= width && d < begin + kArgmaxRun; d += kLanes) {
        const F16 x = load(from + d);
        lanes = max_b(lanes, x);
        // Zero times a number is zero, times NaN (or infinity) is not.
        checksum = fma(x, splat(0.f), checksum);
      }
      const float run_peak = greatest(lanes);
      if (run_peak > peak) peak = run_peak, place = begin;
    }
    bool has_nan = !(sum(checksum) == 0.f);
    for (; d < width; ++d) {
      const float x = to_float(from[d]);
      has_nan |= x != x;
      if (x > peak) peak = x, place = d;
    }
    int64_t index = 0;
    if (has_nan) {
      // Rare: NaN, or just an infinity.
      for (index = 0; index < width; ++index)
        if (to_float(from[index]) != to_float(from[index])) break;
      has_nan = index < width;
      if (!has_nan) {
        place = 0;
        peak = to_float(from[0]);
        for (int64_t i = 1; i < width; ++i) peak = to_float(from[i]) > peak ? to_float(from[i]) : peak;
      }
    }
    if (!has_nan) {
      for (index = place; index + kLanes <= width && first_set(equal(load(from + index), splat(peak))) < 0;)
        index += kLanes;
      while (index < width - 1 && to_float(from[index]) != peak) ++index;
    }
    out[row] = index;
  }
}

}  // namespace

namespace HEADRACE_VARIANT {

#define HEADRACE_BY_TYPE(function, ...)                      \
  if (dtype == headrace::kFloat32) {                         \
    typedef float T;                                         \
    function<T>(__VA_ARGS__);                                \
  } else {                                                   \
    typedef bf16 T;                                          \
    function<T>(__VA_ARGS__);                                \
  }

void rms_norm(DType dtype, const void* in, int64_t in_stride, const float* gain, float eps, void* out, int64_t width,
              int64_t first, int64_t last) {
  HEADRACE_BY_TYPE(norm_tokens, static_cast<const T*>(in), in_stride, gain, eps, static_cast<T*>(out), width, first,
                   last)
}

void gated_silu(DType dtype, const void* in, int64_t in_stride, void* out, int64_t width, int64_t first,
                int64_t last) {
  HEADRACE_BY_TYPE(gate_tokens, static_cast<const T*>(in), in_stride, static_cast<T*>(out), width, first, last)
}

void rotate(DType dtype, const headrace::Rotation& rotation, int64_t first, int64_t last) {
  HEADRACE_BY_TYPE(rotate_tokens, rotation, first, last)
}

void argmax(DType dtype, const void* in, int64_t in_stride, int64_t width, int64_t* out, int64_t first,
            int64_t last) {
  HEADRACE_BY_TYPE(argmax_rows, static_cast<const T*>(in), in_stride, width, out, first, last)
}

}  // namespace HEADRACE_VARIANT
