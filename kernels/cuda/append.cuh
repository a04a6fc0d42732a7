// The fused append. The warp that owns a row's last token stores k_new and v_new to the token's page and puts them into
// its ring itself: the page is written and not read by this launch, so the store needs no order inside it.
#pragma once
#include "work_item.cuh"

namespace mlxcel {

static_assert(kRowChunks <= kWarpSize, "one chunk a lane");

class AppendedToken {
 public:
  __device__ __forceinline__ void load(const DecodeArgs& args, const WorkItem& item, const Span& span, int kv_head,
                                       int warp) {
    int lane = threadIdx.x & 31;
    step_ = -1;
    if (!span.append) return;
    int token = span.end - 1;
    int turn = token / kSliceTokens - span.first_slice;
    if (turn % kNumWarps != warp) return;
    step_ = turn / kNumWarps;
    place_ = chunk_offset(token % kSliceTokens, lane);
    if (lane >= kRowChunks) return;
    int page = load_plan(args.page_table + static_cast<i64>(item.slot) * args.page_table_stride +
                         (token >> args.page_size_log2));
    i64 source = static_cast<i64>(item.out_row) * args.new_row_stride + kv_head * kHeadDim + lane * 8;
    key_ = *reinterpret_cast<const Int4*>(args.k_new + source);
    value_ = *reinterpret_cast<const Int4*>(args.v_new + source);
    int in_page = token & ((1 << args.page_size_log2) - 1);
    i64 target = static_cast<i64>(page) * args.page_stride + kv_head * args.head_stride + in_page * args.token_stride +
                 lane * 8;
    *reinterpret_cast<Int4*>(args.k_pages + target) = key_;
    *reinterpret_cast<Int4*>(args.v_pages + target) = value_;
  }

  // Call once the matrix of slice `step` has arrived, with zeros in the appended token's row.
  __device__ __forceinline__ void patch_k(int step, u32 matrix) const { patch(step, matrix, key_); }
  __device__ __forceinline__ void patch_v(int step, u32 matrix) const { patch(step, matrix, value_); }

 private:
  __device__ __forceinline__ void patch(int step, u32 matrix, const Int4& row) const {
    if (step != step_) return;
    if ((threadIdx.x & 31) < kRowChunks) store_shared(matrix + place_, row);
    __syncwarp();
  }

  int step_;  // of this warp in the item; -1 when another warp or item owns the token
  u32 place_;
  Int4 key_, value_;
};

}  // namespace mlxcel
