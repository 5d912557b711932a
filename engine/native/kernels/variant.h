// The functions that exist once per instruction set.
#pragma once

#include "attention.h"

#define HEADRACE_DECLARE_VARIANT(variant)                                                                        \
  namespace variant {                                                                                            \
  size_t attention_scratch(const headrace::AttentionCall&);                                                      \
  void attend(const headrace::AttentionCall&, void* scratch);                                                    \
  void rms_norm(headrace::DType, const void* in, int64_t in_stride, const float* gain, float eps, void* out,     \
                int64_t width, int64_t first, int64_t last);                                                     \
  void gated_silu(headrace::DType, const void* in, int64_t in_stride, void* out, int64_t width, int64_t first,   \
                  int64_t last);                                                                                 \
  void rotate(headrace::DType, const headrace::Rotation&, int64_t first, int64_t last);                          \
  void argmax(headrace::DType, const void* in, int64_t in_stride, int64_t width, int64_t* out, int64_t first,    \
              int64_t last);                                                                                     \
  bool can_multiply(headrace::DType);                                                                            \
  void multiply(const headrace::LinearCall&, int64_t first_row, int64_t last_row, int64_t first_panel,           \
                int64_t last_panel);                                                                             \
  void quantise(headrace::DType, const void* in, int64_t in_stride, int64_t width, const headrace::QuantisedRows&, \
                int64_t first, int64_t last);                                                                    \
  void multiply_quantised(const headrace::LinearCall&, int64_t first_row, int64_t last_row, int64_t first_panel, \
                          int64_t last_panel);                                                                   \
  }

#if defined(HEADRACE_VARIANT)
HEADRACE_DECLARE_VARIANT(HEADRACE_VARIANT)
#endif
