// The query heads of one KV head as the second tensor-core operand, Q^T: in registers, or in shared memory where the
// accumulators of D 256 with more than 8 heads leave no registers for it.
#pragma once
#include "rotation.cuh"

namespace mlxcel {

constexpr bool kQueryInShared = kHeadDim * kHeadTiles > 256;
static_assert(!kQueryInShared || kMaxGroupSize * kRowBytes <= kExchangeFloats * 4);

class Query {
 public:
  // `area` is the exchange area of the block, which is idle while an item is being walked.
  __device__ __forceinline__ void load(const DecodeArgs& args, int row, int kv_head, float* area) {
    int lane = threadIdx.x & 31;
    const u16* source = args.q + static_cast<i64>(row) * args.q_row_stride +
                        static_cast<i64>(kv_head) * args.group_size * kHeadDim;
    if constexpr (kQueryInShared) {
      area_ = shared_address(area);
      __syncthreads();  // the previous item's reduction has read the area
#pragma unroll 1
      for (int index = threadIdx.x; index < kMaxGroupSize * kRowChunks; index += kNumThreads) {
        int head = index / kRowChunks, chunk = index % kRowChunks;
        Int4 bits = {0, 0, 0, 0};
        if (head < args.group_size) {
          if constexpr (kRotates) {
            bits = rotated_chunk(source + head * kHeadDim, chunk, row_rotations(args, row));
          } else {
            bits = load_once(source + index * 8);
          }
        }
        store_shared(area_ + chunk_offset(head, chunk), bits);
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        int head = tile * kTileHeads + (lane >> 2);
        bool used = head < args.group_size;
        const u16* words = source + head * kHeadDim + 2 * (lane & 3);
#pragma unroll
        for (int dim = 0; dim < kDimTiles; ++dim) {
          words_[dim][tile][0] = used ? *reinterpret_cast<const u32*>(words + dim * 16) : 0u;
          words_[dim][tile][1] = used ? *reinterpret_cast<const u32*>(words + dim * 16 + 8) : 0u;
        }
      }
    }
  }

  // Applies RoPE to what is in registers. Apart from load, so that other loads can be on their way in between.
  __device__ __forceinline__ void rotate(const DecodeArgs& args, int row) {
    if constexpr (kRotates && !kQueryInShared) {
      // A lane has the same two dims of every chunk, and so both halves of a pair.
      const float* turns = row_rotations(args, row) + (kRopeTraditional ? 2 : 4) * (threadIdx.x & 3);
#pragma unroll
      for (int chunk = 0; chunk < kRopeChunks; ++chunk) {
        if constexpr (kRopeTraditional) {
          Float2 turn = *reinterpret_cast<const Float2*>(turns + chunk * 8);
#pragma unroll
          for (int tile = 0; tile < kHeadTiles; ++tile) {
            u32& pair = words_[chunk / 2][tile][chunk % 2];
            pair = rotate_pair(pair, turn.x, turn.y);
          }
        } else if (chunk < kRopeChunks / 2) {
          Float4 turn = *reinterpret_cast<const Float4*>(turns + chunk * 16);
          int partner = chunk + kRopeChunks / 2;
#pragma unroll
          for (int tile = 0; tile < kHeadTiles; ++tile) {
            rotate_halves(words_[chunk / 2][tile][chunk % 2], words_[partner / 2][tile][partner % 2], turn);
          }
        }
      }
    }
  }

  // Both tiles of one step of 16 dims: lane holds head lane / 4, dims 2 * (lane % 4) (+ 1) and the same + 8.
  __device__ __forceinline__ void fragment(int dim, u32 (&words)[kHeadTiles][2]) const {
    if constexpr (kQueryInShared) {
      int lane = threadIdx.x & 31;
      int row = (lane & 7) + ((lane >> 4) & 1) * 8, chunk = 2 * dim + ((lane >> 3) & 1);
      u32 loaded[4];
      load_matrix_x4(loaded, area_ + chunk_offset(row, chunk));
#pragma unroll
      for (int i = 0; i < 4; ++i) words[(i >> 1) % kHeadTiles][i & 1] = loaded[i];
    } else {
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        words[tile][0] = words_[dim][tile][0];
        words[tile][1] = words_[dim][tile][1];
      }
    }
  }

 private:
  u32 words_[kQueryInShared ? 1 : kDimTiles][kHeadTiles][2];
  u32 area_;
};

}  // namespace mlxcel
