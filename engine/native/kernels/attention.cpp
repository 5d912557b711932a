// Attention over a paged cache, tile by tile: online softmax (arXiv 1805.02867) with tiles as in FlashAttention
// (arXiv 2205.14135), long rows cut as in Flash-Decoding. Compiled once per instruction set; HEADRACE_VARIANT is
// its name. The file is long since Worker is one class: its two ways through a tile, for few rows and for many, share
// scratch memory, the look ahead, and softmax.
#include "attention.h"

#include "attention_avx2.h"
#include "attention_math.h"
#include "variant.h"

namespace {

using headrace::AttentionCall;
using headrace::Item;
using headrace::SplitRow;

const float kMinusInfinity = -__builtin_inff();

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

// Where the tokens of a tile lie. A position that no query of the item sees is never read: a row of zeros
// stands in for it.
struct TileRows {
  int first = 0, last = 0;  // seen positions, from the tile's begin; empty where first >= last
  const char* keys[kTile];
  const char* values[kTile];
  // Instead, where the item's rows are few, each quad, in bytes from the cache's begin. For one that is not seen stands
  // one of its unit that is: what is hidden there has scores, too, but no weight.
  int64_t quads[kTile / kQuad];
  int first_head, num_heads;
  bool is_few;
};

// A unit of a tile with few rows: first the keys of all its units and heads, then their values.
struct UnitCursor {
  const TileRows* rows = nullptr;  // null: nothing is known
  int unit = 0, head = 0;
  bool is_values = false;

  void begin(const TileRows* tile) {
    const bool has_units = tile->is_few && tile->first < tile->last;
    *this = UnitCursor();
    if (has_units) rows = tile, unit = tile->first / kUnit;
  }
  // Past the tile's last one comes `next_tile`, if any.
  void advance(const TileRows* next_tile) {
    if (++head < rows->num_heads) return;
    head = 0;
    if (++unit * kUnit < rows->last) return;
    unit = rows->first / kUnit;
    if (!is_values) is_values = true;
    else if (next_tile && next_tile != rows) begin(next_tile);
    else rows = nullptr;
  }
};

// Of N queries, what one softmax tile gives. Whole vectors are read: past the last query stand minus infinity and 0.
template <int N>
struct Softmax {
  static constexpr int kRoom = (N + kLanes - 1) / kLanes * kLanes;
  float greatest[kRoom];
  float total[kRoom];
};

// How the weighted values of a tile merge with those before it.
template <int N>
struct Factors {
  float keep[Softmax<N>::kRoom];
  float take[Softmax<N>::kRoom];
};

// Merges a tile's maxima and totals of up to N queries into the running ones. These have room for whole vectors.
template <int N>
inline void merge(const Softmax<N>& tile, int count, float* greatest, float* total, Factors<N>* factors) {
  for (int i = 0; i < count; i += kLanes) {
    const F16 old_greatest = load(greatest + i), tile_greatest = load(tile.greatest + i);
    const F16 new_greatest = max_b(old_greatest, tile_greatest);
    const M16 is_empty = equal(tile_greatest, splat(kMinusInfinity));
    const F16 keep = select(is_empty, splat(1.f), exp2(sub(old_greatest, new_greatest)));
    const F16 take = select(is_empty, splat(0.f), exp2(sub(tile_greatest, new_greatest)));
    store(greatest + i, select(is_empty, old_greatest, new_greatest));
    store(total + i, fma(load(tile.total + i), take, mul(load(total + i), keep)));
    store(factors->keep + i, keep);
    store(factors->take + i, take);
  }
}

template <typename Math>
class Worker {
 public:
  typedef typename Math::Stored Stored;
  typedef typename Math::Query Query;
  typedef typename Math::Prob Prob;

