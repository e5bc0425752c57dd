// The gram form of Newton-Schulz for matrices of at most 192 rows (attention heads), on Hopper.
//
// A matrix of m <= 192 rows is too small for the tiles of batched_products_sm90.cu, but its m x m
// matrices fit in shared memory. Three kernels:
//
//     gram_kernel    R = X X^T: partial sums over chunks of columns
//     chain_kernel   from R to Q, the product of the polynomials of a segment of steps: one block a
//                    matrix, nothing leaves shared memory
//     apply_kernel   X <- Q X, and at a restart the partial sums of the new R on the way
//
// Rows are padded with zeros to kM = 64, 128 or 192. Chunks depend on n alone and their sums are
// added in order, so that the bits of a matrix do not depend on the batch.
// C ABI at the end of the file; kernels/newton_schulz_small.py calls it.

#include <cuda_runtime.h>
#include <type_traits>

#include "sm90.cuh"
#include "tensor_map.cuh"

namespace {

using namespace sm90;

constexpr int kChunkColumns = 1792;
constexpr int kMaxSteps = 16;
constexpr int kApplyStages = 3;  // two blocks a multiprocessor for m <= 128

template <int kM>
constexpr int kPanelBytes = kM * 128;  // kM rows of 64 elements

template <int kN>
using Width = std::integral_constant<int, kN>;

// acc (64 rows of a warpgroup x kN) += or = one step of 16 of k
template <int kN, int kTransposeA, int kTransposeB>
__device__ __forceinline__ void wgmma(float* acc, uint64_t a, uint64_t b, int accumulate) {
    if constexpr (kN == 64) wgmma_n64<kTransposeA, kTransposeB>(acc, a, b, accumulate);
    if constexpr (kN == 128) wgmma_n128<kTransposeA, kTransposeB>(acc, a, b, accumulate);
    if constexpr (kN == 192) wgmma_n192<kTransposeA, kTransposeB>(acc, a, b, accumulate);
}

// acc += kN columns of P P^T, P a panel (kM x 64) in shared memory, for the warpgroup's 64 rows
template <int kN>
__device__ __forceinline__ void add_gram(float* acc, uint32_t panel, int group, bool accumulate) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
        wgmma<kN, 0, 0>(acc, operand(panel + group * 8192 + k * 32, 0, 1024),
                        operand(panel + k * 32, 0, 1024), accumulate || k > 0);
}

// Calls `run` with the number of columns up to the diagonal of a warpgroup's 64 rows, as a constant:
// wgmma is serialised where the branch is anywhere but around all of it.
template <int kM, typename Run>
__device__ __forceinline__ void up_to_diagonal(int group, Run run) {
    if constexpr (kM == 64) {
        run(Width<64>{});
    } else {
        if (group == 0) run(Width<64>{});
        else if (kM == 128 || group == 1) run(Width<128>{});
        else if constexpr (kM == 192) run(Width<192>{});
    }
}

// the accumulators as kN columns of float32 [kM, kM], row-major
template <int kM, int kN>
__device__ __forceinline__ void store_partial(const float* acc, float* target) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<float2*>(target + (row + 8 * h) * kM + column + 8 * j) =
                make_float2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
}

// ---- R = X X^T ------------------------------------------------------------------------------------

template <int kM>
__global__ void __launch_bounds__(2 * kM + 32)
    gram_kernel(const __grid_constant__ CUtensorMap x, float* partial, int n) {
    constexpr int kStages = kM == 192 ? 4 : 6;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ uint64_t full[kStages], empty[kStages];
    const int warp = threadIdx.x / 32, group = threadIdx.x / 128;
    const int begin = blockIdx.x * kChunkColumns, panels = (min(n - begin, kChunkColumns) + 63) / 64;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) barrier_init(&full[i], 1), barrier_init(&empty[i], kM / 16);
        fence_async_proxy();
    }
    __syncthreads();
    if (warp == kM / 16) {
        if (threadIdx.x % 32 != 0) return;
        for (int i = 0; i < panels; ++i) {
            const int stage = i % kStages;
            barrier_wait(&empty[stage], i / kStages % 2 ^ 1);
            barrier_expect_bytes(&full[stage], kPanelBytes<kM>);
            tensor_load(shared + stage * kPanelBytes<kM>, &x, &full[stage], begin + 64 * i, 0,
                        blockIdx.y);
        }
        return;
    }
    up_to_diagonal<kM>(group, [&](auto width) {
        constexpr int kN = decltype(width)::value;
        float acc[kN / 2];
        for (int i = 0; i < panels; ++i) {
            barrier_wait(&full[i % kStages], i / kStages % 2);
            wgmma_fence();
            add_gram<kN>(acc, shared_address(shared) + i % kStages * kPanelBytes<kM>, group, i > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (i > 0 && threadIdx.x % 32 == 0) barrier_arrive(&empty[(i - 1) % kStages]);
        }
        wgmma_wait<0>();
        store_partial<kM, kN>(
            acc, partial + (long(blockIdx.y) * gridDim.x + blockIdx.x) * kM * kM);
    });
}

