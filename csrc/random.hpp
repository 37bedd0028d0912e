// The pinned generator: every shuffle this project makes comes from these few lines, on every compiler and standard
// library. `std::shuffle` and `std::uniform_int_distribution` leave their draws to the implementation, so an order made
// with one cannot be replayed with another. docs/bucket-plan.md states the same in words and gives golden vectors.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace prism {

// SplitMix64 (Steele, Lea & Flood 2014, constants of Vigna's public-domain version). Any 64-bit seed is as good as any.
class SplitMix64 {
 public:
  explicit SplitMix64(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // Uniform in [0, bound), bound >= 1, without bias (Lemire 2019): the high half of next() * bound, drawn again while
  // the low half is below 2^64 mod bound.
  std::uint64_t below(std::uint64_t bound) {
    Product product = static_cast<Product>(next()) * bound;
    if (static_cast<std::uint64_t>(product) < bound) [[unlikely]] {
      const std::uint64_t threshold = (0 - bound) % bound;
      while (static_cast<std::uint64_t>(product) < threshold) product = static_cast<Product>(next()) * bound;
    }
    return static_cast<std::uint64_t>(product >> 64);
  }

 private:
  __extension__ using Product = unsigned __int128;
  std::uint64_t state_;
};

// Fisher-Yates from the last item down: for i = n-1 ... 1, swap items i and below(i + 1).
//
// Draws do not depend on the items, so they are made in groups and their cache lines requested together: in an array
// larger than the cache a plain loop would wait for memory once per item, and the cost per item would grow with n.
template <class T>
void shuffle(std::span<T> items, SplitMix64& random) {
  constexpr std::size_t kGroup = 64;
  std::array<std::size_t, kGroup> draw;
  for (std::size_t left = items.size(); left > 1;) {
    const std::size_t group = std::min(kGroup, left - 1);
    for (std::size_t k = 0; k < group; ++k) {
      draw[k] = random.below(left - k);
      __builtin_prefetch(&items[draw[k]], 1);
    }
    for (std::size_t k = 0; k < group; ++k) std::swap(items[left - 1 - k], items[draw[k]]);
    left -= group;
  }
}

}  // namespace prism
