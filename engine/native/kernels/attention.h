// What the planner, the dispatcher and the kernels of every instruction set agree on.
//
// Words: a row is a sequence's share of the step; a tile is a run of kTile KV positions that begins at a multiple
// of kTile; G is the number of query heads per KV head.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

// Each tile has a softmax of its own, and the tiles of a row are merged in order. So a query's result depends on
// its own sequence alone, whatever thread computed which tile.
constexpr int kTile = 128;

enum DType : int32_t { kFloat32 = 0, kBfloat16 = 1 };

// A rectangle of work: some queries of one row, some KV heads, some tiles.
struct Item {
  int32_t row;
  int32_t first_query, num_queries;
  int32_t first_head, num_heads;
  int32_t first_tile, num_tiles;
  int32_t split;  // index of its SplitRow; -1: the item holds all tiles of its queries
};

// A row whose tiles go to several items: each leaves its part, the last one to finish merges.
struct SplitRow {
  int64_t offset;  // of its parts, in floats
  int32_t row;
  int32_t num_tiles;
  int32_t num_items;
  int32_t num_unfinished;
};

struct AttentionCall {
  DType dtype;
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  // (N, S, H_kv, D) of one layer.
  const char* keys;
  const char* values;
  const void* query;  // (T, H_q, D)
  int64_t query_stride;  // elements from token to token
  void* out;  // (T, H_q, D), contiguous
  float scale;
  int32_t window;  // 0: none
  float soft_cap;  // 0: none

  const int32_t* block_table;
  int32_t table_width;
  const int32_t* seq_lens;
  const int32_t* cu_seqlens_q;

  const Item* items;
  int32_t num_items;
  int32_t* next_item;  // shared by all threads
  SplitRow* splits;
  float* parts;
  int32_t max_item_rows;  // greatest num_queries * G * num_heads of an item
};

// Turns heads in place. Strides are in elements, from token to token; heads of a token lie side by side.
struct Rotation {
  void* heads;
  int64_t heads_stride;
  const void* cosine;  // (T, D / 2)
  int64_t cosine_stride;
  const void* sine;
  int64_t sine_stride;
  int64_t num_heads, head_dim;
};

// Outputs of packed weights that lie together.
constexpr int kPanel = 32;

// How weights are kept: as numbers of the model's type, as whole numbers in groups of inputs with scales of their own,
// in bf16 for fp32, or in fp32 and behind that as whole numbers, too.
enum WeightKind : int32_t { kSame = 0, kInt8 = 1, kInt4 = 2, kKeptBf16 = 3, kWithInt8 = 4, kWithInt4 = 5 };

// Inputs of a group.
constexpr int kGroup = 32;

// Rows of whole numbers: of each group its scale and its total, so that a number is worth itself times the scale.
struct QuantisedRows {
  int8_t* numbers;   // (M, num_groups, kGroup)
  float* scales;     // (M, num_groups)
  int32_t* totals;   // (M, num_groups)
  int64_t num_groups;
};

// out = in . weights^T [+ bias] [+ residual]. Strides are in elements, from row to row.
struct LinearCall {
  DType dtype;  // of all but `out`
  bool is_out_fp32;
  const void* in;  // (M, width)
  int64_t in_stride;
  const float* weights;  // packed
  const void* bias;      // (num_outputs,) or null
  const void* residual;  // (M, num_outputs) or null
  int64_t residual_stride;
  void* out;  // (M, num_outputs), contiguous
  int64_t width, num_outputs;
  WeightKind kind = kSame;
  QuantisedRows quantised = {};  // the inputs, where the weights are
};

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  size_t (*attention_scratch)(const AttentionCall&);
  // Work through the items until none is left; `scratch` belongs to the calling thread.
  void (*attend)(const AttentionCall&, void* scratch);
  void (*rms_norm)(DType, const void* in, int64_t in_stride, const float* gain, float eps, void* out, int64_t width,
                   int64_t first, int64_t last);
  void (*gated_silu)(DType, const void* in, int64_t in_stride, void* out, int64_t width, int64_t first, int64_t last);
  void (*rotate)(DType, const Rotation&, int64_t first, int64_t last);
  bool (*can_multiply)(DType);
  void (*multiply)(const LinearCall&, int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel);
  void (*quantise)(DType, const void* in, int64_t in_stride, int64_t width, const QuantisedRows&, int64_t first,
                   int64_t last);
  void (*multiply_quantised)(const LinearCall&, int64_t first_row, int64_t last_row, int64_t first_panel,
                             int64_t last_panel);
  void (*argmax)(DType, const void* in, int64_t in_stride, int64_t width, int64_t* out, int64_t first, int64_t last);
};

}  // namespace headrace
