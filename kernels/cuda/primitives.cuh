// Every PTX instruction and every memory-order decision of the CUDA kernels. Nothing else in this folder uses inline
// assembly, so a test can put another header of this name first on the include path and run the kernels elsewhere.
#pragma once

namespace mlxcel {

using u16 = unsigned short;  // one f16 or bf16 element, moved as bits
using u32 = unsigned int;
using i64 = long long;

struct alignas(16) Int4 {
  int x, y, z, w;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};
struct alignas(8) Float2 {
  float x, y;
};
struct alignas(8) Word2 {
  u32 x, y;
};

constexpr u32 kFullMask = 0xffffffffu;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- asynchronous copies, 16 bytes a lane -------------------------------------------------------------------------

// Copies 16 bytes, or writes 16 zero bytes without reading `global` when `ignored`.
// KV is read once a launch, so its lines go first when L2 evicts (the constant is what createpolicy.fractional
// makes of L2::evict_first and 1). Plan arrays then stay: 22.8 -> 21.9 us for 4 rows of 4096 tokens on an H200.
__device__ __forceinline__ void copy_async_or_zero(u32 shared, const void* global, bool ignored) {
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      "setp.ne.u32 ignored, %2, 0;\n"
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, ignored, %3;\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(static_cast<u32>(ignored)), "n"(0x12F0000000000000)
      : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `kPending` of the groups that this thread committed are still in flight.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void store_shared(u32 shared, const Int4& value) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// ---- overlap with the launch before ------------------------------------------------------------------------------

// Waits until the launch before on the stream has ended and its writes are visible, then lets the launch after start.
// In that order, so that whatever runs before this line of a launch comes after the end of all launches but one. Does
// nothing unless the host allows the overlap (programmatic stream serialization), nor before sm_90.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// ---- elements and tensor-core fragments ----------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrix_x4(u32 (&fragment)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x4_transposed(u32 (&fragment)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared)
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements that is spread over the warp.
__device__ __forceinline__ u32 transpose_matrix(u32 fragment) {
  u32 result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(result) : "r"(fragment));
  return result;
}

struct F16 {
  __device__ __forceinline__ static void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  __device__ __forceinline__ static u32 pack(float low, float high) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(result) : "f"(high), "f"(low));
    return result;
  }
  __device__ __forceinline__ static Float2 unpack(u32 pair) {
    Float2 result;
    asm("{\n"
        ".reg .f16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}\n"
        : "=f"(result.x), "=f"(result.y)
        : "r"(pair));
    return result;
  }
  static constexpr u32 kOneTile[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
  // Two integers below 1024, in the halves of a word, as elements: exact.
  __device__ __forceinline__ static u32 small_integers(u32 values) {
    u32 result;
    asm("sub.f16x2 %0, %1, %2;\n" : "=r"(result) : "r"(values | 0x64006400u), "r"(0x64006400u));
    return result;
  }
};

struct Bf16 {
  __device__ __forceinline__ static void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  __device__ __forceinline__ static u32 pack(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(result) : "f"(high), "f"(low));
    return result;
  }
  __device__ __forceinline__ static Float2 unpack(u32 pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
  static constexpr u32 kOneTile[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  // Two integers below 128, in the halves of a word, as elements: exact. A subtraction of pairs needs sm_90.
  __device__ __forceinline__ static u32 small_integers(u32 values) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n"
        : "=r"(result)
        : "r"(values | 0x43004300u), "r"(0x3f803f80u), "r"(0xc300c300u));
    return result;
  }
};

// ---- arithmetic ---------------------------------------------------------------------------------------------------

// Four of the eight bytes of `low` and `high`, one hexadecimal digit each.
__device__ __forceinline__ u32 choose_bytes(u32 low, u32 high, u32 digits) {
  return __byte_perm(low, high, digits);
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// ---- global memory ------------------------------------------------------------------------------------------------

// Plan arrays: nobody writes them during the launch.
__device__ __forceinline__ int load_plan(const int* pointer) {
  int value;
  asm("ld.global.nc.s32 %0, [%1];\n" : "=r"(value) : "l"(pointer));
  return value;
}

__device__ __forceinline__ Int4 load_plan(const Int4* pointer) {
  Int4 value;
  asm("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];\n"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(pointer));
  return value;
}

// The same for a load that has to be on its way before a test of something else has come back: the assembler moves
// ordinary plan loads behind such tests.
__device__ __forceinline__ int load_plan_now(const int* pointer) {
  int value;
  asm volatile("ld.volatile.global.s32 %0, [%1];\n" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

__device__ __forceinline__ Int4 load_once(const void* pointer) {
  Int4 value;
  asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(pointer));
  return value;
}

// Weights: read once a step and never written, so they take no room in L1.
__device__ __forceinline__ Int4 load_streamed(const void* pointer) {
  Int4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.s32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(pointer));
  return value;
}

// The same for 4, 8 or 16 bytes.
template <int kWords>
__device__ __forceinline__ void load_streamed(u32 (&words)[kWords], const void* pointer) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "4, 8 or 16 bytes");
  if constexpr (kWords == 1) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];\n" : "=r"(words[0]) : "l"(pointer));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];\n"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(pointer));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(pointer));
  }
}

