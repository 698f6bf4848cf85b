// GAE(λ), and module A's mean and deviation of advantages (sb3_fp16/buffers.py; sb3_fp16/scalars.py:
// normalize_advantages): FP32 arithmetic on numbers in storage format.
#pragma once

#include "formats.cuh"
#include "reduce.cuh"
#include "rollout.h"

namespace sb3_fp16 {

constexpr int STATISTICS_THREADS = 1024;

// Where a minibatch lies among the indices of an update.
struct Piece {
    int64_t first, count;
    SB3_FP16_METHOD Piece(int64_t minibatch, int64_t samples, int64_t batch_size) {
        const int64_t per_epoch = (samples + batch_size - 1) / batch_size;
        const int64_t start = minibatch % per_epoch * batch_size, left = samples - start;
        first = minibatch / per_epoch * samples + start, count = left < batch_size ? left : batch_size;
    }
};

SB3_FP16_FUNCTION int64_t minibatches(int64_t samples, int64_t batch_size, int64_t epochs) {
    return (samples + batch_size - 1) / batch_size * epochs;
}

// Σ term(A) over a minibatch, by one block.
template <class F, class Term>
__device__ __forceinline__ float sum_advantages(const StatisticsSettings& settings, const Piece& piece, float* shared, Term term) {
    const F format{settings.significand_bits};
    const typename F::Word* advantages = static_cast<const typename F::Word*>(settings.advantages);
    float sum = 0.0f;
    for (int64_t b = threadIdx.x; b < piece.count; b += blockDim.x)
        sum = sum + term(format.load(advantages[settings.indices[piece.first + b]]));
    return over_block<Sum>(sum, shared);
}

// Mean, and unbiased std + 1e-8, of one minibatch per block; (0, 1) where advantages stay as they are, as one sample's do.
template <class F>
__global__ void __launch_bounds__(STATISTICS_THREADS) advantage_statistics(const __grid_constant__ StatisticsSettings settings) {
    __shared__ float per_warp[STATISTICS_THREADS / 32];
    const Piece piece(blockIdx.x, settings.samples, settings.batch_size);
    Statistics result{0.0f, 1.0f};
    if (settings.normalize && piece.count > 1) {
        const float n = static_cast<float>(piece.count);
        const auto sum = [&](auto term) { return sum_advantages<F>(settings, piece, per_warp, term); };
        const float near = sum([](float a) { return a; }) / n;
        // What rounding took from the mean is given back: constant advantages then have deviation 1e-8 and become 0.
        result.mean = near + sum([near](float a) { return a - near; }) / n;
        const float mean = result.mean, squares = sum([mean](float a) { return (a - mean) * (a - mean); });
        result.deviation = sqrtf(squares / (n - 1.0f)) + 1e-8f;
    }
    if (threadIdx.x == 0) settings.statistics[blockIdx.x] = result;
}

// A number rounded to storage, saturating; counts what rounding has put beyond the range.
template <class F>
__device__ __forceinline__ typename F::Word saturated(const F& format, float x, int* beyond) {
    const float rounded = format.round(x), largest = format.largest();
    *beyond += absolute(rounded) > largest;
    return format.store(clamped(rounded, -largest, largest));
}

// δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1}, returns A + V (Schulman et al. 2016): one thread per environment,
// from the last step to the first, each step rounded as it leaves.
template <class F>
__global__ void __launch_bounds__(THREADS) gae(const __grid_constant__ GaeSettings settings) {
    using Word = typename F::Word;
    const F format{settings.significand_bits};
    const Word *rewards = static_cast<const Word*>(settings.rewards), *values = static_cast<const Word*>(settings.values);
    Word *advantages = static_cast<Word*>(settings.advantages), *returns = static_cast<Word*>(settings.returns);
    const int64_t e = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    int beyond = 0;
    if (e < settings.envs) {
        float next = settings.last_values[e], continues = settings.last_continues[e], recurrence = 0.0f;
        for (int64_t i = (settings.steps - 1) * settings.envs + e; i >= 0; i -= settings.envs) {
            const float value = format.load(values[i]);
            const float delta = format.load(rewards[i]) + settings.gamma * next * continues - value;
            recurrence = delta + settings.decay * continues * recurrence;
            advantages[i] = saturated(format, recurrence, &beyond), returns[i] = saturated(format, recurrence + value, &beyond);
            next = value, continues = settings.episode_starts[i] ? 0.0f : 1.0f;
        }
    }
    count(settings.saturated, beyond);
}

}  // namespace sb3_fp16
