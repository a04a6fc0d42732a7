// The fetching side of a warp: walks the warp's slices over all items of its worker and keeps the ring full. It runs
// kNumStages slices ahead of the consuming side and crosses item borders on its own, so the memory never idles there.
#pragma once
#include "work_item.cuh"

namespace mlxcel {

// Page ids of this many slices are loaded at once, two lanes a slice: one for each half of 8 tokens.
constexpr int kIdWindow = kWarpSize / 2;
constexpr int kCopiesPerLane = kSliceTokens * kRowChunks / kWarpSize;  // of 16 bytes, for K and again for V
static_assert(kSliceTokens * kRowChunks % kWarpSize == 0);

class KvStream {
 public:
  __device__ __forceinline__ KvStream(const DecodeArgs& args, int worker, int head, int warp, u32 ring)
      : args_(args),
        head_(head),
        warp_(warp),
        lane_(threadIdx.x & 31),
        ring_(ring),
        index_(worker - args.num_workers),
        step_(0),
        live_(true) {
    span_.num_slices = 0;
  }

  // False once the work list has ended.
  __device__ __forceinline__ bool live() const { return live_; }

  // Fixes the source of the next slice. Afterwards issue_k and issue_v fetch it, or nothing when the list has ended.
  __device__ __forceinline__ void prepare() {
    while (live_ && step_ >= span_.num_slices) enter_next_item();
    if (!live_) return;
    if (step_ % kIdWindow == 0) load_ids();
    int source = 2 * (step_ % kIdWindow);
    int low_page = __shfl_sync(kFullMask, ids_, source);
    int high_page = __shfl_sync(kFullMask, ids_, source + 1);
    int token = span_.token(warp_, step_);
    int first_row = max(0, span_.begin - token);
    int end_row = min(kSliceTokens, span_.end - (span_.append ? 1 : 0) - token);
    hidden_ = ~(((1u << max(end_row, 0)) - 1) & ~0u << first_row);
    // A half without a visible token may have no page: it borrows the other's address and is not read.
    if (first_row >= kHalfTokens) low_page = high_page;
    if (end_row <= kHalfTokens) high_page = low_page;
    low_ = address(low_page, token);
    high_ = address(high_page, token + kHalfTokens);
    ++step_;
  }

  __device__ __forceinline__ void issue_k(int stage) const {
    if (live_) issue(args_.k_pages, ring_ + stage * kSliceBytes);
    copy_async_commit();
  }

  __device__ __forceinline__ void issue_v(int stage) const {
    if (live_) issue(args_.v_pages, ring_ + stage * kSliceBytes + kMatrixBytes);
    copy_async_commit();
  }

 private:
  __device__ __forceinline__ void enter_next_item() {
    index_ += args_.num_workers;
    live_ = index_ < args_.num_items;
    if (!live_) return;
    WorkItem item = load_item(args_, index_);
    live_ = (item.flags & kItemValid) != 0;
    if (!live_) return;
    step_ = 0;
    row_pages_ = args_.page_table + static_cast<i64>(item.slot) * args_.page_table_stride;
    span_ = resolve_span(args_, item, warp_);
  }

  // Lane j gets the page of half j % 2 of slice step_ + j / 2. Entries past the row's pages may hold anything: they
  // are read inside the slot's part of the table only, and no token of theirs is visible.
  __device__ __forceinline__ void load_ids() {
    int token = span_.token(warp_, step_ + (lane_ >> 1)) + (lane_ & 1) * kHalfTokens;
    ids_ = load_plan(row_pages_ + min(token >> args_.page_size_log2, args_.page_table_stride - 1));
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
  int index_;  // of the item being fetched, in the work list
  int step_;   // slices taken from it
  bool live_;
  Span span_;
  const int* row_pages_;  // page ids of the item's row
  int ids_;               // see load_ids
  u32 hidden_;            // bit r: row r of the prepared slice is not to be read from its page
  i64 low_, high_;        // element offsets of its two halves
};

}  // namespace mlxcel
