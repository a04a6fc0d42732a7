// Products of a few rows with weights of 4 or 8 bits: y = x w^T + bias with w = scale * q + offset for every group of
// inner elements, bound by reading the packed weights once. The quantized values go through the tensor cores as exact
// small integers; a group's sum is scaled in float32, and the sums of x that the offsets need come from a product with
// ones. As in projection.cuh a lane's words stand for the places of the fragments that it holds, and a row's bits depend
// on nothing but the row.
#pragma once
#include "affine_words.cuh"
#include "projection_block.cuh"

namespace mlxcel {

// [num_features, num_inner] in the layout of mx.quantize: 32 / kBits values a word, lowest bits first.
struct AffineWeights {
  const u32* words;    // [num_features, num_inner * kBits / 32]
  const u16* scales;   // [num_features, num_inner / group_size]
  const u16* offsets;  // likewise; mx.quantize calls them biases
};

using AffinePart = ProjectionPart<AffineWeights>;

constexpr int kAffineBlock = 256;  // inner elements that a warp takes in a row, so that they are summed in this order

// What follows from bits, group size and a warp's tiles.
template <int kBits_, int kGroupSize_, int kTiles>
struct AffineShape {
  static constexpr int kBits = kBits_, kGroupSize = kGroupSize_;
  static_assert(kBits == 4 || kBits == 8, "values that do not straddle words");
  static_assert(kGroupSize == 32 || kGroupSize == 64 || kGroupSize == 128, "group sizes of mx.quantize");
  // Inner elements that a warp has in flight at once: what registers have room for.
#if __CUDA_ARCH__ == 900
  static constexpr int kChunk = kTiles == 4 && kGroupSize == 32 ? 64
                                : kBits * kTiles > 8 || kBits + kGroupSize == 40 ? 128 : 256;
#else  // Less is enough where memory is slower.
  static constexpr int kChunk = kTiles == 4 || kBits * kTiles > 8 ? 64 : kTiles > 1 || kGroupSize == 32 ? 128 : 256;
#endif
  // Inner elements whose sums are scaled together: every lane of a row holds a quarter of them, next to each other.
  static constexpr int kUnit = kGroupSize == 32 ? 32 : 64;
  static constexpr int kUnits = kChunk / kUnit;
  static constexpr int kLaneElements = kUnit / 4;
  static constexpr int kLaneWords = kLaneElements * kBits / 32;
  // The four lanes of a row share the scales of a chunk.
  static constexpr int kScales = kChunk > kGroupSize ? kChunk / kGroupSize : 1;
  static constexpr int kLaneScales = kScales > 4 ? kScales / 4 : 1;
  static constexpr int kScaleLanes = kScales < 4 ? 4 / kScales : 1;  // that hold the same
  static constexpr int kRowLoads = kLaneElements / 8;  // of x, 16 bytes each
};

template <class Element, int kBits, int kGroupSize, int kRowTiles, int kFeatureTiles, bool kAlignedRows>
__device__ __forceinline__ void project_affine(const u16* x, const AffinePart& part, int first_feature, int num_rows,
                                               int num_inner, ProjectionSums* sums) {
  using Shape = AffineShape<kBits, kGroupSize, kRowTiles * kFeatureTiles>;
  using Pairs = QuantizedPairs<kBits>;
  constexpr int kChunk = Shape::kChunk, kUnit = Shape::kUnit, kUnits = Shape::kUnits;
  constexpr int kLaneWords = Shape::kLaneWords, kRowLoads = Shape::kRowLoads;
  constexpr int kAhead = kRowTiles == 1 || kChunk < 128 ? kUnits : 128 / kUnit;  // units whose rows are in registers
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, member = lane & 3;
  float sum[kFeatureTiles][kRowTiles][4] = {};

  int row_words = num_inner / 32 * kBits, row_scales = num_inner / kGroupSize;
  i64 my_feature = first_feature + group;
  const u32* my_words = part.weights.words + my_feature * row_words + member * kLaneWords;
  i64 my_scale = my_feature * row_scales + member / Shape::kScaleLanes * Shape::kLaneScales;
  const u16* my_scales = part.weights.scales + my_scale;
  const u16* my_offsets = part.weights.offsets + my_scale;
  const u16* my_x = x + static_cast<i64>(group) * num_inner + member * Shape::kLaneElements;
#pragma unroll 1
  for (int inner = warp * kAffineBlock; inner < num_inner;) {
    // Everything that the chunk needs is under way before the first product, with two tiles of rows half of the rows.
    u32 words[kUnits][kFeatureTiles * 2][kLaneWords];
    u32 scales[kFeatureTiles * 2][2];  // and offsets; then a scale and its offset
    Int4 rows[kAhead][kRowTiles][kRowLoads];
#pragma unroll
    for (int f = 0; f < kFeatureTiles * 2; ++f) {
      const u32* chunk_words = my_words + f * 8 * row_words + inner / 32 * kBits;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) load_streamed(words[u][f], chunk_words + u * (kUnit * kBits / 32));
    }
#pragma unroll
    for (int f = 0; f < kFeatureTiles * 2; ++f) {
      int place = f * 8 * row_scales + inner / kGroupSize;
      scales[f][0] = load_constant<Shape::kLaneScales>(my_scales + place);
      scales[f][1] = load_constant<Shape::kLaneScales>(my_offsets + place);
    }
    auto load_rows = [&](int unit) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < kRowLoads; ++i) {
          Int4& row = rows[unit % kAhead][r][i];
          row = {0, 0, 0, 0};
          if (r * kProjectionRows + group < num_rows) {
            const u16* place = my_x + r * kProjectionRows * num_inner + inner + unit * kUnit + i * 8;
            row = kAlignedRows ? load_once(place) : load_elements(place);
          }
        }
      }
    };
