// Merge of a split row by the block that finishes last. A thread owns four dims of a head and has kMergeBatch partials
// in flight at once: a serial merge of 16 splits takes longer than their attention.
#pragma once
#include "reduce.cuh"

namespace mlxcel {

constexpr int kMergeBatch = kQueryInShared ? 4 : 8;  // partials that one thread has in flight
constexpr int kMergeStep = 4;                        // and how many of them are loaded, and added, under one test

// True in every thread of the block that arrives last at this row and KV head.
__device__ __forceinline__ bool arrives_last(const DecodeArgs& args, const Exchange& exchange, const WorkItem& item,
                                             int kv_head) {
  __syncthreads();  // puts the block's partials before thread 0's release
  if (threadIdx.x == 0) {
    int* counter = args.arrivals + item.out_row * args.num_kv_heads + kv_head;
    bool last = arrive_acq_rel(counter) == item.num_splits - 1;
    if (last) *counter = 0;
    *exchange.is_last = last;
  }
  __syncthreads();
  return *exchange.is_last != 0;
}

__device__ __forceinline__ Partial exchange_partial(const Partial& mine, int distance) {
  return {{__shfl_xor_sync(kFullMask, mine.out.x, distance), __shfl_xor_sync(kFullMask, mine.out.y, distance),
           __shfl_xor_sync(kFullMask, mine.out.z, distance), __shfl_xor_sync(kFullMask, mine.out.w, distance)},
          __shfl_xor_sync(kFullMask, mine.maximum, distance),
          __shfl_xor_sync(kFullMask, mine.sum, distance)};
}

// Adds splits `first`, first + stride, ... of one head (stride a power of two), four dims from `dim` on.
__device__ __forceinline__ Partial merge_splits(const DecodeArgs& args, const WorkItem& item, const HeadRef& head,
                                                int dim, int first, int stride_log2) {
  i64 flat = head.flat(item.partial_row - item.split + first);
  const float* states = args.partial_state + flat * 2;
  const float* outs = args.partial_out + flat * kHeadDim + dim;
  int pitch = head.num_query_heads << stride_log2;
  int last = (item.num_splits - 1 - first) >> stride_log2;  // -1 when there is none
  Partial total = {{0.0f, 0.0f, 0.0f, 0.0f}, negative_infinity(), 0.0f};
#pragma unroll 1
  for (int base = 0; base <= last; base += kMergeBatch) {
    Float2 state[kMergeBatch];
    Float4 out[kMergeBatch];
#pragma unroll
    for (int step = 0; step < kMergeBatch; step += kMergeStep) {
      if (step > 0 && base + step > last) break;
#pragma unroll
      for (int i = step; i < step + kMergeStep; ++i) {
        state[i] = {negative_infinity(), 0.0f};
        out[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (base + i <= last) {
          i64 row = static_cast<i64>(base + i) * pitch;
          state[i] = load_shared_by_grid(reinterpret_cast<const Float2*>(states + row * 2));
          out[i] = load_shared_by_grid(reinterpret_cast<const Float4*>(outs + row * kHeadDim));
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kMergeBatch; step += kMergeStep) {
      if (step > 0 && base + step > last) break;
      Partial next = {{0.0f, 0.0f, 0.0f, 0.0f}, total.maximum, 0.0f};
#pragma unroll
      for (int i = step; i < step + kMergeStep; ++i) next.maximum = fmaxf(next.maximum, state[i].x);
      float reference = WarpSoftmax::finite_or_zero(next.maximum);
      add_scaled(next, total, exp2_approx(total.maximum - reference));
#pragma unroll
      for (int i = step; i < step + kMergeStep; ++i) {
        add_scaled(next, {out[i], state[i].x, state[i].y}, exp2_approx(state[i].x - reference));
      }
      total = next;
    }
  }
  return total;
}

// Every thread of the last block calls it. Where there are threads to spare and more partials than one has in flight,
// 2, 4 or 8 neighbouring lanes share four dims and split the partials among them.
__device__ __forceinline__ void merge_row(const DecodeArgs& args, const WorkItem& item, int kv_head) {
  constexpr int kRowVectors = kHeadDim / 4;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int num_vectors = args.group_size * kRowVectors;
  int shift = 0;
#pragma unroll
  for (int parts = 2; parts <= 8; parts *= 2) {
    shift += num_vectors * parts <= kNumThreads && item.num_splits > kMergeBatch * parts / 2;
  }
#pragma unroll 1
  for (int base = warp * kWarpSize; base < num_vectors << shift; base += kNumThreads) {
    int index = base + lane, part = index & ((1 << shift) - 1);
    int vector = min(index >> shift, num_vectors - 1);
    int dim = vector % kRowVectors * 4;
    HeadRef head = {item.out_row, kv_head * args.group_size + vector / kRowVectors,
                    args.num_kv_heads * args.group_size};
    Partial total = merge_splits(args, item, head, dim, part, shift);
#pragma unroll 1
    for (int distance = 1 << shift >> 1; distance > 0; distance >>= 1) {
      Partial other = exchange_partial(total, distance);
      Partial next = {{0.0f, 0.0f, 0.0f, 0.0f}, fmaxf(total.maximum, other.maximum), 0.0f};
      float reference = WarpSoftmax::finite_or_zero(next.maximum);
      add_scaled(next, total, exp2_approx(total.maximum - reference));
      add_scaled(next, other, exp2_approx(other.maximum - reference));
      total = next;
    }
    if (part == 0 && index >> shift < num_vectors) store_output(args, head, dim, total);
  }
}

}  // namespace mlxcel
