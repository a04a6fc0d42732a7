// The fused append. The warp that owns a row's last token stores k_new and v_new to the token's page and puts them into
// its ring itself: the page is written and not read by this launch, so the store needs no order inside it.
#pragma once
#include "work_item.cuh"

namespace mlxcel {

static_assert(kRowChunks <= kWarpSize, "one chunk a lane");

// Offset of this lane's chunk of the row's new token in k_new and v_new.
__device__ __forceinline__ i64 new_token_offset(const DecodeArgs& args, const WorkItem& item, int kv_head) {
  int lane = threadIdx.x & 31;
  return static_cast<i64>(item.out_row) * args.new_row_stride + kv_head * kHeadDim + lane * 8;
}

// Stores the token if this warp owns it. Returns the warp's step that the token is in, -1 for all other warps.
__device__ __forceinline__ int append_token(const DecodeArgs& args, const WorkItem& item, const Span& span, int kv_head,
                                            int warp) {
  if (!span.append) return -1;
  int lane = threadIdx.x & 31, token = span.end - 1;
  u32 turn = static_cast<u32>(token) / kSliceTokens - span.first_slice;
  if (turn % kNumWarps != warp) return -1;
  if (lane < kRowChunks) {
    int page = load_plan(args.page_table + static_cast<i64>(item.slot) * args.page_table_stride +
                         (token >> args.page_size_log2));
    i64 source = new_token_offset(args, item, kv_head);
    Int4 key = load_once(args.k_new + source), value = load_once(args.v_new + source);
    int in_page = token & ((1 << args.page_size_log2) - 1);
    i64 target = static_cast<i64>(page) * args.page_stride + kv_head * args.head_stride + in_page * args.token_stride +
                 lane * 8;
    store(args.k_pages + target, key);
    store(args.v_pages + target, value);
  }
  return turn / kNumWarps;
}

// Puts the token into a matrix that has arrived with zeros in its row. The bits are read again, from L1: registers are
// short in the loop that calls this.
__device__ __forceinline__ void patch_token(const DecodeArgs& args, const WorkItem& item, const Span& span, int kv_head,
                                            const u16* newest, u32 matrix) {
  int lane = threadIdx.x & 31;
  if (lane < kRowChunks) {
    u32 place = chunk_offset((span.end - 1) & (kSliceTokens - 1), lane);
    store_shared(matrix + place, load_once(newest + new_token_offset(args, item, kv_head)));
  }
  __syncwarp();
}

}  // namespace mlxcel
