// Batches of half-precision matrix products for Newton-Schulz on Hopper, several shapes a launch:
//
//     out = alpha * scale[matrix] * (a @ b) + beta * c + diagonal * I
//
// A persistent, warp-specialised kernel. Two blocks form a cluster and compute 256 x 256 of a
// result: each has 128 rows and all 256 columns, and each loads half of the operand b for both. In a
// block one warp issues bulk tensor copies into a ring of stages and two warpgroups of 64 rows each
// multiply. A symmetric result is computed on and below the diagonal only; what lies above it is
// either stored too, transposed, or (a "lower" matrix) never stored: an operand's block above the
// diagonal is then read as the transpose of the one below, which wgmma takes as it is.
//
// The order of every sum is fixed by the shapes of the product alone. C ABI at the end of the file;
// kernels/batched_products_sm90.py calls it.

#include <cuda_runtime.h>

#include "sm90.cuh"
#include "tensor_map.cuh"

namespace {

using namespace sm90;

constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
constexpr int kStages = 4;
constexpr int kBlockBytes = 64 * 64 * 2;  // a 64 x 64 block, 64 elements (128 bytes) a row
constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2;
constexpr int kTilesPerBlock = kTileN / kTileK;  // along k, of a block of a lower matrix
constexpr int kThreads = 384;  // a producer warpgroup and two consumers
constexpr int kConsumers = 2, kCluster = 2;
constexpr int kMaxProducts = 16;

struct Product {
    CUtensorMap a, b, c, out;
    const float* scale;
    float alpha, beta, diagonal;
    int m, n, k;
    int row_pairs, columns;  // tiles: pairs of 128 rows, 256 columns
    int tiles_per_matrix, first_tile;
    int is_symmetric, is_bfloat16;
    bool a_rows, b_rows;             // memory rows of a run along k, those of b along k
    bool a_lower, b_lower, out_lower;  // 256 x 256 blocks above the diagonal are not there
};

struct Products {
    Product items[kMaxProducts];
    int count, num_tiles;
};

struct Shared {
    alignas(1024) unsigned char a[kStages][kBytesA];
    alignas(1024) unsigned char b[kStages][kBytesB];
    alignas(1024) unsigned char staging[kConsumers][kBlockBytes];
    uint64_t full[kStages], empty[kStages];
};

struct Tile {
    const Product* product;
    int batch, row_pair, column;
};

__device__ __forceinline__ Tile find_tile(const Products& products, int index) {
    int i = 0;
    while (i + 1 < products.count && index >= products.items[i + 1].first_tile) ++i;
    const Product& p = products.items[i];
    const int local = index - p.first_tile;
    const int batch = local / p.tiles_per_matrix;
    const int rest = local - batch * p.tiles_per_matrix;
    if (!p.is_symmetric) {
        return {&p, batch, rest % p.row_pairs, rest / p.row_pairs};
    }
    int row = int((sqrtf(8.0f * rest + 1.0f) - 1.0f) * 0.5f);
    while (row * (row + 1) / 2 > rest) --row;
    while ((row + 1) * (row + 2) / 2 <= rest) ++row;
    return {&p, batch, row, rest - row * (row + 1) / 2};
}

// The first row of group `group` of block `rank`, in rows of 64 from the tile's first. Tiles on the
// diagonal of a symmetric result need 1, 2, 3 and 4 of its 64-column blocks: 5 for each block.
__device__ __forceinline__ int block_row(bool on_diagonal, int rank, int group) {
    if (on_diagonal) return group == 0 ? rank : 3 - rank;
    return 2 * rank + group;
}

__device__ __forceinline__ bool is_on_diagonal(const Tile& tile) {
    return tile.product->is_symmetric && tile.row_pair == tile.column;
}

// How many k tiles, from the first, are read from memory rows that run along k.
__device__ __forceinline__ int tiles_along_k(bool lower, bool rows, int block, int k_tiles) {
    if (lower) return min((block + 1) * kTilesPerBlock, k_tiles);
    return rows ? k_tiles : 0;
}

__device__ void produce(const Products& products, Shared& shared, int rank) {
    int stage = 0, phase = 0;
    for (int t = blockIdx.x / kCluster; t < products.num_tiles; t += gridDim.x / kCluster) {
        const Tile tile = find_tile(products, t);
        const Product& p = *tile.product;
        const bool on_diagonal = is_on_diagonal(tile);
        const int k_tiles = (p.k + kTileK - 1) / kTileK, n = tile.column * kTileN;
        const int a_tiles = tiles_along_k(p.a_lower, p.a_rows, tile.row_pair, k_tiles);
        const int b_tiles = tiles_along_k(p.b_lower, p.b_rows, tile.column, k_tiles);
        int m[kConsumers];
        for (int i = 0; i < kConsumers; ++i)
            m[i] = tile.row_pair * kCluster * kTileM + 64 * block_row(on_diagonal, rank, i);
        for (int i = 0; i < k_tiles; ++i) {
            const int k = i * kTileK;
            barrier_wait(&shared.empty[stage], phase ^ 1);
            uint64_t* full = &shared.full[stage];
            barrier_expect_bytes(full, kBytesA + kBytesB);
            for (int j = 0; j < kConsumers; ++j) {
                unsigned char* a = shared.a[stage] + j * kBlockBytes;
                if (i < a_tiles) tensor_load(a, &p.a, full, k, m[j], tile.batch);
                else tensor_load(a, &p.a, full, m[j], k, tile.batch);
            }
            for (int j = 2 * rank; j < 2 * rank + 2; ++j) {
                unsigned char* b = shared.b[stage] + j * kBlockBytes;
                if (i < b_tiles) tensor_load_multicast(b, &p.b, full, 3, k, n + 64 * j, tile.batch);
                else tensor_load_multicast(b, &p.b, full, 3, n + 64 * j, k, tile.batch);
            }
            if (++stage == kStages) stage = 0, phase ^= 1;
        }
        if (p.beta == 0.0f) continue;
        for (int half = 0; half < 2; ++half) {  // 128 columns of c a stage, in place of b
            barrier_wait(&shared.empty[stage], phase ^ 1);
            barrier_expect_bytes(&shared.full[stage], kBytesB);
            for (int i = 0; i < 4; ++i)
                tensor_load(shared.b[stage] + i * kBlockBytes, &p.c, &shared.full[stage],
                            n + 128 * half + 64 * (i / 2), m[i % 2], tile.batch);
            if (++stage == kStages) stage = 0, phase ^= 1;
        }
    }
}

__device__ __forceinline__ void release(Shared& shared, int stage) {
    const int lane = threadIdx.x % 32;
    if (lane < kCluster) barrier_arrive_at(&shared.empty[stage], lane);
}

// acc (+)= a b over k tiles `first` to `end`, of 64 kBlocks columns
template <bool kRowsA, bool kRowsB, int kBlocks>
__device__ __forceinline__ void multiply(float (&acc)[128], Shared& shared, int group, int first,
                                         int end, int& stage, int& phase) {
    int previous = -1;
    for (int i = first; i < end; ++i) {
        barrier_wait(&shared.full[stage], phase);
        const uint32_t a = shared_address(shared.a[stage]) + group * kBlockBytes;
        const uint32_t b = shared_address(shared.b[stage]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileK / 16; ++k) {
            // 16 elements on: 32 bytes inside the swizzle, or 16 rows of 128 bytes
            const uint64_t da = operand(a + k * (kRowsA ? 32 : 2048), kBlockBytes, 1024);
            const uint64_t db = operand(b + k * (kRowsB ? 32 : 2048), kBlockBytes, 1024);
            const int accumulate = i > 0 || k > 0;
            if constexpr (kBlocks == 1) wgmma_n64<!kRowsA, !kRowsB>(acc, da, db, accumulate);
            if constexpr (kBlocks == 2) wgmma_n128<!kRowsA, !kRowsB>(acc, da, db, accumulate);
            if constexpr (kBlocks == 3) wgmma_n192<!kRowsA, !kRowsB>(acc, da, db, accumulate);
            if constexpr (kBlocks == 4) wgmma_n256<!kRowsA, !kRowsB>(acc, da, db, accumulate);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (previous >= 0) release(shared, previous);
        previous = stage;
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    release(shared, previous);
}

// On a tile of the diagonal both operands change their direction at the same k.
template <bool kRows>
__device__ __forceinline__ void multiply_diagonal(float (&acc)[128], Shared& shared, int group,
                                                  int blocks, int first, int end, int& stage,
                                                  int& phase) {
    if (first >= end) return;
    if (blocks == 1) multiply<kRows, kRows, 1>(acc, shared, group, first, end, stage, phase);
    else if (blocks == 2) multiply<kRows, kRows, 2>(acc, shared, group, first, end, stage, phase);
    else if (blocks == 3) multiply<kRows, kRows, 3>(acc, shared, group, first, end, stage, phase);
    else multiply<kRows, kRows, 4>(acc, shared, group, first, end, stage, phase);
}

// alpha * acc + beta * c + diagonal * I of a 64 x 64 block, rounded and packed as stmatrix wants it.
// `c` is the address of its block of c in shared memory. Never writes the accumulators: that would
// serialise the next tile's wgmma.
__device__ __forceinline__ void finish_block(uint32_t (&packed)[8][2], const float* acc,
                                             const Product& p, float alpha, uint32_t c,
                                             bool on_diagonal) {
    const int lane = threadIdx.x % 32, r0 = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float low = alpha * acc[4 * j + 2 * h], high = alpha * acc[4 * j + 2 * h + 1];
            if (p.beta != 0.0f) {
                const uint32_t bits = load_shared(c + swizzled(r0 + 8 * h, j) + lane % 4 * 4);
                const float2 value = __half22float2(reinterpret_cast<const __half2&>(bits));
                low = fmaf(p.beta, value.x, low);
                high = fmaf(p.beta, value.y, high);
            }
            if (on_diagonal) {
                const int row = r0 + 8 * h, column = lane % 4 * 2 + 8 * j;
                if (row == column) low += p.diagonal;
                if (row == column + 1) high += p.diagonal;
            }
            packed[j][h] = pack_halves(low, high, p.is_bfloat16);
        }
    }
}

// One warpgroup's stores of 64 x 64 blocks, one after the other through one buffer.
struct Storer {
    unsigned char* staging;
    int barrier, thread;

