// Memory-bound kernels between the matrix products: embedding gather, RMSNorm, RoPE with cache append,
// SwiGLU, cache layout and casts, affine dequantization, random fill.
//
// The residual stream is f32; what feeds a matrix product is a 16-bit element. Vectors are 8 elements (16 bytes):
// every row length must be a multiple of 8, which the host checks.

struct Vec8 {
    float x[8];
};

__device__ __forceinline__ Vec8 load8(const u16* p) {
    uint4 raw = *(const uint4*)p;
    Vec8 v;
    v.x[0] = lo_to_float(raw.x), v.x[1] = hi_to_float(raw.x), v.x[2] = lo_to_float(raw.y), v.x[3] = hi_to_float(raw.y);
    v.x[4] = lo_to_float(raw.z), v.x[5] = hi_to_float(raw.z), v.x[6] = lo_to_float(raw.w), v.x[7] = hi_to_float(raw.w);
    return v;
}
__device__ __forceinline__ void store8(u16* p, const Vec8& v) {
    uint4 raw;
    raw.x = pack2(v.x[0], v.x[1]), raw.y = pack2(v.x[2], v.x[3]);
    raw.z = pack2(v.x[4], v.x[5]), raw.w = pack2(v.x[6], v.x[7]);
    *(uint4*)p = raw;
}
__device__ __forceinline__ Vec8 load8(const float* p) {
    float4 a = ((const float4*)p)[0], b = ((const float4*)p)[1];
    Vec8 v;
    v.x[0] = a.x, v.x[1] = a.y, v.x[2] = a.z, v.x[3] = a.w, v.x[4] = b.x, v.x[5] = b.y, v.x[6] = b.z, v.x[7] = b.w;
    return v;
}
__device__ __forceinline__ void store8(float* p, const Vec8& v) {
    ((float4*)p)[0] = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
    ((float4*)p)[1] = make_float4(v.x[4], v.x[5], v.x[6], v.x[7]);
}

__device__ __forceinline__ float block_sum(float x) {
    __shared__ float partial[32];
    int warps = (blockDim.x + 31) >> 5;
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = x;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < warps; ++i) total += partial[i];
    return total;
}

// x[t, :] = table[ids[t], :], table in `format`; an id outside the table gives zeros (the host refuses it before).
extern "C" __global__ void embedding_gather(float* x, const void* table, const u32* ids, i32 hidden, u32 vocab, i32 format) {
    const u32 id = ids[blockIdx.x];
    for (int c = threadIdx.x; c < hidden; c += blockDim.x)
        x[(i64)blockIdx.x * hidden + c] = id < vocab ? load_format(table, (i64)id * hidden + c, format) : 0.0f;
}

// out = x / sqrt(mean(x^2) + eps) * weight. One block per row; hidden <= 8 * 4 * blockDim.x.
extern "C" __global__ void __launch_bounds__(512)
rms_norm(const float* x, const float* weight, u16* out, i32 hidden, float eps) {
    const i64 row = (i64)blockIdx.x * hidden;
    Vec8 held[4];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int c = (i * (int)blockDim.x + (int)threadIdx.x) * 8;
        if (c >= hidden) continue;
        held[i] = load8(x + row + c);
#pragma unroll
        for (int e = 0; e < 8; ++e) squares += held[i].x[e] * held[i].x[e];
    }
    const float scale = 1.0f / sqrtf(block_sum(squares) / (float)hidden + eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int c = (i * (int)blockDim.x + (int)threadIdx.x) * 8;
        if (c >= hidden) continue;
        Vec8 w = load8(weight + c);
#pragma unroll
        for (int e = 0; e < 8; ++e) held[i].x[e] = held[i].x[e] * scale * w.x[e];
        store8(out + row + c, held[i]);
    }
}

// table[t, i] = (cos, sin) of (start + t) * inv_freq[i]. The angle is an f32 product, as decoders compute it; its
// cosine and sine are then exact to f32.
extern "C" __global__ void rope_table(float2* table, const float* inv_freq, i32 start, i32 half_dim, i32 tokens) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= half_dim * tokens) return;
    float angle = (float)(start + i / half_dim) * inv_freq[i % half_dim];
    double s, c;
    sincos((double)angle, &s, &c);
    table[i] = make_float2((float)c, (float)s);
}

