// The weight gradients of a mixture-of-experts MLP in bfloat16 on Hopper, over rows sorted by expert:
//
//     out[e] = the sum over the rows r of expert e of a[source[r]]^T b[r],  [m, n], or transposed
//
// The kernel of grouped_products_sm90.cu with the rows as k. Rows of both operands run along the
// result, and wgmma takes them so. A cluster of two blocks has 256 columns of a, half of them each,
// and the same 256 columns of b. Rows of b come by bulk copies, each half by one block for both; rows
// of a, gathered or not, by copies of 16 bytes that all threads of the first warpgroup issue. An
// operand that is gathered is thus always a: where it should be b, the result is transposed on its
// way to memory.
//
// An expert has a group of consecutive rows, or several, which lie apart. A stage takes 64 rows of
// one group. What is left of a group at its end is copied, of b too, by 16 bytes, with zeros for the
// rows that are not of the group: rows of others are never read, so no NaN of theirs can reach a sum.
// A result has one block and the order of its rows. C ABI at the end of the file;
// kernels/grouped_weights_sm90.py calls it.

#include <cuda_runtime.h>

#include "grouped_pipeline.cuh"
#include "tensor_map.cuh"

namespace {

using namespace grouped;

constexpr int kCluster = 2;
constexpr int kHeight = kCluster * kTileM;  // columns of a that a cluster has
constexpr int kGroup = 8;                   // of these, computed one column of tiles after the other

struct Problem {
    CUtensorMap b;
    const __nv_bfloat16 *a_rows, *b_rows;
    const long *source, *rows_per_group;
    __nv_bfloat16* out;
    long a_stride, b_stride;
    int rows, experts, groups, m, n;
};

// `stages`: how many each expert's rows fill. `order`: experts from the most stages to the fewest.
struct Shared : Ring {
    int first_row[kMaxExperts + 1];
    int stages[kMaxExperts], order[kMaxExperts];
};

// ---- which tiles there are ------------------------------------------------------------------------

// All threads of the block.
__device__ void find_rows(const Problem& p, Shared& shared) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        int row = 0;
        for (int first = 0; first < p.groups; first += 32) {
            const int g = first + lane;
            const int end = group_end(p.rows_per_group, p.groups, p.rows, g, row);
            if (g < p.groups) shared.first_row[g + 1] = end;
            row = __shfl_sync(~0u, end, 31);
        }
        if (lane == 0) shared.first_row[0] = 0;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.experts; e += kThreads) {
        int stages = 0;
        for (int g = e; g < p.groups; g += p.experts)
            stages += (shared.first_row[g + 1] - shared.first_row[g] + kTileK - 1) / kTileK;
        shared.stages[e] = stages;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.experts; e += kThreads) {
        const int stages = shared.stages[e];
        int before = 0;
        for (int i = 0; i < p.experts; ++i)
            before += shared.stages[i] > stages || (shared.stages[i] == stages && i < e);
        shared.order[before] = e;
    }
    __syncthreads();
}

struct Tile {
    int expert, m, n;
};

// The tiles of one cluster: all of an expert, the largest expert first. They are dealt out in rounds,
// every other one backwards, so that no cluster has the longer tile of every round.
struct Schedule {
    const Problem& p;
    const Shared& shared;
    int row_tiles, columns, round = 0;

    __device__ __forceinline__ Schedule(const Problem& p, const Shared& shared)
        : p(p), shared(shared), row_tiles((p.m + kHeight - 1) / kHeight),
          columns((p.n + kTileN - 1) / kTileN) {}

    __device__ __forceinline__ bool find(Tile& tile) {
        const int clusters = gridDim.x / kCluster, cluster = blockIdx.x / kCluster;
        const int next = round * clusters + (round % 2 == 0 ? cluster : clusters - 1 - cluster);
        ++round;
        const int place = next / (row_tiles * columns);
        if (place >= p.experts) return false;
        int row_tile, column;
        find_place<kGroup>(next - place * row_tiles * columns, row_tiles, columns, row_tile, column);
        tile = {shared.order[place], row_tile * kHeight, column * kTileN};
        return true;
    }
};

// The rows of an expert in steps of kTileK: those of its groups in turn.
struct Walk {
    const Problem& p;
    const Shared& shared;
    int group, row, end;

    __device__ __forceinline__ Walk(const Problem& p, const Shared& shared, int expert)
        : p(p), shared(shared), group(expert), row(shared.first_row[expert]),
          end(shared.first_row[expert + 1]) {
        settle();
    }

