// A stack of plain decoder layers in one call: norm, attention, norm, gated MLP, each half added to what came in.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <cstring>

#include "api.h"
#include "attention.h"
#include "team.h"

namespace {

// A large page of x86, and of others a multiple of their small one.
constexpr int64_t kPageBytes = 2 << 20;

struct Buffers {
  ~Buffers() { std::free(memory); }
  char* at_least(int64_t num_bytes) {
    if (num_bytes > size) {
      std::free(memory);
      size = (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
      memory = std::aligned_alloc(size_t(kPageBytes), size_t(size));
#if defined(MADV_HUGEPAGE)
      // Rows that lie apart in memory push each other out of a core's cache; with small pages chance says which do.
      if (memory) madvise(memory, size_t(size), MADV_HUGEPAGE);
#endif
    }
    return static_cast<char*>(memory);
  }
  void* memory = nullptr;
  int64_t size = 0;
};

// Kept from step to step; what it holds has no meaning between two calls.
thread_local Buffers buffers;

struct Run {
  const void* kernels;
  HeadraceAttention* attention;
  const HeadraceStack& stack;
  const HeadraceRotary* rotary;
  char *normed, *qkv, *attended, *gate_up, *gated;
  int64_t number_bytes;

  int64_t query_width() const { return int64_t(stack.num_heads) * stack.head_dim; }

  void multiply(const void* in, int64_t num_rows, int64_t width, int32_t kind, const void* weights, const void* bias,
                void* out, int64_t num_outputs, bool is_added) const {
    headrace_multiply(kernels, stack.dtype, kind, stack.dtype == headrace::kFloat32, in, width, weights, bias,
                      is_added ? out : nullptr, num_outputs, out, num_rows, width, num_outputs, stack.num_threads);
  }

  // hidden -> attended; writes K and V.
  void attend(const HeadraceLayer& layer, int32_t index, const char* hidden, int64_t num_tokens) const {
    const int64_t head_dim = stack.head_dim, kv_width = stack.num_kv_heads * head_dim;
    const int64_t qkv_width = query_width() + 2 * kv_width;
    headrace_rms_norm(kernels, stack.dtype, hidden, stack.width, layer.attention_gain, layer.attention_eps, normed,
                      num_tokens, stack.width, stack.num_threads);
    multiply(normed, num_tokens, stack.width, layer.qkv_kind, layer.qkv, layer.qkv_bias, qkv, qkv_width, false);
    if (layer.rotary >= 0) {
      const HeadraceRotary& factors = rotary[layer.rotary];
      headrace_rotate(kernels, stack.dtype, qkv, qkv_width, factors.cosine, factors.stride, factors.sine,
                      factors.stride, num_tokens, stack.num_heads + stack.num_kv_heads, head_dim, stack.num_threads);
    }
    const char* key = qkv + query_width() * number_bytes;
    headrace_attention_write(attention, index, key, qkv_width, key + kv_width * number_bytes, qkv_width);
    headrace_attention_attend(attention, index, stack.num_heads, qkv, qkv_width, attended, layer.scale, layer.window,
                              layer.soft_cap);
  }

  // Brings what attention found back into `hidden`, then adds the MLP.
  void finish(const HeadraceLayer& layer, char* hidden, int64_t num_rows) const {
    multiply(attended, num_rows, query_width(), layer.attention_out_kind, layer.attention_out,
             layer.attention_out_bias, hidden, stack.width, true);
    headrace_rms_norm(kernels, stack.dtype, hidden, stack.width, layer.mlp_gain, layer.mlp_eps, normed, num_rows,
                      stack.width, stack.num_threads);
    multiply(normed, num_rows, stack.width, layer.gate_up_kind, layer.gate_up, layer.gate_up_bias, gate_up,
             2 * stack.inner_width, false);
    headrace_gated_silu(kernels, stack.dtype, gate_up, 2 * stack.inner_width, gated, num_rows, stack.inner_width,
                        stack.num_threads);
    multiply(gated, num_rows, stack.inner_width, layer.down_kind, layer.down, layer.down_bias, hidden, stack.width,
             true);
  }
};

// Some rows of a matrix, one after the other.
void gather(const char* in, const int64_t* rows, int64_t num_rows, int64_t row_bytes, char* out) {
  for (int64_t i = 0; i < num_rows; ++i) std::memcpy(out + i * row_bytes, in + rows[i] * row_bytes, size_t(row_bytes));
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void headrace_stack_run(const void* kernels, HeadraceAttention* attention, const HeadraceStack* stack,
                        const HeadraceLayer* layers, const HeadraceRotary* rotary, void* hidden, int64_t num_tokens,
                        const int64_t* rows, int64_t num_rows, void* out) {
  const int64_t number_bytes = stack->dtype == headrace::kFloat32 ? 4 : 2;
  const int64_t query_width = int64_t(stack->num_heads) * stack->head_dim;
  const int64_t qkv_width = query_width + int64_t(2) * stack->num_kv_heads * stack->head_dim;
  const int64_t widths[] = {stack->width, qkv_width, query_width, 2 * stack->inner_width, stack->inner_width};
  const int64_t most_rows = num_tokens > num_rows ? num_tokens : num_rows;
  int64_t offsets[6] = {0};
  for (int i = 0; i < 5; ++i) offsets[i + 1] = offsets[i] + (widths[i] * most_rows * number_bytes + 63) / 64 * 64;
  char* memory = buffers.at_least(offsets[5]);
  const Run run = {kernels,
                   attention,
                   *stack,
                   rotary,
                   memory,
                   memory + offsets[1],
                   memory + offsets[2],
                   memory + offsets[3],
                   memory + offsets[4],
                   number_bytes};
  char* stream = static_cast<char*>(hidden);
  const int32_t last = stack->num_layers - 1;
  headrace::with_team(stack->num_threads, [&] {
    for (int32_t index = 0; index < last; ++index) {
      run.attend(layers[index], index, stream, num_tokens);
      run.finish(layers[index], stream, num_tokens);
    }
    run.attend(layers[last], last, stream, num_tokens);
    if (num_rows == 0) return;
    // Past the last attention no token needs another.
    gather(stream, rows, num_rows, stack->width * number_bytes, static_cast<char*>(out));
    gather(run.attended, rows, num_rows, query_width * number_bytes, run.qkv);
    std::memcpy(run.attended, run.qkv, size_t(num_rows * query_width * number_bytes));
    run.finish(layers[last], static_cast<char*>(out), num_rows);
  });
}

}  // extern "C"
#pragma GCC visibility pop
