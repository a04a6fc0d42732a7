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
constexpr int kProjectionDepth = 2;      // chunks in flight a warp, all feature tiles together

// Blocks: num_features / (16 * kFeatureTiles), each with kProjectionThreads threads. x is [num_rows, num_inner], w
// [num_features, num_inner], y [num_rows, num_features], all contiguous and 16-byte aligned. num_rows <= 8 * kRowTiles,
// num_features a multiple of the block's, num_inner of 64.
//
// The order of the inner dimension does not matter to a product, so a lane's 16 bytes, 8 neighbours, stand for the
// places of the fragments that it holds: no shuffling, no shared memory on the way in.
template <class Element, int kRowTiles, int kFeatureTiles>
__device__ __forceinline__ void project(const u16* x, const u16* w, u16* y, int num_rows, int num_features,
                                        int num_inner) {
  __shared__ float sums[kProjectionWarps][kFeatureTiles * kRowTiles][kProjectionFeatures * kProjectionRows];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, member = lane & 3;
  int first_feature = blockIdx.x * (kProjectionFeatures * kFeatureTiles);
  float sum[kFeatureTiles][kRowTiles][4] = {};

  constexpr int kDepth = kProjectionDepth / kFeatureTiles;
  const u16* my_w = w + static_cast<i64>(first_feature + group) * num_inner + member * 8;
  const u16* my_x = x + static_cast<i64>(group) * num_inner + member * 8;
  int num_chunks = num_inner / kProjectionChunk;
#pragma unroll 1
  for (int first = warp; first < num_chunks; first += kProjectionWarps * kDepth) {
    // [chunk][feature tile][half of the features][half of the chunk]
    Int4 weights[kDepth][kFeatureTiles][2][2];
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      int chunk = first + d * kProjectionWarps;
      if (chunk >= num_chunks) break;
#pragma unroll
      for (int f = 0; f < kFeatureTiles * 4; ++f) {
        int feature = f / 4 * kProjectionFeatures + f / 2 % 2 * 8;
        weights[d][f / 4][f / 2 % 2][f % 2] =
            load_streamed(my_w + static_cast<i64>(feature) * num_inner + chunk * kProjectionChunk + f % 2 * 32);
      }
    }
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      int chunk = first + d * kProjectionWarps;
      if (chunk >= num_chunks) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Int4 rows[kRowTiles];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          rows[r] = {0, 0, 0, 0};
          if (r * kProjectionRows + group < num_rows) {
            rows[r] = load_once(my_x + static_cast<i64>(r) * kProjectionRows * num_inner + chunk * kProjectionChunk +
                                half * 32);
          }
        }
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
          const Int4 &low = weights[d][f][0][half], &high = weights[d][f][1][half];
          u32 even[4] = {u32(low.x), u32(high.x), u32(low.y), u32(high.y)};
          u32 odd[4] = {u32(low.z), u32(high.z), u32(low.w), u32(high.w)};
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            Element::mma(sum[f][r], even, u32(rows[r].x), u32(rows[r].y));
            Element::mma(sum[f][r], odd, u32(rows[r].z), u32(rows[r].w));
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
        sums[warp][f * kRowTiles + r][row * kProjectionFeatures + feature] = sum[f][r][i];
      }
    }
  }
  __syncthreads();
  constexpr int kTileValues = kProjectionFeatures * kProjectionRows;
  for (int i = threadIdx.x; i < kFeatureTiles * kRowTiles * kTileValues; i += kProjectionThreads) {
    int tile = i / kTileValues, place = i % kTileValues;
    float total = 0;
#pragma unroll
    for (int other = 0; other < kProjectionWarps; ++other) total += sums[other][tile][place];
    int row = tile % kRowTiles * kProjectionRows + place / kProjectionFeatures;
    int feature = first_feature + tile / kRowTiles * kProjectionFeatures + place % kProjectionFeatures;
    if (row < num_rows) y[static_cast<i64>(row) * num_features + feature] = static_cast<u16>(Element::pack(total, 0.f));
  }
}

// As above with what is left to run time: up to 16 rows, and as many feature tiles as the grid leaves to a block, 1 or 2.
template <class Element>
__device__ __forceinline__ void project_rows(const u16* x, const u16* w, u16* y, int num_rows, int num_features,
                                             int num_inner) {
  bool one_tile = static_cast<int>(gridDim.x) * kProjectionFeatures == num_features;
  if (num_rows <= kProjectionRows) {
    if (one_tile) {
      project<Element, 1, 1>(x, w, y, num_rows, num_features, num_inner);
    } else {
      project<Element, 1, 2>(x, w, y, num_rows, num_features, num_inner);
    }
  } else if (one_tile) {
    project<Element, 2, 1>(x, w, y, num_rows, num_features, num_inner);
  } else {
    project<Element, 2, 2>(x, w, y, num_rows, num_features, num_inner);
  }
}

}  // namespace mlxcel
