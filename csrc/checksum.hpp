// XXH64: the checksum of every section of a shard. Not cryptographic: it finds damage, not malice (sha256 does that).
// Algorithm: xxHash specification, "XXH64" (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace prism {

/// Streaming XXH64 with seed 0. `digest()` may be called at any point and does not disturb the state.
class Xxh64 {
 public:
  Xxh64();
  void update(std::span<const std::byte> data);
  std::uint64_t digest() const;

 private:
  std::array<std::uint64_t, 4> lanes_;
  std::array<std::byte, 32> pending_{};
  std::size_t pending_size_ = 0;
  std::uint64_t total_ = 0;
};

std::uint64_t xxh64(std::span<const std::byte> data);

}  // namespace prism