// ---- from R to Q ----------------------------------------------------------------------------------

struct Segment {
    float a[kMaxSteps], b[kMaxSteps], c[kMaxSteps];
    int steps;
    float gram_scale;  // R is kept times this power of two
};

// A kM x kM matrix in shared memory: panels of 64 columns, swizzled
template <int kM>
struct Square {
    uint32_t base;

    __device__ __forceinline__ uint32_t at(int row, int column) const {
        return base + column / 64 * kPanelBytes<kM> + swizzled(row, column % 64 / 8) +
               column % 8 * 2;
    }

    // 64 rows, up to the diagonal, of this matrix times `other`; both are symmetric
    __device__ __forceinline__ void times(float* acc, Square other, int group) const {
        up_to_diagonal<kM>(group, [&](auto width) {
            constexpr int kN = decltype(width)::value;
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kM; k += 16) {
                const uint32_t offset = k / 64 * kPanelBytes<kM> + k % 64 * 2;
                wgmma<kN, 0, 0>(acc, operand(base + offset + group * 8192, 0, 1024),
                                operand(other.base + offset, 0, 1024), k > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
        });
    }

    // The blocks of 64 columns on and below the diagonal, and their mirror image: products of
    // commuting matrices are symmetric but for rounding, and kept so or errors grow.
    __device__ __forceinline__ void write_symmetric(const uint32_t (&packed)[kM / 8][2],
                                                    int group) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int block = lane / 8, in_block = lane % 8;
        for (int s = 0; s < group; ++s) {
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                uint32_t values[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) values[i] = select(packed, s, j + i / 2, i % 2);
                const int inner = warp * 16 + 8 * (block & 1), outer = 64 * s + 8 * (j + (block >> 1));
                store_blocks<false>(at(inner + in_block, outer), values[0], values[1], values[2],
                                    values[3]);
                store_blocks<true>(at(outer + in_block, inner), values[0], values[1], values[2],
                                   values[3]);
            }
        }
        // the warp's 16 rows of the block on the diagonal: 16 x 16 blocks left of it, then itself
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            if (j / 2 < warp % 4) {
                uint32_t values[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) values[i] = select(packed, group, j + i / 2, i % 2);
                const int inner = warp * 16 + 8 * (block & 1);
                const int outer = 64 * group + 8 * (j + (block >> 1));
                store_blocks<false>(at(inner + in_block, outer), values[0], values[1], values[2],
                                    values[3]);
                store_blocks<true>(at(outer + in_block, inner), values[0], values[1], values[2],
                                   values[3]);
            } else if (j / 2 == warp % 4) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int row = warp * 16 + lane / 4 + 8 * (i / 2 % 2);
                    const int column = 64 * group + 8 * (j + i / 4) + lane % 4 * 2 + i % 2;
                    if (row < column) continue;
                    const uint16_t value =
                        select(packed, group, j + i / 4, i / 2 % 2) >> (16 * (i % 2));
                    store_shared(at(row, column), value);
                    store_shared(at(column, row), value);
                }
            }
        }
    }

    // registers cannot be indexed by a variable: one of kM / 64 alternatives
    static __device__ __forceinline__ uint32_t select(const uint32_t (&packed)[kM / 8][2], int s,
                                                      int j, int h) {
        uint32_t value = packed[j][h];
        if (kM > 64 && s == 1) value = packed[(j + 8) % (kM / 8)][h];
        if (kM > 128 && s == 2) value = packed[(j + 16) % (kM / 8)][h];
        return value;
    }
};

// everything written to shared memory before it is visible to every thread's wgmma after it
__device__ __forceinline__ void publish() {
    fence_async_proxy();
    __syncthreads();
}

template <int kM>
__device__ __forceinline__ void pack(uint32_t (&packed)[kM / 8][2], const float* acc) {
#pragma unroll
    for (int i = 0; i < kM / 4; ++i)
        packed[i / 2][i % 2] = pack_halves(acc[2 * i], acc[2 * i + 1], false);
}