// What belongs to weights, but lies in pieces smaller than a sector: neighbours find it in L1. One element of 16 bits,
// or two in a word.
template <int kElements>
__device__ __forceinline__ u32 load_constant(const u16* pointer) {
  static_assert(kElements == 1 || kElements == 2, "2 or 4 bytes");
  u32 word;
  if constexpr (kElements == 1) {
    u16 element;
    asm volatile("ld.global.nc.L2::128B.u16 %0, [%1];\n" : "=h"(element) : "l"(pointer));
    word = element;
  } else {
    asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];\n" : "=r"(word) : "l"(pointer));
  }
  return word;
}

__device__ __forceinline__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % 16 == 0;
}

// 8 elements that begin anywhere.
__device__ __forceinline__ Int4 load_elements(const u16* pointer) {
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u16 low, high;
    asm volatile("ld.global.u16 %0, [%1];\n" : "=h"(low) : "l"(pointer + 2 * i));
    asm volatile("ld.global.u16 %0, [%1];\n" : "=h"(high) : "l"(pointer + 2 * i + 1));
    pairs[i] = u32(low) | u32(high) << 16;
  }
  return {static_cast<int>(pairs[0]), static_cast<int>(pairs[1]), static_cast<int>(pairs[2]),
          static_cast<int>(pairs[3])};
}

__device__ __forceinline__ void store(void* pointer, const Int4& value) {
  asm volatile("st.global.v4.s32 [%0], {%1, %2, %3, %4};\n" ::"l"(pointer), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// Values that blocks hand to each other during a launch. A word is its own flag: kNotWritten until its block has written
// it, so neither side needs an order between words, and the writer does not wait for its stores to arrive. Relaxed at
// GPU scope, with load_handed_over and store_handed_over as each other's partners. Whoever has read a word puts
// kNotWritten back; the end of the launch orders that before the next one.
constexpr u32 kNotWritten = 0xffffffffu;  // a NaN that no arithmetic makes

__device__ __forceinline__ u32 never_not_written(float value) { return min(__float_as_uint(value), kNotWritten - 1); }

// The largest word, which is kNotWritten if one of them is.
__device__ __forceinline__ u32 largest_word(const Float4& value) {
  return max(max(__float_as_uint(value.x), __float_as_uint(value.y)),
             max(__float_as_uint(value.z), __float_as_uint(value.w)));
}

__device__ __forceinline__ u32 largest_word(const Float2& value) {
  return max(__float_as_uint(value.x), __float_as_uint(value.y));
}

__device__ __forceinline__ void store_handed_over(Float4* pointer, const Float4& value) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(pointer), "r"(never_not_written(value.x)),
               "r"(never_not_written(value.y)), "r"(never_not_written(value.z)), "r"(never_not_written(value.w))
               : "memory");
}

__device__ __forceinline__ void store_handed_over(Float2* pointer, const Float2& value) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};\n" ::"l"(pointer), "r"(never_not_written(value.x)),
               "r"(never_not_written(value.y))
               : "memory");
}

__device__ __forceinline__ Float4 load_handed_over(const Float4* pointer) {
  Float4 value;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(pointer)
               : "memory");
  return value;
}

__device__ __forceinline__ Float2 load_handed_over(const Float2* pointer) {
  Float2 value;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];\n" : "=f"(value.x), "=f"(value.y) : "l"(pointer) : "memory");
  return value;
}

__device__ __forceinline__ void take_back(Float4* pointer) {
  asm volatile("st.global.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"l"(pointer), "r"(kNotWritten) : "memory");
}

__device__ __forceinline__ void take_back(Float2* pointer) {
  asm volatile("st.global.v2.b32 [%0], {%1, %1};\n" ::"l"(pointer), "r"(kNotWritten) : "memory");
}

// Adds one and returns the old value. Relaxed, its partners are the other blocks' calls: the count says who merges, not
// that anything is written.
__device__ __forceinline__ int draw_ticket(int* counter) {
  int ticket;
  asm volatile("atom.add.relaxed.gpu.global.s32 %0, [%1], 1;\n" : "=r"(ticket) : "l"(counter) : "memory");
  return ticket;
}

[[noreturn]] __device__ __forceinline__ void fail_launch() { __trap(); }

// Writes a word of host memory.
__device__ __forceinline__ void store_to_host(int* pointer, int value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;\n" ::"l"(pointer), "r"(value) : "memory");
}

// Release: words written to the host before this call, by the whole block if a block barrier came before it, are visible
// to a host that sees a later word, or that has waited for the event behind the launch.
__device__ __forceinline__ void fence_host() { asm volatile("fence.acq_rel.sys;\n" ::: "memory"); }

// ---- warp collectives ---------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 warp_value(u32 value, int lane) { return __shfl_sync(kFullMask, value, lane); }

__device__ __forceinline__ float warp_xor_max(float value, int lane_mask) {
  return fmaxf(value, __shfl_xor_sync(kFullMask, value, lane_mask));
}

__device__ __forceinline__ float warp_xor_sum(float value, int lane_mask) {
  return value + __shfl_xor_sync(kFullMask, value, lane_mask);
}

}  // namespace mlxcel