    __device__ __forceinline__ uint32_t begin() const {
        if (thread == 0) tensor_store_wait_read<0>();  // the block before has left the buffer
        named_barrier(barrier, 128);
        return shared_address(staging);
    }

    __device__ __forceinline__ void end(const Product& p, int batch, int row, int column) const {
        fence_async_proxy();
        named_barrier(barrier, 128);
        if (thread == 0) {
            tensor_store(&p.out, staging, column, row, batch);
            tensor_store_commit();
        }
    }

    // The four 8 x 8 blocks at rows 0 and 8 of the warp and columns 8 j and 8 j + 8 are a stmatrix;
    // lane l gives the address of row l % 8 of block l / 8.
    template <bool kTranspose>
    __device__ __forceinline__ void write(uint32_t target, const uint32_t (&packed)[8][2]) const {
        const int warp = thread / 32, block = thread % 32 / 8, in_block = thread % 8;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const int inner = 8 * (block & 1) + in_block, outer = j + (block >> 1);
            const uint32_t at = kTranspose
                                    ? swizzled(8 * outer + in_block, warp * 2 + (block & 1))
                                    : swizzled(warp * 16 + inner, outer);
            store_blocks<kTranspose>(target + at, packed[j][0], packed[j][1], packed[j + 1][0],
                                     packed[j + 1][1]);
        }
    }

