#include "plan.h"

#include <algorithm>
#include <numeric>

namespace headrace {

namespace {

// Query rows (tokens x G) of an item of a long chunk: the more of them, the cheaper is packing a tile's keys and
// values; the fewer, the more evenly threads share the work.
constexpr int kLeastChunkRows = 96;
constexpr int kMostChunkRows = 384;
// Loading and packing a tile costs about as much as so many query rows.
constexpr int kTileRows = 7;
// Rows with no more query rows than this may be cut along their context.
constexpr int kMostSplitRows = 64;
// Items per thread that even out what was guessed wrongly.
constexpr int kItemsPerThread = 6;

int ceil_div(int n, int by) { return (n + by - 1) / by; }

}  // namespace

double Plan::cost_of(int num_queries, int num_heads, int num_tiles) const {
  return double(num_tiles) * num_heads * (kTileRows + num_queries * group_size_);
}

void Plan::make(const StepShape& shape, int num_heads, int num_kv_heads, int head_dim, int num_threads) {
  items.clear();
  splits.clear();
  costs_.clear();
  parts_floats = 0;
  max_item_rows = 0;
  num_kv_heads_ = num_kv_heads;
  group_size_ = num_heads / num_kv_heads;
  part_width_ = (head_dim + 31) / 32 * 32 + 2;
  double total = 0;
  for (int row = 0; row < shape.num_rows; ++row) {
    const int query_len = shape.cu_seqlens_q[row + 1] - shape.cu_seqlens_q[row];
    total += cost_of(query_len, num_kv_heads, std::max(1, ceil_div(shape.seq_lens[row], kTile)));
  }
  const double wanted_cost = total / (num_threads * kItemsPerThread);
  for (int row = 0; row < shape.num_rows; ++row) {
    const int query_len = shape.cu_seqlens_q[row + 1] - shape.cu_seqlens_q[row];
    if (query_len == 0) continue;
    if (query_len * group_size_ > kMostSplitRows) add_chunk(row, query_len, shape.seq_lens[row], wanted_cost);
    else add_short(row, query_len, shape.seq_lens[row], num_threads > 1 ? wanted_cost : total + 1);
  }
  // The heaviest first: what is left for the end is small.
  std::vector<int> order(items.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [this](int a, int b) { return costs_[a] > costs_[b]; });
  std::vector<Item> sorted;
  sorted.reserve(items.size());
  for (const int index : order) sorted.push_back(items[index]);
  items.swap(sorted);
}

void Plan::add_chunk(int row, int query_len, int seq_len, double wanted_cost) {
  const double wanted_rows = wanted_cost / std::max(1, ceil_div(seq_len, kTile)) - kTileRows;
  const int num_rows = int(std::clamp<double>(wanted_rows, kLeastChunkRows, kMostChunkRows));
  const int step = std::max(1, num_rows / group_size_);
  for (int first = 0; first < query_len; first += step) {
    const int count = std::min(step, query_len - first);
    // Later positions are seen by none of these queries.
    const int last_seen = std::max(1, seq_len - query_len + first + count);
    const int num_tiles = ceil_div(last_seen, kTile);
    // In its last tile a query sees a part.
    const double unseen = double(num_tiles) - (last_seen - count / 2.) / kTile;
    const double cost = cost_of(count, 1, num_tiles) - unseen * count * group_size_;
    for (int head = 0; head < num_kv_heads_; ++head) add_item({row, first, count, head, 1, 0, num_tiles, -1}, cost);
  }
}

void Plan::add_short(int row, int query_len, int seq_len, double wanted_cost) {
  const int num_tiles = std::max(1, ceil_div(seq_len, kTile));
  const double cost = cost_of(query_len, num_kv_heads_, num_tiles);
  const int num_wanted = std::min(num_tiles * num_kv_heads_, int(cost / wanted_cost));
  if (num_wanted < 2) {
    add_item({row, 0, query_len, 0, num_kv_heads_, 0, num_tiles, -1}, cost);
    return;
  }
  const int tiles_per_item = std::max(1, num_tiles / num_wanted);
  const int num_tile_runs = ceil_div(num_tiles, tiles_per_item);
  const int heads_per_item = std::max(1, num_kv_heads_ / std::max(1, num_wanted / num_tile_runs));
  const int split = int(splits.size());
  int num_items = 0;
  for (int tile = 0; tile < num_tiles; tile += tiles_per_item)
    for (int head = 0; head < num_kv_heads_; head += heads_per_item, ++num_items) {
      const int tiles = std::min(tiles_per_item, num_tiles - tile);
      const int heads = std::min(heads_per_item, num_kv_heads_ - head);
      add_item({row, 0, query_len, head, heads, tile, tiles, split}, cost_of(query_len, heads, tiles));
    }
  splits.push_back({parts_floats, row, num_tiles, num_items, num_items});
  parts_floats += int64_t(num_tiles) * num_kv_heads_ * query_len * group_size_ * part_width_;
}

void Plan::add_item(const Item& item, double cost) {
  items.push_back(item);
  costs_.push_back(cost);
  max_item_rows = std::max(max_item_rows, item.num_queries * group_size_ * item.num_heads);
}

}  // namespace headrace
