// What becomes of the accumulators in grouped_products_sm90.cu.
#pragma once

#include "grouped_tiles.cuh"

namespace grouped {

__device__ __forceinline__ float sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
}

__device__ __forceinline__ void store_plain(const float (&acc)[128], const Problem& p,
                                            const Writer& writer, long row, int column) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const int c = column * kTileN + 64 * s;
        if (c >= p.n) continue;
        Packed packed;
        pack(packed, acc + 32 * s);
        writer.write(packed, p.out + row * p.n + c, p.n, p.n - c);
    }
}

// The first half of the columns is the gate. The activation is of the unrounded gate and up.
__device__ __forceinline__ void store_swiglu(const float (&acc)[128], const Problem& p,
                                             const Writer& writer, long row, int column,
                                             const float (&prob)[2]) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        const int c = column * (kTileN / 2) + 64 * s;
        if (c >= p.n) continue;
        const float *gate = acc + 32 * s, *up = acc + 64 + 32 * s;
        Packed packed;
        pack(packed, gate);
        writer.write(packed, p.out + row * 2 * p.n + c, 2 * p.n, p.n - c);
        pack(packed, up);
        writer.write(packed, p.out + row * 2 * p.n + p.n + c, 2 * p.n, p.n - c);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float value[2];
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                const float g = gate[2 * i + v];
                value[v] = g * sigmoid(g) * up[2 * i + v] * prob[i % 2];
            }
            packed[i / 2][i % 2] = pack_halves(value[0], value[1], true);
        }
        writer.write(packed, p.activation + row * p.n + c, p.n, p.n - c);
    }
}

__device__ __forceinline__ float2 unpack(uint32_t bits) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits));
}

// From d activation (acc) and the saved gate and up, in shared memory after the last stage:
//     activation = prob silu up     d prob += d activation silu up
//     d up = d activation prob silu     d gate = d activation prob up silu'
// with silu' = sigmoid + silu (1 - sigmoid).
template <int kCluster>
__device__ __forceinline__ void store_swiglu_backward(const float (&acc)[128], const Problem& p,
                                                      Shared& shared, const Writer& writer, long row,
                                                      int column, const float (&prob)[2],
                                                      Position& at) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128 - 1;
    const int r0 = threadIdx.x % 128 / 32 * 16 + lane / 4, blocks = column_blocks(p, column);
    float dprob[2] = {0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        if (s >= blocks) continue;
        Packed dgate, dup, activation;
        barrier_wait(&shared.full[at.stage], at.phase);
        const uint32_t saved = shared_address(shared.b[at.stage]) + group * kBlockBytes;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int j = i / 2, h = i % 2;
            const uint32_t bits = saved + swizzled(r0 + 8 * h, j) + lane % 4 * 4;
            const float2 gate = unpack(load_shared(bits));
            const float2 up = unpack(load_shared(bits + kBytesB / 2));
            float value[3][2];
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                const float g = v == 0 ? gate.x : gate.y, u = v == 0 ? up.x : up.y;
                const float d = acc[32 * s + 2 * i + v], scaled = d * prob[h];
                const float one = sigmoid(g), silu = g * one, product = silu * u;
                dprob[h] = fmaf(d, product, dprob[h]);
                value[0][v] = scaled * u * fmaf(silu, 1.0f - one, one);
                value[1][v] = scaled * silu;
                value[2][v] = product * prob[h];
            }
            dgate[j][h] = pack_halves(value[0][0], value[0][1], true);
            dup[j][h] = pack_halves(value[1][0], value[1][1], true);
            activation[j][h] = pack_halves(value[2][0], value[2][1], true);
        }
        __syncwarp();  // every lane has read its part
        release<kCluster>(shared, at.stage);
        at.advance();
        const int c = column * kTileN + 64 * s;
        writer.write(dgate, p.out + row * 2 * p.n + c, 2 * p.n, p.n - c);
        writer.write(dup, p.out + row * 2 * p.n + p.n + c, 2 * p.n, p.n - c);
        writer.write(activation, p.activation + row * p.n + c, p.n, p.n - c);
    }
    if (p.dprob == nullptr) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        dprob[h] += __shfl_xor_sync(~0u, dprob[h], 1);
        dprob[h] += __shfl_xor_sync(~0u, dprob[h], 2);
        const int r = lane / 4 + 8 * h;
        if (lane % 4 == 0 && r < writer.rows) p.dprob[(row + r) * p.columns + column] = dprob[h];
    }
}

}  // namespace grouped