    // the lower triangle and its mirror image
    __device__ __forceinline__ void write_symmetric(uint32_t target,
                                                    const uint32_t (&packed)[8][2]) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int h = 0; h < 4; ++h) {
                const int r = thread / 32 * 16 + thread % 32 / 4 + 8 * (h / 2);
                const int c = 8 * j + thread % 4 * 2 + h % 2;
                if (r < c) continue;
                const uint16_t value = packed[j][h / 2] >> (16 * (h % 2));
                store_shared(target + swizzled(r, c / 8) + c % 8 * 2, value);
                store_shared(target + swizzled(c, r / 8) + r % 8 * 2, value);
            }
        }
    }

    __device__ __forceinline__ void store(const uint32_t (&packed)[8][2], const Product& p,
                                          int batch, int row, int column,
                                          bool mirror) const {
        const uint32_t target = begin();
        if (p.is_symmetric && row == column)
            write_symmetric(target, packed);
        else
            write<false>(target, packed);
        end(p, batch, row, column);
        if (mirror && row != column) {
            write<true>(begin(), packed);
            end(p, batch, column, row);
        }
    }
};

__device__ void consume(const Products& products, Shared& shared, int rank, int group) {
    const Storer storer{shared.staging[group], 1 + group, int(threadIdx.x % 128)};
    int stage = 0, phase = 0;
    for (int t = blockIdx.x / kCluster; t < products.num_tiles; t += gridDim.x / kCluster) {
        const Tile tile = find_tile(products, t);
        const Product& p = *tile.product;
        const bool on_diagonal = is_on_diagonal(tile);
        const int block = block_row(on_diagonal, rank, group);
        const int row = tile.row_pair * kCluster * kTileM + 64 * block;
        const int column = tile.column * kTileN;
        const float alpha = p.scale == nullptr ? p.alpha : p.alpha * p.scale[tile.batch];
        const int k_tiles = (p.k + kTileK - 1) / kTileK;
        const int a_tiles = tiles_along_k(p.a_lower, p.a_rows, tile.row_pair, k_tiles);
        const int b_tiles = tiles_along_k(p.b_lower, p.b_rows, tile.column, k_tiles);
        float acc[128];
        if (on_diagonal && a_tiles == b_tiles) {
            multiply_diagonal<true>(acc, shared, group, block + 1, 0, a_tiles, stage, phase);
            multiply_diagonal<false>(acc, shared, group, block + 1, a_tiles, k_tiles, stage, phase);
        } else {
            const int both = min(a_tiles, b_tiles), either = max(a_tiles, b_tiles);
            if (both > 0) multiply<true, true, 4>(acc, shared, group, 0, both, stage, phase);
            if (a_tiles > both)
                multiply<true, false, 4>(acc, shared, group, both, either, stage, phase);
            else if (b_tiles > both)
                multiply<false, true, 4>(acc, shared, group, both, either, stage, phase);
            if (k_tiles > either)
                multiply<false, false, 4>(acc, shared, group, either, k_tiles, stage, phase);
        }
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const int c = column + 64 * s;
            uint32_t packed[8][2];
            if (p.beta != 0.0f && s % 2 == 0) barrier_wait(&shared.full[stage], phase);
            finish_block(packed, acc + 32 * s, p, alpha,
                         shared_address(shared.b[stage]) + (2 * (s % 2) + group) * kBlockBytes,
                         p.diagonal != 0.0f && row == c);
            if (p.beta != 0.0f && s % 2 == 1) {
                __syncwarp();  // every lane has read its part of c
                release(shared, stage);
                if (++stage == kStages) stage = 0, phase ^= 1;
            }
            if (row < p.m && c < p.n && !(p.is_symmetric && c > row))
                storer.store(packed, p, tile.batch, row, c,
                             p.is_symmetric && (on_diagonal || !p.out_lower));
        }
    }
}

