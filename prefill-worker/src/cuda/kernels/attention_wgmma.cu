// Causal flash attention for grouped-query heads on Hopper: warp-group products (wgmma), tensor-map copies (TMA),
// one producer warp, two consumer warp groups of 64 query rows each.
//
// Each consumer overlaps the score product of the next tile with the value product of the current one, so that its
// softmax runs while the tensor cores work. PINGPONG also makes the two consumers take turns at issuing products.
// Method: FlashAttention-3 (Shah et al., 2024). Tiles lie in shared memory as panels of 64 columns, 128-byte swizzle.
//
// Compile-time: HEAD_DIM (64 or 128), PINGPONG (0 or 1). Query i stands at position q_start + i and sees keys j with
// pos - window < j <= pos  (window 0: no lower limit). Maps: q (dim, q_len, heads), k and v (dim, kv_len, kv_heads);
// rows beyond a map's end read as zeros, so nothing beyond kv_len reaches a product.

constexpr int TILE_M = 128;
constexpr int TILE_N = 128;
constexpr int STAGES = 2;
constexpr int PANELS = HEAD_DIM / 64;
constexpr u32 PANEL_BYTES = 128 * 128;                 // 128 rows of 64 elements; equal for Q, K and V
constexpr u32 TILE_BYTES = PANELS * PANEL_BYTES;
constexpr int CONSUMER_WARPS = 8;
constexpr int SCORES = TILE_N / 2;                     // score registers per thread
constexpr int OUTS = HEAD_DIM / 2;                     // output registers per thread
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "head dims of the warp-group kernel");

struct AttentionWgmmaParams {
    u16* out;                                          // [q_len, n_heads, HEAD_DIM], strides in elements
    i64 out_row_stride, out_head_stride;
    i32 q_len, q_start, group, window;
    float scale_log2;                                  // softmax scale * log2(e)
};

struct Barriers {
    u64 q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// A row's reference follows its maximum only when that has grown by this much (in powers of two): weights stay below
// 2^8, and sums and outputs are rescaled rarely instead of in every step. The result is the same softmax.
constexpr float SLACK = 8.0f;

struct Softmax {
    float ref[2], sum[2], shrink[2];
    bool rescale;   // the same in all lanes of a warp
};

__device__ __forceinline__ void mask_scores(float (&s)[SCORES], int row_pos, int key0, int window) {
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
        int pos = row_pos + ((i >> 1) & 1) * 8;
        int key = key0 + (i >> 2) * 8 + (i & 1);
        bool seen = key <= pos && (window == 0 || key > pos - window);
        if (!seen) s[i] = NEG_INF;
    }
}

// Turns scores into weights relative to each row's reference; `shrink` is what older weights are worth now.
__device__ __forceinline__ void softmax_step(float (&s)[SCORES], Softmax& state, float scale_log2) {
    bool grown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float m = s[2 * h];
#pragma unroll
        for (int i = 0; i < SCORES / 4; ++i) m = fmaxf(m, fmaxf(s[i * 4 + 2 * h], s[i * 4 + 2 * h + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2)) * scale_log2;
        state.shrink[h] = 1.0f;
        if (m > state.ref[h] + SLACK) {
            state.shrink[h] = exp2_approx(state.ref[h] - m);
            state.ref[h] = m;
            grown = true;
        }
        // A row that has seen no key yet keeps 0 as its reference, which avoids inf - inf.
        const float ref = state.ref[h] == NEG_INF ? 0.0f : state.ref[h];
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SCORES / 4; ++i) {
            s[i * 4 + 2 * h] = exp2_approx(fmaf(s[i * 4 + 2 * h], scale_log2, -ref));
            s[i * 4 + 2 * h + 1] = exp2_approx(fmaf(s[i * 4 + 2 * h + 1], scale_log2, -ref));
            sum += s[i * 4 + 2 * h] + s[i * 4 + 2 * h + 1];
        }
        state.sum[h] = state.sum[h] * state.shrink[h] + sum;
    }
    state.rescale = __any_sync(0xffffffffu, grown);
}

