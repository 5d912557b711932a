// Weights as the kernels read them, and the whole numbers that some were restored from. Part of the C interface.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "team.h"

using namespace headrace;

extern "C" {

#pragma GCC visibility push(default)

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

#pragma GCC visibility pop
}  // extern "C"
