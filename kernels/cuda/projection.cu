// `projection.cuh` as a kernel of its own, for compile tests. MLXCEL_BF16: 0 = f16, 1 = bf16; MLXCEL_NUM_PARTS: matrices
// that a launch serves, 1 to 3.
#include "projection.cuh"

#if MLXCEL_BF16
using Element = mlxcel::Bf16;
#else
using Element = mlxcel::F16;
#endif

struct Parts {
  mlxcel::DensePart parts[MLXCEL_NUM_PARTS];
};

extern "C" __global__ void __launch_bounds__(mlxcel::kProjectionThreads, 2)
    mlxcel_projection(const mlxcel::u16* x, Parts all, int num_rows, int num_inner) {
  mlxcel::project_rows<Element>(x, all.parts, num_rows, num_inner);
}
