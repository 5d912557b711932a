// Attention over a paged cache, tile by tile: tiles as in FlashAttention (arXiv 2205.14135), long rows cut as in
// Flash-Decoding. Compiled once per instruction set; HEADRACE_VARIANT is its name.
#include "attention.h"

#include "attention_few.h"
#include "attention_many.h"
#include "attention_tiles.h"
#include "variant.h"

namespace {

// Works through a step's items.
template <typename Math>
class Worker {
 public:
  Worker(const AttentionCall& call, void* scratch) : call_(call), work_(call, scratch), few_(work_), many_(work_) {}

  void run() {
    std::memset(work_.zeros, 0, size_t(work_.token_bytes));
    for (int64_t i = 0; i < call_.max_item_rows + kLanes; ++i) work_.maxima[i] = work_.totals[i] = 0.f;
    // One item ahead, so that the first tile of the next one is on its way when it begins.
    int index = take_item();
    if (index >= call_.num_items) return;
    work_.ahead->clear();
    find_rows(call_.items[index], 0, work_.rows[0], false);
    few_.begin();
    while (index < call_.num_items) {
      const int next = take_item();
      run_item(call_.items[index], next < call_.num_items ? &call_.items[next] : nullptr);
      index = next;
    }
  }

 private:
  typedef typename Math::Stored Stored;

  int take_item() { return __atomic_fetch_add(call_.next_item, 1, __ATOMIC_RELAXED); }

  // Where a tile lies. Its memory will be fetched ahead: unit by unit where it and the tile before are of few rows.
  void find_rows(const Item& item, int tile, TileRows* rows, bool is_after_few) {
    rows->is_few = few_.takes(item);
    rows->first_head = item.first_head;
    rows->num_heads = item.num_heads;
    const int begin = (item.first_tile + tile) * kTile;
    rows->first = larger(0, work_.first_seen(item.row, item.first_query) - begin);
    rows->last = smaller(kTile, work_.last_seen(item.row, item.first_query + item.num_queries - 1) - begin);
    if (rows->first >= rows->last) return;
    const int32_t* blocks = call_.block_table + int64_t(item.row) * call_.table_width;
    if (rows->is_few) return find_quads(item, begin, blocks, rows, is_after_few);
    const int end = int(round_up(rows->last, 2 * kLanes));
    for (int t = rows->first / (2 * kLanes) * (2 * kLanes); t < rows->first; ++t)
      rows->keys[t] = rows->values[t] = work_.zeros;
    int block = (begin + rows->first) / call_.block_size, offset = (begin + rows->first) % call_.block_size;
    for (int t = rows->first; t < rows->last; ++block, offset = 0) {
      const int stop = smaller(rows->last, t + call_.block_size - offset);
      int64_t place = (int64_t(blocks[block]) * call_.block_size + offset) * work_.token_bytes;
      ask_for(item, place, stop - t);
      for (; t < stop; ++t, place += work_.token_bytes) {
        rows->keys[t] = call_.keys + place;
        rows->values[t] = call_.values + place;
      }
    }
    for (int t = rows->last; t < end; ++t) rows->keys[t] = rows->values[t] = work_.zeros;
  }

  void find_quads(const Item& item, int begin, const int32_t* blocks, TileRows* rows, bool is_after_few) {
    const int first = rows->first / kQuad, last = (rows->last + kQuad - 1) / kQuad;
    const int quads_per_block = call_.block_size / kQuad;
    int block = (begin / kQuad + first) / quads_per_block, offset = (begin / kQuad + first) % quads_per_block;
    for (int q = first; q < last; ++q) {
      rows->quads[q] = (int64_t(blocks[block]) * call_.block_size + offset * kQuad) * work_.token_bytes;
      if (!is_after_few) ask_for(item, rows->quads[q], kQuad);
      if (++offset == quads_per_block) ++block, offset = 0;
    }
    for (int q = first / kUnitQuads * kUnitQuads; q < first; ++q) rows->quads[q] = rows->quads[first];
    for (int q = last; q % kUnitQuads; ++q) rows->quads[q] = rows->quads[last - 1];
  }

  void ask_for(const Item& item, int64_t place, int num_tokens) {
    const bool is_whole = item.num_heads == call_.num_kv_heads;
    const int64_t num_bytes = is_whole ? num_tokens * work_.token_bytes : item.num_heads * work_.head_bytes;
    for (int t = 0; t < (is_whole ? 1 : num_tokens); ++t, place += work_.token_bytes) {
      work_.ahead->add(call_.keys + place + item.first_head * work_.head_bytes, num_bytes);
      work_.ahead->add(call_.values + place + item.first_head * work_.head_bytes, num_bytes);
    }
  }

