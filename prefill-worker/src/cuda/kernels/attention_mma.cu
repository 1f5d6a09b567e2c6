// Causal flash attention for grouped-query heads on mma.sync tensor cores (sm_80 and later).
//
// One block computes TILE_M queries of one head. K and V tiles of TILE_N tokens stream through two shared-memory
// stages by cp.async while the previous tile is multiplied. Scores live in registers only (online softmax, base 2).
// Rows in shared memory are padded by 16 bytes, an odd number of 16-byte units, so ldmatrix meets no bank conflict.
// Method: FlashAttention-2 (Dao, 2023), one warp per 16*WARP_TILES query rows.
//
// Compile-time: HEAD_DIM, TILE_M, TILE_N, WARPS, WARP_TILES (TILE_M == 16 * WARP_TILES * WARPS), MIN_BLOCKS.
// Query i stands at position q_start + i and sees keys j with  pos - window < j <= pos  (window 0: no lower limit).

struct AttentionParams {
    const u16* q;   // [q_len, n_heads, HEAD_DIM], strides below
    const u16* k;   // [n_kv_heads, kv_len, HEAD_DIM], strides below
    const u16* v;
    u16* out;       // [q_len, n_heads, HEAD_DIM], strides below
    i64 q_row_stride, q_head_stride;      // in elements, like every stride here
    i64 kv_row_stride, kv_head_stride;
    i64 out_row_stride, out_head_stride;
    i32 q_len, q_start, n_heads, group;   // group = query heads per KV head
    i32 window;
    float scale_log2;                     // softmax scale * log2(e)
};

// A row's reference follows its maximum only when that has grown by this much (in powers of two): weights stay below
// 2^8, and sums and outputs are rescaled rarely instead of in every step. The result is the same softmax.
constexpr float SLACK = 8.0f;
constexpr int PITCH = HEAD_DIM + 8;            // elements per padded row
constexpr int CHUNKS = HEAD_DIM / 8;           // 16-byte units per row
constexpr int THREADS = WARPS * 32;
constexpr int ROWS_PER_WARP = 16 * WARP_TILES;
static_assert(TILE_M == ROWS_PER_WARP * WARPS, "tile and warps disagree");
static_assert(HEAD_DIM % 16 == 0 && TILE_N % 16 == 0, "tiles are multiples of 16");

// Copies ROWS rows into shared memory; rows outside [0, n_rows) become zeros.
template <int ROWS>
__device__ __forceinline__ void load_edge_tile(u32 dst, const u16* src, i64 row_stride, int first_row, int n_rows) {
#pragma unroll
    for (int i = 0; i < (ROWS * CHUNKS + THREADS - 1) / THREADS; ++i) {
        int unit = i * THREADS + (int)threadIdx.x;
        if ((ROWS * CHUNKS) % THREADS != 0 && unit >= ROWS * CHUNKS) break;
        int row = unit / CHUNKS, col = (unit % CHUNKS) * 8;
        int src_row = first_row + row;
        bool inside = src_row < n_rows && src_row >= 0;
        const u16* p = src + (i64)(inside ? src_row : 0) * row_stride + col;
        cp_async_16(dst + (u32)(row * PITCH + col) * 2u, p, inside ? 16u : 0u);
    }
}

