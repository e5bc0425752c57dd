// Host side of bulk tensor copies: the driver's descriptor of a half-precision batch of matrices.
#pragma once

#include <cstdint>
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
    static const EncodeTiled function = [] {
        void* driver = dlopen("libcuda.so.1", RTLD_NOW);
        return driver == nullptr
                   ? nullptr
                   : reinterpret_cast<EncodeTiled>(dlsym(driver, "cuTensorMapEncodeTiled"));
    }();
    return function;
}

// What the driver's functions need: a thread of autograd's may have no context before its first call
// of the runtime, and then encode() fails. Returns 0, a cudaError_t, or -1 without a driver.
inline int prepare_to_encode() {
    if (encode_tiled() == nullptr) return -1;
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    return error != cudaSuccess ? error : cudaSetDevice(device);
}

// [batch, rows, columns], unit stride along columns, strides in elements, in boxes of `box_rows` x 64
inline int encode(CUtensorMap* map, const void* data, long batch, long rows, long columns,
                  long batch_stride, long row_stride, int box_rows) {
    const cuuint64_t sizes[3] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(batch)};
    const cuuint64_t strides[2] = {cuuint64_t(row_stride) * 2, cuuint64_t(batch_stride) * 2};
    const cuuint32_t box[3] = {64, cuuint32_t(box_rows), 1}, steps[3] = {1, 1, 1};
    return encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, const_cast<void*>(data), sizes,
                          strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
