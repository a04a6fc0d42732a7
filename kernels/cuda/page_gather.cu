// Lays the tokens of one sequence out densely: those that a prompt chunk still sees in their pages, then the chunk's own.
// Attention over a chunk reads the result. The chunk's tokens come from k_new and v_new, never from their pages, so it
// does not matter whether mlxcel_page_write has run.
#include "page_address.cuh"

using namespace mlxcel;

// k_new, v_new      [num_new, num_kv_heads, row], strides new_token_stride and new_head_stride, rows contiguous
// k_pages, v_pages  pools as PoolShape says
// page_ids          int32, the sequence's pages in order
// keys, values      [num_kv_heads, num_prefix + num_new, row], contiguous
// first_token       place of the first prefix token among the tokens of page_ids
// The grid's second axis is the KV head. A head of the result has less than 2^31 chunks.
extern "C" __global__ void mlxcel_page_gather(const Chunk* k_new, const Chunk* v_new, const Chunk* k_pages,
                                              const Chunk* v_pages, const int* page_ids, Chunk* keys, Chunk* values,
                                              int first_token, int num_prefix, int num_new, int row_chunks,
                                              int new_token_stride, int new_head_stride, int page_size,
                                              int page_stride, int head_stride, int token_stride) {
  PoolShape pool{page_size, page_stride, head_stride, token_stride};
  int head = blockIdx.y;
  i64 head_chunks = static_cast<i64>(num_prefix + num_new) * row_chunks;
  keys += head * head_chunks;
  values += head * head_chunks;
  for (i64 item = first_item(); item < head_chunks; item += item_step()) {
    int token = static_cast<int>(item) / row_chunks, chunk = static_cast<int>(item) - token * row_chunks;
    if (token < num_prefix) {
      int held = first_token + token, index = held / page_size;
      i64 source = pool.offset(page_ids[index], held - index * page_size, head) + chunk;
      keys[item] = k_pages[source];
      values[item] = v_pages[source];
    } else {
      i64 source = static_cast<i64>(token - num_prefix) * new_token_stride +
                   static_cast<i64>(head) * new_head_stride + chunk;
      keys[item] = k_new[source];
      values[item] = v_new[source];
    }
  }
}
