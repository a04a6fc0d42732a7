// Products of a few rows with a weight matrix: y = x w^T, bound by reading w once. A warp holds 16 features of w as the
// left operand of the tensor cores, up to 8 rows of x a tile as the right one; the block's warps share the inner
// dimension. A row's bits depend neither on the other rows nor on their number.
#pragma once
#include "primitives.cuh"

namespace mlxcel {

constexpr int kProjectionWarps = 8;
constexpr int kProjectionThreads = 32 * kProjectionWarps;
constexpr int kProjectionFeatures = 16;  // of one tensor-core tile
constexpr int kProjectionRows = 8;       // of one tensor-core tile
constexpr int kProjectionChunk = 64;     // inner elements that a warp takes at once: a cache line of every feature

using ProjectionSums = float[kProjectionFeatures * kProjectionRows];  // of one pair of tiles and one warp

// Blocks: num_features / (16 * kFeatureTiles), each with kProjectionThreads threads. x is [num_rows, num_inner], w
// [num_features, num_inner], y [num_rows, num_features], all contiguous and 16-byte aligned. num_rows <= 8 * kRowTiles,
// num_features a multiple of the block's, num_inner of 64.
//
// The order of the inner dimension does not matter to a product, so a lane's 16 bytes, 8 neighbours, stand for the
// places of the fragments that it holds: no shuffling, no shared memory on the way in.
template <class Element, int kRowTiles, int kFeatureTiles>
__device__ __forceinline__ void project(const u16* x, const u16* w, u16* y, int num_rows, int num_features,
                                        int num_inner, ProjectionSums* sums) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, member = lane & 3;
  int first_feature = blockIdx.x * (kProjectionFeatures * kFeatureTiles);
  float sum[kFeatureTiles][kRowTiles][4] = {};

  constexpr int kDepth = 4 / (kFeatureTiles * kRowTiles);  // chunks in flight a warp
  const u16* my_w = w + static_cast<i64>(first_feature + group) * num_inner + member * 8;
  const u16* my_x = x + static_cast<i64>(group) * num_inner + member * 8;
  int num_chunks = num_inner / kProjectionChunk;
#pragma unroll 1
  for (int first = warp; first < num_chunks; first += kProjectionWarps * kDepth) {
    // Everything that a turn needs is under way before the first product. Behind the last chunk it is read again.
    Int4 weights[kDepth][kFeatureTiles][2][2];  // half of the features, half of the chunk
    Int4 rows[kDepth][2][kRowTiles];            // half of the chunk
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      int inner = min(first + d * kProjectionWarps, num_chunks - 1) * kProjectionChunk;
#pragma unroll
      for (int f = 0; f < kFeatureTiles * 4; ++f) {
        int feature = f / 4 * kProjectionFeatures + f / 2 % 2 * 8;
        weights[d][f / 4][f / 2 % 2][f % 2] =
            load_streamed(my_w + static_cast<i64>(feature) * num_inner + inner + f % 2 * 32);
      }
    }
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      int chunk = first + d * kProjectionWarps;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          rows[d][half][r] = {0, 0, 0, 0};
          if (chunk < num_chunks && r * kProjectionRows + group < num_rows) {
            rows[d][half][r] = load_once(my_x + static_cast<i64>(r) * kProjectionRows * num_inner +
                                         chunk * kProjectionChunk + half * 32);
          }
        }
      }
    }
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
          const Int4 &low = weights[d][f][0][half], &high = weights[d][f][1][half];
          u32 even[4] = {u32(low.x), u32(high.x), u32(low.y), u32(high.y)};
          u32 odd[4] = {u32(low.z), u32(high.z), u32(low.w), u32(high.w)};
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            const Int4& row = rows[d][half][r];
            Element::mma(sum[f][r], even, u32(row.x), u32(row.y));
            Element::mma(sum[f][r], odd, u32(row.z), u32(row.w));
          }
        }
      }
    }
  }

#pragma unroll
  for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int feature = group + i / 2 * 8, row = 2 * member + i % 2;
        sums[warp * kFeatureTiles * kRowTiles + f * kRowTiles + r][row * kProjectionFeatures + feature] = sum[f][r][i];
      }
    }
  }
  __syncthreads();
  constexpr int kTileValues = kProjectionFeatures * kProjectionRows;
  for (int i = threadIdx.x; i < kFeatureTiles * kRowTiles * kTileValues; i += kProjectionThreads) {
    int tile = i / kTileValues, place = i % kTileValues;
    float total = 0;
#pragma unroll
    for (int other = 0; other < kProjectionWarps; ++other) total += sums[other * kFeatureTiles * kRowTiles + tile][place];
    int row = tile % kRowTiles * kProjectionRows + place / kProjectionFeatures;
    int feature = first_feature + tile / kRowTiles * kProjectionFeatures + place % kProjectionFeatures;
    if (row < num_rows) y[static_cast<i64>(row) * num_features + feature] = static_cast<u16>(Element::pack(total, 0.f));
  }
}

// As above; the grid says how many feature tiles are a block's, 1 or 2.
template <class Element, int kRowTiles>
__device__ __forceinline__ void project_rows(const u16* x, const u16* w, u16* y, int num_rows, int num_features,
                                             int num_inner) {
  __shared__ ProjectionSums sums[kProjectionWarps * 2 * kRowTiles];
  if (static_cast<int>(gridDim.x) * kProjectionFeatures == num_features) {
    project<Element, kRowTiles, 1>(x, w, y, num_rows, num_features, num_inner, sums);
  } else {
    project<Element, kRowTiles, 2>(x, w, y, num_rows, num_features, num_inner, sums);
  }
}

}  // namespace mlxcel
