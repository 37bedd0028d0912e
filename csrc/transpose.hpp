// Copies a matrix into one of another layout, tile by tile, so that both sides are read and written in whole cache
// lines.
#pragma once

#include "cross_entropy.hpp"

namespace prism {

// to[row, class] = from[row, class]; the same dtype and shape, memory that does not overlap.
void copy_matrix(const Matrix& from, const Matrix& to, int threads);

}  // namespace prism
