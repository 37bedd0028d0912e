// Ids as they are stored -> ids as models take them, in the two places where a row needs them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>

namespace prism {

inline constexpr std::int64_t kIgnore = -100;  // the target of nobody: torch's ignore_index

template <class Id>
struct TokenBuffers {
  using Token = Id;
  std::span<Id> tokens;
  std::span<Id> targets;
};
using IdBuffers = std::variant<TokenBuffers<std::int64_t>, TokenBuffers<std::int32_t>>;

#define PRISM_FOR_ID_TYPES(X)    \
  X(std::uint8_t, std::int64_t)  \
  X(std::uint16_t, std::int64_t) \
  X(std::uint32_t, std::int64_t) \
  X(std::uint64_t, std::int64_t) \
  X(std::uint8_t, std::int32_t)  \
  X(std::uint16_t, std::int32_t) \
  X(std::uint32_t, std::int32_t) \
  X(std::uint64_t, std::int32_t)

/// Writes each of `n` ids twice, as input and as the target of the position before, and returns the largest: the source
/// is read once, and the check against the vocabulary costs no pass of its own.
#define PRISM_DECLARE(Stored, Token) \
  std::uint64_t widen(const Stored* in, Token* tokens, Token* targets, std::size_t n);
PRISM_FOR_ID_TYPES(PRISM_DECLARE)
#undef PRISM_DECLARE

}  // namespace prism
