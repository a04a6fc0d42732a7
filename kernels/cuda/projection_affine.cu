// `projection_affine.cuh` as a kernel of its own, for compile tests. MLXCEL_BF16: 0 = f16, 1 = bf16; MLXCEL_BITS: 4, or 8
// with f16; MLXCEL_GROUP_SIZE: 32, 64 or 128; MLXCEL_NUM_PARTS: matrices that a launch serves, 1 to 3.
#include "projection_affine.cuh"

#if MLXCEL_BF16
using Element = mlxcel::Bf16;
#else
using Element = mlxcel::F16;
#endif

struct Parts {
  mlxcel::AffinePart parts[MLXCEL_NUM_PARTS];
};

extern "C" __global__ void __launch_bounds__(mlxcel::kProjectionThreads, 2)
    mlxcel_projection_affine(const mlxcel::u16* x, Parts all, int num_rows, int num_inner) {
  mlxcel::project_affine_rows<Element, MLXCEL_BITS, MLXCEL_GROUP_SIZE>(x, all.parts, num_rows, num_inner);
}
