// Stands in for kernels/cuda/primitives.cuh on the host: a thread a lane, a barrier a warp. Has what the kernels for
// products use. Loads abort where the GPU would trap on an address.
#pragma once
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __shared__ static

struct Index {
  int x;
};

struct Warp {
  std::barrier<> barrier{32};
  uint32_t left[32][4], right[32][2], value[32];
};

inline thread_local Index threadIdx, blockIdx;
inline thread_local Warp* own_warp;
inline Index gridDim;
inline std::barrier<>* block_barrier;

inline void __syncthreads() { block_barrier->arrive_and_wait(); }

namespace mlxcel {

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

struct alignas(16) Int4 {
  int x, y, z, w;
};
struct Float2 {
  float x, y;
};

// m16n8k16: a lane holds rows lane / 4 and lane / 4 + 8 of the left operand, column lane / 4 of the right one.
template <class Element>
void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  int lane = threadIdx.x & 31, group = lane >> 2, member = lane & 3;
  Warp& warp = *own_warp;
  std::memcpy(warp.left[lane], a, sizeof(a));
  warp.right[lane][0] = b0;
  warp.right[lane][1] = b1;
  warp.barrier.arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    int row = group + i / 2 * 8, column = 2 * member + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; k += 2) {
      int holder = k % 8 / 2, upper = k / 8;
      Float2 left = Element::unpack(warp.left[row % 8 * 4 + holder][upper * 2 + row / 8]);
      Float2 right = Element::unpack(warp.right[column * 4 + holder][upper]);
      sum += static_cast<double>(left.x) * right.x + static_cast<double>(left.y) * right.y;
    }
    c[i] += static_cast<float>(sum);
  }
  warp.barrier.arrive_and_wait();
}

struct F16 {
  static float widen(u16 bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
  }
  static u16 round(float wide) {
    _Float16 value = static_cast<_Float16>(wide);
    u16 bits;
    std::memcpy(&bits, &value, 2);
    return bits;
  }
  static Float2 unpack(u32 pair) { return {widen(static_cast<u16>(pair)), widen(static_cast<u16>(pair >> 16))}; }
  static u32 pack(float low, float high) { return round(low) | u32(round(high)) << 16; }
  static void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply<F16>(c, a, b0, b1); }
  static constexpr u32 kOneTile[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
  static u32 small_integers(u32 values) {
    return pack(static_cast<float>(values & 0xffff), static_cast<float>(values >> 16));
  }
};

struct Bf16 {
  static float widen(u16 bits) {
    u32 word = u32(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
  static u16 round(float wide) {
    u32 word;
    std::memcpy(&word, &wide, 4);
    return static_cast<u16>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  static Float2 unpack(u32 pair) { return {widen(static_cast<u16>(pair)), widen(static_cast<u16>(pair >> 16))}; }
  static u32 pack(float low, float high) { return round(low) | u32(round(high)) << 16; }
  static void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply<Bf16>(c, a, b0, b1); }
  static constexpr u32 kOneTile[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  static u32 small_integers(u32 values) {
    return pack(static_cast<float>(values & 0xffff), static_cast<float>(values >> 16));
  }
};

inline u32 choose_bytes(u32 low, u32 high, u32 digits) {
  uint64_t bytes = low | static_cast<uint64_t>(high) << 32;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<u32>(bytes >> (digits >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

template <class Value>
Value aligned_load(const void* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % sizeof(Value)) std::abort();
  Value value;
  std::memcpy(&value, pointer, sizeof(Value));
  return value;
}

inline Int4 load_once(const void* pointer) { return aligned_load<Int4>(pointer); }
inline Int4 load_streamed(const void* pointer) { return aligned_load<Int4>(pointer); }

template <int kWords>
void load_streamed(u32 (&words)[kWords], const void* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % sizeof(words)) std::abort();
  std::memcpy(words, pointer, sizeof(words));
}

template <int kElements>
u32 load_constant(const u16* pointer) {
  if constexpr (kElements == 1) return *pointer;
  return aligned_load<u32>(pointer);
}

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline Int4 load_elements(const u16* pointer) {
  Int4 value;
  std::memcpy(&value, pointer, 16);
  return value;
}

inline u32 warp_value(u32 value, int lane) {
  own_warp->value[threadIdx.x & 31] = value;
  own_warp->barrier.arrive_and_wait();
  u32 result = own_warp->value[lane];
  own_warp->barrier.arrive_and_wait();
  return result;
}

}  // namespace mlxcel
