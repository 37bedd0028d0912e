#include "widen.hpp"

#include <algorithm>

// AVX2 widens 16-bit ids twice as fast as the SSE2 baseline; the clone is chosen once, when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(PRISM_NO_CLONES)
#define PRISM_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define PRISM_CLONES
#endif

namespace prism {
namespace {

template <class Stored, class Token>
[[gnu::always_inline]] inline std::uint64_t widen_loop(const Stored* in, Token* tokens, Token* targets, std::size_t n) {
  Stored largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Stored id = in[i];
    tokens[i] = static_cast<Token>(id);
    targets[i] = static_cast<Token>(id);
    largest = std::max(largest, id);
  }
  return largest;
}

}  // namespace

#define PRISM_DEFINE(Stored, Token)                                                                  \
  PRISM_CLONES std::uint64_t widen(const Stored* in, Token* tokens, Token* targets, std::size_t n) { \
    return widen_loop(in, tokens, targets, n);                                                       \
  }
PRISM_FOR_ID_TYPES(PRISM_DEFINE)
#undef PRISM_DEFINE

}  // namespace prism