    __device__ __forceinline__ bool is_over() const { return group >= p.groups; }

    __device__ __forceinline__ void advance() {
        row += kTileK;
        settle();
    }

    __device__ __forceinline__ void settle() {
        while (row >= end && (group += p.experts) < p.groups)
            row = shared.first_row[group], end = shared.first_row[group + 1];
    }
};

// ---- loading --------------------------------------------------------------------------------------

constexpr int kRowsAThread = kTileK * 8 / kProducers;  // each thread copies one chunk of 8 columns
constexpr int kRowStep = kTileK / kRowsAThread;

// kBlocks times 64 columns of the thread's rows, of which `columns` from its first on are there, and
// `count` rows from its first on; zeros for what is not.
template <int kBlocks>
__device__ __forceinline__ void copy_rows(uint32_t target,
                                          const __nv_bfloat16* const (&rows)[kRowsAThread],
                                          int count, int columns, const __nv_bfloat16* nothing) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < kRowsAThread; ++i) {
            const bool inside = i * kRowStep < count && 64 * block < columns;
            copy_async(target + block * kBlockBytes + i * kRowStep * 128,
                       inside ? rows[i] + 64 * block : nothing, inside ? 16 : 0);
        }
    }
}

__device__ __forceinline__ void find_sources(const Problem& p, const Walk& walk, int first,
                                             long (&sources)[kRowsAThread]) {
#pragma unroll
    for (int i = 0; i < kRowsAThread; ++i) {
        const int row = walk.row + first + i * kRowStep;
        sources[i] = row;
        if (p.source != nullptr && !walk.is_over() && row < walk.end) sources[i] = p.source[row];
    }
}

// The whole warpgroup.
__device__ void produce(const Problem& p, Shared& shared, int rank) {
    const int first = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const uint32_t offset = swizzled(first, chunk);
    Position at;
    Tile tile;
    for (Schedule schedule(p, shared); schedule.find(tile);) {
        const int m = tile.m + rank * kTileM + 8 * chunk, n = tile.n + 8 * chunk;
        long sources[kRowsAThread];
        Walk walk(p, shared, tile.expert);
        find_sources(p, walk, first, sources);
        while (!walk.is_over()) {
            const int row = walk.row, count = walk.end - walk.row;
            const __nv_bfloat16* rows[kRowsAThread];
#pragma unroll
            for (int i = 0; i < kRowsAThread; ++i)
                rows[i] = p.a_rows + sources[i] * p.a_stride + m;
            walk.advance();
            find_sources(p, walk, first, sources);  // they are on their way while this waits
            uint64_t* full = &shared.full[at.stage];
            barrier_wait(&shared.empty[at.stage], at.phase ^ 1);
            if (threadIdx.x == 0) {
                if (count >= kTileK) {
                    barrier_expect_bytes(full, kBytesB);
                    for (int i = 2 * rank; i < 2 * rank + 2; ++i)
                        tensor_load_multicast(shared.b[at.stage] + i * kBlockBytes, &p.b, full, 3,
                                              tile.n + 64 * i, row, 0);
                } else {
                    barrier_arrive(full);
                }
            }
            copy_rows<2>(shared_address(shared.a[at.stage]) + offset, rows, count - first, p.m - m,
                         p.a_rows);
            if (count < kTileK) {
#pragma unroll
                for (int i = 0; i < kRowsAThread; ++i)
                    rows[i] = p.b_rows + long(row + first + i * kRowStep) * p.b_stride + n;
                copy_rows<4>(shared_address(shared.b[at.stage]) + offset, rows, count - first,
                             p.n - n, p.b_rows);
            }
            barrier_arrive_after_copies(full);
            at.advance();
        }
    }
}

// ---- multiplying ----------------------------------------------------------------------------------

