// The fused append. The warp that owns a row's last token stores k_new and v_new to the token's page and puts them into
// its ring itself: the page is written and not read by this launch, so the store needs no order inside it.
#pragma once
#include "rotation.cuh"

namespace mlxcel {

static_assert(kRowChunks <= kWarpSize, "one chunk a lane");

// Offset of this lane's chunk of the row's new token in k_new and v_new.
__device__ __forceinline__ i64 new_token_offset(const DecodeArgs& args, const WorkItem& item, int kv_head) {
  int lane = threadIdx.x & 31;
  return static_cast<i64>(item.out_row) * args.new_row_stride + kv_head * kHeadDim + lane * 8;
}

struct NewToken {
  int step;  // the warp's step that the token is in; -1 in the warps that do not own it
  Int4 key;  // this lane's chunk after RoPE; without RoPE it is read again where it is needed
};

// Stores the token if this warp owns it.
__device__ __forceinline__ NewToken append_token(const DecodeArgs& args, const WorkItem& item, const Span& span,
                                                 int kv_head, int warp) {
  NewToken newest;
  newest.step = -1;
  if (!span.append) return newest;
  int lane = threadIdx.x & 31, token = span.end - 1;
  u32 turn = static_cast<u32>(token) / kSliceTokens - span.first_slice;
  if (turn % kNumWarps != warp) return newest;
  if (lane < kRowChunks) {
    int page = load_plan(args.page_table + static_cast<i64>(item.slot) * args.page_table_stride +
                         (token >> args.page_size_log2));
    i64 source = new_token_offset(args, item, kv_head);
    Int4 key, value = load_once(args.v_new + source);
    if constexpr (kRotates) {
      key = rotated_chunk(args.k_new + source - lane * 8, lane, row_rotations(args, item.out_row));
      newest.key = key;
    } else {
      key = load_once(args.k_new + source);
    }
    int in_page = token & ((1 << args.page_size_log2) - 1);
    i64 target = static_cast<i64>(page) * args.page_stride + kv_head * args.head_stride + in_page * args.token_stride +
                 lane * 8;
    store(args.k_pages + target, key);
    store(args.v_pages + target, value);
  }
  newest.step = turn / kNumWarps;
  return newest;
}

// Address of this lane's chunk of the token in a matrix, which has arrived with zeros there.
__device__ __forceinline__ u32 new_token_address(const Span& span, u32 matrix) {
  return matrix + chunk_offset((span.end - 1) & (kSliceTokens - 1), threadIdx.x & 31);
}

// Puts the token's key into the matrix of its slice. The bits are read again, from L1, if that is all it takes:
// registers are short in the loop that calls this.
__device__ __forceinline__ void patch_key(const DecodeArgs& args, const WorkItem& item, const Span& span, int kv_head,
                                          const NewToken& newest, u32 matrix) {
  if ((threadIdx.x & 31) < kRowChunks) {
    if constexpr (kRotates) {
      store_shared(new_token_address(span, matrix), newest.key);
    } else {
      store_shared(new_token_address(span, matrix), load_once(args.k_new + new_token_offset(args, item, kv_head)));
    }
  }
  __syncwarp();
}

// The same for its value.
__device__ __forceinline__ void patch_value(const DecodeArgs& args, const WorkItem& item, const Span& span, int kv_head,
                                            u32 matrix) {
  if ((threadIdx.x & 31) < kRowChunks) {
    store_shared(new_token_address(span, matrix), load_once(args.v_new + new_token_offset(args, item, kv_head)));
  }
  __syncwarp();
}

}  // namespace mlxcel
