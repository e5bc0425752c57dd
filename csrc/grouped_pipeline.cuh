// What the kernels over rows sorted by expert share: the ring of stages, the product of what is in it,
// the way of a result to memory, and where the rows of a group end.
#pragma once

#include "sm90.cuh"

namespace grouped {

using namespace sm90;

constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
constexpr int kStages = 4;
constexpr int kBlockBytes = 64 * 64 * 2;  // a 64 x 64 block, 64 elements (128 bytes) a row
constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2;
constexpr int kThreads = 384, kProducers = 128;  // a producer warpgroup and two consumers
constexpr int kConsumers = 2, kConsumerWarps = 4 * kConsumers;
constexpr int kMaxExperts = 1024;

struct Ring {
    alignas(1024) unsigned char a[kStages][kBytesA];
    alignas(1024) unsigned char b[kStages][kBytesB];
    alignas(1024) unsigned char staging[kConsumerWarps][16 * 128];
    uint64_t full[kStages], empty[kStages];
};

// A place in the ring of stages.
struct Position {
    int stage = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

// One thread. `producers` arrive when a stage is full, besides the bytes of bulk copies.
template <int kCluster>
__device__ __forceinline__ void init_barriers(Ring& ring, int producers) {
    for (int i = 0; i < kStages; ++i) {
        barrier_init(&ring.full[i], producers);
        barrier_init(&ring.empty[i], kConsumerWarps * kCluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// every warp of both consumers says so, to each block that fills this stage
template <int kCluster>
__device__ __forceinline__ void release(Ring& ring, int stage) {
    const int lane = threadIdx.x % 32;
    if (lane < kCluster) barrier_arrive_at(&ring.empty[stage], lane);
}

// ---- multiplying ----------------------------------------------------------------------------------

template <int kCluster>
__device__ __forceinline__ void skip(Ring& ring, Position& at, int stages) {
    for (int i = 0; i < stages; ++i) {
        barrier_wait(&ring.full[at.stage], at.phase);
        release<kCluster>(ring, at.stage);
        at.advance();
    }
}

// acc = a b of a warpgroup's 64 rows and all columns, over k_tiles > 0 stages. Memory rows of a, and
// of b, run along k or (not kRows) along the result.
template <bool kRowsA, bool kRowsB, int kCluster>
__device__ __forceinline__ void multiply(float (&acc)[128], Ring& ring, int group, int k_tiles,
                                         bool gathered, Position& at) {
    int previous = -1;
    for (int i = 0; i < k_tiles; ++i) {
        barrier_wait(&ring.full[at.stage], at.phase);
        if (gathered) fence_async_proxy();  // the rows came by ordinary copies, wgmma is not
        const uint32_t a = shared_address(ring.a[at.stage]) + group * kBlockBytes;
        const uint32_t b = shared_address(ring.b[at.stage]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileK / 16; ++k) {
            // 16 elements on: 32 bytes inside the swizzle, or 16 rows of 128 bytes
            const uint64_t da = operand(a + k * (kRowsA ? 32 : 2048), kBlockBytes, 1024);
            const uint64_t db = operand(b + k * (kRowsB ? 32 : 2048), kBlockBytes, 1024);
            wgmma_n256_bf16<!kRowsA, !kRowsB>(acc, da, db, i > 0 || k > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (previous >= 0) release<kCluster>(ring, previous);
        previous = at.stage;
        at.advance();
    }
    wgmma_wait<0>();
    release<kCluster>(ring, previous);
}

// ---- to memory ------------------------------------------------------------------------------------

// 16 x 64 results of a warp as its threads have them: [j][h] is row 8 h + lane / 4 and columns
// 8 j + 2 (lane % 4) and the next.
using Packed = uint32_t[8][2];

// One 16-byte store: the compiler makes four of some assignments.
__device__ __forceinline__ void store_chunk(__nv_bfloat16* target, const uint4& value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

// Where a warp's 16 rows go. Each block of 64 columns passes through shared memory, for stores of
// whole lines, which also leave out what is not of the tile.
struct Writer {
    uint32_t staging;
    int rows;  // of the 16, those that are stored; may be negative

    __device__ __forceinline__ void write(const Packed& packed, __nv_bfloat16* target, long stride,
                                          int columns) const {
        const int lane = threadIdx.x % 32, block = lane / 8, in_block = lane % 8;
        __syncwarp();  // every lane has read the block before
#pragma unroll
        for (int j = 0; j < 8; j += 2)
            store_blocks<false>(staging + swizzled(8 * (block & 1) + in_block, j + (block >> 1)),
                                packed[j][0], packed[j][1], packed[j + 1][0], packed[j + 1][1]);
        __syncwarp();
        store(target, stride, columns);
    }

    // 16 rows of what is in shared memory
    __device__ __forceinline__ void store(__nv_bfloat16* target, long stride, int columns) const {
        const int lane = threadIdx.x % 32, in_block = lane % 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 4 * i + lane / 8;
            const uint4 value = load_shared_chunk(staging + swizzled(row, in_block));
            if (row < rows && 8 * in_block < columns)
                store_chunk(target + row * stride + 8 * in_block, value);
        }
    }
};

__device__ __forceinline__ void pack(Packed& packed, const float* acc) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
        packed[i / 2][i % 2] = pack_halves(acc[2 * i], acc[2 * i + 1], true);
}

// ---- where things are -----------------------------------------------------------------------------

// One warp, of whose groups the first begins at `row`: where the rows of `group`, the lane's, end.
// Counts that add up to more than the rows there are lose what is over.
__device__ __forceinline__ int group_end(const long* counts, int groups, int rows, int group,
                                         int row) {
    const int lane = threadIdx.x % 32;
    const long count = group < groups ? counts[group] : 0;
    int end = int(max(0l, min(count, long(rows))));
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const int below = __shfl_up_sync(~0u, end, i);
        if (lane >= i) end = int(min(long(end) + below, long(rows)));
    }
    return int(min(long(end) + row, long(rows)));
}

// Tile `index` of row_tiles x columns, in groups of kGroup row tiles, column by column.
template <int kGroup>
__device__ __forceinline__ void find_place(int index, int row_tiles, int columns, int& row_tile,
                                           int& column) {
    const int group = index / (kGroup * columns);
    const int rest = index - group * kGroup * columns;
    const int height = min(kGroup, row_tiles - group * kGroup);
    row_tile = group * kGroup + rest % height;
    column = rest / height;
}

}  // namespace grouped
