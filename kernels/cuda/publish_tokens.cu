// Copies a step's tokens to page-locked host memory, so that the host can read them without moving the array, which stays
// in device memory for the next step. One block.
#include "primitives.cuh"

using namespace mlxcel;

// tokens      int32 [num_tokens] or longer
// done        int32 [1]: step; waiting for it is waiting for the slot
// slot        host memory as the device addresses it, in two halves; int32 [1 + num_tokens]: step, then the tokens
extern "C" __global__ void mlxcel_publish_tokens(const int* tokens, int* done, int slot_low, int slot_high,
                                                 int num_tokens, int step) {
  i64 address = static_cast<i64>(slot_high) << 32 | static_cast<u32>(slot_low);
  int* slot = reinterpret_cast<int*>(address);
  for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) store_to_host(slot + 1 + i, tokens[i]);
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_host();
    store_to_host(slot, step);
    done[0] = step;
  }
}
