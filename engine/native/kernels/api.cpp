#include "api.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "plan.h"
#include "team.h"
#include "variant.h"

#if defined(__x86_64__)
HEADRACE_DECLARE_VARIANT(avx512bf16)
HEADRACE_DECLARE_VARIANT(avx512)
HEADRACE_DECLARE_VARIANT(avx2)
#endif
HEADRACE_DECLARE_VARIANT(generic)

namespace {

using namespace headrace;

// What the variant `whole` has for products of whole numbers, `variant` uses too.
#define HEADRACE_KERNELS(variant, whole)                                                                     \
  constexpr Kernels variant##_kernels = {                                                                    \
      #variant,         variant::attention_scratch, variant::attend,   variant::rms_norm,                    \
      variant::gated_silu, variant::rotate,         variant::can_multiply, variant::multiply,                \
      whole::quantise,  whole::multiply_quantised,  variant::argmax}

#if defined(__x86_64__)
HEADRACE_KERNELS(avx512bf16, avx512bf16);
HEADRACE_KERNELS(avx512, avx2);
HEADRACE_KERNELS(avx2, avx2);
#endif
HEADRACE_KERNELS(generic, generic);

// The variants that this processor can run, the best one first.
int usable_variants(const Kernels** out) {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
    out[count++] = &avx512bf16_kernels;
  if (has_avx512) out[count++] = &avx512_kernels;
  if (has_avx2) out[count++] = &avx2_kernels;
#endif
  out[count++] = &generic_kernels;
  return count;
}

struct Scratch {
  ~Scratch() { std::free(memory); }
  void* at_least(size_t num_bytes) {
    if (num_bytes > size) {
      std::free(memory);
      size = (num_bytes + 4095) / 4096 * 4096;
      memory = std::aligned_alloc(64, size);
    }
    return memory;
  }
  void* memory = nullptr;
  size_t size = 0;
};

// A multiple of the rows that kernels of any instruction set compute together.
constexpr int64_t kRowsTogether = 12;

// Kept by each thread: fresh memory would be mapped and unmapped at each call.
thread_local Scratch thread_scratch;
// Kept by the thread that drives a product, read by all that take part.
thread_local Scratch quantised_rows;

}  // namespace

extern "C" {

struct HeadraceAttention {
  // What holds for all steps.
  const Kernels* kernels;
  AttentionCall call;  // of the current step; `attend` fills in what a layer changes
  int64_t layer_bytes;
  const char* keys;
  const char* values;
  int32_t num_threads;
  // The current step.
  Plan plan;
  std::vector<float> parts;
  const int64_t* slots;
  int32_t num_rows;
  int64_t num_tokens;
  size_t scratch_bytes;
};

static void make_plan(HeadraceAttention* attention, int32_t num_heads) {
  AttentionCall& call = attention->call;
  Plan& plan = attention->plan;
  call.num_heads = num_heads;
  plan.make({attention->num_rows, call.seq_lens, call.cu_seqlens_q}, num_heads, call.num_kv_heads, call.head_dim,
            attention->num_threads);
  if (int64_t(attention->parts.size()) < plan.parts_floats) attention->parts.resize(size_t(plan.parts_floats) * 5 / 4);
  call.items = plan.items.data();
  call.num_items = int32_t(plan.items.size());
  call.splits = plan.splits.data();
  call.parts = attention->parts.data();
  call.max_item_rows = plan.max_item_rows;
  attention->scratch_bytes = attention->kernels->attention_scratch(call);
}

#pragma GCC visibility push(default)

const char* headrace_variant(int32_t index) {
  const Kernels* variants[4];
  const int count = usable_variants(variants);
  return index >= 0 && index < count ? variants[index]->name : nullptr;
}

const void* headrace_kernels(int32_t index) {
  const Kernels* variants[4];
  const int count = usable_variants(variants);
  return index >= 0 && index < count ? variants[index] : nullptr;
}

HeadraceAttention* headrace_attention_new(const void* kernels, int32_t dtype, int32_t num_kv_heads, int32_t head_dim,
                                          int32_t block_size, const void* keys, const void* values,
                                          int64_t layer_bytes, int32_t num_threads) {
  auto made = std::make_unique<HeadraceAttention>();
  made->kernels = static_cast<const Kernels*>(kernels);
  made->call = AttentionCall();
  made->call.dtype = DType(dtype);
  made->call.num_kv_heads = num_kv_heads;
  made->call.head_dim = head_dim;
  made->call.block_size = block_size;
  made->keys = static_cast<const char*>(keys);
  made->values = static_cast<const char*>(values);
  made->layer_bytes = layer_bytes;
  made->num_threads = num_threads;
  return made.release();
}

void headrace_attention_free(HeadraceAttention* attention) { delete attention; }

void headrace_attention_begin(HeadraceAttention* attention, int32_t num_rows, int64_t num_tokens,
                              const int32_t* block_table, int32_t table_width, const int32_t* seq_lens,
                              const int32_t* cu_seqlens_q, const int64_t* slots) {
  AttentionCall& call = attention->call;
  call.block_table = block_table;
  call.table_width = table_width;
  call.seq_lens = seq_lens;
  call.cu_seqlens_q = cu_seqlens_q;
  attention->slots = slots;
  attention->num_rows = num_rows;
  attention->num_tokens = num_tokens;
  // Planned by the first `attend`, which knows the number of heads.
  call.num_heads = 0;
}

void headrace_attention_write(HeadraceAttention* attention, int32_t layer, const void* key, int64_t key_stride,
                              const void* value, int64_t value_stride) {
  const AttentionCall& call = attention->call;
  const int64_t number_bytes = call.dtype == kFloat32 ? 4 : 2;
  const int64_t token_bytes = int64_t(call.num_kv_heads) * call.head_dim * number_bytes;
  char* keys = const_cast<char*>(attention->keys) + layer * attention->layer_bytes;
  char* values = const_cast<char*>(attention->values) + layer * attention->layer_bytes;
  const auto write = [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      const int64_t place = attention->slots[token] * token_bytes;
      std::memcpy(keys + place, static_cast<const char*>(key) + token * key_stride * number_bytes,
                  size_t(token_bytes));
      std::memcpy(values + place, static_cast<const char*>(value) + token * value_stride * number_bytes,
                  size_t(token_bytes));
    }
  };
  share(attention->num_tokens, token_bytes, attention->num_threads, write);
}

