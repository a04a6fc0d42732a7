// The fetching side of a warp: walks the warp's slices over all items of its worker and keeps the ring full. It runs
// kNumStages slices ahead of the consuming side and crosses item borders on its own, so the memory never idles there.
#pragma once
#include "work_item.cuh"

namespace mlxcel {

// Page ids of this many slices are loaded at once, two lanes a slice: one for each half of 8 tokens.
constexpr int kIdWindow = kWarpSize / 2;
constexpr int kCopiesPerLane = kSliceTokens * kRowChunks / kWarpSize;  // of 16 bytes, for K and again for V
static_assert(kSliceTokens * kRowChunks % kWarpSize == 0);

// Up to kIdWindow slices of one item.
struct Segment {
  Span span;
  const int* row_pages;  // page ids of the item's row
  int step, end;         // slices of the span, as counted by this warp
  int ids;               // lane j: page of half j % 2 of slice step + j / 2, counted from the segment's start
};

class KvStream {
 public:
  __device__ __forceinline__ KvStream(const DecodeArgs& args, int worker, int head, int warp, u32 ring)
      : args_(args), head_(head), warp_(warp), lane_(threadIdx.x & 31), ring_(ring), index_(worker) {
    next_.span.num_slices = next_.end = now_.step = now_.end = taken_ = 0;
    live_ = true;
    find_next();
  }

  // Fixes the source of the next slice. Afterwards issue_k and issue_v fetch it, or nothing when the list has ended.
  __device__ __forceinline__ void prepare() {
    if (now_.step == now_.end) {
      now_ = next_;
      taken_ = 0;
      live_ = now_.step < now_.end;
    }
    if (!live_) return;
    int low_page = __shfl_sync(kFullMask, now_.ids, 2 * taken_);
    int high_page = __shfl_sync(kFullMask, now_.ids, 2 * taken_ + 1);
    const Span& span = now_.span;
    int token = span.token(warp_, now_.step);
    int first_row = max(0, span.begin - token);
    int end_row = min(kSliceTokens, span.end - (span.append ? 1 : 0) - token);
    hidden_ = ~(((1u << max(end_row, 0)) - 1) & ~0u << first_row);
    // A half without a visible token may have no page: it borrows the other's address and is not read.
    if (first_row >= kHalfTokens) low_page = high_page;
    if (end_row <= kHalfTokens) high_page = low_page;
    low_ = address(low_page, token);
    high_ = address(high_page, token + kHalfTokens);
    ++now_.step;
  }

  __device__ __forceinline__ void issue_k(int stage) const {
    if (live_) issue(args_.k_pages, ring_ + stage * kSliceBytes);
    copy_async_commit();
  }

  __device__ __forceinline__ void issue_v(int stage) {
    if (live_) issue(args_.v_pages, ring_ + stage * kSliceBytes + kMatrixBytes);
    copy_async_commit();
    // Page ids are under way a whole segment before their use: behind a full ring a load can take microseconds.
    if (taken_++ == 0 && live_) find_next();
  }

 private:
  // Makes next_ the segment after it, empty at the end of the list.
  __device__ __forceinline__ void find_next() {
    next_.step = next_.end;
    while (next_.step >= next_.span.num_slices) {
      next_.end = next_.step;
      if (index_ >= args_.num_items) return;
      WorkItem item = load_item(args_, index_);
      if (!(item.flags & kItemValid)) return;
      index_ += args_.num_workers;
      next_.row_pages = args_.page_table + static_cast<i64>(item.slot) * args_.page_table_stride;
      next_.step = 0;
      // Windows and offsets move the start; without them the ids are here as soon as the length is.
      int planned_slice = static_cast<u32>(item.kv_begin) / kSliceTokens;
      next_.span.first_slice = planned_slice;
      load_ids();
      next_.span = resolve_span(args_, item, warp_);
      if (next_.span.first_slice != planned_slice) load_ids();
    }
    if (next_.step > 0) load_ids();
    next_.end = min(next_.step + kIdWindow, next_.span.num_slices);
  }

  // Entries past the row's pages may hold anything: they are read inside the slot's part of the table only, and no
  // token of theirs is visible.
  __device__ __forceinline__ void load_ids() {
    int token = next_.span.token(warp_, next_.step + (lane_ >> 1)) + (lane_ & 1) * kHalfTokens;
    int page = min(token >> args_.page_size_log2, args_.page_table_stride - 1);
    next_.ids = load_plan_now(next_.row_pages + page);
  }

  // Element offset of a token of this head inside a pool.
  __device__ __forceinline__ i64 address(int page, int token) const {
    int in_page = token & ((1 << args_.page_size_log2) - 1);
    return static_cast<i64>(page) * args_.page_stride + (head_ * args_.head_stride + in_page * args_.token_stride);
  }

  __device__ __forceinline__ void issue(const u16* pages, u32 matrix) const {
    const u16* low = pages + low_;
    const u16* high = pages + high_;
    if constexpr (kPermutesGroups) {
      constexpr int kRowsPerCopy = kWarpSize / kRowChunks, kCopiesPerHalf = kHalfTokens / kRowsPerCopy;
      int row = lane_ / kRowChunks, chunk = lane_ % kRowChunks;
      u32 first = matrix + chunk_offset(row, chunk), hidden = hidden_ >> row;
      low += row * args_.token_stride + chunk * 8;
      high += row * args_.token_stride + chunk * 8;
#pragma unroll
      for (int i = 0; i < kCopiesPerLane; ++i) {
        const u16* source = (i < kCopiesPerHalf ? low : high) + i % kCopiesPerHalf * kRowsPerCopy * args_.token_stride;
        u32 target = (first ^ ((i * kRowsPerCopy & 7) * 16)) + i * kRowsPerCopy * kRowBytes;
        copy_async_or_zero(target, source, hidden >> (i * kRowsPerCopy) & 1);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCopiesPerLane; ++i) {
        int row = (lane_ + i * kWarpSize) / kRowChunks, chunk = (lane_ + i * kWarpSize) % kRowChunks;
        const u16* source = (row < kHalfTokens ? low : high) + row % kHalfTokens * args_.token_stride + chunk * 8;
        copy_async_or_zero(matrix + chunk_offset(row, chunk), source, hidden_ >> row & 1);
      }
    }
  }

  const DecodeArgs& args_;
  int head_, warp_, lane_;
  u32 ring_;
  Segment now_, next_;
  int taken_;  // slices taken from now_
  int index_;  // work item after next_'s
  bool live_;
  u32 hidden_;      // bit r: row r of the prepared slice is not to be read from its page
  i64 low_, high_;  // element offsets of its two halves
};

}  // namespace mlxcel
