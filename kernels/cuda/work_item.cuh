// The launch arguments and one entry of the plan's work list.
#pragma once
#include "geometry.cuh"

namespace mlxcel {

constexpr int kItemValid = 1;    // WorkItem::flags: clear on padding, which ends its worker's list
constexpr int kItemOpenEnd = 2;  // the row's last item: it ends at the row's length, whatever kv_end says

constexpr int kOptionAppend = 1;           // write k_new and v_new to the row's last visible token
constexpr int kOptionFirstPageOffset = 2;  // first_page_offsets holds values other than 0
constexpr int kOptionSinks = 4;            // sinks are f32 logits, one a query head
constexpr int kOptionLse = 8;              // write lse

// B = batch rows, S = slots, R = rows of partials, Hq = num_kv_heads * group_size, D = kHeadDim. Elements are f16 or
// bf16. Strides count elements and are multiples of 8; base pointers are 16-byte aligned. D is contiguous everywhere.
struct DecodeArgs {
  const u16* q;                   // [B, Hq, D], rows q_row_stride apart
  const u16* k_new;               // [B, Hkv, D], rows new_row_stride apart; read only with kOptionAppend
  const u16* v_new;               // as k_new
  u16* k_pages;                   // [pages, ...], addressed by page_stride, head_stride and token_stride
  u16* v_pages;                   // as k_pages, same strides
  const int* page_table;          // int32 [S, page_table_stride], page ids of a slot from its first held page on
  const int* lengths;             // int32 [S], tokens held from first_page_offset on, the appended one included
  const int* first_page_offsets;  // int32 [S]; read only with kOptionFirstPageOffset
  const int* work_items;          // int32 [num_items, 8], see WorkItem
  const float* sinks;             // f32 [Hq]; read only with kOptionSinks
  const float* rotations;         // f32 [B, kRopeDims / 2, 2], cosines and sines of the rows; read only with kRopeDims
  float* partial_out;             // f32 [R, Hq, D], workspace: kNotWritten before the first launch and after each
  float* partial_state;           // f32 [R, Hq, 2], as partial_out: max (log2 domain) and sum
  int* arrivals;                  // int32 [B, Hkv], zero before the first launch; every launch leaves zeros
  u16* out;                       // [B, Hq, D], contiguous
  float* lse;                     // f32 [B, Hq], base 2; written only with kOptionLse
  int num_items;
  int num_workers;  // worker w runs items w, w + num_workers, ... up to the first padded one
  int num_kv_heads;
  int group_size;
  int page_size_log2;  // 3..7
  int page_table_stride;
  int q_row_stride;
  int new_row_stride;
  int page_stride;
  int head_stride;
  int token_stride;
  int window;  // visible tokens, the current one included; 0 = all
  int options;
  float scale_log2;         // sm_scale * log2(e); with a soft cap: sm_scale
  float soft_cap_log2;      // logits_soft_cap * log2(e); 0 = off
  float soft_cap_inverse2;  // 2 * log2(e) / logits_soft_cap
};

// One stretch of one row. kv_begin and kv_end count tokens from the row's first held token.
struct WorkItem {
  int slot;
  int kv_begin;
  int kv_end;
  int flags;
  int out_row;      // batch row: q, k_new, v_new, out, lse, arrivals
  int split;        // index among the row's items
  int num_splits;   // 1: the row is written directly
  int partial_row;  // row of partial_out and partial_state that this split owns; a row's splits are consecutive
};
static_assert(sizeof(WorkItem) == 32);

__device__ __forceinline__ WorkItem load_item(const DecodeArgs& args, int index) {
  const Int4* record = reinterpret_cast<const Int4*>(args.work_items + static_cast<i64>(index) * 8);
  Int4 a = load_plan(record), b = load_plan(record + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// The part of an item that one warp walks, in physical tokens: counted from the start of the row's first held page, so
// that slices never straddle pages in an unaligned way. Warp w takes slices first_slice + w, + kNumWarps, ...
struct Span {
  int begin;  // first visible token
  int end;    // one past the last visible token
  int first_slice;
  int num_slices;  // of this warp
  bool append;     // token end - 1 comes from k_new and v_new, not from its page

  __device__ __forceinline__ int token(int warp, int step) const {
    return (first_slice + warp + step * kNumWarps) * kSliceTokens;
  }
};

__device__ __forceinline__ Span resolve_span(const DecodeArgs& args, const WorkItem& item, int warp) {
  // Without window and offsets nothing that follows needs the length before the page ids do, so both loads overlap.
  int length = load_plan(args.lengths + item.slot);
  int offset = 0;
  if (args.options & kOptionFirstPageOffset) offset = load_plan(args.first_page_offsets + item.slot);
  int begin = item.kv_begin;
  if (args.window > 0) begin = max(begin, length - args.window);
  bool open = (item.flags & kItemOpenEnd) != 0;
  int end = open ? length : min(item.kv_end, length);
  Span span;
  span.begin = begin + offset;
  span.end = end + offset;
  span.first_slice = static_cast<u32>(span.begin) / kSliceTokens;
  int last_slice = static_cast<u32>(span.end + kSliceTokens - 1) / kSliceTokens;
  int mine = last_slice - span.first_slice - warp;
  bool empty = span.end <= span.begin;
  span.num_slices = empty ? 0 : static_cast<u32>(max(mine + kNumWarps - 1, 0)) / kNumWarps;
  span.append = open && !empty && (args.options & kOptionAppend) != 0;
  return span;
}

}  // namespace mlxcel
