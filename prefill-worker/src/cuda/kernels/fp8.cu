// FP8 (E4M3) operands for matrix products: one scale per row of activations, one per output channel of weights.

struct alignas(8) Fp8x8 {
    u32 lo, hi;
};

__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
    u16 lo, hi;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(d), "f"(c));
    return (u32)lo | ((u32)hi << 16);
}

__device__ __forceinline__ float block_max(float x) {
    __shared__ float partial[32];
    for (int o = 16; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = x;
    __syncthreads();
    float m = 0.0f;
    for (int i = 0; i < (int)(blockDim.x + 31) >> 5; ++i) m = fmaxf(m, partial[i]);
    return m;
}

// out[r, :] = x[r, :] / scales[r], scales[r] = max |x[r, :]| / 448. One block per row; columns a multiple of 8.
extern "C" __global__ void quantize_rows(u8* out, float* scales, const u16* x, i32 columns) {
    const u16* row = x + (i64)blockIdx.x * columns;
    float m = 0.0f;
    for (int c = threadIdx.x * 8; c < columns; c += blockDim.x * 8) {
        uint4 raw = *(const uint4*)(row + c);
        const u32 w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) m = fmaxf(m, fmaxf(fabsf(lo_to_float(w[e])), fabsf(hi_to_float(w[e]))));
    }
    m = block_max(m);
    const float scale = m > 0.0f ? m / 448.0f : 1.0f, inverse = 1.0f / scale;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (int c = threadIdx.x * 8; c < columns; c += blockDim.x * 8) {
        uint4 raw = *(const uint4*)(row + c);
        Fp8x8 q;
        q.lo = pack_e4m3(lo_to_float(raw.x) * inverse, hi_to_float(raw.x) * inverse, lo_to_float(raw.y) * inverse,
                         hi_to_float(raw.y) * inverse);
        q.hi = pack_e4m3(lo_to_float(raw.z) * inverse, hi_to_float(raw.z) * inverse, lo_to_float(raw.w) * inverse,
                         hi_to_float(raw.w) * inverse);
        *(Fp8x8*)(out + (i64)blockIdx.x * columns + c) = q;
    }
}
