// Products of a few rows with dense weights: y = x w^T + bias, bound by reading w once. A warp holds 16 features of w as
// the left operand of the tensor cores, up to 8 rows of x a tile as the right one; the block's warps share the inner
// dimension. A row's bits depend neither on the other rows nor on their number, nor on the matrices of the launch.
#pragma once
#include "projection_block.cuh"

namespace mlxcel {

constexpr int kProjectionChunk = 64;  // inner elements that a warp takes at once: a cache line of every feature

using DensePart = ProjectionPart<const u16*>;

// The order of the inner dimension does not matter to a product, so a lane's 16 bytes, 8 neighbours, stand for the
// places of the fragments that it holds: no shuffling, no shared memory on the way in.
template <class Element, int kRowTiles, int kFeatureTiles>
__device__ __forceinline__ void project(const u16* x, const DensePart& part, int first_feature, int num_rows,
                                        int num_inner, ProjectionSums* sums) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, member = lane & 3;
  float sum[kFeatureTiles][kRowTiles][4] = {};

  constexpr int kDepth = 4 / (kFeatureTiles * kRowTiles);  // chunks in flight a warp
  const u16* my_w = part.weights + static_cast<i64>(first_feature + group) * num_inner + member * 8;
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

  finish_rows<Element, kRowTiles, kFeatureTiles>(sum, part, first_feature, num_rows, sums);
}

template <class Element, int kRowTiles, int kNumParts>
__device__ __forceinline__ void project_tiles(const u16* x, const DensePart (&parts)[kNumParts], int num_rows,
                                              int num_inner, ProjectionSums* sums) {
  DensePart part;
  if (has_single_tiles(parts)) {
    int first_feature = own_part(parts, kProjectionFeatures, part);
    project<Element, kRowTiles, 1>(x, part, first_feature, num_rows, num_inner, sums);
  } else {
    int first_feature = own_part(parts, 2 * kProjectionFeatures, part);
    project<Element, kRowTiles, 2>(x, part, first_feature, num_rows, num_inner, sums);
  }
}

// Blocks: the features of all parts / (16 * feature tiles of a block, 1 or 2), each of kProjectionThreads threads. x is
// [num_rows, num_inner], num_rows <= 16; everything is contiguous and 16-byte aligned. The features of every part are a
// multiple of the block's, num_inner of 64.
template <class Element, int kNumParts>
__device__ __forceinline__ void project_rows(const u16* x, const DensePart (&parts)[kNumParts], int num_rows,
                                             int num_inner) {
  __shared__ ProjectionSums sums[kProjectionWarps * kProjectionMaxTiles];
  if (num_rows <= kProjectionRows) {
    project_tiles<Element, 1>(x, parts, num_rows, num_inner, sums);
  } else {
    project_tiles<Element, 2>(x, parts, num_rows, num_inner, sums);
  }
}

}  // namespace mlxcel