// Products are rounded before the sum (no fused multiply-add), as decoders do.
__device__ __forceinline__ void rotate(float lo, float hi, float c, float s, float& out_lo, float& out_hi) {
    out_lo = __fsub_rn(__fmul_rn(lo, c), __fmul_rn(hi, s));
    out_hi = __fadd_rn(__fmul_rn(lo, s), __fmul_rn(hi, c));
}

struct RopeParams {
    u16* qkv;            // [tokens, q_heads + 2 * kv_heads, head_dim], row stride below; q is rotated in place
    u16* k_cache;        // [kv_heads, capacity, head_dim]
    u16* v_cache;
    const float2* table; // [tokens, head_dim / 2]
    i64 row_stride, cache_head_stride;
    i32 tokens, start, q_heads, kv_heads, head_dim;
};

// Rotates q in place, rotates k into the cache and copies v there. Half-split pairing (i, i + head_dim / 2).
// One thread handles 8 pairs (16 elements) of one head.
extern "C" __global__ void rope_append(const RopeParams p) {
    const int half = p.head_dim / 2, units = half / 8, heads = p.q_heads + 2 * p.kv_heads;
    const i64 total = (i64)p.tokens * heads * units;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (i64)gridDim.x * blockDim.x) {
        int unit = (int)(i % units);
        i64 rest = i / units;
        int head = (int)(rest % heads), token = (int)(rest / heads);
        u16* src = p.qkv + token * p.row_stride + (i64)head * p.head_dim + unit * 8;
        Vec8 lo = load8(src), hi = load8(src + half);
        u16* dst = src;
        if (head >= p.q_heads + p.kv_heads) {
            dst = p.v_cache + (head - p.q_heads - p.kv_heads) * p.cache_head_stride + (i64)(p.start + token) * p.head_dim + unit * 8;
            store8(dst, lo);
            store8(dst + half, hi);
            continue;
        }
        if (head >= p.q_heads)
            dst = p.k_cache + (head - p.q_heads) * p.cache_head_stride + (i64)(p.start + token) * p.head_dim + unit * 8;
        const float4* table = (const float4*)(p.table + (i64)token * half + unit * 8);
        Vec8 out_lo, out_hi;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float4 cs = table[e];   // cos, sin, cos, sin
            rotate(lo.x[2 * e], hi.x[2 * e], cs.x, cs.y, out_lo.x[2 * e], out_hi.x[2 * e]);
            rotate(lo.x[2 * e + 1], hi.x[2 * e + 1], cs.z, cs.w, out_lo.x[2 * e + 1], out_hi.x[2 * e + 1]);
        }
        store8(dst, out_lo);
        store8(dst + half, out_hi);
    }
}

// out[t, i] = silu(gate_up[t, i]) * gate_up[t, inner + i]
extern "C" __global__ void swiglu(u16* out, const u16* gate_up, i32 inner, i64 units) {
    const int row_units = inner / 8;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < units; i += (i64)gridDim.x * blockDim.x) {
        i64 row = i / row_units;
        int c = (int)(i - row * row_units) * 8;
        Vec8 g = load8(gate_up + row * 2 * inner + c), u = load8(gate_up + row * 2 * inner + inner + c);
#pragma unroll
        for (int e = 0; e < 8; ++e) g.x[e] = g.x[e] / (1.0f + exp2_approx(-1.4426950408889634f * g.x[e])) * u.x[e];
        store8(out + i * 8, g);
    }
}

