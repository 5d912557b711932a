// What products of every kind of weights do with their rows: sums of 32 outputs become numbers of the result.
#pragma once

#include "attention.h"
#include "attention_math.h"

namespace {

constexpr int kVectors = headrace::kPanel / kLanes;

// Where the results go may have left the caches since it was last written.
template <typename Stored, typename Out, int R>
inline void prefetch_rows(const headrace::LinearCall& call, int64_t row, int64_t column) {
  HEADRACE_UNROLL
  for (int r = 0; r < R; ++r) {
    prefetch_write(static_cast<Out*>(call.out) + (row + r) * call.num_outputs + column);
    if (call.residual)
      prefetch(reinterpret_cast<const char*>(static_cast<const Stored*>(call.residual) +
                                             (row + r) * call.residual_stride + column));
  }
}

// Adds bias and residual, and stores as many outputs as there are.
template <typename Stored, typename Out, int R, int V>
inline void store_rows(const headrace::LinearCall& call, int64_t row, int64_t column, const F16 (&sums)[R][V]) {
  HEADRACE_UNROLL
  for (int v = 0; v < V; ++v) {
    const int64_t first = column + v * kLanes;
    const int count = int(call.num_outputs - first < kLanes ? call.num_outputs - first : kLanes);
    if (count <= 0) break;
    const F16 bias = call.bias ? load_first(static_cast<const Stored*>(call.bias) + first, count) : splat(0.f);
    HEADRACE_UNROLL
    for (int r = 0; r < R; ++r) {
      F16 sum = call.bias ? add(sums[r][v], bias) : sums[r][v];
      if (call.residual)
        sum = add(sum, load_first(static_cast<const Stored*>(call.residual) + (row + r) * call.residual_stride + first,
                                  count));
      store_first(static_cast<Out*>(call.out) + (row + r) * call.num_outputs + first, sum, count);
    }
  }
}

}  // namespace
