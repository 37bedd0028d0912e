#include "transpose.hpp"

#include <algorithm>

#include "parallel.hpp"

namespace prism {
namespace {

constexpr std::int64_t kTile = 16;  // 64 bytes of float

template <class T>
void copy_tile(const Matrix& from, const Matrix& to, std::int64_t row, std::int64_t column) {
  const std::int64_t rows = std::min(kTile, from.rows - row);
  const std::int64_t columns = std::min(kTile, from.vocab - column);
  const T* const source = static_cast<const T*>(from.data) + row * from.row_stride + column * from.vocab_stride;
  T* const sink = static_cast<T*>(to.data) + row * to.row_stride + column * to.vocab_stride;
  T tile[kTile][kTile];
  if (from.row_stride == 1) {
    for (std::int64_t c = 0; c < columns; ++c) {
      for (std::int64_t r = 0; r < rows; ++r) tile[r][c] = source[r + c * from.vocab_stride];
    }
  } else {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) tile[r][c] = source[r * from.row_stride + c * from.vocab_stride];
    }
  }
  if (to.row_stride == 1) {
    for (std::int64_t c = 0; c < columns; ++c) {
      for (std::int64_t r = 0; r < rows; ++r) sink[r + c * to.vocab_stride] = tile[r][c];
    }
  } else {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) sink[r * to.row_stride + c * to.vocab_stride] = tile[r][c];
    }
  }
}

template <class T>
void copy(const Matrix& from, const Matrix& to, int threads) {
  const std::int64_t tiles = (from.vocab + kTile - 1) / kTile;
  parallel_for(tiles, 64, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t tile = begin; tile < end; ++tile) {
      for (std::int64_t row = 0; row < from.rows; row += kTile) copy_tile<T>(from, to, row, tile * kTile);
    }
  });
}

}  // namespace

void copy_matrix(const Matrix& from, const Matrix& to, int threads) {
  switch (from.dtype) {
    case Dtype::kF64:
      return copy<std::uint64_t>(from, to, threads);
    case Dtype::kF32:
      return copy<std::uint32_t>(from, to, threads);
    case Dtype::kBF16:
    case Dtype::kF16:
      return copy<std::uint16_t>(from, to, threads);
  }
}

}  // namespace prism
