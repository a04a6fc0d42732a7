// What products of a few rows have in common, whatever the weights are stored as: which features a block computes, and
// the way from its warps' sums to the output.
#pragma once
#include "primitives.cuh"

namespace mlxcel {

constexpr int kProjectionWarps = 8;
constexpr int kProjectionThreads = 32 * kProjectionWarps;
constexpr int kProjectionFeatures = 16;  // of one tensor-core tile
constexpr int kProjectionRows = 8;       // of one tensor-core tile
constexpr int kProjectionMaxTiles = 4;   // of features times of rows, a block

using ProjectionSums = float[kProjectionFeatures * kProjectionRows];  // of one pair of tiles and one warp

// One of the matrices that a launch multiplies the same rows with. `bias` may be null.
template <class Weights>
struct ProjectionPart {
  Weights weights;  // [num_features, num_inner]
  const u16* bias;  // [num_features]
  u16* y;           // [num_rows, num_features]
  int num_features;
};

// Blocks are dealt to the matrices in their order; every matrix has a multiple of the block's features. Makes `part` the
// block's own matrix and returns the block's first feature in it.
template <int kNumParts, class Part>
__device__ __forceinline__ int own_part(const Part (&parts)[kNumParts], int block_features, Part& part) {
  int feature = blockIdx.x * block_features;
  part = parts[0];
#pragma unroll
  for (int i = 1; i < kNumParts; ++i) {
    if (feature >= part.num_features) {
      feature -= part.num_features;
      part = parts[i];
    }
  }
  return feature;
}

// The grid says how many feature tiles are a block's: 1 if it has a block for every tile of all matrices, else 2.
template <int kNumParts, class Part>
__device__ __forceinline__ bool has_single_tiles(const Part (&parts)[kNumParts]) {
  int num_features = 0;
#pragma unroll
  for (int i = 0; i < kNumParts; ++i) num_features += parts[i].num_features;
  return static_cast<int>(gridDim.x) * kProjectionFeatures == num_features;
}

// Adds up what the block's warps found, always in the same order, and the bias; rounds once.
template <class Element, int kRowTiles, int kFeatureTiles, class Part>
__device__ __forceinline__ void finish_rows(const float (&sum)[kFeatureTiles][kRowTiles][4], const Part& part,
                                            int first_feature, int num_rows, ProjectionSums* sums) {
  constexpr int kTiles = kFeatureTiles * kRowTiles;
  static_assert(kTiles <= kProjectionMaxTiles, "sums of the block");
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, member = lane & 3;
#pragma unroll
  for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int feature = group + i / 2 * 8, row = 2 * member + i % 2;
        sums[warp * kTiles + f * kRowTiles + r][row * kProjectionFeatures + feature] = sum[f][r][i];
      }
    }
  }
  __syncthreads();
  constexpr int kTileValues = kProjectionFeatures * kProjectionRows;
  for (int i = threadIdx.x; i < kTiles * kTileValues; i += kProjectionThreads) {
    int tile = i / kTileValues, place = i % kTileValues;
    float total = 0;
#pragma unroll
    for (int other = 0; other < kProjectionWarps; ++other) total += sums[other * kTiles + tile][place];
    int row = tile % kRowTiles * kProjectionRows + place / kProjectionFeatures;
    int feature = first_feature + tile / kRowTiles * kProjectionFeatures + place % kProjectionFeatures;
    if (row < num_rows) {
      if (part.bias) total += Element::unpack(part.bias[feature]).x;
      part.y[static_cast<i64>(row) * part.num_features + feature] = static_cast<u16>(Element::pack(total, 0.f));
    }
  }
}

}  // namespace mlxcel
