// The library's C interface: addresses and numbers, no type of any other library.
#pragma once

#include <cstdint>

extern "C" {

struct HeadraceAttention;

void headrace_attention_write(HeadraceAttention* attention, int32_t layer, const void* key, int64_t key_stride,
                              const void* value, int64_t value_stride);

void headrace_attention_attend(HeadraceAttention* attention, int32_t layer, int32_t num_heads, const void* query,
                               int64_t query_stride, void* out, float scale, int32_t window, float soft_cap);

void headrace_rms_norm(const void* kernels, int32_t dtype, const void* in, int64_t in_stride, const float* gain,
                       float eps, void* out, int64_t num_tokens, int64_t width, int32_t num_threads);

void headrace_gated_silu(const void* kernels, int32_t dtype, const void* in, int64_t in_stride, void* out,
                         int64_t num_tokens, int64_t width, int32_t num_threads);

void headrace_rotate(const void* kernels, int32_t dtype, void* heads, int64_t heads_stride, const void* cosine,
                     int64_t cosine_stride, const void* sine, int64_t sine_stride, int64_t num_tokens,
                     int64_t num_heads, int64_t head_dim, int32_t num_threads);

// `weight_kind` is a WeightKind: how the weights were packed.
void headrace_multiply(const void* kernels, int32_t dtype, int32_t weight_kind, int32_t is_out_fp32, const void* in, int64_t in_stride,
                       const void* weights, const void* bias, const void* residual, int64_t residual_stride, void* out,
                       int64_t num_rows, int64_t width, int64_t num_outputs, int32_t num_threads);

// One layer of a decoder: weights are packed, a null bias is none.
struct HeadraceLayer {
  const float* attention_gain;
  const void* qkv;
  const void* qkv_bias;
  const void* attention_out;
  const void* attention_out_bias;
  const float* mlp_gain;
  const void* gate_up;
  const void* gate_up_bias;
  const void* down;
  const void* down_bias;
  float attention_eps, mlp_eps;
  float scale, soft_cap;
  int32_t window;
  int32_t rotary;  // which factors turn its heads; -1: none
  int32_t qkv_kind, attention_out_kind, gate_up_kind, down_kind;  // each a WeightKind
};

struct HeadraceStack {
  int32_t dtype;
  int32_t num_heads, num_kv_heads, head_dim;
  int64_t width, inner_width;
  int32_t num_layers;
  int32_t num_threads;
};

// Factors of this step's tokens, (T, D / 2) each; strides in elements.
struct HeadraceRotary {
  const void* cosine;
  const void* sine;
  int64_t stride;
};

// Runs `hidden`, (T, width), through all layers; it is overwritten. After the last attention only some rows go on:
// they end in `out`, (num_rows, width).
void headrace_stack_run(const void* kernels, HeadraceAttention* attention, const HeadraceStack* stack,
                        const HeadraceLayer* layers, const HeadraceRotary* rotary, void* hidden, int64_t num_tokens,
                        const int64_t* rows, int64_t num_rows, void* out);
}
