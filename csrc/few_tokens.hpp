// The product of few tokens' hidden states with the head. A matrix library lays the head out anew for every product,
// which pays for hundreds of tokens; for some tens it takes as long as the product itself.
#pragma once

#include <cstdint>

#include "cross_entropy.hpp"

namespace prism {

constexpr std::int64_t kFewTokens = 64;

// For n <= kFewTokens, out [n, V] = hidden [n, H] @ head [V, H]^T + bias [V] (null: none), all float; rows of `hidden`
// and `head` contiguous, any strides of `out`. Each product is summed in the order of H, so a token has the same bits
// among any others, with any number of threads.
void few_tokens_logits(const Matrix& hidden, const Matrix& head, const float* bias, const Matrix& out, int threads);

}  // namespace prism