  // Places what the worker needs in `scratch`; with a null pointer it only counts.
  Worker(const AttentionCall& call, void* scratch) : call_(call), scratch_(static_cast<char*>(scratch)) {
    group_size_ = call.num_heads / call.num_kv_heads;
    num_units_ = Math::num_units(call.head_dim);
    width_ = Math::padded_width(call.head_dim);
    token_bytes_ = int64_t(call.num_kv_heads) * call.head_dim * int64_t(sizeof(Stored));
    head_bytes_ = int64_t(call.head_dim) * int64_t(sizeof(Stored));
    is_raw_ = call.soft_cap == 0.f && call.scale > 0.f;
    factor_ = is_raw_ ? call.scale * kLog2E : 1.f;
    const int64_t item_rows = call.max_item_rows;
    take(&zeros_, token_bytes_);
    take(&rows_[0], 1);
    take(&rows_[1], 1);
    take(&ahead_, 1);
    take(&packed_, int64_t(kTile) * num_units_);
    if (Math::kPacksValues) take(&packed_values_, width_ / kLanes * kValuePanel);
    take(&scores_, larger(int(item_rows), kMaxBlock) * int64_t(kTile));
    // Probabilities of the same width take their scores' place.
    if constexpr (sizeof(Prob) == sizeof(float)) probs_ = scores_;
    else take(&probs_, int64_t(kMaxBlock) * kTile);
    take(&queries_, item_rows * call.head_dim);
    // Whole vectors are read from any row on.
    take(&greatest_, item_rows + kLanes);
    take(&totals_, item_rows + kLanes);
    take(&sums_, larger(int(item_rows), kMaxGroup) * int64_t(width_));
    take(&tile_sums_, item_rows * width_);
    take(&factors_, call.num_kv_heads);
  }

  size_t scratch_bytes() const { return size_t(used_bytes_); }

  void run() {
    std::memset(zeros_, 0, size_t(token_bytes_));
    for (int64_t i = 0; i < call_.max_item_rows + kLanes; ++i) greatest_[i] = totals_[i] = 0.f;
    // One item ahead, so that the first tile of the next one is on its way when it begins.
    int index = take_item();
    if (index >= call_.num_items) return;
    ahead_->clear();
    find_rows(call_.items[index], 0, rows_[0], false);
    begin_coming();
    while (index < call_.num_items) {
      const int next = take_item();
      run_item(call_.items[index], next < call_.num_items ? &call_.items[next] : nullptr);
      index = next;
    }
  }

 private:
  template <typename U>
  void take(U** place, int64_t count) {
    *place = scratch_ ? reinterpret_cast<U*>(scratch_ + used_bytes_) : nullptr;
    used_bytes_ += round_up(count * int64_t(sizeof(U)), 64);
  }

  int take_item() { return __atomic_fetch_add(call_.next_item, 1, __ATOMIC_RELAXED); }

  int seq_len(int row) const { return call_.seq_lens[row]; }
  int query_len(int row) const { return call_.cu_seqlens_q[row + 1] - call_.cu_seqlens_q[row]; }
  // Positions that a query sees: first_seen .. last_seen - 1.
  int last_seen(int row, int query) const { return seq_len(row) - query_len(row) + query + 1; }
  int first_seen(int row, int query) const {
    return call_.window ? larger(0, last_seen(row, query) - call_.window) : 0;
  }

  bool is_few(const Item& item) const {
#if defined(HEADRACE_AVX2_ONLY)
    return item.num_queries * group_size_ <= kMostFewRows && call_.block_size % kQuad == 0 &&
           call_.head_dim % 8 == 0 && head_bytes_ <= kMostFewHeadBytes;
#else
    (void)item;
    return false;
#endif
  }

