#include "checksum.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace prism {
namespace {

static_assert(std::endian::native == std::endian::little, "shards are little-endian and read in place");

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;

template <typename T>
T load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

std::uint64_t round(std::uint64_t lane, std::uint64_t input) { return std::rotl(lane + input * kPrime2, 31) * kPrime1; }

std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) { return (hash ^ round(0, lane)) * kPrime1 + kPrime4; }

/// Consumes whole 32-byte stripes; returns how many bytes that were.
std::size_t stripes(std::array<std::uint64_t, 4>& lanes, const std::byte* p, std::size_t size) {
  auto [a, b, c, d] = lanes;  // kept in registers over the loop
  std::size_t done = 0;
  for (; size - done >= 32; done += 32) {
    a = round(a, load<std::uint64_t>(p + done));
    b = round(b, load<std::uint64_t>(p + done + 8));
    c = round(c, load<std::uint64_t>(p + done + 16));
    d = round(d, load<std::uint64_t>(p + done + 24));
  }
  lanes = {a, b, c, d};
  return done;
}

}  // namespace

Xxh64::Xxh64() : lanes_{kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1} {}

void Xxh64::update(std::span<const std::byte> data) {
  if (data.empty()) return;
  total_ += data.size();
  if (pending_size_ != 0) {
    const std::size_t take = std::min(data.size(), pending_.size() - pending_size_);
    std::memcpy(pending_.data() + pending_size_, data.data(), take);
    pending_size_ += take;
    data = data.subspan(take);
    if (pending_size_ < pending_.size()) return;
    stripes(lanes_, pending_.data(), pending_.size());
    pending_size_ = 0;
  }
  const std::size_t done = stripes(lanes_, data.data(), data.size());
  pending_size_ = data.size() - done;
  if (pending_size_ != 0) std::memcpy(pending_.data(), data.data() + done, pending_size_);
}

std::uint64_t Xxh64::digest() const {
  std::uint64_t hash = kPrime5;
  if (total_ >= 32) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) + std::rotl(lanes_[3], 18);
    for (const std::uint64_t lane : lanes_) hash = merge(hash, lane);
  }
  hash += total_;
  const std::byte* p = pending_.data();
  std::size_t left = pending_size_;
  for (; left >= 8; left -= 8, p += 8) {
    hash = std::rotl(hash ^ round(0, load<std::uint64_t>(p)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ (load<std::uint32_t>(p) * kPrime1), 23) * kPrime2 + kPrime3;
    p += 4;
    left -= 4;
  }
  for (; left > 0; --left, ++p) {
    hash = std::rotl(hash ^ (std::to_integer<std::uint64_t>(*p) * kPrime5), 11) * kPrime1;
  }
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

std::uint64_t xxh64(std::span<const std::byte> data) {
  Xxh64 state;
  state.update(data);
  return state.digest();
}

}  // namespace prism
