// What the kernel of grouped_products_sm90.cu computes and shares, and which tiles a block has.
#pragma once

#include "grouped_pipeline.cuh"

namespace grouped {

constexpr int kGroupRows = 2048;  // rows whose tiles are computed column by column

enum Epilogue { kPlain, kSwiglu, kSwigluBackward };

struct Problem {
    CUtensorMap a, b, gate, up;  // a without an index; gate and up for the backward epilogue
    const __nv_bfloat16* a_rows;
    const long *source, *rows_per_expert;
    const float* prob;
    float* dprob;
    __nv_bfloat16 *out, *activation;
    long a_stride;
    int rows, experts, n, k, columns;  // n: of a result, I for those of 2I columns; columns of tiles
};

struct Shared : Ring {
    int first_row[kMaxExperts + 1], first_tile[kMaxExperts + 1];
};

// ---- which tiles there are ------------------------------------------------------------------------

__device__ __forceinline__ int inclusive_sum(int value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const int below = __shfl_up_sync(~0u, value, i);
        if (lane >= i) value += below;
    }
    return value;
}

// One warp: the first row and tile of every expert.
template <int kCluster>
__device__ void find_experts(const Problem& p, Shared& shared) {
    const int lane = threadIdx.x % 32;
    int row = 0, tile = 0;
    for (int first = 0; first < p.experts; first += 32) {
        const int e = first + lane;
        const int end = group_end(p.rows_per_expert, p.experts, p.rows, e, row);
        const int before = __shfl_up_sync(~0u, end, 1), begin = lane == 0 ? row : before;
        const int height = kCluster * kTileM;
        const int tiles = tile + inclusive_sum((end - begin + height - 1) / height * p.columns);
        if (e < p.experts) shared.first_row[e + 1] = end, shared.first_tile[e + 1] = tiles;
        row = __shfl_sync(~0u, end, 31);
        tile = __shfl_sync(~0u, tiles, 31);
    }
    if (lane == 0) shared.first_row[0] = shared.first_tile[0] = 0;
}

struct Tile {
    int expert, row, end, column;  // rows row to end - 1, fewer than the tile's or more
};

// The tiles of one cluster, in order: expert by expert, in groups of rows, column by column.
template <int kCluster>
struct Schedule {
    const Shared& shared;
    int columns, num_tiles, next, expert = 0;

    __device__ __forceinline__ Schedule(const Problem& p, const Shared& shared)
        : shared(shared), columns(p.columns), num_tiles(shared.first_tile[p.experts]),
          next(blockIdx.x / kCluster) {}

    __device__ __forceinline__ bool find(Tile& tile) {
        if (next >= num_tiles) return false;
        while (next >= shared.first_tile[expert + 1]) ++expert;
        constexpr int kGroup = kGroupRows / (kCluster * kTileM);
        const int first = shared.first_tile[expert];
        const int row_tiles = (shared.first_tile[expert + 1] - first) / columns;
        int row_tile;
        find_place<kGroup>(next - first, row_tiles, columns, row_tile, tile.column);
        tile.expert = expert;
        tile.row = shared.first_row[expert] + row_tile * kCluster * kTileM;
        tile.end = shared.first_row[expert + 1];
        next += gridDim.x / kCluster;
        return true;
    }
};

// blocks of 64 columns that a tile of the backward epilogue has
__device__ __forceinline__ int column_blocks(const Problem& p, int column) {
    return min(kTileN / 64, (p.n - column * kTileN + 63) / 64);
}

}  // namespace grouped
