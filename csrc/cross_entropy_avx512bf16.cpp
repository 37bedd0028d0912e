// The loops for x86-64 with AVX-512 and its bfloat16 conversions.
#include "cross_entropy_avx512.hpp"

namespace prism {

Loops avx512bf16_loops() { return float_loops<Avx512>("avx512bf16"); }

}  // namespace prism