  // Where a tile lies. Its memory will be fetched ahead: unit by unit where it and the tile before are of few rows.
  void find_rows(const Item& item, int tile, TileRows* rows, bool is_after_few) {
    rows->is_few = is_few(item);
    rows->first_head = item.first_head;
    rows->num_heads = item.num_heads;
    const int begin = (item.first_tile + tile) * kTile;
    rows->first = larger(0, first_seen(item.row, item.first_query) - begin);
    rows->last = smaller(kTile, last_seen(item.row, item.first_query + item.num_queries - 1) - begin);
    if (rows->first >= rows->last) return;
    const int32_t* blocks = call_.block_table + int64_t(item.row) * call_.table_width;
    if (rows->is_few) return find_quads(item, begin, blocks, rows, is_after_few);
    const int end = int(round_up(rows->last, 2 * kLanes));
    for (int t = rows->first / (2 * kLanes) * (2 * kLanes); t < rows->first; ++t) rows->keys[t] = rows->values[t] = zeros_;
    int block = (begin + rows->first) / call_.block_size, offset = (begin + rows->first) % call_.block_size;
    for (int t = rows->first; t < rows->last; ++block, offset = 0) {
      const int stop = smaller(rows->last, t + call_.block_size - offset);
      int64_t place = (int64_t(blocks[block]) * call_.block_size + offset) * token_bytes_;
      ask_for(item, place, stop - t);
      for (; t < stop; ++t, place += token_bytes_) {
        rows->keys[t] = call_.keys + place;
        rows->values[t] = call_.values + place;
      }
    }
    for (int t = rows->last; t < end; ++t) rows->keys[t] = rows->values[t] = zeros_;
  }

  void find_quads(const Item& item, int begin, const int32_t* blocks, TileRows* rows, bool is_after_few) {
    const int first = rows->first / kQuad, last = (rows->last + kQuad - 1) / kQuad;
    const int quads_per_block = call_.block_size / kQuad;
    int block = (begin / kQuad + first) / quads_per_block, offset = (begin / kQuad + first) % quads_per_block;
    for (int q = first; q < last; ++q) {
      rows->quads[q] = (int64_t(blocks[block]) * call_.block_size + offset * kQuad) * token_bytes_;
      if (!is_after_few) ask_for(item, rows->quads[q], kQuad);
      if (++offset == quads_per_block) ++block, offset = 0;
    }
    for (int q = first / kUnitQuads * kUnitQuads; q < first; ++q) rows->quads[q] = rows->quads[first];
    for (int q = last; q % kUnitQuads; ++q) rows->quads[q] = rows->quads[last - 1];
  }

  void ask_for(const Item& item, int64_t place, int num_tokens) {
    const bool is_whole = item.num_heads == call_.num_kv_heads;
    const int64_t num_bytes = is_whole ? num_tokens * token_bytes_ : item.num_heads * head_bytes_;
    for (int t = 0; t < (is_whole ? 1 : num_tokens); ++t, place += token_bytes_) {
      ahead_->add(call_.keys + place + item.first_head * head_bytes_, num_bytes);
      ahead_->add(call_.values + place + item.first_head * head_bytes_, num_bytes);
    }
  }

  void run_item(const Item& item, const Item* next_item) {
    const int num_rows = item.num_queries * group_size_;
    load_queries(item, num_rows);
    if (item.split < 0) {
      for (int i = 0; i < item.num_heads * num_rows; ++i) greatest_[i] = kMinusInfinity, totals_[i] = 0.f;
      std::memset(sums_, 0, size_t(item.num_heads) * size_t(num_rows) * size_t(width_) * 4);
    }
    const bool has_few_rows = is_few(item);
    for (int tile = 0; tile < item.num_tiles; ++tile) {
      TileRows* next = rows_[1];
      ahead_->clear();
      if (tile + 1 < item.num_tiles) find_rows(item, tile + 1, next, has_few_rows);
      else if (next_item) find_rows(*next_item, 0, next, has_few_rows);
      else next->first = next->last = 0;
      if (!has_few_rows) coming_ = UnitCursor();
      else if (!coming_.rows) coming_.begin(next);
      if (has_few_rows) run_tile_of_few(item, tile, num_rows);
      else for (int h = 0; h < item.num_heads; ++h) run_tile(item, tile, h, num_rows);
      while (!ahead_->is_done()) ahead_->fetch_lines<4>();
      rows_[1] = rows_[0];
      rows_[0] = next;
    }
    if (item.split < 0) {
      for (int h = 0; h < item.num_heads; ++h)
        write_rows(item.row, item.first_query, 0, num_rows, item.first_head + h, totals_ + h * num_rows,
                   sums_ + int64_t(h) * num_rows * width_);
      return;
    }
    SplitRow& split = call_.splits[item.split];
    if (__atomic_sub_fetch(&split.num_unfinished, 1, __ATOMIC_ACQ_REL) == 0) merge_parts(split);
  }

