// What happens when an item is done: the warps of the block are reduced to one state, which is written to the output
// (unsplit rows) or to the workspace, from where merge.cuh takes it.
#pragma once
#include "softmax.cuh"
#include "work_item.cuh"

namespace mlxcel {

struct Exchange {
  float* out;    // f32 [kNumWarps][kTileHeads][kExchangePitch], shared memory
  float* state;  // f32 [kNumWarps][kMaxGroupSize][2], shared memory
  int* is_last;  // shared memory
};

// Head `head` of the group of KV head `kv_head`, as a query head.
struct HeadRef {
  int row;  // batch row
  int query_head;
  int num_query_heads;
  __device__ __forceinline__ i64 flat(int base_row) const {
    return static_cast<i64>(base_row) * num_query_heads + query_head;
  }
};

// Softmax state of four dims of one query head, in units of 2^maximum.
struct Partial {
  Float4 out;
  float maximum;
  float sum;
};

// Adds a partial whose unit is `factor` times that of `total`; the maximum is the caller's.
__device__ __forceinline__ void add_scaled(Partial& total, const Partial& part, float factor) {
  total.out.x += part.out.x * factor;
  total.out.y += part.out.y * factor;
  total.out.z += part.out.z * factor;
  total.out.w += part.out.w * factor;
  total.sum += part.sum * factor;
}

// Normalises and stores. The sink joins the denominator here and nowhere else.
__device__ __forceinline__ void store_output(const DecodeArgs& args, const HeadRef& head, int dim,
                                             const Partial& partial) {
  float maximum = partial.maximum, sum = partial.sum, scale = 1.0f;
  if (args.options & kOptionSinks) {
    constexpr float kLog2E = 1.4426950408889634f;
    float sink = args.sinks[head.query_head] * kLog2E;
    float top = fmaxf(maximum, sink);
    scale = exp2_approx(maximum - WarpSoftmax::finite_or_zero(top));
    sum = sum * scale + exp2_approx(sink - WarpSoftmax::finite_or_zero(top));
    maximum = top;
  }
  float factor = sum > 0.0f ? scale * reciprocal_approx(sum) : 0.0f;
  const Float4& out = partial.out;
  Word2 packed = {Element::pack(out.x * factor, out.y * factor), Element::pack(out.z * factor, out.w * factor)};
  *reinterpret_cast<Word2*>(args.out + head.flat(head.row) * kHeadDim + dim) = packed;
  if (dim == 0 && (args.options & kOptionLse)) {
    args.lse[head.flat(head.row)] = sum > 0.0f ? maximum + log2_approx(sum) : negative_infinity();
  }
}

// Reduces the block's warps; writes the row or its partial. Every thread of the block calls it. Returns the ticket of a
// split row, in thread 0, which nothing has waited for yet.
__device__ __forceinline__ int write_item(const DecodeArgs& args, const Exchange& exchange, const WorkItem& item,
                                           int kv_head, const WarpSoftmax& state, bool first_item) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int lane_dim = lane >> 2, lane_head = 2 * (lane & 3);
  int num_query_heads = args.num_kv_heads * args.group_size;
  int ticket = -1;
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile) {
    int first_head = tile * kTileHeads;
    if (first_head >= args.group_size) break;
    if (tile > 0 || !first_item) __syncthreads();  // the exchange area is free: earlier readers are done
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int head = first_head + lane_head + h;
      if (head < args.group_size) {
        float* row = exchange.out + (warp * kTileHeads + lane_head + h) * kExchangePitch;
#pragma unroll
        for (int dim = 0; dim < kDimTiles; ++dim) {
          row[dim * 16 + lane_dim] = state.out[dim][tile][h];
          row[dim * 16 + lane_dim + 8] = state.out[dim][tile][h + 2];
        }
        if (lane_dim == 0) {
          *reinterpret_cast<Float2*>(exchange.state + (warp * kMaxGroupSize + head) * 2) = {state.row_max[tile][h],
                                                                                           state.row_sum[tile][h]};
        }
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && item.num_splits > 1 && args.group_size <= first_head + kTileHeads) {
      ticket = draw_ticket(args.arrivals + item.out_row * args.num_kv_heads + kv_head);
    }
    int num_heads = min(kTileHeads, args.group_size - first_head);
    constexpr int kRowVectors = kHeadDim / 4;
#pragma unroll 1
    for (int index = threadIdx.x; index < num_heads * kRowVectors; index += kNumThreads) {
      int local = index / kRowVectors, dim = index % kRowVectors * 4;
      const float* states = exchange.state + (first_head + local) * 2;
      const float* outs = exchange.out + local * kExchangePitch + dim;
      Float2 warp_state[kNumWarps];
      Partial partial = {{0.0f, 0.0f, 0.0f, 0.0f}, negative_infinity(), 0.0f};
#pragma unroll
      for (int w = 0; w < kNumWarps; ++w) {
        warp_state[w] = *reinterpret_cast<const Float2*>(states + w * kMaxGroupSize * 2);
        partial.maximum = fmaxf(partial.maximum, warp_state[w].x);
      }
      float base = WarpSoftmax::finite_or_zero(partial.maximum);
#pragma unroll
      for (int w = 0; w < kNumWarps; ++w) {
        const Float4& out = *reinterpret_cast<const Float4*>(outs + w * kTileHeads * kExchangePitch);
        add_scaled(partial, {out, warp_state[w].x, warp_state[w].y}, exp2_approx(warp_state[w].x - base));
      }
      HeadRef head = {item.out_row, kv_head * args.group_size + first_head + local, num_query_heads};
      if (item.num_splits == 1) {
        store_output(args, head, dim, partial);
      } else {
        i64 flat = head.flat(item.partial_row);
        store_handed_over(reinterpret_cast<Float4*>(args.partial_out + flat * kHeadDim + dim), partial.out);
        if (dim == 0) {
          store_handed_over(reinterpret_cast<Float2*>(args.partial_state) + flat, {partial.maximum, partial.sum});
        }
      }
    }
  }
  return ticket;
}

}  // namespace mlxcel
