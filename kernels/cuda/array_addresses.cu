// Where arrays begin: their addresses, from which the host tells how pools are laid out and whether what the decode kernel
// reads in chunks of 16 bytes is aligned. One thread. The launch reads nothing.
#include "primitives.cuh"

extern "C" __global__ void mlxcel_array_addresses(const void* q, const void* k_new, const void* v_new, const void* k0,
                                                  const void* k1, const void* k2, const void* k3, const void* k4,
                                                  const void* v0, const void* v1, const void* v2, const void* v3,
                                                  const void* v4, mlxcel::i64* addresses) {
  const void* arrays[13] = {q, k_new, v_new, k0, k1, k2, k3, k4, v0, v1, v2, v3, v4};
#pragma unroll
  for (int i = 0; i < 13; ++i) addresses[i] = reinterpret_cast<mlxcel::i64>(arrays[i]);
}