  void load_queries(const Item& item, int num_rows) {
    const Stored* first = static_cast<const Stored*>(call_.query) +
                          (call_.cu_seqlens_q[item.row] + item.first_query) * call_.query_stride;
    for (int h = 0; h < item.num_heads; ++h)
      for (int i = 0; i < num_rows; ++i) {
        const int head = (item.first_head + h) * group_size_ + i % group_size_;
        Math::load_query(first + (i / group_size_) * call_.query_stride + int64_t(head) * call_.head_dim,
                         queries_ + (int64_t(h) * num_rows + i) * call_.head_dim, call_.head_dim);
      }
  }

  // A part of a split row: maxima, totals, weighted values of one tile and one KV head.
  float* part(const SplitRow& split, int tile, int head, int num_rows) const {
    const int64_t part_floats = int64_t(num_rows) * (width_ + 2);
    return call_.parts + split.offset + (int64_t(tile) * call_.num_kv_heads + head) * part_floats;
  }

  void run_tile(const Item& item, int tile, int h, int num_rows) {
    const TileRows& rows = *rows_[0];
    const int head = item.first_head + h;
    if (rows.first < rows.last) pack(rows, head);
    for (int r = 0; r < num_rows; r += kMaxBlock) run_block(item, tile, h, num_rows, r, smaller(num_rows, r + kMaxBlock));
  }

  // Rows begin .. end - 1 of an item against one tile.
  void run_block(const Item& item, int tile, int h, int num_rows, int begin, int end) {
    const int head = item.first_head + h;
    float* raw = item.split < 0 ? nullptr : part(call_.splits[item.split], item.first_tile + tile, head, num_rows);
    Group groups[kMaxBlock / kMaxGroup];
    int num_groups = 0, first = kTile, last = 0;
    for (int r = begin; r < end; r += kMaxGroup) {
      const Group group = group_of(item, tile, r, smaller(kMaxGroup, end - r));
      if (group.first < group.last) {
        groups[num_groups++] = group;
        first = smaller(first, group.first);
        last = larger(last, group.last);
      } else if (raw) {
        clear_part(raw, num_rows, group.row, group.count);
      }
    }
    const Query* queries = queries_ + int64_t(h) * num_rows * call_.head_dim;
    for (int t = first / (2 * kLanes) * (2 * kLanes); t < last; t += 2 * kLanes)
      for (int g = 0; g < num_groups; ++g) {
        const Group& group = groups[g];
        if (t >= group.last || t + 2 * kLanes <= group.first) continue;
        ahead_->fetch_lines<4>();
        ahead_->fetch_lines<4>();
        score(reinterpret_cast<const float*>(queries + int64_t(group.row) * call_.head_dim), group.count, t,
              smaller(group.last, t + 2 * kLanes), scores_ + (group.row - begin) * kTile);
      }
    Softmax<kMaxBlock> softmax;
    for (int i = 0; i < softmax.kRoom; ++i) softmax.greatest[i] = kMinusInfinity, softmax.total[i] = 0.f;
    const int tile_begin = (item.first_tile + tile) * kTile;
    for (int g = 0; g < num_groups; ++g)
      for (int i = groups[g].row; i < groups[g].row + groups[g].count; ++i) {
        const int query = item.first_query + i / group_size_;
        softmax.greatest[i - begin] =
            find_peak(scores_ + (i - begin) * kTile, groups[g].first, groups[g].last,
                      first_seen(item.row, query) - tile_begin, last_seen(item.row, query) - tile_begin);
      }
    for (int g = 0; g < num_groups; ++g)
      for (int i = groups[g].row - begin; i < groups[g].row - begin + groups[g].count; ++i)
        softmax.total[i] = to_probs(scores_ + i * kTile, probs_ + i * kTile, groups[g].first, groups[g].last,
                                    softmax.greatest[i]);
    Factors<kMaxBlock> factors;
    if (raw) {
      std::memcpy(raw + begin, softmax.greatest, size_t(end - begin) * 4);
      std::memcpy(raw + num_rows + begin, softmax.total, size_t(end - begin) * 4);
    } else {
      merge(softmax, end - begin, greatest_ + h * num_rows + begin, totals_ + h * num_rows + begin, &factors);
    }
    for (int d = 0; d < width_; d += kColumnsAtOnce)
      for (int g = 0; g < num_groups; ++g) {
        const Group& group = groups[g];
        const int at = group.row - begin;
        ahead_->fetch_lines<4>();
        ahead_->fetch_lines<4>();
        float* out = raw ? raw + 2 * num_rows + int64_t(group.row) * width_
                         : sums_ + (int64_t(h) * num_rows + group.row) * width_;
        weigh(group, probs_ + at * kTile, head, d, smaller(width_, d + kColumnsAtOnce),
              {out, width_, raw ? nullptr : factors.keep + at, raw ? nullptr : factors.take + at});
      }
  }