#pragma unroll
    for (int u = 0; u < kAhead; ++u) load_rows(u);

#pragma unroll
    for (int f = 0; f < kFeatureTiles * 2; ++f) {
      u32 scale = scales[f][0], offset = scales[f][1];
      scales[f][0] = choose_bytes(scale, offset, 0x5410);
      scales[f][1] = choose_bytes(scale, offset, 0x7632);
    }

#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      u32 right[kRowTiles][kRowLoads][4];
      float row_sum[kRowTiles][4] = {};
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < kRowLoads; ++i) {
          Pairs::arrange(right[r][i], rows[u % kAhead][r][i]);
          Element::mma(row_sum[r], Element::kOneTile, right[r][i][0], right[r][i][1]);
          Element::mma(row_sum[r], Element::kOneTile, right[r][i][2], right[r][i][3]);
        }
      }
#pragma unroll
      for (int f = 0; f < kFeatureTiles; ++f) {
        float group_sum[kRowTiles][4] = {};
#pragma unroll
        for (int i = 0; i < kRowLoads; ++i) {
          u32 low[4], high[4];
          Pairs::template expand<Element>(low, words[u][2 * f], i);
          Pairs::template expand<Element>(high, words[u][2 * f + 1], i);
          u32 first[4] = {low[0], high[0], low[1], high[1]}, second[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            Element::mma(group_sum[r], first, right[r][i][0], right[r][i][1]);
            Element::mma(group_sum[r], second, right[r][i][2], right[r][i][3]);
          }
        }
        int scale = u * kUnit / kGroupSize, holder = scale / Shape::kLaneScales * Shape::kScaleLanes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 pair = warp_value(scales[2 * f + half][scale % Shape::kLaneScales], group * 4 + holder);
          Float2 scale_offset = Element::unpack(pair);
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              // Fused by name: every instantiation rounds alike.
              sum[f][r][i] = fmaf(scale_offset.x, group_sum[r][i], fmaf(scale_offset.y, row_sum[r][i], sum[f][r][i]));
            }
          }
        }
      }
      if (u + kAhead < kUnits) load_rows(u + kAhead);
    }
    inner += kChunk;
    if (inner % kAffineBlock == 0) inner += (kProjectionWarps - 1) * kAffineBlock;
  }
  finish_rows<Element, kRowTiles, kFeatureTiles>(sum, part, first_feature, num_rows, sums);
}

// Blocks as for project_rows, but of two feature tiles where there are more than 8 rows, whose reading then weighs as much
// as that of the words; with 8 bits always of one, which has as many words as two of 4 bits. num_inner is a multiple of
// kAffineBlock. Words, scales and offsets are contiguous and 16-byte aligned; so is x, but a single row may begin anywhere.
template <class Element, int kBits, int kGroupSize, int kNumParts>
__device__ __forceinline__ void project_affine_rows(const u16* x, const AffinePart (&parts)[kNumParts], int num_rows,
                                                    int num_inner) {
  __shared__ ProjectionSums sums[kProjectionWarps * kProjectionMaxTiles];
  constexpr int kWide = kBits == 4 ? 2 : 1;
  int num_tiles = has_single_tiles(parts) ? 1 : kWide;
  AffinePart part;
  int feature = own_part(parts, num_tiles * kProjectionFeatures, part);
  if (num_rows > kProjectionRows) {
    project_affine<Element, kBits, kGroupSize, 2, kWide, true>(x, part, feature, num_rows, num_inner, sums);
  } else if (!is_aligned(x)) {
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      if (tile) __syncthreads();
      project_affine<Element, kBits, kGroupSize, 1, 1, false>(x, part, feature + tile * kProjectionFeatures, num_rows,
                                                              num_inner, sums);
    }
  } else if (num_tiles == kWide) {
    project_affine<Element, kBits, kGroupSize, 1, kWide, true>(x, part, feature, num_rows, num_inner, sums);
  } else {
    project_affine<Element, kBits, kGroupSize, 1, 1, true>(x, part, feature, num_rows, num_inner, sums);
  }
}

}  // namespace mlxcel
