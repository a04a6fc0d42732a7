// Where a token lies in a pool of pages, for the kernels that move tokens without computing on them. They move bits, so
// dtypes do not matter: a row (one token of one KV head) is a run of chunks of MLXCEL_CHUNK_BYTES.
#pragma once

namespace mlxcel {

using i64 = long long;

#if MLXCEL_CHUNK_BYTES == 16
struct alignas(16) Chunk {
  int x, y, z, w;
};
#elif MLXCEL_CHUNK_BYTES == 8
struct alignas(8) Chunk {
  int x, y;
};
#elif MLXCEL_CHUNK_BYTES == 4
using Chunk = int;
#elif MLXCEL_CHUNK_BYTES == 2
using Chunk = short;
#else
#error "MLXCEL_CHUNK_BYTES must be 16, 8, 4 or 2"
#endif
static_assert(sizeof(Chunk) == MLXCEL_CHUNK_BYTES, "one chunk is one memory access");

// Strides count chunks. A page id times page_stride may pass 2^31, so offsets are 64-bit.
struct PoolShape {
  int page_size;  // tokens in a page, any number
  int page_stride;
  int head_stride;
  int token_stride;

  // `place` is page id * page_size + token in the page.
  __device__ __forceinline__ i64 offset(int place, int head) const {
    int page = place / page_size;
    return offset(page, place - page * page_size, head);
  }
  __device__ __forceinline__ i64 offset(int page, int token, int head) const {
    return static_cast<i64>(page) * page_stride + static_cast<i64>(head) * head_stride +
           static_cast<i64>(token) * token_stride;
  }
};

__device__ __forceinline__ i64 first_item() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 item_step() { return static_cast<i64>(gridDim.x) * blockDim.x; }

// Launches that need the pools as this kernel leaves them take its order token as an input. It holds 0, so that adding
// it to an array of theirs changes nothing.
__device__ __forceinline__ void write_order_token(int* order_token) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *order_token = 0;
}

}  // namespace mlxcel
