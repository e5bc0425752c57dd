// The matrix products of a mixture-of-experts MLP in bfloat16 on Hopper, over rows sorted by expert:
//
//     gate_up        hidden = gate_up[e] x, activation = silu(gate) * up * prob
//     down           y = down[e] activation
//     down_backward  d activation = grad down[e], and from it d hidden, the activation again, d prob
//     dx             dx = d hidden gate_up[e]
//
// The kernel of batched_products_sm90.cu in its other shape: persistent and warp-specialised. A
// cluster of blocks has 128 rows a block of one expert and the same 256 columns, and shares the
// expert's weights. A warpgroup fills a ring of stages and two warpgroups of 64 rows each multiply.
// How many rows an expert has is known on the device only: each block finds its tiles from the
// counts. Rows may be gathered by an index: Hopper's bulk copies cannot, so then all threads of the
// first warpgroup copy 16 bytes at a time, in the swizzled order that wgmma reads.
//
// A tile has rows of one expert. What is loaded past the expert's last row is another's row, or
// zeros, and reaches only rows that are not stored. The order of a row's sums is fixed by the shape
// of the weights alone. C ABI at the end of the file; kernels/grouped_products_sm90.py calls it.

#include <cuda_runtime.h>

#include "grouped_results.cuh"
#include "tensor_map.cuh"

namespace {

using namespace grouped;

// ---- loading --------------------------------------------------------------------------------------

// The block's share of 64 k of the weights: 256 columns, of which a block of two loads one half for
// both. The halves of a SwiGLU tile are the gate's columns and the same columns of up.
template <int kEpilogue, bool kRowsB, int kCluster>
__device__ __forceinline__ void load_weights(const Problem& p, Shared& shared, int stage,
                                             const Tile& tile, int k, int rank) {
    uint64_t* full = &shared.full[stage];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (kCluster == 2 && half != rank) continue;
        const int n = kEpilogue == kSwiglu ? half * p.n + tile.column * (kTileN / 2)
                                           : tile.column * kTileN + half * (kTileN / 2);
#pragma unroll
        for (int i = 0; i < (kRowsB ? 1 : 2); ++i) {
            unsigned char* b = shared.b[stage] + (2 * half + i) * kBlockBytes;
            const int column = kRowsB ? k : n + 64 * i, row = kRowsB ? n : k;
            if constexpr (kCluster == 2)
                tensor_load_multicast(b, &p.b, full, 3, column, row, tile.expert);
            else
                tensor_load(b, &p.b, full, column, row, tile.expert);
        }
    }
}

// The whole warpgroup where rows are gathered, else one thread. Of a gathered tile each thread copies
// one 16-byte chunk of 8 rows.
template <int kEpilogue, bool kRowsB, int kCluster, bool kGather>
__device__ void produce(const Problem& p, Shared& shared, int rank) {
    constexpr int kRowsAThread = kTileM * 8 / kProducers;
    const bool leads = threadIdx.x == 0;
    const int first = threadIdx.x / 8, chunk = threadIdx.x % 8;
    Position at;
    Tile tile;
    for (Schedule<kCluster> schedule(p, shared); schedule.find(tile);) {
        const int row = tile.row + rank * kTileM;
        const __nv_bfloat16* rows[kRowsAThread];
        if constexpr (kGather) {
#pragma unroll
            for (int i = 0; i < kRowsAThread; ++i) {
                const int r = min(row + first + i * (kTileM / kRowsAThread), tile.end - 1);
                rows[i] = p.a_rows + p.source[r] * p.a_stride + 8 * chunk;
            }
        }
        for (int k = 0; k < p.k; k += kTileK) {
            uint64_t* full = &shared.full[at.stage];
            barrier_wait(&shared.empty[at.stage], at.phase ^ 1);
            if (leads) {
                barrier_expect_bytes(full, kGather ? kBytesB : kBytesA + kBytesB);
                load_weights<kEpilogue, kRowsB, kCluster>(p, shared, at.stage, tile, k, rank);
                if (!kGather) tensor_load(shared.a[at.stage], &p.a, full, k, row, 0);
            }
            if constexpr (kGather) {
                const uint32_t target = shared_address(shared.a[at.stage]) + swizzled(first, chunk);
                const bool inside = k + 8 * chunk < p.k;
#pragma unroll
                for (int i = 0; i < kRowsAThread; ++i)
                    copy_async(target + i * (kBytesA / kRowsAThread), inside ? rows[i] + k : rows[i],
                               inside ? 16 : 0);
                barrier_arrive_after_copies(full);
            }
            at.advance();
        }
        if constexpr (kEpilogue == kSwigluBackward) {  // 64 columns of gate and up, in place of b
            const int blocks = column_blocks(p, tile.column);
            for (int i = 0; i < blocks; ++i) {
                uint64_t* full = &shared.full[at.stage];
                barrier_wait(&shared.empty[at.stage], at.phase ^ 1);
                if (leads) {
                    const int column = tile.column * kTileN + 64 * i;
                    barrier_expect_bytes(full, kBytesB);
                    tensor_load(shared.b[at.stage], &p.gate, full, column, row, 0);
                    tensor_load(shared.b[at.stage] + kBytesB / 2, &p.up, full, column, row, 0);
                }
                if constexpr (kGather) barrier_arrive_after_copies(full);
                at.advance();
            }
        }
    }
}