// The sum of `value` over the block, added in one order. Ends with a barrier.
template <int kThreads>
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[kThreads / 32];
#pragma unroll
    for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(~0u, value, i);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < kThreads / 32; ++i) sum += sums[i];
    return sum;
}

// R times `gram_scale` from its partial sums, up to the diagonal. Where R is that of the input
// (`margin` > 0) it is divided by the square of X's norm times `margin`, taken from its trace, and
// `scale` receives what does the same to X; at a restart X has that norm already.
template <int kM>
__device__ __forceinline__ void load_gram(uint32_t (&packed)[kM / 8][2], const float* partial,
                                          int chunks, int group, float margin, float gram_scale,
                                          float* scale) {
    float alpha = gram_scale;
    if (margin > 0.0f) {
        float diagonal = 0.0f;
        for (int i = 0; i < chunks && threadIdx.x < kM; ++i)
            diagonal += partial[i * kM * kM + threadIdx.x * (kM + 1)];
        // the smallest positive norm of a float16 matrix is 2^-24
        const float norm = fmaxf(sqrtf(block_sum<2 * kM>(diagonal)), 0x1p-24f) * margin;
        alpha = alpha / norm / norm;
        if (threadIdx.x == 0) *scale = 1.0f / norm;
    }
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    partial += row * kM + column;
#pragma unroll
    for (int s = 0; s < kM / 64; ++s) {
        if (s > group) continue;
        float2 sums[8][2];
        for (int i = 0; i < chunks; ++i) {
#pragma unroll
            for (int j = 0; j < 16; ++j) {  // 16 loads are in flight together
                const int at = i * kM * kM + 8 * (j % 2 * kM + 8 * s + j / 2);
                const float2 value = *reinterpret_cast<const float2*>(partial + at);
                float2& sum = sums[j / 2][j % 2];
                sum = i == 0 ? value : make_float2(sum.x + value.x, sum.y + value.y);
            }
        }
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float2 sum = sums[j / 2][j % 2];
            packed[8 * s + j / 2][j % 2] = pack_halves(alpha * sum.x, alpha * sum.y, false);
        }
    }
}

template <int kM>
__global__ void __launch_bounds__(2 * kM)
    chain_kernel(const float* partial, int chunks, float margin, float* scale,
                 const __grid_constant__ Segment segment, __half* result) {
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int kBytes = kM * kM * 2;
    const uint32_t base = shared_address(shared);
    const Square<kM> r{base}, z{base + kBytes}, q{base + 2 * kBytes};
    const int group = threadIdx.x / 128;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    float acc[kM / 2];
    uint32_t packed[kM / 8][2];

    load_gram<kM>(packed, partial + long(blockIdx.x) * chunks * kM * kM, chunks, group, margin,
                  segment.gram_scale, scale + blockIdx.x);
    r.write_symmetric(packed, group);
    publish();
    for (int i = 0; i < segment.steps; ++i) {
        const bool is_last = i + 1 == segment.steps;
        const float inverse = 1.0f / segment.gram_scale;
        const float beta = segment.b[i] * inverse, gamma = segment.c[i] * inverse * inverse;
        r.times(acc, r, group);
#pragma unroll
        for (int j = 0; j < kM / 8; ++j) {
            if (j / 8 > group) continue;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t bits = load_shared(r.at(row + 8 * h, column + 8 * j));
                const float2 value = __half22float2(reinterpret_cast<const __half2&>(bits));
                float low = fmaf(beta, value.x, gamma * acc[4 * j + 2 * h]);
                float high = fmaf(beta, value.y, gamma * acc[4 * j + 2 * h + 1]);
                if (row + 8 * h == column + 8 * j) low += segment.a[i];
                if (row + 8 * h == column + 8 * j + 1) high += segment.a[i];
                packed[j][h] = pack_halves(low, high, false);
            }
        }
        z.write_symmetric(packed, group);
        if (i == 0) q.write_symmetric(packed, group);
        publish();
        if (i > 0) {
            q.times(acc, z, group);
            pack<kM>(packed, acc);
            __syncthreads();
            q.write_symmetric(packed, group);
        }
        if (!is_last) {
            r.times(acc, z, group);
            pack<kM>(packed, acc);
            __syncthreads();
            r.write_symmetric(packed, group);
            publish();
            z.times(acc, r, group);
            pack<kM>(packed, acc);
            __syncthreads();
            r.write_symmetric(packed, group);
        }
        publish();
    }
    uint4* target = reinterpret_cast<uint4*>(result + long(blockIdx.x) * kM * kM);
    for (int i = threadIdx.x; i < kM * kM / 8; i += blockDim.x)
        target[i] = load_shared_chunk(q.at(i / (kM / 8), i % (kM / 8) * 8));
}

