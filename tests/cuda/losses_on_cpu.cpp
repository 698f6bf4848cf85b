// A library for test_losses.py: the CPU engine's heads on dense FP32 arrays.
#include "../../cpu/headers.h"

namespace sb3_fp16 {
namespace {
#include "../../cpu/lanes.inl"
}
}  // namespace sb3_fp16

#include "../../cuda/numerics.h"

namespace sb3_fp16 {
namespace {

#include "../../cpu/formats.inl"
#include "../../cpu/tiles.inl"
#include "../../cpu/network.inl"
#include "../../cpu/heads.inl"

// Rows of a minibatch; null where there is no such array.
struct Rows {
    int64_t count, size, action_size;
    const float *outputs, *actions, *behaviour, *old_log_prob, *log_std, *log_std0;
    const int64_t* choices;
    int64_t heads;
};

Samples columns(const Rows& rows) {
    Samples samples(rows.count, rows.size, rows.action_size);
    const auto turn = [&](const float* from, int64_t size, Floats& to) {
        for (int64_t b = 0; from && b < rows.count; ++b)
            for (int64_t j = 0; j < size; ++j) to[static_cast<size_t>(j * samples.stride + b)] = from[b * size + j];
    };
    turn(rows.outputs, rows.size, samples.outputs), turn(rows.behaviour, rows.size, samples.behaviour);
    turn(rows.actions, rows.action_size, samples.actions), turn(rows.old_log_prob, 1, samples.old_log_prob);
    return samples;
}

// d of each sample or, given the slopes ∂loss/∂d, the gradients of the outputs.
template <class Format>
void evaluate(const Format& format, Head kind, LogRatio form, const Rows& rows, const float* slopes, float entropy_slope, float* result) {
    Plan plan{};
    plan.head = kind, plan.policy.push_back({0, 0, 0, rows.size, Activation::none, 0.0f});
    if (rows.choices) plan.choices.assign(rows.choices, rows.choices + rows.heads);
    ActionHead<Format> head(format, plan);
    Samples samples = columns(rows);
    if (kind == Head::gaussian) head.gaussian.begin(rows.log_std, rows.log_std0);
    for (int64_t s = 0; s < rows.count; s += WIDTH) {
        Lane entropy, slope{};
        const Lane d = head.log_ratio(form, samples, s, &entropy);
        for (int l = 0; l < WIDTH && s + l < rows.count; ++l)
            slopes ? slope[l] = slopes[s + l] : result[s + l] = d[l];
        if (slopes) head.backward(samples, s, slope, entropy_slope, first_lanes(rows.count - s));
    }
    for (int64_t b = 0; slopes && b < rows.count; ++b)
        for (int64_t j = 0; j < rows.size; ++j) result[b * rows.size + j] = samples.signal[static_cast<size_t>(j * samples.stride + b)];
}

}  // namespace
}  // namespace sb3_fp16

using namespace sb3_fp16;

extern "C" {

void evaluate_head(Storage storage, Head kind, LogRatio form, const Rows* rows, const float* slopes, float entropy_slope, float* result) {
    if (storage == Storage::fp32) return evaluate(Single(23), kind, form, *rows, slopes, entropy_slope, result);
    if (storage == Storage::bf16) return evaluate(Brain(7), kind, form, *rows, slopes, entropy_slope, result);
    evaluate(Half(10), kind, form, *rows, slopes, entropy_slope, result);
}

void exponentials(const float* x, float* result, int64_t count, bool minus_1) {
    for (int64_t i = 0; i < count; ++i) result[i] = minus_1 ? exponential_minus_1(x[i]) : exponential(x[i]);
}

}  // extern "C"
