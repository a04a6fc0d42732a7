// `projection.cuh` as a kernel of its own, for compile tests and benchmarks. MLXCEL_BF16: 0 = f16, 1 = bf16;
// MLXCEL_ROW_TILES: 1 for up to 8 rows, 2 for up to 16.
#include "projection.cuh"

#if MLXCEL_BF16
using Element = mlxcel::Bf16;
#else
using Element = mlxcel::F16;
#endif

extern "C" __global__ void __launch_bounds__(mlxcel::kProjectionThreads, 2)
    mlxcel_projection(const mlxcel::u16* x, const mlxcel::u16* w, mlxcel::u16* y, int num_rows, int num_features,
                      int num_inner) {
  mlxcel::project_rows<Element, MLXCEL_ROW_TILES>(x, w, y, num_rows, num_features, num_inner);
}
