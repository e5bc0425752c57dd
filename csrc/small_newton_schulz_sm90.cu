// The gram form of Newton-Schulz for matrices of at most 192 rows (attention heads), on Hopper.
//
// A matrix of m <= 192 rows is too small for the tiles of batched_products_sm90.cu, but its m x m
// matrices fit in shared memory. Three kernels:
//
//     gram_kernel    R = X X^T: partial sums over chunks of columns
//     chain_kernel   from R to Q, the product of the polynomials of a segment of steps, in
//                    small_newton_schulz_chain.cuh
//     apply_kernel   X <- Q X, and at a restart the partial sums of the new R on the way
//
// Rows are padded with zeros to kM = 64, 128 or 192. Chunks depend on n alone and their sums are
// added in order, so that the bits of a matrix do not depend on the batch.
// C ABI at the end of the file; kernels/newton_schulz_small.py calls it.

#include <cuda_runtime.h>

#include "small_newton_schulz_chain.cuh"
#include "tensor_map.cuh"

namespace {

using namespace small_newton_schulz;

constexpr int kChunkColumns = 1792;
constexpr int kApplyStages = 3;  // two blocks a multiprocessor for m <= 128

// acc += kN columns of P P^T, P a panel (kM x 64) in shared memory, for the warpgroup's 64 rows
template <int kN>
__device__ __forceinline__ void add_gram(float* acc, uint32_t panel, int group, bool accumulate) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
        wgmma<kN, 0, 0>(acc, operand(panel + group * 8192 + k * 32, 0, 1024),
                        operand(panel + k * 32, 0, 1024), accumulate || k > 0);
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
    if (const int error = prepare_to_encode()) return error;
    auto* on = static_cast<cudaStream_t>(stream);
    if (x->m <= 64) return run_small<64>(*x, on);
    if (x->m <= 128) return run_small<128>(*x, on);
    return run_small<192>(*x, on);
}
}