  // Rows that go through the loops together, and the positions of a tile that any of them sees.
  struct Group {
    int row, count;
    int first, last;
  };
  Group group_of(const Item& item, int tile, int row, int count) const {
    const int begin = (item.first_tile + tile) * kTile;
    const int first_query = item.first_query + row / group_size_;
    const int last_query = item.first_query + (row + count - 1) / group_size_;
    return {row, count, larger(0, first_seen(item.row, first_query) - begin),
            smaller(kTile, last_seen(item.row, last_query) - begin)};
  }

  // One tile of all the item's heads, each of few rows: all scores, then all values.
  void run_tile_of_few(const Item& item, int tile, int num_rows) {
#if defined(HEADRACE_AVX2_ONLY)
    switch (num_rows) {
      case 1: return run_tile_of<1>(item, tile);
      case 2: return run_tile_of<2>(item, tile);
      case 3: return run_tile_of<3>(item, tile);
      case 4: return run_tile_of<4>(item, tile);
      case 5: return run_tile_of<5>(item, tile);
      case 6: return run_tile_of<6>(item, tile);
      case 7: return run_tile_of<7>(item, tile);
      default: return run_tile_of<8>(item, tile);
    }
#else
    (void)item, (void)tile, (void)num_rows;
#endif
  }

  // The first of all units; later ones are on their way when their tile begins.
  void begin_coming() {
    coming_ = UnitCursor();
#if defined(HEADRACE_AVX2_ONLY)
    coming_.begin(rows_[0]);
    for (int64_t bytes = 0; coming_.rows && bytes < kBytesAhead; bytes += kUnit * head_bytes_)
      next_coming(nullptr).fetch_all(int(head_bytes_));
#endif
  }

#if defined(HEADRACE_AVX2_ONLY)
  // Keys and values that are on their way while a unit is computed.
  static constexpr int64_t kBytesAhead = 16 * 1024;

  UnitPlace place_of(const UnitCursor& cursor) const {
    const int64_t at = (cursor.rows->first_head + cursor.head) * head_bytes_;
    const char* begin = (cursor.is_values ? call_.values : call_.keys) + at;
    UnitPlace place;
    for (int q = 0; q < kUnitQuads; ++q) place.quads[q] = begin + cursor.rows->quads[cursor.unit * kUnitQuads + q];
    return place;
  }

  // What to fetch while the next unit is computed. The heads of a unit share its tokens' memory out between them, each
  // a run of it.
  Coming next_coming(const TileRows* next_tile) {
    Coming coming;
    const int num_runs = int(kUnit * head_bytes_ / Coming::kRunBytes);
    if (!coming_.rows) {
      for (int i = 0; i < num_runs; ++i) coming.run(i) = reinterpret_cast<const char*>(scores_);
      return coming;
    }
    const TileRows& rows = *coming_.rows;
    const char* begin = (coming_.is_values ? call_.values : call_.keys) + rows.first_head * head_bytes_;
    const int64_t* quads = rows.quads + coming_.unit * kUnitQuads;
    // Pieces that lie in one: quads of all heads, or tokens of some.
    const bool is_whole = rows.num_heads == call_.num_kv_heads;
    const int piece_bytes = int(is_whole ? kQuad * token_bytes_ : rows.num_heads * head_bytes_);
    int at = coming_.head * num_runs * Coming::kRunBytes, piece = at / piece_bytes;
    at -= piece * piece_bytes;
    for (int i = 0; i < num_runs; ++i) {
      coming.run(i) = begin + at + (is_whole ? quads[piece] : quads[piece / kQuad] + piece % kQuad * token_bytes_);
      for (at += Coming::kRunBytes; at >= piece_bytes; at -= piece_bytes) ++piece;
    }
    coming_.advance(next_tile);
    return coming;
  }