// Score registers of one thread are, in order, the A operand of the value product.
__device__ __forceinline__ void pack_weights(u32 (&p)[SCORES / 2], const float (&s)[SCORES]) {
#pragma unroll
    for (int i = 0; i < SCORES / 2; ++i) p[i] = pack2(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void issue_scores(float (&s)[SCORES], u32 q_tile, u32 k_tile) {
#pragma unroll
    for (int kk = 0; kk < HEAD_DIM / 16; ++kk) {
        u32 offset = (kk / 4) * PANEL_BYTES + (kk % 4) * 32;
        wgmma_ss(s, matrix_descriptor(q_tile + offset, 16, 1024), matrix_descriptor(k_tile + offset, 16, 1024), kk > 0);
    }
    wgmma_commit();
}

__device__ __forceinline__ void issue_values(float (&o)[OUTS], const u32 (&p)[SCORES / 2], u32 v_tile) {
#pragma unroll
    for (int kk = 0; kk < TILE_N / 16; ++kk)
        wgmma_rs(o, &p[kk * 4], matrix_descriptor(v_tile + kk * 2048, PANEL_BYTES, 1024));
    wgmma_commit();
}

__device__ __forceinline__ void produce(const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map, u32 smem,
                                        Barriers* bars, int head, int kv_head, int m0, int n_last, int n_first) {
    u32 q_full = smem_u32(&bars->q_full);
    mbarrier_expect_bytes(q_full, TILE_BYTES);
#pragma unroll
    for (int c = 0; c < PANELS; ++c) tma_load_3d(smem + c * PANEL_BYTES, q_map, q_full, c * 64, m0, head);
    u32 k_smem = smem + TILE_BYTES, v_smem = k_smem + STAGES * TILE_BYTES;
    int stage = 0;
    u32 parity = 1;
    for (int n = n_last; n >= n_first; --n) {
        u32 full = smem_u32(&bars->k_full[stage]);
        mbarrier_wait(smem_u32(&bars->k_empty[stage]), parity);
        mbarrier_expect_bytes(full, TILE_BYTES);
#pragma unroll
        for (int c = 0; c < PANELS; ++c)
            tma_load_3d(k_smem + stage * TILE_BYTES + c * PANEL_BYTES, k_map, full, c * 64, n * TILE_N, kv_head);
        full = smem_u32(&bars->v_full[stage]);
        mbarrier_wait(smem_u32(&bars->v_empty[stage]), parity);
        mbarrier_expect_bytes(full, TILE_BYTES);
#pragma unroll
        for (int c = 0; c < PANELS; ++c)
            tma_load_3d(v_smem + stage * TILE_BYTES + c * PANEL_BYTES, v_map, full, c * 64, n * TILE_N, kv_head);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
}

__device__ __forceinline__ void consume(const AttentionWgmmaParams& p, u32 smem, Barriers* bars, int head, int m0,
                                        int n_last, int n_first) {
    const int group_index = (int)threadIdx.x / 128 - 1;
    const int lane = threadIdx.x & 31, warp = ((int)threadIdx.x >> 5) & 3;
    const u32 q_tile = smem + group_index * 64 * 128;
    const u32 k_smem = smem + TILE_BYTES, v_smem = k_smem + STAGES * TILE_BYTES;
    const int group_pos = p.q_start + m0 + group_index * 64;
    const int row_pos = group_pos + warp * 16 + (lane >> 2);
    const int key_lane = (lane & 3) * 2;

    float o[OUTS], s[SCORES];
    u32 weights[SCORES / 2];
    Softmax state;
#pragma unroll
    for (int i = 0; i < OUTS; ++i) o[i] = 0.0f;
    state.ref[0] = state.ref[1] = NEG_INF;
    state.sum[0] = state.sum[1] = 0.0f;

#if PINGPONG
    if (group_index == 1) named_arrive(2, 256);
#endif
    mbarrier_wait(smem_u32(&bars->q_full), 0);
    mbarrier_wait(smem_u32(&bars->k_full[0]), 0);
#if PINGPONG
    named_sync(2 + group_index, 256);
#endif
    wgmma_fence();
    issue_scores(s, q_tile, k_smem);
#if PINGPONG
    named_arrive(3 - group_index, 256);
#endif
    wgmma_wait<0>();
    hold(s);
    if (lane == 0) mbarrier_arrive(smem_u32(&bars->k_empty[0]));
    mask_scores(s, row_pos, n_last * TILE_N + key_lane, p.window);
    softmax_step(s, state, p.scale_log2);
    pack_weights(weights, s);

    int k_stage = 1 % STAGES, v_stage = 0;
    u32 k_parity = STAGES == 1 ? 1 : 0, v_parity = 0;
    for (int n = n_last - 1; n >= n_first; --n) {
        mbarrier_wait(smem_u32(&bars->k_full[k_stage]), k_parity);
#if PINGPONG
        named_sync(2 + group_index, 256);
#endif
        hold(s);
        hold(o);
        wgmma_fence();
        issue_scores(s, q_tile, k_smem + k_stage * TILE_BYTES);
        mbarrier_wait(smem_u32(&bars->v_full[v_stage]), v_parity);
        issue_values(o, weights, v_smem + v_stage * TILE_BYTES);
#if PINGPONG
        named_arrive(3 - group_index, 256);
#endif
        wgmma_wait<1>();
        hold(s);
        if (lane == 0) mbarrier_arrive(smem_u32(&bars->k_empty[k_stage]));
        const bool above = n * TILE_N + TILE_N - 1 > group_pos;
        const bool below = p.window > 0 && n * TILE_N <= group_pos + 63 - p.window;
        if (above || below) mask_scores(s, row_pos, n * TILE_N + key_lane, p.window);
        softmax_step(s, state, p.scale_log2);
        // A sum of exponentials is never negative; the branch only keeps the assembler from moving the wait above
        // them, which would leave nothing to overlap with the value product.
        if (state.sum[0] + state.sum[1] < 0.0f) asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(state.sum[0]) : "memory");
        wgmma_wait<0>();
        hold(o);
        if (lane == 0) mbarrier_arrive(smem_u32(&bars->v_empty[v_stage]));
        if (state.rescale) {
#pragma unroll
            for (int i = 0; i < OUTS; ++i) o[i] *= state.shrink[(i >> 1) & 1];
        }
        pack_weights(weights, s);
        if (++k_stage == STAGES) {
            k_stage = 0;
            k_parity ^= 1;
        }
        if (++v_stage == STAGES) {
            v_stage = 0;
            v_parity ^= 1;
        }
    }
    mbarrier_wait(smem_u32(&bars->v_full[v_stage]), v_parity);
    hold(o);
    wgmma_fence();
    issue_values(o, weights, v_smem + v_stage * TILE_BYTES);
    wgmma_wait<0>();
    hold(o);
#if PINGPONG
    if (group_index == 0) named_sync(2, 256);
#endif

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = state.sum[h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        float inv = sum > 0.0f ? 1.0f / sum : 0.0f;
        int row = m0 + group_index * 64 + warp * 16 + h * 8 + (lane >> 2);
        if (row < p.q_len) {
            u32* dst = (u32*)(p.out + (i64)head * p.out_head_stride + (i64)row * p.out_row_stride + key_lane);
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 8; ++d)
                dst[d * 4] = pack2(o[d * 4 + 2 * h] * inv, o[d * 4 + 2 * h + 1] * inv);
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
attention_wgmma(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                const __grid_constant__ TensorMap v_map, const __grid_constant__ AttentionWgmmaParams p) {
    extern __shared__ __align__(1024) u8 shared_bytes[];
    __shared__ Barriers bars;
    const u32 smem = (smem_u32(shared_bytes) + 1023u) & ~1023u;   // swizzled panels start on 1024 bytes

    const int head = blockIdx.x;
    // Blocks with the longest key range start first, which evens out the end of a causal launch.
    const int m0 = (int)(gridDim.y - 1 - blockIdx.y) * TILE_M;
    const int kv_end = p.q_start + min(m0 + TILE_M, p.q_len);
    const int kv_begin = p.window > 0 ? max(0, p.q_start + m0 - p.window + 1) : 0;
    const int n_last = (kv_end - 1) / TILE_N, n_first = kv_begin / TILE_N;

    if (threadIdx.x == 0) {
        tma_prefetch_map(&q_map);
        tma_prefetch_map(&k_map);
        tma_prefetch_map(&v_map);
        mbarrier_init(smem_u32(&bars.q_full), 1);
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(smem_u32(&bars.k_full[i]), 1);
            mbarrier_init(smem_u32(&bars.v_full[i]), 1);
            mbarrier_init(smem_u32(&bars.k_empty[i]), CONSUMER_WARPS);
            mbarrier_init(smem_u32(&bars.v_empty[i]), CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) produce(&q_map, &k_map, &v_map, smem, &bars, head, head / p.group, m0, n_last, n_first);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(p, smem, &bars, head, m0, n_last, n_first);
    }
}
