// Paged decode attention: one query token a row, the whole batch in one launch. Grid: (num_kv_heads, num_workers)
// blocks of kNumThreads threads, kSharedBytes of dynamic shared memory. Split-KV as in FlashDecoding; the plan decides
// where.
#include "append.cuh"
#include "kv_stream.cuh"
#include "merge.cuh"

namespace mlxcel {

// A small batch runs most of this code once, at two to three cycles an instruction: the length of the code is latency.
// Hence one copy of the fetching part, which serves the filling of the ring too (steps below zero of the first item).
__device__ __forceinline__ void decode_worker(const DecodeArgs& args, char* shared) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int kv_head = blockIdx.x, worker = blockIdx.y;
  u32 ring = shared_address(shared) + warp * kWarpRingBytes;
  float* exchange_floats = reinterpret_cast<float*>(shared + kRingBytes);
  Exchange exchange = {exchange_floats, exchange_floats + kExchangeFloats,
                       reinterpret_cast<int*>(exchange_floats + kExchangeFloats + kStateFloats)};
  ScoreTransform transform = {args.scale_log2, args.soft_cap_log2, args.soft_cap_inverse2};

  KvStream stream(args, worker, kv_head, warp, ring);
  int stage = 0, step = -kNumStages;
#pragma unroll 1
  for (int index = worker; index < args.num_items; index += args.num_workers) {
    WorkItem item;
    Span span;
    Query query;
    NewToken newest;
    WarpSoftmax state;
#pragma unroll 1
    for (;; ++step) {
      u32 keys = ring + stage * kSliceBytes;
      float scores[kHeadTiles][4];
      if (step == 0) {
        // K and V of older tokens are on their way; queries, new tokens and the workspace are the launch's before.
        wait_for_previous_launch();
        item = load_item(args, index);
        if (!(item.flags & kItemValid)) return;
        span = resolve_span(args, item, warp);
        query.load(args, item.out_row, kv_head, exchange.out);
        newest = append_token(args, item, span, kv_head, warp);
        query.rotate(args, item.out_row);
        state.clear();
      }
      if (step >= 0) {
        if (step >= span.num_slices) break;
        // In flight behind this slice's K: its V and both matrices of the kNumStages - 1 slices after it.
        copy_async_wait<2 * kNumStages - 1>();
        __syncwarp();
        if (step == newest.step) patch_key(args, item, span, kv_head, newest, keys);
        score_slice(scores, query, keys, lane);
        __syncwarp();  // every lane has read K: its place may be filled again
      }
      stream.prepare();
      stream.issue_k(stage);
      if (step >= 0) {
        int token = span.token(warp, step);
        state.update(scores, transform, span.begin - token, span.end - token, lane >> 2);
        copy_async_wait<2 * kNumStages - 1>();
        __syncwarp();
        if (step == newest.step) patch_value(args, item, span, kv_head, keys + kMatrixBytes);
        accumulate_slice(state, scores, keys + kMatrixBytes, lane);
        __syncwarp();
      }
      stream.issue_v(stage);
      stage = stage + 1 == kNumStages ? 0 : stage + 1;
    }
    state.finish();
    // The record's second half is in L1 and was not worth its registers where they are short.
    if constexpr (kQueryInShared) item = load_item(args, index);
    int ticket = write_item(args, exchange, item, kv_head, state, !kQueryInShared && index == worker);
    if (item.num_splits > 1 && is_merging_block(args, exchange, item, kv_head, ticket)) {
      merge_row(args, item, kv_head);
    }
    step = 0;
  }
}

}  // namespace mlxcel

// Inputs, then outputs, then by-value scalars: the order that MLX's precompiled kernels pass. See DecodeArgs. lse stands
// where it can be either, as a launch without it has one output less.
extern "C" __global__ void __launch_bounds__(mlxcel::kNumThreads, 1)
    mlxcel_paged_decode(const mlxcel::u16* q, const mlxcel::u16* k_new, const mlxcel::u16* v_new, mlxcel::u16* k_pages,
                        mlxcel::u16* v_pages, const int* page_table, const int* lengths, const int* first_page_offsets,
                        const int* work_items, const float* sinks, const float* rotations, float* partial_out,
                        float* partial_state, int* arrivals, float* lse, mlxcel::u16* out, int num_items,
                        int num_workers, int num_kv_heads, int group_size, int page_size_log2, int page_table_stride,
                        int q_row_stride, int new_row_stride, int page_stride, int head_stride, int token_stride,
                        int window, int options, float scale_log2, float soft_cap_log2, float soft_cap_inverse2) {
  extern __shared__ __align__(128) char shared[];
  mlxcel::DecodeArgs args = {q, k_new, v_new, k_pages, v_pages, page_table, lengths, first_page_offsets, work_items,
                             sinks, rotations, partial_out, partial_state, arrivals, out, lse, num_items,
                             num_workers, num_kv_heads, group_size, page_size_log2, page_table_stride, q_row_stride,
                             new_row_stride, page_stride, head_stride, token_stride, window, options, scale_log2,
                             soft_cap_log2, soft_cap_inverse2};
  mlxcel::decode_worker(args, shared);
}