  template <int R>
  void run_tile_of(const Item& item, int tile) {
    const TileRows& rows = *rows_[0];
    const int begin = (item.first_tile + tile) * kTile;
    const auto raw = [&](int h) {
      return part(call_.splits[item.split], item.first_tile + tile, item.first_head + h, R);
    };
    if (rows.first >= rows.last) {
      for (int h = 0; item.split >= 0 && h < item.num_heads; ++h) clear_part(raw(h), R, 0, R);
      return;
    }
    UnitCursor cursor;
    cursor.begin(&rows);
    for (; !cursor.is_values; cursor.advance(nullptr))
      score_unit<Stored, R>(queries_ + int64_t(cursor.head) * R * call_.head_dim, call_.head_dim, place_of(cursor),
                            token_bytes_, scores_ + cursor.head * R * kTile + cursor.unit * kUnit,
                            next_coming(rows_[1]));
    for (int h = 0; h < item.num_heads; ++h) {
      Softmax<kLanes> softmax;
      for (int i = 0; i < R; ++i) {
        const int query = item.first_query + i / group_size_;
        softmax.greatest[i] =
            find_peak(scores_ + (h * R + i) * kTile, rows.first, rows.last, first_seen(item.row, query) - begin,
                      last_seen(item.row, query) - begin);
      }
      for (int i = 0; i < R; ++i) {
        float* scores = scores_ + (h * R + i) * kTile;
        softmax.total[i] = to_probs(scores, scores, rows.first, rows.last, softmax.greatest[i]);
      }
      for (int i = R; i < softmax.kRoom; ++i) softmax.greatest[i] = kMinusInfinity, softmax.total[i] = 0.f;
      if (item.split < 0) {
        merge(softmax, R, greatest_ + h * R, totals_ + h * R, &factors_[h]);
      } else {
        std::memcpy(raw(h), softmax.greatest, R * 4);
        std::memcpy(raw(h) + R, softmax.total, R * 4);
      }
    }
    const auto tile_sums = [&](int h) {
      return item.split < 0 ? tile_sums_ + int64_t(h) * R * width_ : raw(h) + 2 * R;
    };
    for (int h = 0; h < item.num_heads; ++h) std::memset(tile_sums(h), 0, size_t(R) * size_t(width_) * 4);
    for (; cursor.rows; cursor.advance(nullptr)) {
      const int unit_begin = cursor.unit * kUnit;
      weigh_unit<Stored, R>(scores_ + cursor.head * R * kTile + unit_begin, call_.head_dim,
                            larger(0, rows.first - unit_begin), smaller(kUnit, rows.last - unit_begin),
                            place_of(cursor), token_bytes_, tile_sums(cursor.head), width_, next_coming(rows_[1]));
    }
    for (int h = 0; item.split < 0 && h < item.num_heads; ++h)
      for (int r = 0; r < R; ++r)
        for (int d = 0; d < width_; d += kLanes) {
          float* out = sums_ + (int64_t(h) * R + r) * width_ + d;
          const F16 kept = mul(load(out), splat(factors_[h].keep[r]));
          store(out, fma(load(tile_sums(h) + r * width_ + d), splat(factors_[h].take[r]), kept));
        }
  }
#endif

  void clear_part(float* raw, int num_rows, int r, int count) const {
    for (int i = r; i < r + count; ++i) raw[i] = kMinusInfinity, raw[num_rows + i] = 0.f;
    std::memset(raw + 2 * num_rows + int64_t(r) * width_, 0, size_t(count) * size_t(width_) * 4);
  }

