// The loops for x86-64 with AVX-512 (F, BW, VL, DQ).
#include "cross_entropy_avx512.hpp"

namespace prism {

Loops avx512_loops() { return float_loops<Avx512>("avx512"); }

}  // namespace prism
