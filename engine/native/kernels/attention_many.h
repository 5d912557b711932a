// A tile against many query rows, as of a prompt's chunk: its keys and values are packed first.
#pragma once

#include "attention_tiles.h"

namespace {

template <typename Math>
class ManyRows {
 public:
  explicit ManyRows(Workspace<Math>& work) : work_(work), call_(work.call) {}

  // The current tile against the rows of the item's head `h`.
  void run_tile(const Item& item, int tile, int h, int num_rows) {
    const int head = item.first_head + h;
    if (work_.rows[0]->first < work_.rows[0]->last) pack(*work_.rows[0], head);
    for (int r = 0; r < num_rows; r += kMaxBlock)
      run_block(item, tile, h, num_rows, r, smaller(num_rows, r + kMaxBlock));
  }

 private:
  typedef typename Math::Query Query;
  typedef typename Math::Prob Prob;

  // Rows that go through the loops together, and the positions of a tile that any of them sees.
  struct Group {
    int row, count;
    int first, last;
  };

  Group group_of(const Item& item, int tile, int row, int count) const {
    const int begin = (item.first_tile + tile) * kTile;
    const int first_query = item.first_query + row / work_.group_size;
    const int last_query = item.first_query + (row + count - 1) / work_.group_size;
    return {row, count, larger(0, work_.first_seen(item.row, first_query) - begin),
            smaller(kTile, work_.last_seen(item.row, last_query) - begin)};
  }

  void pack(const TileRows& rows, int head) {
    const int64_t at = head * work_.head_bytes;
    const int first = rows.first / (2 * kLanes) * (2 * kLanes), end = int(round_up(rows.last, 2 * kLanes));
    for (int t = first; t < end; t += kLanes)
      Math::pack_keys(rows.keys + t, at, call_.head_dim, work_.packed_keys + int64_t(t) * work_.num_units,
                      work_.ahead);
    if constexpr (Math::kPacksValues)
      Math::pack_values(rows.values, at, call_.head_dim, rows.first, rows.last, work_.packed_values, work_.ahead);
  }

  // Rows begin .. end - 1 of an item against one tile.
  void run_block(const Item& item, int tile, int h, int num_rows, int begin, int end) {
    const int head = item.first_head + h;
    float* raw =
        item.split < 0 ? nullptr : work_.part(call_.splits[item.split], item.first_tile + tile, head, num_rows);
    Group groups[kMaxBlock / kMaxGroup];
    int num_groups = 0;
    for (int r = begin; r < end; r += kMaxGroup) {
      const Group group = group_of(item, tile, r, smaller(kMaxGroup, end - r));
      if (group.first < group.last) groups[num_groups++] = group;
      else if (raw) work_.clear_part(raw, num_rows, group.row, group.count);
    }
    if (num_groups == 0) return;
    const Query* queries = work_.queries + int64_t(h) * num_rows * call_.head_dim;
    // Later queries see no less of the end, and no more of the begin.
    const int first = groups[0].first, last = groups[num_groups - 1].last;
    for (int t = first / (2 * kLanes) * (2 * kLanes); t < last; t += 2 * kLanes)
      for (int g = 0; g < num_groups; ++g) {
        const Group& group = groups[g];
        if (t >= group.last || t + 2 * kLanes <= group.first) continue;
        fetch();
        score(reinterpret_cast<const float*>(queries + int64_t(group.row) * call_.head_dim), group.count, t,
              smaller(group.last, t + 2 * kLanes), work_.scores + (group.row - begin) * kTile);
      }
    Softmax<kMaxBlock> softmax;
    softmax.clear();
    for (int g = 0; g < num_groups; ++g)
      for (int i = groups[g].row; i < groups[g].row + groups[g].count; ++i)
        softmax.greatest[i - begin] =
            work_.find_peak(work_.scores + (i - begin) * kTile, item, tile, item.first_query + i / work_.group_size,
                            groups[g].first, groups[g].last);
    for (int g = 0; g < num_groups; ++g)
      for (int i = groups[g].row - begin; i < groups[g].row - begin + groups[g].count; ++i)
        softmax.total[i] = work_.to_probs(work_.scores + i * kTile, work_.probs + i * kTile, groups[g].first,
                                          groups[g].last, softmax.greatest[i]);
    Factors<kMaxBlock> factors;
    if (raw) {
      std::memcpy(raw + begin, softmax.greatest, size_t(end - begin) * 4);
      std::memcpy(raw + num_rows + begin, softmax.total, size_t(end - begin) * 4);
    } else {
      const int at = h * num_rows + begin;
      merge(softmax, end - begin, work_.maxima + at, work_.totals + at, &factors);
    }
    float* sums = raw ? raw + 2 * num_rows : work_.sums + int64_t(h) * num_rows * work_.width;
    for (int d = 0; d < work_.width; d += kColumnsAtOnce)
      for (int g = 0; g < num_groups; ++g) {
        const Group& group = groups[g];
        const int at = group.row - begin;
        fetch();
        weigh(group, work_.probs + at * kTile, head, d, smaller(work_.width, d + kColumnsAtOnce),
              {sums + int64_t(group.row) * work_.width, work_.width, raw ? nullptr : factors.keep + at,
               raw ? nullptr : factors.take + at});
      }
  }

  // So often that the next tile has come when this one is done.
  void fetch() {
    work_.ahead->template fetch_lines<4>();
    work_.ahead->template fetch_lines<4>();
  }

  template <int R>
  void score_rows(const float* queries, int first, int last, float* scores) const {
    constexpr int kAtOnce = scores_at_once(R);
    for (int t = first; t < last; t += kAtOnce * kLanes)
      score_groups<Math, R, kAtOnce>(queries, work_.num_units, work_.packed_keys + int64_t(t) * work_.num_units,
                                     scores + t);
  }

  // Scores of a group's queries against the positions first .. last - 1.
  void score(const float* queries, int count, int first, int last, float* scores) const {
    switch (count) {
      case 1: return score_rows<1>(queries, first, last, scores);
      case 2: return score_rows<2>(queries, first, last, scores);
      case 3: return score_rows<3>(queries, first, last, scores);
      case 4: return score_rows<4>(queries, first, last, scores);
      case 5: return score_rows<5>(queries, first, last, scores);
      default: return score_rows<6>(queries, first, last, scores);
    }
  }

  template <int R>
  void weigh_rows(const Group& group, const Prob* probs, int head, int begin, int end, const GroupState& state) {
    if constexpr (Math::kPacksValues) {
      (void)head;
      Math::template weigh<R>(probs, work_.packed_values, begin, end, group.first, group.last, state);
    } else if (begin == 0) {
      (void)end;
      Math::template weigh<R>(probs, work_.rows[0]->values, head * work_.head_bytes, call_.head_dim, group.first,
                              group.last, state, work_.ahead);
    }
  }

  // Adds a group's weighted values, of the columns begin .. end - 1 where they are packed, else of all at once.
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

  Workspace<Math>& work_;
  const AttentionCall& call_;
};

}  // namespace
