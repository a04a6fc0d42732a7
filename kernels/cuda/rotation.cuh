// RoPE of queries and new keys, so that a layer needs no launches of its own for it. The angles of a row are the same
// in all layers and heads: they come as a table of cosines and sines, and only MLX's last step, x1 * cos - x2 * sin in
// f32 and one rounding, is done here.
#pragma once
#include "work_item.cuh"

namespace mlxcel {

constexpr bool kRotates = kRopeDims > 0;
constexpr int kRopeChunks = kRopeDims / 8;  // 8 elements each

// The row's part of the table: f32 [kRopeDims / 2][cos, sin].
__device__ __forceinline__ const float* row_rotations(const DecodeArgs& args, int row) {
  return args.rotations + static_cast<i64>(row) * kRopeDims;
}

// `low` and `high` are two pairs: elements d and d + 1, and those kRopeDims / 2 further on. `turn`: cos, sin of d and
// of d + 1.
__device__ __forceinline__ void rotate_halves(u32& low, u32& high, const Float4& turn) {
  Float2 x1 = Element::unpack(low), x2 = Element::unpack(high);
  low = Element::pack(x1.x * turn.x - x2.x * turn.y, x1.y * turn.z - x2.y * turn.w);
  high = Element::pack(x1.x * turn.y + x2.x * turn.x, x1.y * turn.w + x2.y * turn.z);
}

// A pair of neighbours.
__device__ __forceinline__ u32 rotate_pair(u32 pair, float cosine, float sine) {
  Float2 x = Element::unpack(pair);
  return Element::pack(x.x * cosine - x.y * sine, x.x * sine + x.y * cosine);
}

// Chunk `chunk` of a head, rotated.
__device__ __forceinline__ Int4 rotated_chunk(const u16* head, int chunk, const float* rotations) {
  if (chunk >= kRopeChunks) return load_once(head + chunk * 8);
  u32 words[4];
  if constexpr (kRopeTraditional) {
    const Float4* turns = reinterpret_cast<const Float4*>(rotations + chunk * 8);
    Float4 first = turns[0], second = turns[1];
    Int4 bits = load_once(head + chunk * 8);
    words[0] = rotate_pair(bits.x, first.x, first.y);
    words[1] = rotate_pair(bits.y, first.z, first.w);
    words[2] = rotate_pair(bits.z, second.x, second.y);
    words[3] = rotate_pair(bits.w, second.z, second.w);
  } else {
    constexpr int kHalf = kRopeChunks / 2;
    bool is_high = chunk >= kHalf;
    int pair = is_high ? chunk - kHalf : chunk;
    Int4 lows = load_once(head + pair * 8), highs = load_once(head + (pair + kHalf) * 8);
    u32 low[4] = {static_cast<u32>(lows.x), static_cast<u32>(lows.y), static_cast<u32>(lows.z),
                  static_cast<u32>(lows.w)};
    u32 high[4] = {static_cast<u32>(highs.x), static_cast<u32>(highs.y), static_cast<u32>(highs.z),
                   static_cast<u32>(highs.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rotate_halves(low[i], high[i], reinterpret_cast<const Float4*>(rotations + pair * 16)[i]);
      words[i] = is_high ? high[i] : low[i];
    }
  }
  return {static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
          static_cast<int>(words[3])};
}

}  // namespace mlxcel