// Rows first..first+tokens of every plane src[h, t, d], cast to `format` and cut at multiples of `block` tokens. The
// pieces follow each other, each contiguous [heads, tokens of the piece, head_dim]: the decoder's own layout.
// One thread moves 8 elements.
extern "C" __global__ void pack_pieces(void* dst, const u16* src, i64 head_stride, i32 first, i32 tokens, i32 block,
                                       i32 head_dim, i32 heads, i32 format) {
    const int row_units = head_dim / 8;
    const i64 total = (i64)heads * tokens * row_units;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (i64)gridDim.x * blockDim.x) {
        i64 row = i / row_units;
        int c = (int)(i - row * row_units) * 8;
        int head = (int)(row / tokens), token = first + (int)(row - (i64)head * tokens);
        int piece_begin = max(first, token / block * block);
        int piece_end = (int)min((i64)first + tokens, ((i64)(token / block) + 1) * block);
        i64 to = (i64)(piece_begin - first) * heads * head_dim
            + ((i64)head * (piece_end - piece_begin) + token - piece_begin) * head_dim + c;
        const u16* from = src + head * head_stride + (i64)token * head_dim + c;
#if defined(ELEM_BF16)
        const bool same = format == FORMAT_BF16;
#else
        const bool same = format == FORMAT_F16;
#endif
        if (same) {
            *(uint4*)((u16*)dst + to) = *(const uint4*)from;
            continue;
        }
        Vec8 v = load8(from);
        if (format == FORMAT_F32) {
            store8((float*)dst + to, v);
        } else {
            u32 w[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                u16 a = format == FORMAT_F16 ? float_to_f16(v.x[2 * e]) : float_to_bf16(v.x[2 * e]);
                u16 b = format == FORMAT_F16 ? float_to_f16(v.x[2 * e + 1]) : float_to_bf16(v.x[2 * e + 1]);
                w[e] = (u32)a | ((u32)b << 16);
            }
            *(uint4*)((u16*)dst + to) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

// The reverse for one piece in the element type: src[h, t, d] (contiguous) -> dst[h, first + t, d].
extern "C" __global__ void restore_cache(u16* dst, const uint4* src, i64 head_stride, i32 first, i32 tokens,
                                         i32 head_dim, i32 heads) {
    const int row_units = head_dim / 8;
    const i64 total = (i64)heads * tokens * row_units;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (i64)gridDim.x * blockDim.x) {
        i64 row = i / row_units;
        int c = (int)(i - row * row_units) * 8;
        i64 head = row / tokens, token = row - head * tokens;
        *(uint4*)(dst + head * head_stride + (first + token) * head_dim + c) = src[i];
    }
}

// dst[i] = src[i] between storage formats (FORMAT_*).
extern "C" __global__ void cast_format(void* dst, const void* src, i64 n, i32 to, i32 from) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        store_format(dst, i, to, load_format(src, i, from));
}

// out[r, c] = scale[r, c / group] * q[r, c] + bias[r, c / group]; q packed little-endian into u32 words, 32 / bits
// values each. Both products are f32, rounded once. One thread per packed word.
extern "C" __global__ void dequantize_affine(u16* out, const u32* packed, const void* scales, const void* biases,
                                             i32 format, i32 bits, i32 group, i32 columns, i64 words) {
    const int per_word = 32 / bits;
    const u32 mask = (u32)((1ull << bits) - 1);
    const int row_words = columns / per_word;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += (i64)gridDim.x * blockDim.x) {
        i64 row = i / row_words;
        int c = (int)(i - row * row_words) * per_word;
        i64 g = row * (columns / group) + c / group;
        float scale = load_format(scales, g, format), bias = load_format(biases, g, format);
        u32 word = packed[i];
        for (int e = 0; e < per_word; e += 2) {
            float a = scale * (float)((word >> (e * bits)) & mask) + bias;
            float b = scale * (float)((word >> ((e + 1) * bits)) & mask) + bias;
            *(u32*)(out + row * columns + c + e) = pack2(a, b);
        }
    }
}

__device__ __forceinline__ u32 mix(u64 x) {
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    return (u32)x;
}

// Normal values (Box-Muller over a hash of the index), for benchmarks that need no model file.
extern "C" __global__ void fill_normal(void* out, i64 n, i32 format, float mean, float deviation, u64 seed) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        float u = ((float)mix(seed * 0x9e3779b97f4a7c15ull + 2 * (u64)i) + 1.0f) * 2.3283064e-10f;
        float v = (float)mix(seed * 0x9e3779b97f4a7c15ull + 2 * (u64)i + 1) * 2.3283064e-10f;
        float radius = sqrtf(-2.0f * __logf(fminf(u, 1.0f)));
        store_format(out, i, format, mean + deviation * radius * __cosf(6.2831853f * v));
    }
}