void headrace_attention_attend(HeadraceAttention* attention, int32_t layer, int32_t num_heads, const void* query,
                               int64_t query_stride, void* out, float scale, int32_t window, float soft_cap) {
  if (attention->call.num_heads != num_heads) make_plan(attention, num_heads);
  AttentionCall call = attention->call;
  int32_t next_item = 0;
  call.keys = attention->keys + layer * attention->layer_bytes;
  call.values = attention->values + layer * attention->layer_bytes;
  call.query = query;
  call.query_stride = query_stride;
  call.out = out;
  call.scale = scale;
  call.window = window;
  call.soft_cap = soft_cap;
  call.next_item = &next_item;
  const auto attend = attention->kernels->attend;
  in_parallel(std::min(attention->num_threads, call.num_items),
              [&] { attend(call, thread_scratch.at_least(attention->scratch_bytes)); });
}

void headrace_rms_norm(const void* kernels, int32_t dtype, const void* in, int64_t in_stride, const float* gain,
                       float eps, void* out, int64_t num_tokens, int64_t width, int32_t num_threads) {
  share(num_tokens, width, num_threads, [&](int64_t first, int64_t last) {
    static_cast<const Kernels*>(kernels)->rms_norm(DType(dtype), in, in_stride, gain, eps, out, width, first, last);
  });
}

void headrace_gated_silu(const void* kernels, int32_t dtype, const void* in, int64_t in_stride, void* out,
                         int64_t num_tokens, int64_t width, int32_t num_threads) {
  share(num_tokens, 4 * width, num_threads, [&](int64_t first, int64_t last) {
    static_cast<const Kernels*>(kernels)->gated_silu(DType(dtype), in, in_stride, out, width, first, last);
  });
}

void headrace_rotate(const void* kernels, int32_t dtype, void* heads, int64_t heads_stride, const void* cosine,
                     int64_t cosine_stride, const void* sine, int64_t sine_stride, int64_t num_tokens,
                     int64_t num_heads, int64_t head_dim, int32_t num_threads) {
  const Rotation rotation = {heads, heads_stride, cosine, cosine_stride, sine, sine_stride, num_heads, head_dim};
  share(num_tokens, 2 * num_heads * head_dim, num_threads, [&](int64_t first, int64_t last) {
    static_cast<const Kernels*>(kernels)->rotate(DType(dtype), rotation, first, last);
  });
}

void headrace_argmax(const void* kernels, int32_t dtype, const void* in, int64_t in_stride, int64_t num_rows,
                     int64_t width, int64_t* out, int32_t num_threads) {
  share(num_rows, width, num_threads, [&](int64_t first, int64_t last) {
    static_cast<const Kernels*>(kernels)->argmax(DType(dtype), in, in_stride, width, out, first, last);
  });
}