// ---- X <- Q X -------------------------------------------------------------------------------------

struct ApplyArguments {
    CUtensorMap q, x, out;
    const float* scale;  // multiplies gain, matrix by matrix; may be null
    float* partial;      // of the next R; null after the last step
    float gain;
    int n;
    int is_transposed, is_bfloat16;  // of the result: stored as [n, m]
};

template <int kM>
__global__ void __launch_bounds__(2 * kM, kM == 192 ? 1 : 2)
    apply_kernel(const __grid_constant__ ApplyArguments x) {
    constexpr int kStages = kApplyStages;
    constexpr int kPanel = kPanelBytes<kM>;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ uint64_t full[kStages], q_full;
    unsigned char* stages = shared + kM / 64 * kPanel;  // after Q
    unsigned char* staging = stages + kStages * kPanel;
    const int warp = threadIdx.x / 32, group = threadIdx.x / 128, lane = threadIdx.x % 32;
    const int begin = blockIdx.x * kChunkColumns;
    const int panels = (min(x.n - begin, kChunkColumns) + 63) / 64;
    auto load = [&](int i) {
        uint64_t* barrier = &full[i % kStages];
        barrier_expect_bytes(barrier, kPanel);
        tensor_load(stages + i % kStages * kPanel, &x.x, barrier, begin + 64 * i, 0, blockIdx.y);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) barrier_init(&full[i], 1);
        barrier_init(&q_full, 1);
        fence_async_proxy();
        barrier_expect_bytes(&q_full, kM * kM * 2);
        for (int i = 0; i < kM / 64; ++i)
            tensor_load(shared + i * kPanel, &x.q, &q_full, 64 * i, 0, blockIdx.y);
        for (int i = 0; i < min(kStages, panels); ++i) load(i);
    }
    __syncthreads();
    const float alpha = x.scale == nullptr ? x.gain : x.gain * x.scale[blockIdx.y];
    const uint32_t q = shared_address(shared);
    float sums[kM / 2];  // of the next R
    barrier_wait(&q_full, 0);
    for (int i = 0; i < panels; ++i) {
        const int stage = i % kStages;
        barrier_wait(&full[stage], i / kStages % 2);
        const uint32_t panel = shared_address(stages) + stage * kPanel;
        float acc[32];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kM; k += 16)
            wgmma<64, 0, 1>(
                acc, operand(q + k / 64 * kPanel + group * 8192 + k % 64 * 2, 0, 1024),
                operand(panel + k * 128, 0, 1024), k > 0);
        wgmma_commit();
        wgmma_wait<0>();  // also of the sums of the panel before: its staging is free
        uint32_t packed[8][2];
#pragma unroll
        for (int j = 0; j < 16; ++j)
            packed[j / 2][j % 2] =
                pack_halves(alpha * acc[2 * j], alpha * acc[2 * j + 1], x.is_bfloat16);
        const uint32_t target = shared_address(staging) + i % 2 * kPanel;
        const int block = lane / 8, in_block = lane % 8;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const int inner = warp * 16 + 8 * (block & 1) + in_block, outer = j + (block >> 1);
            if (x.is_transposed)
                store_blocks<true>(target + group * 8192 +
                                       swizzled(8 * outer + in_block, warp % 4 * 2 + (block & 1)),
                                   packed[j][0], packed[j][1], packed[j + 1][0], packed[j + 1][1]);
            else
                store_blocks<false>(target + swizzled(inner, outer), packed[j][0], packed[j][1],
                                    packed[j + 1][0], packed[j + 1][1]);
        }
        fence_async_proxy();
        if (threadIdx.x == 0) tensor_store_wait_read<0>();  // of the other buffer, written next
        __syncthreads();
        if (threadIdx.x == 0) {
            if (i + kStages < panels) load(i + kStages);  // every warpgroup is done with the stage
            const int column = begin + 64 * i;
            if (x.is_transposed)
                for (int j = 0; j < kM / 64; ++j)
                    tensor_store(&x.out, staging + i % 2 * kPanel + j * 8192, 64 * j, column,
                                 blockIdx.y);
            else
                tensor_store(&x.out, staging + i % 2 * kPanel, column, 0, blockIdx.y);
            tensor_store_commit();
        }
        if (x.partial != nullptr) {
            wgmma_fence();
            add_gram<kM>(sums, target, group, i > 0);
            wgmma_commit();
        }
    }
    wgmma_wait<0>();
    if (x.partial != nullptr)
        store_partial<kM, kM>(sums,
                          x.partial + (long(blockIdx.y) * gridDim.x + blockIdx.x) * kM * kM);
    if (threadIdx.x == 0) tensor_store_wait_read<0>();
}