  void run_item(const Item& item, const Item* next_item) {
    const int num_rows = item.num_queries * work_.group_size;
    load_queries(item, num_rows);
    if (item.split < 0) {
      for (int i = 0; i < item.num_heads * num_rows; ++i) work_.maxima[i] = kMinusInfinity, work_.totals[i] = 0.f;
      std::memset(work_.sums, 0, size_t(item.num_heads) * size_t(num_rows) * size_t(work_.width) * 4);
    }
    const bool has_few_rows = few_.takes(item);
    for (int tile = 0; tile < item.num_tiles; ++tile) {
      TileRows* next = work_.rows[1];
      work_.ahead->clear();
      if (tile + 1 < item.num_tiles) find_rows(item, tile + 1, next, has_few_rows);
      else if (next_item) find_rows(*next_item, 0, next, has_few_rows);
      else next->first = next->last = 0;
      if (has_few_rows) {
        few_.run_tile(item, tile, num_rows);
      } else {
        few_.skip();
        for (int h = 0; h < item.num_heads; ++h) many_.run_tile(item, tile, h, num_rows);
      }
      while (!work_.ahead->is_done()) work_.ahead->template fetch_lines<4>();
      work_.rows[1] = work_.rows[0];
      work_.rows[0] = next;
    }
    if (item.split < 0) {
      for (int h = 0; h < item.num_heads; ++h)
        write_rows(item.row, item.first_query, 0, num_rows, item.first_head + h, work_.totals + h * num_rows,
                   work_.sums + int64_t(h) * num_rows * work_.width);
      return;
    }
    SplitRow& split = call_.splits[item.split];
    if (__atomic_sub_fetch(&split.num_unfinished, 1, __ATOMIC_ACQ_REL) == 0) merge_parts(split);
  }

  void load_queries(const Item& item, int num_rows) {
    const int group_size = work_.group_size;
    const Stored* first = static_cast<const Stored*>(call_.query) +
                          (call_.cu_seqlens_q[item.row] + item.first_query) * call_.query_stride;
    for (int h = 0; h < item.num_heads; ++h)
      for (int i = 0; i < num_rows; ++i) {
        const int head = (item.first_head + h) * group_size + i % group_size;
        Math::load_query(first + (i / group_size) * call_.query_stride + int64_t(head) * call_.head_dim,
                         work_.queries + (int64_t(h) * num_rows + i) * call_.head_dim, call_.head_dim);
      }
  }

  // The same operations in the same order as if one item had held the row, so that the bits are the same.
  void merge_parts(SplitRow& split) {
    const int num_rows = work_.query_len(split.row) * work_.group_size;
    for (int head = 0; head < call_.num_kv_heads; ++head)
      for (int r = 0; r < num_rows; r += kLanes) merge_rows(split, head, r, smaller(kLanes, num_rows - r), num_rows);
    // Ready for the next layer.
    split.num_unfinished = split.num_items;
  }

  void merge_rows(const SplitRow& split, int head, int r, int count, int num_rows) {
    const int width = work_.width;
    Softmax<kLanes> so_far;
    so_far.clear();
    std::memset(work_.sums, 0, size_t(count) * size_t(width) * 4);
    for (int tile = 0; tile < split.num_tiles; ++tile) {
      const float* raw = work_.part(split, tile, head, num_rows);
      Softmax<kLanes> softmax;
      softmax.clear();
      std::memcpy(softmax.greatest, raw + r, size_t(count) * 4);
      std::memcpy(softmax.total, raw + num_rows + r, size_t(count) * 4);
      Factors<kLanes> factors;
      merge(softmax, count, so_far.greatest, so_far.total, &factors);
      const float* parts = raw + 2 * num_rows + int64_t(r) * width;
      for (int i = 0; i < count; ++i)
        for (int d = i * width; d < (i + 1) * width; d += kLanes) {
          const F16 kept = mul(load(work_.sums + d), splat(factors.keep[i]));
          store(work_.sums + d, fma(load(parts + d), splat(factors.take[i]), kept));
        }
    }
    write_rows(split.row, 0, r, count, head, so_far.total, work_.sums);
  }

  void write_rows(int row, int first_query, int first, int count, int head, const float* totals,
                  const float* sums) const {
    const int64_t first_token = call_.cu_seqlens_q[row] + first_query;
    for (int i = 0; i < count; ++i) {
      const int64_t token = first_token + (first + i) / work_.group_size;
      const int64_t query_head = int64_t(head) * work_.group_size + (first + i) % work_.group_size;
      // No total: the query sees nothing, and gives zero.
      const float factor = totals[i] == 0.f ? 0.f : 1.f / totals[i];
      Math::finish(sums + int64_t(i) * work_.width, factor,
                   static_cast<Stored*>(call_.out) + (token * call_.num_heads + query_head) * call_.head_dim,
                   call_.head_dim);
    }
  }

  const AttentionCall& call_;
  Workspace<Math> work_;
  FewRows<Math> few_;
  ManyRows<Math> many_;
};

#if defined(__AVX512BF16__)
typedef DotMath Bf16Math;
#else
typedef WideMath<bf16> Bf16Math;
#endif

}  // namespace

namespace HEADRACE_VARIANT {

size_t attention_scratch(const AttentionCall& call) {
  if (call.dtype == headrace::kFloat32) return size_t(Workspace<WideMath<float>>(call, nullptr).used_bytes);
  return size_t(Workspace<Bf16Math>(call, nullptr).used_bytes);
}

void attend(const AttentionCall& call, void* scratch) {
  if (call.dtype == headrace::kFloat32) return Worker<WideMath<float>>(call, scratch).run();
  Worker<Bf16Math>(call, scratch).run();
}

}  // namespace HEADRACE_VARIANT
