// The device's side of a decode step's plan: applies the words that changed, then adds one token to every row. One
// block, launched once a step and KV group before the first attention launch. See DeviceMirror in crates/paged-core.
#include "primitives.cuh"

namespace mlxcel {

constexpr int kMaxStepWords = 24;

// Sizes and addresses count int32. Addresses below 2 * num_slots are places in the state, the others in the table.
struct PlanStepArgs {
  const int* state;    // [2, num_slots]: tokens of a slot, then positions of its next token
  int* table;          // page ids, slots of the batch rows, work items
  int* new_state;      // as state, after this step
  int* row_positions;  // [num_rows]: position of the token that each row gets
  int num_slots;       // the last one is the null slot: its rows are padding and get no token
  int row_slots_begin;
  int num_rows;  // 0: words only
  int num_words;
};

__device__ __forceinline__ void plan_step(const PlanStepArgs& args, const int (&addresses)[kMaxStepWords],
                                          const int (&values)[kMaxStepWords]) {
  int thread = threadIdx.x, num_threads = blockDim.x, num_state_words = 2 * args.num_slots;
  for (int i = thread; i < num_state_words; i += num_threads) args.new_state[i] = args.state[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMaxStepWords; ++i) {
    if (thread == i && i < args.num_words) {
      bool is_state = addresses[i] < num_state_words;
      (is_state ? args.new_state + addresses[i] : args.table + (addresses[i] - num_state_words))[0] = values[i];
    }
  }
  __syncthreads();
  for (int row = thread; row < args.num_rows; row += num_threads) {
    int slot = args.table[args.row_slots_begin + row];
    int* end = args.new_state + slot;
    int* position = end + args.num_slots;
    args.row_positions[row] = *position;
    if (slot != args.num_slots - 1) {
      ++*end;
      ++*position;
    }
  }
}

}  // namespace mlxcel

// `after` orders the launch behind the step before, which still reads the table; its contents do not matter.
extern "C" __global__ void mlxcel_plan_step(
    const int* state, int* table, const int* after, int* new_state, int* row_positions, int num_slots,
    int row_slots_begin, int num_rows, int num_words, int a0, int v0, int a1, int v1, int a2, int v2, int a3, int v3,
    int a4, int v4, int a5, int v5, int a6, int v6, int a7, int v7, int a8, int v8, int a9, int v9, int a10, int v10,
    int a11, int v11, int a12, int v12, int a13, int v13, int a14, int v14, int a15, int v15, int a16, int v16, int a17,
    int v17, int a18, int v18, int a19, int v19, int a20, int v20, int a21, int v21, int a22, int v22, int a23,
    int v23) {
  const int addresses[mlxcel::kMaxStepWords] = {a0,  a1,  a2,  a3,  a4,  a5,  a6,  a7,  a8,  a9,  a10, a11,
                                                a12, a13, a14, a15, a16, a17, a18, a19, a20, a21, a22, a23};
  const int values[mlxcel::kMaxStepWords] = {v0,  v1,  v2,  v3,  v4,  v5,  v6,  v7,  v8,  v9,  v10, v11,
                                             v12, v13, v14, v15, v16, v17, v18, v19, v20, v21, v22, v23};
  mlxcel::plan_step({state, table, new_state, row_positions, num_slots, row_slots_begin, num_rows, num_words}, addresses,
                    values);
}