// The same for a tile that lies wholly inside: one pointer per thread and constant steps.
template <int ROWS>
__device__ __forceinline__ void load_inner_tile(u32 dst, const u16* src, i64 row_stride, int first_row) {
    if constexpr (THREADS % CHUNKS == 0 && ROWS % (THREADS / CHUNKS) == 0) {
        constexpr int STEP = THREADS / CHUNKS;
        int row = (int)threadIdx.x / CHUNKS, col = ((int)threadIdx.x % CHUNKS) * 8;
        const u16* p = src + (i64)(first_row + row) * row_stride + col;
        dst += (u32)(row * PITCH + col) * 2u;
        const i64 step = STEP * row_stride;
#pragma unroll
        for (int i = 0; i < ROWS / STEP; ++i) {
            cp_async_16(dst + (u32)(i * STEP * PITCH) * 2u, p, 16u);
            p += step;
        }
    } else {
        load_edge_tile<ROWS>(dst, src, row_stride, first_row, first_row + ROWS);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_mma(const AttentionParams p) {
    extern __shared__ __align__(128) u8 smem[];
    const u32 q_smem = smem_u32(smem);
    const u32 k_smem = q_smem + TILE_M * PITCH * 2;
    const u32 v_smem = k_smem + 2 * TILE_N * PITCH * 2;
    constexpr u32 STAGE_BYTES = TILE_N * PITCH * 2;

    const int head = blockIdx.x;
    // Blocks with the longest key range start first, which evens out the end of a causal launch.
    const int m0 = (int)(gridDim.y - 1 - blockIdx.y) * TILE_M;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u16* q = p.q + (i64)head * p.q_head_stride;
    const u16* k = p.k + (i64)(head / p.group) * p.kv_head_stride;
    const u16* v = p.v + (i64)(head / p.group) * p.kv_head_stride;

    const int last_query = min(m0 + TILE_M, p.q_len) - 1;
    const int kv_end = p.q_start + last_query + 1;
    const int kv_begin = p.window > 0 ? max(0, p.q_start + m0 - p.window + 1) : 0;
    const int n_last = (kv_end - 1) / TILE_N;
    const int n_first = kv_begin / TILE_N;

    load_edge_tile<TILE_M>(q_smem, q, p.q_row_stride, m0, p.q_len);
    load_edge_tile<TILE_N>(k_smem, k, p.kv_row_stride, n_last * TILE_N, kv_end);
    load_edge_tile<TILE_N>(v_smem, v, p.kv_row_stride, n_last * TILE_N, kv_end);
    cp_async_commit();

    float acc[WARP_TILES][HEAD_DIM / 8][4];
    float row_ref[WARP_TILES][2], row_sum[WARP_TILES][2], shrink[WARP_TILES][2];
#pragma unroll
    for (int t = 0; t < WARP_TILES; ++t) {
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 8; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[t][d][e] = 0.0f;
        row_ref[t][0] = row_ref[t][1] = NEG_INF;
        row_sum[t][0] = row_sum[t][1] = 0.0f;
    }

    const u32 q_frag = q_smem + (u32)((warp * ROWS_PER_WARP + (lane & 15)) * PITCH + (lane >> 4) * 8) * 2u;
    const u32 k_frag = (u32)(((lane & 7) + ((lane >> 4) & 1) * 8) * PITCH + ((lane >> 3) & 1) * 8) * 2u;
    const u32 v_frag = (u32)((lane & 15) * PITCH + (lane >> 4) * 8) * 2u;
    const int row0 = p.q_start + m0 + warp * ROWS_PER_WARP + (lane >> 2);   // position of this lane's first row

    int stage = 0;
    for (int n = n_last; n >= n_first; --n) {
        cp_async_wait<0>();
        __syncthreads();
        if (n > n_first) {
            load_inner_tile<TILE_N>(k_smem + (stage ^ 1) * STAGE_BYTES, k, p.kv_row_stride, (n - 1) * TILE_N);
            load_inner_tile<TILE_N>(v_smem + (stage ^ 1) * STAGE_BYTES, v, p.kv_row_stride, (n - 1) * TILE_N);
            cp_async_commit();
        }

        float s[WARP_TILES][TILE_N / 8][4];
#pragma unroll
        for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
            for (int j = 0; j < TILE_N / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[t][j][e] = 0.0f;

        const u32 k_tile = k_smem + stage * STAGE_BYTES + k_frag;
#pragma unroll
        for (int kk = 0; kk < HEAD_DIM / 16; ++kk) {
            u32 a[WARP_TILES][4];
#pragma unroll
            for (int t = 0; t < WARP_TILES; ++t) ldmatrix_x4(a[t], q_frag + (u32)(t * 16 * PITCH + kk * 16) * 2u);
#pragma unroll
            for (int j = 0; j < TILE_N / 16; ++j) {
                u32 b[4];
                ldmatrix_x4(b, k_tile + (u32)(j * 16 * PITCH + kk * 16) * 2u);
#pragma unroll
                for (int t = 0; t < WARP_TILES; ++t) {
                    mma_16816(s[t][2 * j], a[t], b[0], b[1]);
                    mma_16816(s[t][2 * j + 1], a[t], b[2], b[3]);
                }
            }
        }

        const int tile_begin = n * TILE_N;
        const int warp_row = p.q_start + m0 + warp * ROWS_PER_WARP;
        const bool above = tile_begin + TILE_N - 1 > warp_row;
        const bool below = p.window > 0 && tile_begin <= warp_row + ROWS_PER_WARP - 1 - p.window;
        if (above || below) {
#pragma unroll
            for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
                for (int j = 0; j < TILE_N / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        int pos = row0 + t * 16 + (e >> 1) * 8;
                        int key = tile_begin + j * 8 + (lane & 3) * 2 + (e & 1);
                        bool seen = key <= pos && (p.window == 0 || key > pos - p.window);
                        if (!seen) s[t][j][e] = NEG_INF;
                    }
        }

        bool grown = false;
#pragma unroll
        for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float m = s[t][0][2 * h];
#pragma unroll
                for (int j = 0; j < TILE_N / 8; ++j) m = fmaxf(m, fmaxf(s[t][j][2 * h], s[t][j][2 * h + 1]));
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2)) * p.scale_log2;
                shrink[t][h] = 1.0f;
                if (m > row_ref[t][h] + SLACK) {
                    shrink[t][h] = exp2_approx(row_ref[t][h] - m);
                    row_ref[t][h] = m;
                    grown = true;
                }
            }
        if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
            for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    row_sum[t][h] *= shrink[t][h];
#pragma unroll
                    for (int d = 0; d < HEAD_DIM / 8; ++d) {
                        acc[t][d][2 * h] *= shrink[t][h];
                        acc[t][d][2 * h + 1] *= shrink[t][h];
                    }
                }
        }
