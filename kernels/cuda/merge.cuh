// Merge of a split row by the block that draws the row's last ticket. A block draws when it begins to write its partial:
// the count comes back meanwhile, and the merging block then waits for the words themselves. Every block that holds a
// ticket writes without waiting for anybody, so that wait ends. A thread owns four dims of a head, which no other reads,
// and has kMergeBatch partials in flight at once: a serial merge of 16 splits takes longer than their attention.
#pragma once
#include "reduce.cuh"

namespace mlxcel {

constexpr int kRowVectors = kHeadDim / 4;  // of four dims
// Partials that one thread has in flight, as far as registers go, and how many of them are handled under one test.
constexpr int kMergeBatch = kQueryInShared ? 2 : kHeadTiles > 1 ? 4 : 8;
constexpr int kMergeStep = kQueryInShared ? 2 : 4;

// Looks a merging block gives its partials, each an access to L2, before it takes the plan for wrong: some seconds.
constexpr int kMaxMergeLooks = 1 << 24;

// True in every thread of the block that drew the row's last ticket, whose counter it clears.
__device__ __forceinline__ bool is_merging_block(const DecodeArgs& args, const Exchange& exchange, const WorkItem& item,
                                                 int kv_head, int ticket) {
  if (threadIdx.x == 0) {
    bool last = ticket == item.num_splits - 1;
    if (last) args.arrivals[item.out_row * args.num_kv_heads + kv_head] = 0;
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
__device__ __forceinline__ void merge_splits(Partial& total, const DecodeArgs& args, const WorkItem& item,
                                             const HeadRef& head, int dim, int first, int stride_log2) {
  i64 flat = head.flat(item.partial_row - item.split + first);
  const Float2* states = reinterpret_cast<const Float2*>(args.partial_state) + flat;
  Float4* outs = reinterpret_cast<Float4*>(args.partial_out + flat * kHeadDim + dim);
  int pitch = head.num_query_heads << stride_log2;
  int last = (item.num_splits - 1 - first) >> stride_log2;  // -1 when there is none
  int looks = 0;
#pragma unroll 1
  for (int base = 0; base <= last;) {
    Float2 state[kMergeBatch];
    Float4 out[kMergeBatch];
    u32 largest = 0;
#pragma unroll
    for (int step = 0; step < kMergeBatch; step += kMergeStep) {
      if (step > 0 && base + step > last) break;
#pragma unroll
      for (int i = step; i < step + kMergeStep; ++i) {
        state[i] = {negative_infinity(), 0.0f};
        out[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (base + i <= last) {
          state[i] = load_handed_over(states + i * pitch);
          out[i] = load_handed_over(outs + i * pitch * kRowVectors);
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kMergeBatch; step += kMergeStep) {
      if (step > 0 && base + step > last) break;
#pragma unroll
      for (int i = step; i < step + kMergeStep; ++i) {
        largest = max(largest, max(largest_word(state[i]), largest_word(out[i])));
      }
    }
    if (largest == kNotWritten) {
      if (++looks == kMaxMergeLooks) fail_launch();
      continue;
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
        if (base + i <= last) take_back(outs + i * pitch * kRowVectors);
      }
      total = next;
    }
    base += kMergeBatch;
    states += kMergeBatch * pitch;
    outs += kMergeBatch * pitch * kRowVectors;
  }
}

// Makes the row's states kNotWritten again; many threads have read each. The row itself is stored by now.
__device__ __forceinline__ void clear_states(const DecodeArgs& args, const WorkItem& item, int kv_head) {
  __syncthreads();
  int head = threadIdx.x % kMaxGroupSize;
  if (head >= args.group_size) return;
  HeadRef reference = {0, kv_head * args.group_size + head, args.num_kv_heads * args.group_size};
#pragma unroll 1
  for (int split = threadIdx.x / kMaxGroupSize; split < item.num_splits; split += kNumThreads / kMaxGroupSize) {
    take_back(reinterpret_cast<Float2*>(args.partial_state) + reference.flat(item.partial_row - item.split + split));
  }
}

// Every thread of the merging block calls it. Where there are threads to spare and more partials than one has in flight,
// 2, 4 or 8 neighbouring lanes share four dims and split the partials among them.
__device__ __forceinline__ void merge_row(const DecodeArgs& args, const WorkItem& item, int kv_head) {
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
    int vector = index >> shift;
    int dim = vector % kRowVectors * 4;
    HeadRef head = {item.out_row, kv_head * args.group_size + vector / kRowVectors,
                    args.num_kv_heads * args.group_size};
    Partial total = {{0.0f, 0.0f, 0.0f, 0.0f}, negative_infinity(), 0.0f};
    if (vector < num_vectors) merge_splits(total, args, item, head, dim, part, shift);
#pragma unroll 1
    for (int distance = 1 << shift >> 1; distance > 0; distance >>= 1) {
      Partial other = exchange_partial(total, distance);
      Partial next = {{0.0f, 0.0f, 0.0f, 0.0f}, fmaxf(total.maximum, other.maximum), 0.0f};
      float reference = WarpSoftmax::finite_or_zero(next.maximum);
      add_scaled(next, total, exp2_approx(total.maximum - reference));
      add_scaled(next, other, exp2_approx(other.maximum - reference));
      total = next;
    }
    if (part == 0 && vector < num_vectors) store_output(args, head, dim, total);
  }
  clear_states(args, item, kv_head);
}

}  // namespace mlxcel
