// What the once-per-row code asks of the loops that are compiled for one instruction set. Internal to cross_entropy.
#pragma once

#include <cstdint>

#include "cross_entropy.hpp"

namespace prism {

struct BFloat16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

// One row of logits. `target` is -1 where no class is to be left out. `stride` is between classes.
struct RowIn {
  const void* logits;
  std::int64_t stride;
  std::int64_t vocab;
  std::int64_t target;
  double softcap;            // 0: none
  const void* class_weight;  // null: all 1
  bool smooth;               // the weighted sum of logits is wanted
  bool moment;               // the first moment is wanted
};

// Adds the terms of further classes. Order matters to the last bit: first classes first.
void merge(RowTerms& terms, RowTerms more);

// grad = (scale * softmax - uniform * w - hit at the target) * dz'/dz.
struct RowGrad {
  void* out;
  std::int64_t stride;
  double lse;
  double scale;
  double uniform;
  double hit;
  bool stream;  // write past the caches
};

struct Loops {
  const char* name;
  RowTerms (*terms[4])(const RowIn&);
  void (*grad[4])(const RowIn&, const RowGrad&);
  void (*scale[4])(void* row, std::int64_t stride, std::int64_t n, double factor);
};

Loops portable_loops();
#if defined(__x86_64__)
Loops avx2_loops();
Loops avx512_loops();
Loops avx512bf16_loops();
#endif

}  // namespace prism