#pragma unroll
        for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                // A row that has seen no key yet keeps 0 as its reference, which avoids inf - inf.
                const float ref = row_ref[t][h] == NEG_INF ? 0.0f : row_ref[t][h];
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < TILE_N / 8; ++j) {
                    s[t][j][2 * h] = exp2_approx(fmaf(s[t][j][2 * h], p.scale_log2, -ref));
                    s[t][j][2 * h + 1] = exp2_approx(fmaf(s[t][j][2 * h + 1], p.scale_log2, -ref));
                    sum += s[t][j][2 * h] + s[t][j][2 * h + 1];
                }
                row_sum[t][h] += sum;
            }

        const u32 v_tile = v_smem + stage * STAGE_BYTES + v_frag;
#pragma unroll
        for (int kk = 0; kk < TILE_N / 16; ++kk) {
            u32 a[WARP_TILES][4];
#pragma unroll
            for (int t = 0; t < WARP_TILES; ++t) {
                a[t][0] = pack2(s[t][2 * kk][0], s[t][2 * kk][1]);
                a[t][1] = pack2(s[t][2 * kk][2], s[t][2 * kk][3]);
                a[t][2] = pack2(s[t][2 * kk + 1][0], s[t][2 * kk + 1][1]);
                a[t][3] = pack2(s[t][2 * kk + 1][2], s[t][2 * kk + 1][3]);
            }
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 16; ++d) {
                u32 b[4];
                ldmatrix_x4_trans(b, v_tile + (u32)(kk * 16 * PITCH + d * 16) * 2u);
#pragma unroll
                for (int t = 0; t < WARP_TILES; ++t) {
                    mma_16816(acc[t][2 * d], a[t], b[0], b[1]);
                    mma_16816(acc[t][2 * d + 1], a[t], b[2], b[3]);
                }
            }
        }
        stage ^= 1;
    }

    u16* out = p.out + (i64)head * p.out_head_stride;
#pragma unroll
    for (int t = 0; t < WARP_TILES; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = row_sum[t][h];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            float inv = sum > 0.0f ? 1.0f / sum : 0.0f;
            int row = m0 + warp * ROWS_PER_WARP + t * 16 + h * 8 + (lane >> 2);
            if (row < p.q_len) {
                u32* dst = (u32*)(out + (i64)row * p.out_row_stride + (lane & 3) * 2);
#pragma unroll
                for (int d = 0; d < HEAD_DIM / 8; ++d)
                    dst[d * 4] = pack2(acc[t][d][2 * h] * inv, acc[t][d][2 * h + 1] * inv);
            }
        }
    }
}