template <typename Kernel>
int allow_shared(Kernel* kernel, int bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace

extern "C" {

struct SmallArguments {
    const void* x;        // float16 [batch, m, n], unit stride along n
    void *next, *out;     // next: as x, contiguous, for X after a restart; out: the result
    float* scale;         // float32 [batch], written: what brings x to its starting norm
    void *partial, *q;    // float32 [batch, chunks, kM, kM], float16 [batch, kM, kM]
    long batch, m, n, x_batch, x_row;
    float gain, gram_scale, margin;  // the starting norm is 1 / margin
    int out_is_transposed, out_is_bfloat16;
    int num_segments, segment_steps[kMaxSteps];  // a restart between segments
    float triples[3 * kMaxSteps];                // a, b, c of each step
};

int megacomposer_small_chunk_columns() { return kChunkColumns; }

}  // extern "C"

namespace {

template <int kM>
int run_small(const SmallArguments& x, cudaStream_t stream) {
    constexpr int kPanel = kPanelBytes<kM>;
    constexpr int kGramBytes = (kM == 192 ? 4 : 6) * kPanel, kChainBytes = 3 * kM * kM * 2;
    constexpr int kApplyBytes = (kM / 64 + kApplyStages + 2) * kPanel;
    int error = allow_shared(gram_kernel<kM>, kGramBytes);
    if (error == 0) error = allow_shared(chain_kernel<kM>, kChainBytes);
    if (error == 0) error = allow_shared(apply_kernel<kM>, kApplyBytes);
    if (error != 0) return error;
    const int chunks = int((x.n + kChunkColumns - 1) / kChunkColumns);
    const dim3 grid(chunks, unsigned(x.batch));
    auto* partial = static_cast<float*>(x.partial);
    CUtensorMap input, next{}, q, out;
    error = encode(&input, x.x, x.batch, x.m, x.n, x.x_batch, x.x_row, kM);
    if (error == 0) error = encode(&q, x.q, x.batch, kM, kM, kM * kM, kM, kM);
    if (error == 0 && x.num_segments > 1) error = encode(&next, x.next, x.batch, x.m, x.n, x.m * x.n, x.n, kM);
    if (error == 0)
        error = x.out_is_transposed
                    ? encode(&out, x.out, x.batch, x.n, x.m, x.m * x.n, x.m, 64)
                    : encode(&out, x.out, x.batch, x.m, x.n, x.m * x.n, x.n, kM);
    if (error != 0) return error;
    gram_kernel<kM><<<grid, 2 * kM + 32, kGramBytes, stream>>>(input, partial, int(x.n));
    const float* triple = x.triples;
    for (int number = 0; number < x.num_segments; ++number) {
        const bool is_first = number == 0, is_last = number + 1 == x.num_segments;
        Segment segment{};
        segment.steps = x.segment_steps[number];
        segment.gram_scale = x.gram_scale;
        for (int i = 0; i < segment.steps; ++i, triple += 3)
            segment.a[i] = triple[0], segment.b[i] = triple[1], segment.c[i] = triple[2];
        chain_kernel<kM><<<unsigned(x.batch), 2 * kM, kChainBytes, stream>>>(
            partial, chunks, is_first ? x.margin : 0.0f, x.scale, segment, static_cast<__half*>(x.q));
        ApplyArguments apply{};
        apply.q = q;
        apply.x = is_first ? input : next;
        apply.out = is_last ? out : next;
        apply.scale = is_first ? x.scale : nullptr;
        apply.partial = is_last ? nullptr : partial;
        apply.gain = is_last ? x.gain : 1.0f;
        apply.n = int(x.n);
        apply.is_transposed = is_last && x.out_is_transposed;
        apply.is_bfloat16 = is_last && x.out_is_bfloat16;
        apply_kernel<kM><<<grid, 2 * kM, kApplyBytes, stream>>>(apply);
    }
    return cudaGetLastError();
}

}  // namespace

extern "C" {

// The whole iteration on `stream`. m <= 192; rows of x and out start at multiples of 16 bytes.
// Returns 0, a cudaError_t or a CUresult, or -1 without a driver.
int megacomposer_run_small(const SmallArguments* x, void* stream) {
    if (encode_tiled() == nullptr) return -1;
    auto* on = static_cast<cudaStream_t>(stream);
    if (x->m <= 64) return run_small<64>(*x, on);
    if (x->m <= 128) return run_small<128>(*x, on);
    return run_small<192>(*x, on);
}
}