// 64 x 256 of a warpgroup, from row m and column n on; zeros where the expert has no rows.
template <bool kTransposed>
__device__ __forceinline__ void store(const float (&acc)[128], const Problem& p, uint32_t staging,
                                      const Tile& tile, int m, bool has_rows) {
    const int warp = threadIdx.x % 128 / 32, block = threadIdx.x % 32 / 8, in_block = threadIdx.x % 8;
    __nv_bfloat16* out = p.out + long(tile.expert) * p.m * p.n;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const int n = tile.n + 64 * s;
        if (n >= p.n) continue;
        Packed packed;
        pack(packed, acc + 32 * s);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            packed[j][0] = has_rows ? packed[j][0] : 0;
            packed[j][1] = has_rows ? packed[j][1] : 0;
        }
        if constexpr (kTransposed) {  // rows n of 64 m, to which each warp has 16
            const int barrier = threadIdx.x / 128;
            named_barrier(barrier, 128);  // every warp has read the block before
#pragma unroll
            for (int j = 0; j < 8; j += 2)
                store_blocks<true>(
                    staging + swizzled(8 * (j + (block >> 1)) + in_block, 2 * warp + (block & 1)),
                    packed[j][0], packed[j][1], packed[j + 1][0], packed[j + 1][1]);
            named_barrier(barrier, 128);
            const int row = n + 16 * warp;
            const Writer writer{staging + 16 * warp * 128, p.n - row};
            writer.store(out + long(row) * p.m + m, p.m, p.m - m);
        } else {
            const int row = m + 16 * warp;
            const Writer writer{staging + 16 * warp * 128, p.m - row};
            writer.write(packed, out + long(row) * p.n + n, p.n, p.n - n);
        }
    }
}

template <bool kTransposed>
__device__ void consume(const Problem& p, Shared& shared, int rank, int group) {
    const uint32_t staging = shared_address(shared.staging[4 * group]);
    Position at;
    Tile tile;
    for (Schedule schedule(p, shared); schedule.find(tile);) {
        const int m = tile.m + rank * kTileM + group * 64, stages = shared.stages[tile.expert];
        if (m >= p.m) {
            skip<kCluster>(shared, at, stages);
            continue;
        }
        float acc[128];
        if (stages > 0) multiply<false, false, kCluster>(acc, shared, group, stages, true, at);
        store<kTransposed>(acc, p, staging, tile, m, stages > 0);
    }
}

template <bool kTransposed>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    weights_kernel(const __grid_constant__ Problem p) {
    extern __shared__ unsigned char raw[];
    Shared& shared =
        *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
    const int rank = blockIdx.x % kCluster;
    if (threadIdx.x == 0) init_barriers<kCluster>(shared, 1 + kProducers);
    find_rows(p, shared);
    cluster_sync();
    if (threadIdx.x < kProducers) {
        give_registers<72>();
        produce(p, shared, rank);
    } else {
        take_registers<216>();
        consume<kTransposed>(p, shared, rank, threadIdx.x / 128 - 1);
    }
    __syncwarp();
    cluster_sync();  // a block may not leave while the other still signals its barriers
}

// ---- host -----------------------------------------------------------------------------------------

template <bool kTransposed>
int launch(const Problem& p, int blocks, cudaStream_t stream) {
    auto* kernel = weights_kernel<kTransposed>;
    const int bytes = sizeof(Shared) + 1024;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    const long row_tiles = (p.m + kHeight - 1) / kHeight, columns = (p.n + kTileN - 1) / kTileN;
    const int clusters = int(min(long(blocks / kCluster), p.experts * row_tiles * columns));
    kernel<<<clusters * kCluster, kThreads, bytes, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace

extern "C" {

// A product as kernels/grouped_weights_sm90.py lays it out: a has rows of m elements, a_stride apart,
// and b of n. Group g is of expert g % experts. `out` is dense, [experts, m, n] or, transposed,
// [experts, n, m].
struct WeightArguments {
    const void *a, *b;
    void* out;
    const long *source, *rows_per_group;
    long rows, experts, groups, m, n, a_stride, b_stride;
    int is_transposed;
};

// Launches the product on at most `blocks` multiprocessors. Returns 0, a cudaError_t, or -1 without
// a driver.
int megacomposer_run_weights(const WeightArguments* arguments, int blocks, void* stream) {
    const WeightArguments& x = *arguments;
    if (const int error = prepare_to_encode()) return error;
    Problem p{};
    p.a_rows = static_cast<const __nv_bfloat16*>(x.a);
    p.b_rows = static_cast<const __nv_bfloat16*>(x.b);
    p.source = x.source;
    p.rows_per_group = x.rows_per_group;
    p.out = static_cast<__nv_bfloat16*>(x.out);
    p.a_stride = x.a_stride;
    p.b_stride = x.b_stride;
    p.rows = int(x.rows);
    p.experts = int(x.experts);
    p.groups = int(x.groups);
    p.m = int(x.m);
    p.n = int(x.n);
    const int error = encode(&p.b, x.b, 1, x.rows, x.n, x.rows * x.b_stride, x.b_stride, kTileK);
    if (error != 0) return error;
    auto* on = static_cast<cudaStream_t>(stream);
    return x.is_transposed ? launch<true>(p, blocks, on) : launch<false>(p, blocks, on);
}
}
