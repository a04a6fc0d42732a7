// Online softmax of one warp over its slices, for kMaxGroupSize query heads of one KV head.
//
// Scores are computed transposed, S^T = K Q^T: 16 tokens are the rows of a tensor-core tile and 8 query heads its
// columns, so a group of up to 8 heads fills the tile instead of half of it (the operand swap of TensorRT-LLM's XQA).
// In the accumulator layout a lane holds tokens lane / 4 and lane / 4 + 8 of heads 2 * (lane % 4) and the next one.
#pragma once
#include "query.cuh"

namespace mlxcel {

struct ScoreTransform {
  float scale_log2;
  float soft_cap_log2;
  float soft_cap_inverse2;

  // Raw dot products become logits in units of log2(e). tanh(x) = 1 - 2 / (1 + e^2x), exact at both ends.
  __device__ __forceinline__ void apply(float (&scores)[kHeadTiles][4]) const {
#pragma unroll
    for (int i = 0; i < 4 * kHeadTiles; ++i) scores[i / 4][i % 4] *= scale_log2;
    if (soft_cap_log2 == 0.0f) return;
#pragma unroll
    for (int i = 0; i < 4 * kHeadTiles; ++i) {
      float power = exp2_approx(scores[i / 4][i % 4] * soft_cap_inverse2);
      scores[i / 4][i % 4] = soft_cap_log2 * (1.0f - 2.0f * reciprocal_approx(1.0f + power));
    }
  }
};

class WarpSoftmax {
 public:
  float out[kDimTiles][kHeadTiles][4];  // O^T: dims lane / 4 (+ 8) of heads 2 * (lane % 4) (+ 1), unnormalised
  float row_max[kHeadTiles][2];         // of the two heads of this lane, log2 domain
  float row_sum[kHeadTiles][2];         // of this lane's tokens until finish() has run

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_max[tile][h] = negative_infinity();
        row_sum[tile][h] = 0.0f;
      }
#pragma unroll
      for (int dim = 0; dim < kDimTiles; ++dim) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[dim][tile][i] = 0.0f;
      }
    }
  }

  // Takes the scores of a slice of which tokens [first, last) are visible, leaves probabilities in them. `row` is the
  // lane's token, row + 8 its other one. Masked by select: a masked score may be NaN.
  __device__ __forceinline__ void update(float (&scores)[kHeadTiles][4], const ScoreTransform& transform, int first,
                                         int last, int row) {
    transform.apply(scores);
    if (first > 0 || last < kSliceTokens) {
      bool low_visible = row >= first && row < last, high_visible = row + 8 >= first && row + 8 < last;
#pragma unroll
      for (int i = 0; i < 4 * kHeadTiles; ++i) {
        if (!(i % 4 < 2 ? low_visible : high_visible)) scores[i / 4][i % 4] = negative_infinity();
      }
    }
    bool moved = false;
    float next[kHeadTiles][2];
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float peak = fmaxf(scores[tile][h], scores[tile][h + 2]);
        peak = warp_xor_max(peak, 4);
        peak = warp_xor_max(peak, 8);
        peak = warp_xor_max(peak, 16);
        next[tile][h] = fmaxf(row_max[tile][h], peak);
        moved |= next[tile][h] > row_max[tile][h];
      }
    }
    if (__any_sync(kFullMask, moved)) rescale(next);
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float base = finite_or_zero(row_max[tile][h]);
        float low = exp2_approx(scores[tile][h] - base), high = exp2_approx(scores[tile][h + 2] - base);
        scores[tile][h] = low;
        scores[tile][h + 2] = high;
        row_sum[tile][h] += low + high;
      }
    }
  }

  // Adds up the sums of the lanes that share a head.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = row_sum[tile][h];
        sum = warp_xor_sum(sum, 4);
        sum = warp_xor_sum(sum, 8);
        row_sum[tile][h] = warp_xor_sum(sum, 16);
      }
    }
  }

  // With every logit at -inf the maximum is -inf too, and -inf - -inf would be NaN.
  __device__ __forceinline__ static float finite_or_zero(float maximum) {
    return maximum == negative_infinity() ? 0.0f : maximum;
  }

 private:
  __device__ __forceinline__ void rescale(const float (&next)[kHeadTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factor[h] = exp2_approx(row_max[tile][h] - finite_or_zero(next[tile][h]));
        row_sum[tile][h] *= factor[h];
        row_max[tile][h] = next[tile][h];
      }
#pragma unroll
      for (int dim = 0; dim < kDimTiles; ++dim) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[dim][tile][i] *= factor[i & 1];
      }
    }
  }
};

// S^T of one slice.
__device__ __forceinline__ void score_slice(float (&scores)[kHeadTiles][4], const Query& query, u32 matrix, int lane) {
  int row = (lane & 7) + ((lane >> 3) & 1) * 8, chunk = (lane >> 4) & 1;
  u32 first = matrix + chunk_offset(row, chunk);
  // With one tile, two accumulator chains halve the length of the dependent sequence; two tiles are two chains as is.
  constexpr int kChains = kHeadTiles == 1 ? 2 : 1;
  float chain[kChains][kHeadTiles][4];
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4 * kChains; ++i) chain[i / 4][tile][i % 4] = 0.0f;
  }
#pragma unroll
  for (int dim = 0; dim < kDimTiles; ++dim) {
    u32 keys[4], heads[kHeadTiles][2];
    load_matrix_x4(keys, chunk_pair_address(matrix, first, row, chunk, dim));
    query.fragment(dim, heads);
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      Element::mma(chain[dim % kChains][tile], keys, heads[tile][0], heads[tile][1]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[tile][i] = chain[0][tile][i];
      if constexpr (kChains == 2) scores[tile][i] += chain[kChains - 1][tile][i];
    }
  }
}

// O^T += V^T P^T of one slice. The probabilities change from accumulator to operand layout by a register transpose.
__device__ __forceinline__ void accumulate_slice(WarpSoftmax& state, const float (&probabilities)[kHeadTiles][4],
                                                 u32 matrix, int lane) {
  u32 weights[kHeadTiles][2];
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile) {
    weights[tile][0] = transpose_matrix(Element::pack(probabilities[tile][0], probabilities[tile][1]));
    weights[tile][1] = transpose_matrix(Element::pack(probabilities[tile][2], probabilities[tile][3]));
  }
  int row = (lane & 7) + ((lane >> 4) & 1) * 8, chunk = (lane >> 3) & 1;
  u32 first = matrix + chunk_offset(row, chunk);
#pragma unroll
  for (int dim = 0; dim < kDimTiles; ++dim) {
    u32 values[4];
    load_matrix_x4_transposed(values, chunk_pair_address(matrix, first, row, chunk, dim));
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      Element::mma(state.out[dim][tile], values, weights[tile][0], weights[tile][1]);
    }
  }
}

}  // namespace mlxcel
