// Adam of the FP32 and mixed-precision presets, as torch computes it (cpu/optimizers.inl, Adam), for all parameters at
// once: the peer that SHARP is measured against, in the same graph. A step is: square_sums, gradient_norm, begin_step,
// adam_elements.
#pragma once

#include "sharp.cuh"

namespace sb3_fp16 {

__global__ void __launch_bounds__(THREADS) adam_elements(const __grid_constant__ Table table, const __grid_constant__ SharpSettings settings) {
    const Slice& slice = slice_of_block<&Slice::first_element_block>(table);
    if (settings.skip && *settings.skip) return;
    const int64_t first = (blockIdx.x - slice.first_element_block) * ELEMENTS_OF_BLOCK + static_cast<int64_t>(threadIdx.x) * PACK;
    const int64_t left = slice.rows * slice.columns - first;
    if (left <= 0) return;
    const Step now(slice, settings);
    const float coefficient = settings.coefficients[slice.coefficient], step_size = *settings.lr * now.unbias_first;
    float *data = static_cast<float*>(slice.data) + first, *moments = static_cast<float*>(slice.first_moment) + first;
    float* squares = static_cast<float*>(slice.root) + first;
    const Pack<float> g = read_pack(static_cast<const float*>(slice.gradient) + first, left);
    Pack<float> theta = read_pack(data, left), m = read_pack(moments, left), v = read_pack(squares, left);
    SB3_FP16_UNROLL
    for (int i = 0; i < PACK; ++i) {
        float slope = g.words[i] * coefficient;
        if (settings.weight_decay != 0.0f) slope = slope + settings.weight_decay * theta.words[i];
        m.words[i] = m.words[i] + settings.blend * (slope - m.words[i]);
        v.words[i] = v.words[i] * settings.beta2 + settings.rest * slope * slope;
        theta.words[i] = theta.words[i] - step_size * m.words[i] / (sqrtf(v.words[i]) * now.unbias_root + settings.eps);
    }
    write_pack(data, left, theta), write_pack(moments, left, m), write_pack(squares, left, v);
}

}  // namespace sb3_fp16