// The greatest of each row as three numbers, (num_rows, 3): its index, and twice whether it is finite.
void headrace_greedy(const void* kernels, int32_t dtype, const void* in, int64_t in_stride, int64_t num_rows,
                     int64_t width, double* out, int32_t num_threads) {
  share(num_rows, width, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      int64_t index;
      const char* from = static_cast<const char*>(in) + row * in_stride * (dtype == kFloat32 ? 4 : 2);
      static_cast<const Kernels*>(kernels)->argmax(DType(dtype), from, in_stride, width, &index, 0, 1);
      uint32_t bits = 0;
      if (dtype == kFloat32) std::memcpy(&bits, from + index * 4, 4);
      else std::memcpy(reinterpret_cast<char*>(&bits) + 2, from + index * 2, 2);
      const bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
      out[row * 3] = double(index);
      out[row * 3 + 1] = out[row * 3 + 2] = is_finite ? 1. : 0.;
    }
  });
}

int32_t headrace_can_multiply(const void* kernels, int32_t dtype) {
  return static_cast<const Kernels*>(kernels)->can_multiply(DType(dtype));
}

void headrace_multiply(const void* kernels, int32_t dtype, int32_t weight_kind, int32_t is_out_fp32, const void* in,
                       int64_t in_stride, const void* weights, const void* bias, const void* residual,
                       int64_t residual_stride, void* out, int64_t num_rows, int64_t width, int64_t num_outputs,
                       int32_t num_threads) {
  const Kernels& chosen = *static_cast<const Kernels*>(kernels);
  LinearCall call = {DType(dtype), is_out_fp32 != 0, in,  in_stride, static_cast<const float*>(weights), bias,
                     residual,     residual_stride,  out, width,     num_outputs};
  int64_t row_bytes = width * (dtype == kFloat32 ? 4 : 2);
  auto multiply = chosen.multiply;
  call.kind = WeightKind(weight_kind);
  if (weight_kind == kInt8 || weight_kind == kInt4) {
    multiply = chosen.multiply_quantised;
    const int64_t num_groups = (width + kGroup - 1) / kGroup;
    row_bytes = num_groups * (kGroup + 8);
    char* memory = static_cast<char*>(quantised_rows.at_least(size_t(num_rows * row_bytes)));
    char* scales = memory + num_rows * num_groups * kGroup;
    call.quantised = {reinterpret_cast<int8_t*>(memory), reinterpret_cast<float*>(scales),
                      reinterpret_cast<int32_t*>(scales + num_rows * num_groups * 4), num_groups};
    share(num_rows, width, num_threads, [&](int64_t first, int64_t last) {
      chosen.quantise(DType(dtype), in, in_stride, width, call.quantised, first, last);
    });
  }
  // So many rows stay in a core's cache while the weights pass by.
  constexpr int64_t kCachedBytes = 384 * 1024;
  const int64_t most_rows = std::max<int64_t>(48, kCachedBytes / row_bytes);
  const int64_t num_blocks = (num_rows + most_rows - 1) / most_rows;
  const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
  // Whole groups of the rows that kernels compute together.
  const auto block_begin = [&](int64_t block) {
    return block == num_blocks ? num_rows : num_rows * block / num_blocks / kRowsTogether * kRowsTogether;
  };
  // All panels of the first block of rows, then those of the second.
  const int64_t num_all = num_blocks * num_panels;
  const int64_t num_takers = num_threads > 1 ? 2 * num_threads : 1;
  const int64_t least = std::max<int64_t>(1, num_all / (8 * num_takers));
  int64_t next = 0;
  in_parallel(num_all == 1 ? 1 : num_threads, [&] {
    int64_t first = __atomic_load_n(&next, __ATOMIC_RELAXED);
    while (first < num_all) {
      // Many at first, where one follows the other in memory, few in the end, so that threads are done together.
      const int64_t share = std::max(least, (num_all - first) / num_takers);
      const int64_t block = first / num_panels, panel = first % num_panels;
      const int64_t count = std::min(share, num_panels - panel);
      if (!__atomic_compare_exchange_n(&next, &first, first + count, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
      multiply(call, block_begin(block), block_begin(block + 1), panel, panel + count);
      first = __atomic_load_n(&next, __ATOMIC_RELAXED);
    }
  });
}

#pragma GCC visibility pop
}  // extern "C"
