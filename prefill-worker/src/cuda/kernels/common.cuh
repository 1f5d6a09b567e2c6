// Shared device code of every kernel here. No headers are included, so NVRTC needs no CUDA include folder.
//
// Compile-time switches given by the host as -D options:
//   ELEM_BF16 or ELEM_F16   element type of activations, weights and cache
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed int i32;
typedef signed long long i64;
typedef unsigned char u8;

#if defined(ELEM_BF16)
#define ELEM_MMA "bf16"
#define ELEM_WIDE "bf16x2"
#elif defined(ELEM_F16)
#define ELEM_MMA "f16"
#define ELEM_WIDE "f16x2"
#else
#error "define ELEM_BF16 or ELEM_F16"
#endif

#define NEG_INF (-__int_as_float(0x7f800000))

// ---- 16-bit element conversions -------------------------------------------------------------------------------

__device__ __forceinline__ u32 pack2(float lo, float hi) {
    u32 r;
#if defined(ELEM_BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#endif
    return r;
}

__device__ __forceinline__ float elem_to_float(u16 x) {
#if defined(ELEM_BF16)
    return __int_as_float(((int)x) << 16);
#else
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
#endif
}

__device__ __forceinline__ u16 float_to_elem(float x) { return (u16)(pack2(x, 0.0f) & 0xffffu); }

__device__ __forceinline__ float lo_to_float(u32 x) { return elem_to_float((u16)(x & 0xffffu)); }
__device__ __forceinline__ float hi_to_float(u32 x) { return elem_to_float((u16)(x >> 16)); }

// Storage formats that differ from the compute type (cache dtypes, quantization scales).
#define FORMAT_F32 0
#define FORMAT_F16 1
#define FORMAT_BF16 2

__device__ __forceinline__ float f16_to_float(u16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}
__device__ __forceinline__ u16 float_to_f16(float x) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float bf16_to_float(u16 x) { return __int_as_float(((int)x) << 16); }
__device__ __forceinline__ u16 float_to_bf16(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float load_format(const void* p, i64 i, int format) {
    if (format == FORMAT_F32) return ((const float*)p)[i];
    u16 raw = ((const u16*)p)[i];
    return format == FORMAT_F16 ? f16_to_float(raw) : bf16_to_float(raw);
}

__device__ __forceinline__ void store_format(void* p, i64 i, int format, float x) {
    if (format == FORMAT_F32) ((float*)p)[i] = x;
    else ((u16*)p)[i] = format == FORMAT_F16 ? float_to_f16(x) : float_to_bf16(x);
}

// ---- warp and memory primitives -------------------------------------------------------------------------------

__device__ __forceinline__ u32 smem_u32(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

// 16-byte asynchronous copy global -> shared; `bytes` 0 writes zeros and reads nothing.
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}

// c[16x8] += a[16x16] * b[16x8]
__device__ __forceinline__ void mma_16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEM_MMA "." ELEM_MMA
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