__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    products_kernel(const __grid_constant__ Products products) {
    extern __shared__ unsigned char raw[];
    Shared& shared =
        *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
    const int rank = blockIdx.x % kCluster;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], kConsumers * 4 * kCluster);  // every consumer warp
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    if (threadIdx.x < 128) {
        give_registers<40>();
        if (threadIdx.x == 0) produce(products, shared, rank);
    } else {
        take_registers<232>();
        consume(products, shared, rank, threadIdx.x / 128 - 1);
        if (threadIdx.x % 128 == 0) tensor_store_wait_read<0>();
    }
    __syncwarp();
    cluster_sync();  // a block may not leave while the other still signals its barriers
}

// ---- host -----------------------------------------------------------------------------------------

}  // namespace

extern "C" {

// One product as kernels/batched_products_sm90.py lays it out. Strides in elements, the unit one
// left out: that of `a` is along k (a_rows) or m, of `b` along k (b_rows) or n, of the others along n.
struct ProductArguments {
    const void *a, *b, *c;
    void* out;
    const float* scale;
    long batch, m, n, k;
    long a_batch, a_stride, b_batch, b_stride, c_batch, c_stride, out_batch, out_stride;
    float alpha, beta, diagonal;
    int is_symmetric, is_bfloat16, a_rows, b_rows, a_lower, b_lower, out_lower;
};

static int encode_product(Product& p, const ProductArguments& x) {
    int error = x.a_rows ? encode(&p.a, x.a, x.batch, x.m, x.k, x.a_batch, x.a_stride, 64)
                         : encode(&p.a, x.a, x.batch, x.k, x.m, x.a_batch, x.a_stride, 64);
    if (error == 0)
        error = x.b_rows ? encode(&p.b, x.b, x.batch, x.n, x.k, x.b_batch, x.b_stride, 64)
                         : encode(&p.b, x.b, x.batch, x.k, x.n, x.b_batch, x.b_stride, 64);
    if (error == 0 && x.beta != 0.0f)
        error = encode(&p.c, x.c, x.batch, x.m, x.n, x.c_batch, x.c_stride, 64);
    if (error == 0) error = encode(&p.out, x.out, x.batch, x.m, x.n, x.out_batch, x.out_stride, 64);
    return error;
}

int megacomposer_max_products() { return kMaxProducts; }

// Launches up to `megacomposer_max_products()` products on at most `blocks` multiprocessors (rounded
// down to even). Returns 0, a cudaError_t, or -1 without a driver.
int megacomposer_run_products(const ProductArguments* arguments, int count, int blocks,
                              void* stream) {
    if (const int error = prepare_to_encode()) return error;
    Products products{};
    int tiles = 0;
    for (int i = 0; i < count; ++i) {
        const ProductArguments& x = arguments[i];
        Product& p = products.items[i];
        if (const int error = encode_product(p, x)) return error;
        p.scale = x.scale;
        p.alpha = x.alpha;
        p.beta = x.beta;
        p.diagonal = x.diagonal;
        p.m = int(x.m);
        p.n = int(x.n);
        p.k = int(x.k);
        p.row_pairs = int((x.m + 2 * kTileM - 1) / (2 * kTileM));
        p.columns = int((x.n + kTileN - 1) / kTileN);
        p.is_symmetric = x.is_symmetric;
        p.is_bfloat16 = x.is_bfloat16;
        p.a_rows = x.a_rows;
        p.b_rows = x.b_rows;
        p.a_lower = x.a_lower;
        p.b_lower = x.b_lower;
        p.out_lower = x.out_lower;
        p.tiles_per_matrix =
            p.is_symmetric ? p.row_pairs * (p.row_pairs + 1) / 2 : p.row_pairs * p.columns;
        p.first_tile = tiles;
        tiles += p.tiles_per_matrix * int(x.batch);
    }
    products.count = count;
    products.num_tiles = tiles;
    const int bytes = sizeof(Shared) + 1024;
    const cudaError_t error = cudaFuncSetAttribute(
        products_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    const int clusters = blocks / kCluster < tiles ? blocks / kCluster : tiles;
    products_kernel<<<clusters * kCluster, kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(
        products);
    return cudaGetLastError();
}
}
