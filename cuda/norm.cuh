// Module A's second pass: from the sums of squares of all gradients the global norm, κ, whether to skip the step, and
// the gradient scales (sb3_fp16/scalars.py: gradient_norm, clip_coefficients, GradientScale.update). One block.
#pragma once

#include "layout.h"
#include "reduce.cuh"

namespace sb3_fp16 {

constexpr long long GOOD_STEPS_BEFORE_GROWTH = 2000;

// G = unit·sqrt(Σ (g/unit)²) of one network; not finite where a gradient is not.
__device__ __forceinline__ float network_norm(const Squares* partials, int64_t partial_count, float* shared) {
    float unit = 0.0f, sum = 0.0f;
    for (int64_t i = threadIdx.x; i < partial_count; i += THREADS) unit = larger(partials[i].unit, unit);
    unit = over_block<Largest>(unit, shared);
    const float inverse = inverse_of_power(unit);
    for (int64_t i = threadIdx.x; i < partial_count; i += THREADS) {
        const float ratio = partials[i].unit * inverse;
        sum = sum + partials[i].sum * (ratio * ratio);
    }
    return unit * sqrtf(over_block<Sum>(sum, shared));
}

// The scales' rules; returns whether to skip the step.
__device__ __forceinline__ bool adapt(const NormSettings& settings, const float* norms) {
    bool skip = false, at_floor = false;
    SB3_FP16_UNROLL
    for (int k = 0; k < 2; ++k) {
        if (k >= settings.networks) continue;
        const bool overflowed = !(norms[k] - norms[k] == 0.0f);
        skip = skip || overflowed;
        at_floor = at_floor || (overflowed && settings.scales[k] <= settings.floor[k]);
    }
    long long *good = settings.counters, *skipped = settings.counters + 1, *at_floor_in_a_row = settings.counters + 2;
    *at_floor_in_a_row = at_floor ? *at_floor_in_a_row + 1 : 0;
    *skipped += skip;
    *good = skip ? 0 : *good + 1;
    const bool grow = *good >= GOOD_STEPS_BEFORE_GROWTH;
    if (grow) *good = 0;
    SB3_FP16_UNROLL
    for (int k = 0; k < 2; ++k) {
        if (k >= settings.networks) continue;
        const float scale = settings.scales[k];
        const bool overflowed = !(norms[k] - norms[k] == 0.0f);
        settings.scales[k] = overflowed ? larger(scale / 2, settings.floor[k]) : smaller(scale * (grow ? 2.0f : 1.0f), settings.ceiling[k]);
    }
    return skip;
}

__global__ void __launch_bounds__(THREADS) gradient_norm(const __grid_constant__ NormSettings settings) {
    __shared__ float per_warp[THREADS / 32];
    if (settings.stopped && *settings.stopped) {
        if (threadIdx.x == 0) *settings.skip = true, *settings.norm = NAN;
        return;
    }
    float norms[2] = {}, sum = 0.0f;
    SB3_FP16_UNROLL
    for (int k = 0; k < 2; ++k)
        if (k < settings.networks) norms[k] = network_norm(settings.partials[k], settings.partial_counts[k], per_warp);
    if (threadIdx.x != 0) return;
    SB3_FP16_UNROLL
    for (int k = 0; k < 2; ++k)
        if (k < settings.networks) sum += (norms[k] / settings.scales[k]) * (norms[k] / settings.scales[k]);
    const float total = sqrtf(sum), clip = smaller(settings.max_norm / (total + 1e-6f), 1.0f);
    for (int k = 0; k < settings.networks; ++k) settings.coefficients[k] = clip / settings.scales[k];
    const bool skip = adapt(settings, norms);
    *settings.skip = skip;
    *settings.norm = skip ? NAN : total;
}

}  // namespace sb3_fp16
