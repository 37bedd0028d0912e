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

// grad = ((hit + rest) * softmax - uniform * w - hit at the target) * dz'/dz.
struct RowGrad {
  void* out;
  std::int64_t stride;
  double lse;
  double hit;
  double rest;
  double uniform;
  bool stream;  // write past the caches
};

// Part of the product of few tokens with many classes: over `depth` of the hidden size, for `classes` rows of the head.
// `panels` holds the tokens' hidden states, `vectors` registers of them side by side: panel by panel, each
// [depth, panel_vectors() * width].
struct FewTokens {
  const float* panels;
  std::int64_t vectors;
  std::int64_t depth;
  const float* head;  // [classes, depth]
  std::int64_t head_stride;
  std::int64_t classes;
  float* sums;  // [classes, vectors * width]
  bool begin;   // write the sums; else add to them, in the order of the hidden size
};

// How many of `left` registers of tokens the next panel takes: three fill the multiply-add units of 16 registers with
// four classes beside them; one alone does not.
static constexpr std::int64_t panel_vectors(std::int64_t left) { return left == 4 ? 2 : left < 3 ? left : 3; }

struct Loops {
  const char* name;
  int width;  // floats a register
  void (*few_tokens)(const FewTokens&);
  RowTerms (*terms[4])(const RowIn&);
  void (*grad[4])(const RowIn&, const RowGrad&);
  void (*scale[4])(void* row, std::int64_t stride, std::int64_t n, double factor);
};

// Those in use.
const Loops& loops();

Loops portable_loops();
#if defined(__x86_64__)
Loops avx2_loops();
Loops avx512_loops();
Loops avx512bf16_loops();
#endif

}  // namespace prism
