// Compile-time shape of one instantiation: warps, ring depth and shared memory, chosen for the architecture.
//   MLXCEL_HEAD_DIM        64, 80, 96, 128 or 256
//   MLXCEL_HEAD_TILES      1 for group sizes 1..8, 2 for 9..16
//   MLXCEL_BF16            0 = f16, 1 = bf16
//   MLXCEL_ROPE_DIMS       leading dims of queries and new keys that RoPE turns here, a multiple of 16; 0 = none
//   MLXCEL_ROPE_TRADITIONAL  0 = pairs are half of them apart, 1 = neighbours
//   MLXCEL_SHARED_BYTES    what the host is going to launch with; a mismatch is a compile error
#pragma once
#include "primitives.cuh"

namespace mlxcel {

#if MLXCEL_BF16
using Element = Bf16;
#else
using Element = F16;
#endif

constexpr int kHeadDim = MLXCEL_HEAD_DIM;
constexpr int kHeadTiles = MLXCEL_HEAD_TILES;
constexpr int kRopeDims = MLXCEL_ROPE_DIMS;
constexpr bool kRopeTraditional = MLXCEL_ROPE_TRADITIONAL;
static_assert(kHeadDim == 64 || kHeadDim == 80 || kHeadDim == 96 || kHeadDim == 128 || kHeadDim == 256);
static_assert(kHeadTiles == 1 || kHeadTiles == 2);
static_assert(kRopeDims % 16 == 0 && kRopeDims >= 0 && kRopeDims <= kHeadDim);

// Shared memory that one block may have (the driver keeps 1 KiB of each multiprocessor's for itself).
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
constexpr int kSharedLimit = 163 * 1024;
#elif __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int kSharedLimit = 227 * 1024;
#else
constexpr int kSharedLimit = 99 * 1024;
#endif

constexpr int kWarpSize = 32;
constexpr int kSliceTokens = 16;      // tokens of one tensor-core step: what a warp fetches and consumes at once
constexpr int kHalfTokens = 8;        // smallest page: a slice spans at most two pages
constexpr int kTileHeads = 8;         // query heads of one tensor-core step
constexpr int kMaxGroupSize = kTileHeads * kHeadTiles;

constexpr int kRowBytes = kHeadDim * 2;                 // K or V of one token
constexpr int kRowChunks = kRowBytes / 16;              // in 16-byte copies
constexpr int kMatrixBytes = kSliceTokens * kRowBytes;  // K or V of one slice
constexpr int kSliceBytes = 2 * kMatrixBytes;
constexpr int kDimTiles = kHeadDim / 16;

// A slice of D 256 is twice as large and its accumulators take twice the registers: half the warps.
constexpr int kNumWarps = (kSharedLimit < 128 * 1024 ? 4 : 8) / (kHeadDim > 128 ? 2 : 1);
constexpr int kNumThreads = kNumWarps * kWarpSize;

// Block-wide exchange area, apart from the ring so that the next item's copies go on while a finished one is reduced.
// The row pitch keeps the accumulator layout free of bank conflicts.
constexpr int kExchangePitch = kHeadDim + 4;
constexpr int kExchangeFloats = kNumWarps * kTileHeads * kExchangePitch;  // f32 [warp][head][kExchangePitch]
constexpr int kStateFloats = kNumWarps * kMaxGroupSize * 2;               // f32 [warp][head][max, sum]
constexpr int kFlagBytes = 16;
constexpr int kFixedBytes = (kExchangeFloats + kStateFloats) * 4 + kFlagBytes;

// Two stages, or as many as 64 KiB take. Deeper rings are slower: what is in flight already covers the memory's
// latency, and more of it only lengthens the queue that every other load waits in (H200, D 128, three -> two stages:
// 4 rows of 4096 tokens 22.4 -> 21.6 us, 16 rows 65.8 -> 64.7 us).
constexpr int kStageBytes = kNumWarps * kSliceBytes;
constexpr int kMinRingBytes = 64 * 1024;
constexpr int kStagesWanted = (kMinRingBytes + kStageBytes - 1) / kStageBytes;
constexpr int kNumStages = kStagesWanted < 2 ? 2 : kStagesWanted;
constexpr int kWarpRingBytes = kNumStages * kSliceBytes;
constexpr int kRingBytes = kNumWarps * kWarpRingBytes;
constexpr int kSharedBytes = kRingBytes + kFixedBytes;

#ifdef __CUDA_ARCH__
static_assert(kRingBytes >= kMinRingBytes, "less than 64 KiB in flight does not cover the memory latency");
static_assert(kSharedBytes <= kSharedLimit);
static_assert(kSharedBytes == MLXCEL_SHARED_BYTES, "the host and the kernel disagree about shared memory");
#endif

// Byte offset of a 16-byte chunk inside a K or V matrix of a slice. The permutation makes eight consecutive rows hit
// eight different bank groups at the same chunk, which is what ldmatrix reads.
__device__ __forceinline__ u32 chunk_offset(int row, int chunk) {
  int permuted;
  if constexpr (kRowChunks == 10) {
    permuted = chunk ^ ((row >> 2) & 1);
  } else if constexpr (kRowChunks == 12) {
    permuted = chunk ^ ((row >> 1) & 3);
  } else {
    permuted = chunk ^ (row & 7);
  }
  return static_cast<u32>(row * kRowBytes + permuted * 16);
}

// Where the permutation spans whole 128-byte groups, a fixed step of rows or chunks is an exclusive or and an addition
// of constants to an address that was computed once.
constexpr bool kPermutesGroups = kRowBytes % 128 == 0;

// Address of chunk 2 * dim_tile + chunk (0 or 1) of the row that `first` = matrix + chunk_offset(row, chunk) is in.
__device__ __forceinline__ u32 chunk_pair_address(u32 matrix, u32 first, int row, int chunk, int dim_tile) {
  if constexpr (kPermutesGroups) return (first ^ ((2 * dim_tile & 6) * 16)) + dim_tile / 4 * 128;
  return matrix + chunk_offset(row, 2 * dim_tile + chunk);
}

}  // namespace mlxcel