  void pack(const TileRows& rows, int head) {
    const int first = rows.first / (2 * kLanes) * (2 * kLanes), end = int(round_up(rows.last, 2 * kLanes));
    for (int t = first; t < end; t += kLanes)
      Math::pack_keys(rows.keys + t, head * head_bytes_, call_.head_dim, packed_ + int64_t(t) * num_units_, ahead_);
    if constexpr (Math::kPacksValues)
      Math::pack_values(rows.values, head * head_bytes_, call_.head_dim, rows.first, rows.last, packed_values_, ahead_);
  }

  template <int R>
  void score_rows(const float* queries, int first, int last, float* scores) {
    constexpr int kAtOnce = scores_at_once(R);
    for (int t = first; t < last; t += kAtOnce * kLanes)
      score_groups<Math, R, kAtOnce>(queries, num_units_, packed_ + int64_t(t) * num_units_, scores + t);
  }

  void score(const float* queries, int count, int first, int last, float* scores) {
    switch (count) {
      case 1: return score_rows<1>(queries, first, last, scores);
      case 2: return score_rows<2>(queries, first, last, scores);
      case 3: return score_rows<3>(queries, first, last, scores);
      case 4: return score_rows<4>(queries, first, last, scores);
      case 5: return score_rows<5>(queries, first, last, scores);
      default: return score_rows<6>(queries, first, last, scores);
    }
  }

  // Greatest score of a query; where it may not look becomes minus infinity.
  float find_peak(float* scores, int first, int last, int first_visible, int last_visible) const {
    F16 greatest_lanes = splat(kMinusInfinity);
    const int begin = first / kLanes * kLanes, end = int(round_up(last, kLanes));
    for (int t = begin; t < end; t += kLanes) {
      F16 score = load(scores + t);
      const bool is_whole = t >= first_visible && t + kLanes <= last_visible;
      if (!is_raw_) score = finish_score(score);
      if (!is_whole) {
        const M16 visible = and_not(first_lanes(last_visible - t), first_lanes(first_visible - t));
        score = select(visible, score, splat(kMinusInfinity));
      }
      if (!is_whole || !is_raw_) store(scores + t, score);
      greatest_lanes = max_b(greatest_lanes, score);
    }
    const float peak = greatest(greatest_lanes);
    return is_raw_ ? peak * factor_ : peak;
  }

  F16 finish_score(F16 score) const {
    if (call_.soft_cap == 0.f) return mul(score, splat(call_.scale * kLog2E));
    return mul(tanh(mul(score, splat(call_.scale / call_.soft_cap))), splat(call_.soft_cap * kLog2E));
  }

  // Scores of one query -> probabilities relative to the tile's greatest, exact zeros where it may not look. Returns
  // their sum.
  float to_probs(const float* scores, Prob* probs, int first, int last, float peak) const {
    const int begin = first / kLanes * kLanes, end = int(round_up(last, kLanes));
    const F16 reference = splat(peak == kMinusInfinity ? 0.f : -peak), factor = splat(factor_);
    F16 total = splat(0.f);
    for (int t = begin; t < end; t += kLanes) {
      const F16 prob = exp2_of_negative(fma(load(scores + t), factor, reference));
      total = add(total, prob);
      store(probs + t, prob);
    }
    return sum(total);
  }

  // Adds a group's weighted values, of the columns begin .. end - 1 where they are packed, else of all.
  void weigh(const Group& group, const Prob* probs, int head, int begin, int end, const GroupState& state) {
    switch (group.count) {
      case 1: return weigh_rows<1>(group, probs, head, begin, end, state);
      case 2: return weigh_rows<2>(group, probs, head, begin, end, state);
      case 3: return weigh_rows<3>(group, probs, head, begin, end, state);
      case 4: return weigh_rows<4>(group, probs, head, begin, end, state);
      case 5: return weigh_rows<5>(group, probs, head, begin, end, state);
      default: return weigh_rows<6>(group, probs, head, begin, end, state);
    }
  }

