// One step's work, cut into items.
#pragma once

#include <vector>

#include "attention.h"

namespace headrace {

struct StepShape {
  int32_t num_rows;
  const int32_t* seq_lens;
  const int32_t* cu_seqlens_q;
};

struct Plan {
  std::vector<Item> items;  // heavy ones first
  std::vector<SplitRow> splits;
  int64_t parts_floats = 0;
  int32_t max_item_rows = 0;

  // Cut the step for `num_threads`. How it is cut never changes a result.
  void make(const StepShape& shape, int num_heads, int num_kv_heads, int head_dim, int num_threads);

 private:
  void add_chunk(int row, int query_len, int seq_len, double wanted_cost);
  void add_short(int row, int query_len, int seq_len, double wanted_cost);
  void add_item(const Item& item, double cost);
  double cost_of(int num_queries, int num_heads, int num_tiles) const;

  int group_size_ = 1, num_kv_heads_ = 1, part_width_ = 0;
  std::vector<double> costs_;
};

}  // namespace headrace
