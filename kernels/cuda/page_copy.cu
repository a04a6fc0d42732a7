// Copies whole pages inside a pool, in place: copy-on-write of a page that two sequences share.
#include "page_address.cuh"

using namespace mlxcel;

// k_pages, v_pages  pools whose pages are runs of page_stride chunks; written, as in mlxcel_page_write
// order_token       int32 [1]
extern "C" __global__ void mlxcel_page_copy(const Chunk* k_pages, const Chunk* v_pages, int* order_token,
                                            int source_page, int target_page, int page_stride) {
  write_order_token(order_token);
  i64 source = static_cast<i64>(source_page) * page_stride, target = static_cast<i64>(target_page) * page_stride;
  for (i64 chunk = first_item(); chunk < page_stride; chunk += item_step()) {
    const_cast<Chunk*>(k_pages)[target + chunk] = k_pages[source + chunk];
    const_cast<Chunk*>(v_pages)[target + chunk] = v_pages[source + chunk];
  }
}