  template <int R>
  void weigh_rows(const Group& group, const Prob* probs, int head, int begin, int end, const GroupState& state) {
    if constexpr (Math::kPacksValues) {
      (void)head;
      Math::template weigh<R>(probs, packed_values_, begin, end, group.first, group.last, state);
    } else if (begin == 0) {
      (void)end;
      Math::template weigh<R>(probs, rows_[0]->values, head * head_bytes_, call_.head_dim, group.first, group.last,
                              state, ahead_);
    }
  }

  // The same operations in the same order as if one item had held the row, so that the bits are the same.
  void merge_parts(SplitRow& split) {
    const int num_queries = query_len(split.row), num_rows = num_queries * group_size_;
    for (int head = 0; head < call_.num_kv_heads; ++head)
      for (int r = 0; r < num_rows; r += kMaxGroup) {
        const int count = smaller(kMaxGroup, num_rows - r);
        float greatest[kLanes], total[kLanes];
        for (int i = 0; i < kLanes; ++i) greatest[i] = kMinusInfinity, total[i] = 0.f;
        std::memset(sums_, 0, size_t(count) * size_t(width_) * 4);
        for (int tile = 0; tile < split.num_tiles; ++tile) {
          const float* raw = part(split, tile, head, num_rows);
          Softmax<kLanes> softmax;
          for (int i = 0; i < kLanes; ++i) {
            softmax.greatest[i] = i < count ? raw[r + i] : kMinusInfinity;
            softmax.total[i] = i < count ? raw[num_rows + r + i] : 0.f;
          }
          Factors<kLanes> factors;
          merge(softmax, count, greatest, total, &factors);
          const float* parts = raw + 2 * num_rows + int64_t(r) * width_;
          for (int i = 0; i < count; ++i)
            for (int d = 0; d < width_; d += kLanes) {
              float* out = sums_ + i * width_ + d;
              store(out, fma(load(parts + i * width_ + d), splat(factors.take[i]), mul(load(out), splat(factors.keep[i]))));
            }
        }
        write_rows(split.row, 0, r, count, head, total, sums_);
      }
    // Ready for the next layer.
    split.num_unfinished = split.num_items;
  }

  void write_rows(int row, int first_query, int first, int count, int head, const float* totals,
                  const float* sums) const {
    const int64_t first_token = call_.cu_seqlens_q[row] + first_query;
    for (int i = 0; i < count; ++i) {
      const int64_t token = first_token + (first + i) / group_size_;
      const int64_t query_head = int64_t(head) * group_size_ + (first + i) % group_size_;
      // No total: the query sees nothing, and gives zero.
      const float factor = totals[i] == 0.f ? 0.f : 1.f / totals[i];
      Math::finish(sums + int64_t(i) * width_, factor,
                   static_cast<Stored*>(call_.out) + (token * call_.num_heads + query_head) * call_.head_dim,
                   call_.head_dim);
    }
  }

  const AttentionCall& call_;
  char* scratch_;
  int64_t used_bytes_ = 0;
  int group_size_, num_units_, width_;
  bool is_raw_;  // scores become exponents of two, relative to the greatest, as they become probabilities
  float factor_;
  int64_t token_bytes_, head_bytes_;
  char* zeros_;
  TileRows* rows_[2];  // of the current tile, and of the one that comes after it
  Ahead* ahead_;
  float* packed_;
  float* packed_values_;
  float* scores_;
  Prob* probs_;
  Query* queries_;
  float* greatest_;
  float* totals_;
  float* sums_;
  float* tile_sums_;
  Factors<kLanes>* factors_;
  UnitCursor coming_;  // what is fetched next
};

#if defined(__AVX512BF16__)
typedef DotMath Bf16Math;
#else
typedef WideMath<bf16> Bf16Math;
#endif

}  // namespace

namespace HEADRACE_VARIANT {

size_t attention_scratch(const AttentionCall& call) {
  if (call.dtype == headrace::kFloat32) return Worker<WideMath<float>>(call, nullptr).scratch_bytes();
  return Worker<Bf16Math>(call, nullptr).scratch_bytes();
}

void attend(const AttentionCall& call, void* scratch) {
  if (call.dtype == headrace::kFloat32) return Worker<WideMath<float>>(call, scratch).run();
  Worker<Bf16Math>(call, scratch).run();
}

}  // namespace HEADRACE_VARIANT
