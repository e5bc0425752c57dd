// From R = X X^T of a matrix of at most 192 rows to Q, the product of the polynomials of a segment of
// steps: one block a matrix, nothing leaves shared memory. Part of small_newton_schulz_sm90.cu.
#pragma once

#include <cuda_runtime.h>
#include <type_traits>

#include "sm90.cuh"

namespace small_newton_schulz {

using namespace sm90;

constexpr int kMaxSteps = 16;

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

}  // namespace small_newton_schulz