// ---- multiplying ----------------------------------------------------------------------------------

template <int kEpilogue, bool kRowsB, int kCluster>
__device__ void consume(const Problem& p, Shared& shared, int rank, int group) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int k_tiles = (p.k + kTileK - 1) / kTileK;
    const bool gathered = p.source != nullptr;
    Position at;
    Tile tile;
    for (Schedule<kCluster> schedule(p, shared); schedule.find(tile);) {
        const int first = tile.row + rank * kTileM + group * 64;
        if (first >= tile.end) {  // no row for this warpgroup
            const int saved = kEpilogue == kSwigluBackward ? column_blocks(p, tile.column) : 0;
            skip<kCluster>(shared, at, k_tiles + saved);
            continue;
        }
        const long row = first + 16 * warp;
        const Writer writer{shared_address(shared.staging[4 * group + warp]), tile.end - int(row)};
        float prob[2] = {1.0f, 1.0f};
        if (kEpilogue != kPlain && p.prob != nullptr) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int r = lane / 4 + 8 * h;
                if (r < writer.rows) prob[h] = p.prob[row + r];
            }
        }
        float acc[128];
        multiply<true, kRowsB, kCluster>(acc, shared, group, k_tiles, gathered, at);
        if constexpr (kEpilogue == kPlain) store_plain(acc, p, writer, row, tile.column);
        if constexpr (kEpilogue == kSwiglu) store_swiglu(acc, p, writer, row, tile.column, prob);
        if constexpr (kEpilogue == kSwigluBackward)
            store_swiglu_backward<kCluster>(acc, p, shared, writer, row, tile.column, prob, at);
    }
}

template <int kEpilogue, bool kRowsB, int kCluster>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    grouped_kernel(const __grid_constant__ Problem p) {
    extern __shared__ unsigned char raw[];
    Shared& shared =
        *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
    const int rank = blockIdx.x % kCluster;
    if (threadIdx.x == 0)  // the thread that issues bulk copies arrives, and all that gather
        init_barriers<kCluster>(shared, p.source == nullptr ? 1 : 1 + kProducers);
    if (threadIdx.x / 32 == 1) find_experts<kCluster>(p, shared);
    __syncwarp();
    cluster_sync();
    if (threadIdx.x < kProducers) {
        give_registers<72>();
        if (p.source != nullptr) produce<kEpilogue, kRowsB, kCluster, true>(p, shared, rank);
        else if (threadIdx.x == 0) produce<kEpilogue, kRowsB, kCluster, false>(p, shared, rank);
    } else {
        take_registers<216>();
        consume<kEpilogue, kRowsB, kCluster>(p, shared, rank, threadIdx.x / 128 - 1);
    }
    __syncwarp();
    cluster_sync();  // a block may not leave while the other still signals its barriers
}

