// The kernels for products on the host, one block after the other. MLXCEL_ARCHITECTURE chooses as __CUDA_ARCH__ does.
#define __CUDA_ARCH__ MLXCEL_ARCHITECTURE
#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "primitives.cuh"
using std::min;

#include "projection.cuh"
#include "projection_affine.cuh"

namespace {

template <class Kernel>
void launch(int num_blocks, Kernel kernel) {
  gridDim.x = num_blocks;
  std::barrier<> barrier(mlxcel::kProjectionThreads);
  block_barrier = &barrier;
  std::vector<std::unique_ptr<Warp>> warps(mlxcel::kProjectionWarps);
  for (auto& warp : warps) warp = std::make_unique<Warp>();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < mlxcel::kProjectionThreads; ++thread) {
    threads.emplace_back([&, thread] {
      threadIdx.x = thread;
      own_warp = warps[thread / 32].get();
      for (int block = 0; block < num_blocks; ++block) {
        blockIdx.x = block;
        kernel();
        barrier.arrive_and_wait();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// Copies `num_parts` parts into an array of the length that the kernel is made for.
template <class Part, class Run>
void with_parts(const Part* parts, int num_parts, Run run) {
  if (num_parts == 1) {
    const Part whole[1] = {parts[0]};
    run(whole);
  } else if (num_parts == 2) {
    const Part whole[2] = {parts[0], parts[1]};
    run(whole);
  } else {
    const Part whole[3] = {parts[0], parts[1], parts[2]};
    run(whole);
  }
}

template <class Element, int kBits>
void affine(int group_size, const mlxcel::u16* x, const mlxcel::AffinePart* parts, int num_parts, int num_rows,
            int num_inner, int num_blocks) {
  with_parts(parts, num_parts, [&](const auto& whole) {
    launch(num_blocks, [&] {
      if (group_size == 32) mlxcel::project_affine_rows<Element, kBits, 32>(x, whole, num_rows, num_inner);
      if (group_size == 64) mlxcel::project_affine_rows<Element, kBits, 64>(x, whole, num_rows, num_inner);
      if (group_size == 128) mlxcel::project_affine_rows<Element, kBits, 128>(x, whole, num_rows, num_inner);
    });
  });
}

}  // namespace

extern "C" void run_dense(int is_bf16, const mlxcel::u16* x, const mlxcel::DensePart* parts, int num_parts, int num_rows,
                          int num_inner, int num_blocks) {
  with_parts(parts, num_parts, [&](const auto& whole) {
    launch(num_blocks, [&] {
      if (is_bf16) {
        mlxcel::project_rows<mlxcel::Bf16>(x, whole, num_rows, num_inner);
      } else {
        mlxcel::project_rows<mlxcel::F16>(x, whole, num_rows, num_inner);
      }
    });
  });
}

extern "C" void run_affine(int is_bf16, int bits, int group_size, const mlxcel::u16* x, const mlxcel::AffinePart* parts,
                           int num_parts, int num_rows, int num_inner, int num_blocks) {
  if (bits == 8) {
    affine<mlxcel::F16, 8>(group_size, x, parts, num_parts, num_rows, num_inner, num_blocks);
  } else if (is_bf16) {
    affine<mlxcel::Bf16, 4>(group_size, x, parts, num_parts, num_rows, num_inner, num_blocks);
  } else {
    affine<mlxcel::F16, 4>(group_size, x, parts, num_parts, num_rows, num_inner, num_blocks);
  }
}
