// Writes new tokens to their pages, in place: a prompt chunk of one sequence, or one token of every row of a batch.
#include "page_address.cuh"

using namespace mlxcel;

// k_new, v_new  [num_tokens, num_kv_heads, row], strides new_token_stride and new_head_stride, rows contiguous
// k_pages, v_pages  pools as PoolShape says; inputs to the framework that launches this, written all the same
// places        int32 [num_tokens], page id * page_size + token in the page; negative: the token is not written
// order_token   int32 [1]
extern "C" __global__ void mlxcel_page_write(const Chunk* k_new, const Chunk* v_new, const Chunk* k_pages,
                                             const Chunk* v_pages, const int* places, int* order_token, int num_tokens,
                                             int num_kv_heads, int row_chunks, int new_token_stride,
                                             int new_head_stride, int page_size, int page_stride, int head_stride,
                                             int token_stride) {
  write_order_token(order_token);
  PoolShape pool{page_size, page_stride, head_stride, token_stride};
  int token_chunks = num_kv_heads * row_chunks;
  i64 num_items = static_cast<i64>(num_tokens) * token_chunks;
  for (i64 item = first_item(); item < num_items; item += item_step()) {
    int token = static_cast<int>(item / token_chunks);
    int in_token = static_cast<int>(item - static_cast<i64>(token) * token_chunks);
    int head = in_token / row_chunks, chunk = in_token - head * row_chunks;
    int place = places[token];
    if (place < 0) continue;
    i64 source = static_cast<i64>(token) * new_token_stride + static_cast<i64>(head) * new_head_stride + chunk;
    i64 target = pool.offset(place, head) + chunk;
    const_cast<Chunk*>(k_pages)[target] = k_new[source];
    const_cast<Chunk*>(v_pages)[target] = v_new[source];
  }
}
