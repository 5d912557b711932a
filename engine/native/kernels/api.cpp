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

// Splits `count` tokens between threads if there is enough to do.
template <typename Function>
void share(int64_t count, int64_t work_per_token, int num_threads, const Function& function) {
  constexpr int64_t kLeastWork = 16384;  // numbers; below, starting a thread costs more than it saves
  const int64_t useful = count * work_per_token / kLeastWork;
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>({num_threads, count, useful}));
  if (parts == 1) return function(0, count);
  int64_t next_part = 0;
  in_parallel(int(parts), [&] {
    for (;;) {
      const int64_t part = __atomic_fetch_add(&next_part, 1, __ATOMIC_RELAXED);
      if (part >= parts) return;
      function(count * part / parts, count * (part + 1) / parts);
    }
  });
}

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

// Number of bytes that packed weights take.
int64_t headrace_packed_bytes(int32_t dtype, int64_t num_outputs, int64_t width) {
  return (num_outputs + kPanel - 1) / kPanel * kPanel * width * (dtype == kFloat32 ? 4 : 2);
}

void headrace_pack(int32_t dtype, const void* weights, int64_t num_outputs, int64_t width, void* packed,
                   int32_t num_threads) {
  // Units of four bytes; outputs that only fill the last panel are zero.
  const int64_t num_units = dtype == kFloat32 ? width : width / 2;
  const uint32_t* from = static_cast<const uint32_t*>(weights);
  const auto pack = [&](int64_t panel) {
    uint32_t* to = static_cast<uint32_t*>(packed) + panel * kPanel * num_units;
    for (int64_t unit = 0; unit < num_units; ++unit)
      for (int64_t output = panel * kPanel; output < (panel + 1) * kPanel; ++output)
        *to++ = output < num_outputs ? from[output * num_units + unit] : 0;
  };
  share((num_outputs + kPanel - 1) / kPanel, kPanel * num_units, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel) pack(panel);
  });
}

// Whether every group of 32 numbers is what whole numbers give with one of its choices of a scale and a least value,
// the first that does; of eight bits the least value is that of number 128. `scales` and `least` are (num_choices,
// num_groups); `chosen` is (num_groups,) and `numbers` (num_groups, kGroup), both of no meaning where it is not so.
int32_t headrace_find_numbers(int32_t weight_kind, const float* weights, const float* scales, const float* least,
                              int32_t num_choices, int64_t num_groups, uint8_t* numbers, uint8_t* chosen,
                              int32_t num_threads) {
  const float first = weight_kind == kInt8 ? -127.f : 0.f, last = weight_kind == kInt8 ? 127.f : 15.f;
  const float offset = weight_kind == kInt8 ? 128.f : 0.f;
  const auto gives = [&](float scale, float zero, const float* group, uint8_t* out) {
    const float inverse = scale != 0.f ? 1.f / scale : 0.f;
    int num_others = 0;
    for (int i = 0; i < kGroup; ++i) {
      const float bounded = std::min(std::max((group[i] - zero) * inverse, first), last);
      // Rounds to a whole one.
      const float number = (bounded + 12582912.f) - 12582912.f;
      num_others += number * scale + zero != group[i];
      out[i] = uint8_t(number + offset);
    }
    return num_others == 0;
  };
  int32_t is_found = 1;
  share(num_groups, kGroup, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end && __atomic_load_n(&is_found, __ATOMIC_RELAXED); ++group) {
      int choice = 0;
      while (choice < num_choices && !gives(scales[choice * num_groups + group], least[choice * num_groups + group],
                                            weights + group * kGroup, numbers + group * kGroup))
        ++choice;
      chosen[group] = uint8_t(choice);
      if (choice == num_choices) __atomic_store_n(&is_found, 0, __ATOMIC_RELAXED);
    }
  });
  return is_found;
}

// Number of bytes that packed weights of eight or four bits take.
int64_t headrace_packed_quantised_bytes(int32_t weight_kind, int64_t num_outputs, int64_t width) {
  const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel, num_groups = (width + kGroup - 1) / kGroup;
  return num_panels * num_groups * (weight_kind == kInt8 ? 2 * kPanel + kGroup * kPanel : 4 * kPanel + kGroup * kPanel / 2);
}

// `numbers` are (num_outputs, num_groups, kGroup); `scales` and, of four bits, `least` (num_outputs, num_groups), fp16.
// A weight is its number times the scale, of eight bits less 128 scales, of four bits plus the least value.
void headrace_pack_quantised(int32_t weight_kind, const uint8_t* numbers, const uint16_t* scales,
                             const uint16_t* least, int64_t num_outputs, int64_t num_groups, void* packed,
                             int32_t num_threads) {
  const int64_t panel_bytes = headrace_packed_quantised_bytes(weight_kind, kPanel, num_groups * kGroup);
  const auto pack = [&](int64_t panel) {
    uint8_t* to = static_cast<uint8_t*>(packed) + panel * panel_bytes;
    const int64_t first = panel * kPanel;
    for (int64_t group = 0; group < num_groups; ++group) {
      const auto number = [&](int output, int input) -> unsigned {
        const int64_t row = first + output;
        return row < num_outputs ? numbers[(row * num_groups + group) * kGroup + input] : 0;
      };
      const auto put_halves = [&](const uint16_t* halves) {
        for (int64_t row = first; row < first + kPanel; ++row, to += 2) {
          const uint16_t half = row < num_outputs ? halves[row * num_groups + group] : 0;
          std::memcpy(to, &half, 2);
        }
      };
      put_halves(scales);
      if (weight_kind == kInt8) {
        for (int input = 0; input < kGroup; input += 4)
          for (int output = 0; output < kPanel; ++output)
            for (int i = input; i < input + 4; ++i) *to++ = uint8_t(number(output, i));
        continue;
      }
      put_halves(least);
      for (int half = 0; half < kPanel; half += kPanel / 2)
        for (int input = 0; input < kGroup / 2; input += 4)
          for (int output = half; output < half + kPanel / 2; ++output)
            for (int i = input; i < input + 4; ++i)
              *to++ = uint8_t(number(output, i) | number(output, i + kGroup / 2) << 4);
    }
  };
  const int64_t panel_numbers = kPanel * num_groups * kGroup;
  share((num_outputs + kPanel - 1) / kPanel, panel_numbers, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel) pack(panel);
  });
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
