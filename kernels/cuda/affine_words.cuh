// From packed words of quantized values to fragments of the tensor cores.
#pragma once
#include "primitives.cuh"

namespace mlxcel {

// 8 neighbours of the inner dimension, as the 4 registers of two fragments. `expand` makes them from packed words,
// `arrange` puts 8 elements of x in the same order.
template <int kBits>
struct QuantizedPairs;

template <>
struct QuantizedPairs<4> {
  // Pairs (0, 4), (1, 5), (2, 6), (3, 7): what a mask takes out of a word and a shift of it.
  template <class Element, int kWords>
  __device__ __forceinline__ static void expand(u32 (&pairs)[4], const u32 (&words)[kWords], int index) {
    u32 word = words[index];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = Element::small_integers(word >> 4 * i & 0x000f000fu);
  }

  __device__ __forceinline__ static void arrange(u32 (&pairs)[4], const Int4& x) {
    pairs[0] = choose_bytes(x.x, x.z, 0x5410);
    pairs[1] = choose_bytes(x.x, x.z, 0x7632);
    pairs[2] = choose_bytes(x.y, x.w, 0x5410);
    pairs[3] = choose_bytes(x.y, x.w, 0x7632);
  }
};

template <>
struct QuantizedPairs<8> {
  // Pairs (0, 2), (1, 3), (4, 6), (5, 7).
  template <class Element, int kWords>
  __device__ __forceinline__ static void expand(u32 (&pairs)[4], const u32 (&words)[kWords], int index) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = Element::small_integers(words[2 * index + i / 2] >> i % 2 * 8 & 0x00ff00ffu);
    }
  }

  __device__ __forceinline__ static void arrange(u32 (&pairs)[4], const Int4& x) {
    pairs[0] = choose_bytes(x.x, x.y, 0x5410);
    pairs[1] = choose_bytes(x.x, x.y, 0x7632);
    pairs[2] = choose_bytes(x.z, x.w, 0x5410);
    pairs[3] = choose_bytes(x.z, x.w, 0x7632);
  }
};

}  // namespace mlxcel