// ---- host -----------------------------------------------------------------------------------------

template <int kEpilogue, bool kRowsB, int kCluster>
int launch(const Problem& p, int blocks, cudaStream_t stream) {
    auto* kernel = grouped_kernel<kEpilogue, kRowsB, kCluster>;
    const int bytes = sizeof(Shared) + 1024;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    // each expert may have one tile of rows that is not full
    const long tiles = (long(p.rows) / (kCluster * kTileM) + p.experts) * p.columns;
    const int clusters = int(min(long(blocks / kCluster), tiles));
    kernel<<<clusters * kCluster, kThreads, bytes, stream>>>(p);
    return cudaGetLastError();
}

template <int kEpilogue, bool kRowsB>
int launch(const Problem& p, int cluster, int blocks, cudaStream_t stream) {
    if (cluster == 2) return launch<kEpilogue, kRowsB, 2>(p, blocks, stream);
    return launch<kEpilogue, kRowsB, 1>(p, blocks, stream);
}

}  // namespace

extern "C" {

// One product as kernels/grouped_products_sm90.py lays it out. `a` has rows of k elements, a_stride
// apart, and the weights have strides of experts and rows; everything else is dense. n and k are
// those of the product, of gate_up half of n.
struct GroupedArguments {
    const void *a, *weight, *hidden;
    void *out, *activation;
    const float* prob;
    float* dprob;
    const long *source, *rows_per_expert;
    long rows, experts, n, k, a_stride, weight_stride, weight_row_stride;
    int product, cluster;  // gate_up, down, down_backward, dx; blocks that share weights, 1 or 2
};

int megacomposer_max_experts() { return kMaxExperts; }

// Launches the product on at most `blocks` multiprocessors. Returns 0, a cudaError_t, or -1 without
// a driver.
int megacomposer_run_grouped(const GroupedArguments* arguments, int blocks, void* stream) {
    const GroupedArguments& x = *arguments;
    if (const int error = prepare_to_encode()) return error;
    Problem p{};
    p.a_rows = static_cast<const __nv_bfloat16*>(x.a);
    p.source = x.source;
    p.rows_per_expert = x.rows_per_expert;
    p.prob = x.prob;
    p.dprob = x.dprob;
    p.out = static_cast<__nv_bfloat16*>(x.out);
    p.activation = static_cast<__nv_bfloat16*>(x.activation);
    p.a_stride = x.a_stride;
    p.rows = int(x.rows);
    p.experts = int(x.experts);
    p.n = int(x.n);
    p.k = int(x.k);
    const bool is_gate_up = x.product == 0, weight_rows = x.product <= 1;
    const int width = is_gate_up ? kTileN / 2 : kTileN;
    p.columns = (p.n + width - 1) / width;
    const long n = is_gate_up ? 2 * x.n : x.n;
    int error = weight_rows ? encode(&p.b, x.weight, x.experts, n, x.k, x.weight_stride,
                                     x.weight_row_stride, 128)
                            : encode(&p.b, x.weight, x.experts, x.k, n, x.weight_stride,
                                     x.weight_row_stride, 64);
    if (error == 0 && x.source == nullptr)
        error = encode(&p.a, x.a, 1, x.rows, x.k, x.rows * x.a_stride, x.a_stride, 128);
    if (error == 0 && x.product == 2) {
        const auto* gate = static_cast<const __nv_bfloat16*>(x.hidden);
        error = encode(&p.gate, gate, 1, x.rows, n, x.rows * 2 * n, 2 * n, 128);
        if (error == 0) error = encode(&p.up, gate + n, 1, x.rows, n, x.rows * 2 * n, 2 * n, 128);
    }
    if (error != 0) return error;
    auto* on = static_cast<cudaStream_t>(stream);
    if (x.product == 0) return launch<kSwiglu, true>(p, x.cluster, blocks, on);
    if (x.product == 1) return launch<kPlain, true>(p, x.cluster, blocks, on);
    if (x.product == 2) return launch<kSwigluBackward, false>(p, x.cluster, blocks, on);
    return launch<kPlain, false>(p, x.cluster, blocks, on);
}
}
