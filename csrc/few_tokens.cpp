#include "few_tokens.hpp"

#include <algorithm>
#include <vector>

#include "cross_entropy_loops.hpp"
#include "parallel.hpp"

namespace prism {
namespace {

constexpr std::int64_t kDepth = 512;   // of the hidden size at a time: 48 tokens of it stay in a second-level cache
constexpr std::int64_t kClasses = 64;  // at a time: their sums stay in a first-level cache

const float* row_of(const Matrix& m, std::int64_t row) {
  return static_cast<const float*>(m.data) + row * m.row_stride;
}

// The hidden states as FewTokens wants them, one part of the hidden size after the other; 0 for tokens that fill up the
// last register.
std::vector<float> pack(const Matrix& hidden, std::int64_t vectors, std::int64_t width) {
  const std::int64_t size = hidden.vocab;
  std::vector<float> panels(static_cast<std::size_t>(vectors * width * size));
  float* to = panels.data();
  for (std::int64_t begin = 0; begin < size; begin += kDepth) {
    const std::int64_t end = std::min(begin + kDepth, size);
    for (std::int64_t first = 0; first < vectors;) {
      const std::int64_t taken = panel_vectors(vectors - first);
      for (std::int64_t token = first * width; token < (first + taken) * width; ++token) {
        float* sink = to + (token - first * width);
        if (token < hidden.rows) {
          const float* from = row_of(hidden, token);
          for (std::int64_t h = begin; h < end; ++h, sink += taken * width) *sink = from[h];
        }
      }
      to += (end - begin) * taken * width;
      first += taken;
    }
  }
  return panels;
}

}  // namespace

void few_tokens_logits(const Matrix& hidden, const Matrix& head, const float* bias, const Matrix& out, int threads) {
  const Loops& isa = loops();
  const std::int64_t width = isa.width;
  const std::int64_t size = hidden.vocab;
  const std::int64_t vectors = (hidden.rows + width - 1) / width;
  const std::vector<float> panels = pack(hidden, vectors, width);
  const std::int64_t groups = (head.rows + kClasses - 1) / kClasses;
  parallel_for(groups, 4, threads, [&](std::int64_t first_group, std::int64_t last_group) {
    float sums[kClasses * kFewTokens] = {};
    for (std::int64_t group = first_group; group < last_group; ++group) {
      const std::int64_t first = group * kClasses;
      const std::int64_t classes = std::min(kClasses, head.rows - first);
      for (std::int64_t begin = 0; begin < size; begin += kDepth) {
        const std::int64_t depth = std::min(kDepth, size - begin);
        isa.few_tokens(FewTokens{panels.data() + begin * vectors * width, vectors, depth, row_of(head, first) + begin,
                                 head.row_stride, classes, sums, begin == 0});
      }
      for (std::int64_t token = 0; token < hidden.rows; ++token) {
        float* to = static_cast<float*>(out.data) + token * out.row_stride + first * out.vocab_stride;
        const float* from = sums + token;
        for (std::int64_t c = 0; c < classes; ++c) {
          to[c * out.vocab_stride] = from[c * vectors * width] + (bias == nullptr ? 0.0F : bias[first + c]);
        }
      }
    }
  });
}

}  // namespace prism
