// Sums and maxima over the threads of a block, in one order whatever the device: no atomics on floats.
#pragma once

#include "numerics.h"

namespace sb3_fp16 {

constexpr int THREADS = 256;  // of a block, unless a kernel says otherwise
constexpr unsigned ALL_LANES = 0xffffffffu;

struct Sum {
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Largest {  // NaN is kept
    static __device__ __forceinline__ float of(float a, float b) { return a > b || a != a ? a : b; }
};

// Of LANES neighbouring lanes, in halves: as cpu/lanes.inl adds; right in the first of them.
template <class Operation>
__device__ __forceinline__ float over_lanes(float x) {
    SB3_FP16_UNROLL
    for (int distance = LANES / 2; distance; distance /= 2) x = Operation::of(x, __shfl_down_sync(ALL_LANES, x, distance, LANES));
    return x;
}

// Of all threads of a block; every thread receives it. `shared` holds one number per warp.
template <class Operation>
__device__ __forceinline__ float over_block(float x, float* shared) {
    SB3_FP16_UNROLL
    for (int distance = 16; distance; distance /= 2) x = Operation::of(x, __shfl_down_sync(ALL_LANES, x, distance));
    __syncthreads();  // what an earlier reduction left has been read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x / 32); ++warp) x = Operation::of(x, shared[warp]);
    return x;
}

// Integers may be added in any order; every lane of a warp takes part.
__device__ __forceinline__ void count(unsigned long long* total, int found) {
    SB3_FP16_UNROLL
    for (int distance = 16; distance; distance /= 2) found += __shfl_down_sync(ALL_LANES, found, distance);
    if (threadIdx.x % 32 == 0 && found) atomicAdd(total, static_cast<unsigned long long>(found));
}

}  // namespace sb3_fp16
