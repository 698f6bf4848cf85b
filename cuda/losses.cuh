// Module B and the losses of one minibatch, from the networks' outputs to the signals that go back into them
// (sb3_fp16/residuals.py; cpu/heads.inl and cpu/update.inl, whose bits each sample has). One block: a thread takes every
// LOSS_THREADS-th sample, reads its row of the rollout, and what is summed over samples is summed in one order.
//
// A head answers with a sample's log-ratio d = log π(a|s)/π₀(a|s) and turns ∂loss/∂d into gradients of its outputs.
// Subscript 0 is the behaviour policy.
#pragma once

#include "formats.cuh"
#include "reduce.cuh"
#include "rollout.h"

namespace sb3_fp16 {

constexpr int LOSS_THREADS = 1024;

// Of a launch. Fewer threads than LOSS_THREADS, where they suffice, change no sum.
SB3_FP16_FUNCTION int loss_threads(int64_t count) {
    return count < LOSS_THREADS ? static_cast<int>((count + 31) / 32 * 32) : LOSS_THREADS;
}

// A sample's position in the minibatch, and its row of the rollout.
struct Sample {
    int64_t position, row;
};

// Numbers of the rollout, in format F, and of the networks, in format C.
template <class F, class C>
struct Numbers {
    const LossSettings& settings;
    const F storage;
    const C compute;

    __device__ __forceinline__ explicit Numbers(const LossSettings& settings_)
        : settings(settings_), storage{settings.storage_bits}, compute{settings.compute_bits} {}

    __device__ __forceinline__ float stored(const void* array, int64_t i) const {
        return storage.load(static_cast<const typename F::Word*>(array)[i]);
    }
    __device__ __forceinline__ float computed(const void* array, int64_t i) const {
        return compute.load(static_cast<const typename C::Word*>(array)[i]);
    }
    // To nearest; beyond the range infinite, so that the step is skipped.
    __device__ __forceinline__ void set_signal(void* array, int64_t i, float x) const {
        static_cast<typename C::Word*>(array)[i] = compute.store(x);
    }
    __device__ __forceinline__ float output(const Sample& sample, int64_t j) const {
        return computed(settings.outputs, sample.position * settings.size + j);
    }
    __device__ __forceinline__ float output0(const Sample& sample, int64_t j) const {
        return stored(settings.behaviour, sample.row * settings.size + j);
    }
    __device__ __forceinline__ void set_output_signal(const Sample& sample, int64_t j, float x) const {
        set_signal(settings.policy_signal, sample.position * settings.size + j, x);
    }
};

// a + b = high + low exactly, in a format's own operations (Ogita et al. 2005).
template <class F>
__device__ __forceinline__ float two_sum(const F& format, float a, float b, float* low) {
    const float high = format.round(a + b), b_part = format.round(high - a);
    *low = format.round(format.round(a - format.round(high - b_part)) + format.round(b - b_part));
    return high;
}

// What all samples share in one dimension of a Gaussian; t = expm1(−Δl).
struct Dimension {
    float log_std, inverse_std, inverse_std0, change, t;
    float rounded_inverse_std0, rounded_change, rounded_t;
};

// Bytes: the dimensions, then ∂loss/∂d of each sample.
SB3_FP16_FUNCTION int64_t gaussian_workspace(int64_t count, int64_t size) {
    return size * static_cast<int64_t>(sizeof(Dimension)) + count * static_cast<int64_t>(sizeof(float));
}

template <class F, class C>
class GaussianHead {
public:
    // Every thread of the block comes here.
    __device__ __forceinline__ explicit GaussianHead(const Numbers<F, C>& numbers_)
        : numbers(numbers_), settings(numbers.settings), dims(settings.size), dimensions(static_cast<Dimension*>(settings.workspace)),
          slopes(reinterpret_cast<float*>(dimensions + dims)) {
        for (int64_t j = threadIdx.x; j < dims; j += blockDim.x) {
            const float log_std = numbers.stored(settings.log_std, j);
            const float log_std0 = settings.log_std0 ? numbers.stored(settings.log_std0, j) : log_std;
            const float change = log_std - log_std0, inverse_std0 = exponential(-log_std0), rounded_change = r(change);
            dimensions[j] = {log_std, exponential(-log_std), inverse_std0, change, exponential_minus_1(-change),
                             r(inverse_std0), rounded_change, r(exponential_minus_1(-rounded_change))};
        }
        __syncthreads();
    }

    __device__ __forceinline__ float log_ratio(const Sample& sample, float*) const {
        if (settings.log_ratio == LogRatio::absolute) return log_prob(sample) - settings.old_log_prob[sample.row];
        if (settings.log_ratio == LogRatio::residual) return residual(sample);
        const float rounded = compensated(sample);
        return rounded - rounded == 0.0f ? rounded : residual(sample);  // in FP16 ½Δz² overflows from |Δz| = 362 on
    }

    // ∂d/∂μ = z e^{−l}; entropy does not depend on the state.
    __device__ __forceinline__ void backward(const Sample& sample, float slope, float) const {
        for (int64_t j = 0; j < dims; ++j) numbers.set_output_signal(sample, j, slope * z(sample, j) * dimensions[j].inverse_std);
        slopes[sample.position] = slope;
    }

    // Σ l + ½ log 2πe, of every sample.
    __device__ __forceinline__ float mean_entropy(float, float* shared) const {
        float sum = 0.0f;
        for (int64_t j = threadIdx.x; j < dims; j += blockDim.x) sum = sum + (dimensions[j].log_std + (0.5f + LOG_SQRT_2PI));
        return over_block<Sum>(sum, shared);
    }

    // ∂d/∂l = z² − 1, and the entropy's gradient, with z computed once more rather than kept. Each thread meets the
    // samples whose slopes it has written.
    __device__ __forceinline__ void write_log_std_gradient(float* shared) const {
        const float of_entropy = settings.ent_coef * settings.scales[0];
        for (int64_t j = 0; j < dims; ++j) {
            float sum = 0.0f;
            for (int64_t b = threadIdx.x; b < settings.count; b += blockDim.x) {
                const float zj = z({b, settings.indices[b]}, j);
                sum = sum + slopes[b] * (zj * zj - 1.0f);
            }
            const float gradient = over_block<Sum>(sum, shared) - of_entropy;
            if (threadIdx.x == 0) static_cast<typename F::Word*>(settings.log_std_gradient)[j] = numbers.storage.store(r(gradient));
        }
    }

private:
    const Numbers<F, C>& numbers;
    const LossSettings& settings;
    const int64_t dims;
    Dimension* const dimensions;
    float* const slopes;

    __device__ __forceinline__ float r(float x) const { return numbers.storage.round(x); }
    __device__ __forceinline__ float action(const Sample& sample, int64_t j) const {
        return numbers.stored(settings.actions, sample.row * dims + j);
    }

    // log p = Σ −l − ½z² − C.
    __device__ __forceinline__ float log_prob(const Sample& sample) const {
        float sum = 0.0f;
        for (int64_t j = 0; j < dims; ++j) {
            const float zj = absolute_z(sample, j);
            sum = sum + ((-dimensions[j].log_std - 0.5f * zj * zj) - LOG_SQRT_2PI);
        }
        return sum;
    }
    // z = (a − μ)e^{−l}.
    __device__ __forceinline__ float absolute_z(const Sample& sample, int64_t j) const {
        return (action(sample, j) - numbers.output(sample, j)) * dimensions[j].inverse_std;
    }

    // Δlog p = Σ −Δl − z₀Δz − ½Δz².
    __device__ __forceinline__ float residual(const Sample& sample) const {
        float d = 0.0f;
        for (int64_t j = 0; j < dims; ++j) {
            const Shift shift = shift_of(sample, j);
            d = d + ((-dimensions[j].change - shift.z0 * shift.dz) - 0.5f * shift.dz * shift.dz);
        }
        return d;
    }
    struct Shift {
        float z0, dz;
    };
    // Δz = z₀t − q(1 + t) with q = Δμ·e^{−l₀}.
    __device__ __forceinline__ Shift shift_of(const Sample& sample, int64_t j) const {
        const float mean0 = numbers.output0(sample, j), inverse_std0 = dimensions[j].inverse_std0, t = dimensions[j].t;
        const float z0 = (action(sample, j) - mean0) * inverse_std0;
        const float q = (numbers.output(sample, j) - mean0) * inverse_std0;
        return {z0, z0 * t - q * (1.0f + t)};
    }
    __device__ __forceinline__ float z(const Sample& sample, int64_t j) const {
        if (settings.log_ratio == LogRatio::absolute) return absolute_z(sample, j);
        const Shift shift = shift_of(sample, j);
        return shift.z0 + shift.dz;
    }

    // The residual with every operation rounded; high and low parts are summed over the dimensions in FP32 (paper Sec. 3.2).
    __device__ __forceinline__ float compensated(const Sample& sample) const {
        float high = 0.0f, low = 0.0f;
        for (int64_t j = 0; j < dims; ++j) {
            const float mean0 = numbers.output0(sample, j), t = dimensions[j].rounded_t;
            const float z0 = r(r(action(sample, j) - mean0) * dimensions[j].rounded_inverse_std0);
            const float q = r(r(numbers.output(sample, j) - mean0) * dimensions[j].rounded_inverse_std0);
            float dz_low, low1, low2;
            const float dz = two_sum(numbers.storage, r(z0 * t), -r(q + r(q * t)), &dz_low);
            const float first = two_sum(numbers.storage, -dimensions[j].rounded_change, -r(z0 * dz), &low1);
            high = high + two_sum(numbers.storage, first, -r(0.5f * r(dz * dz)), &low2);
            low = low + r(r(low1 + low2) - r(r(z0 + dz) * dz_low));
        }
        return high + low;
    }
};

template <class Logit>
__device__ __forceinline__ float log_sum_exp(int64_t n, Logit logit) {
    float largest = logit(0), sum = 0.0f;
    for (int64_t k = 1; k < n; ++k) largest = larger(logit(k), largest);
    for (int64_t k = 0; k < n; ++k) sum = sum + exponential(logit(k) - largest);
    return largest + logarithm(sum);
}

// One or several categorical choices.
template <class F, class C>
class CategoricalHead {
public:
    __device__ __forceinline__ explicit CategoricalHead(const Numbers<F, C>& numbers_) : numbers(numbers_), settings(numbers.settings) {}

    __device__ __forceinline__ float log_ratio(const Sample& sample, float* entropy) const {
        const bool absolute = settings.log_ratio == LogRatio::absolute;
        float log_prob = 0.0f, d = 0.0f;
        *entropy = 0.0f;
        each_choice(sample, [&](const Choice& choice) {
            const Shape shape = shape_of(choice, &log_prob);
            *entropy = *entropy - shape.mean_log_prob;
            if (!absolute) d = d + residual(choice, shape.total);
        });
        return absolute ? log_prob - settings.old_log_prob[sample.row] : d;
    }

    // ∂d/∂logit_k = 1[k=a] − p_k; ∂H/∂logit_k = −p_k(log p_k + H). What log_ratio has found is found once more.
    __device__ __forceinline__ void backward(const Sample& sample, float slope, float entropy_slope) const {
        each_choice(sample, [&](const Choice& choice) {
            float log_prob = 0.0f;
            const Shape shape = shape_of(choice, &log_prob);
            const float entropy = -shape.mean_log_prob;
            for (int64_t k = 0; k < choice.n; ++k) {
                const float p = probability(choice, shape.total, k), log_p = larger(-LARGEST_FLOAT, logit(choice, k) - shape.total);
                const float chosen = choice.action == static_cast<float>(k) ? 1.0f : 0.0f;
                numbers.set_output_signal(choice.sample, choice.first + k, slope * (chosen - p) - entropy_slope * p * (log_p + entropy));
            }
        });
    }

    __device__ __forceinline__ float mean_entropy(float sum, float* shared) const {
        return over_block<Sum>(sum, shared) / static_cast<float>(settings.count);
    }

private:
    const Numbers<F, C>& numbers;
    const LossSettings& settings;

    // One head of a sample: which logits are its own, and the choice made.
    struct Choice {
        const Sample& sample;
        int64_t first, n;
        float action;
    };
    // LSE of the logits, and Σ p·log p.
    struct Shape {
        float total, mean_log_prob;
    };

    template <class Visit>
    __device__ __forceinline__ void each_choice(const Sample& sample, Visit visit) const {
        const float* actions = static_cast<const float*>(settings.actions) + sample.row * settings.heads;
        int64_t first = 0;
        for (int64_t h = 0; h < settings.heads; ++h) {
            const int64_t n = settings.choices[h];
            visit(Choice{sample, first, n, actions[h]});
            first += n;
        }
    }

    __device__ __forceinline__ float logit(const Choice& choice, int64_t k) const {
        return numbers.output(choice.sample, choice.first + k);
    }
    __device__ __forceinline__ float logit0(const Choice& choice, int64_t k) const {
        return numbers.output0(choice.sample, choice.first + k);
    }
    __device__ __forceinline__ float probability(const Choice& choice, float total, int64_t k) const {
        const float x = logit(choice, k);
        return x == -INFINITY ? 0.0f : exponential(x - total);
    }

    // Adds the log-probability of the action.
    __device__ __forceinline__ Shape shape_of(const Choice& choice, float* log_prob) const {
        const float total = log_sum_exp(choice.n, [&](int64_t k) { return logit(choice, k); });
        float mean = 0.0f;
        for (int64_t k = 0; k < choice.n; ++k) {
            const float log_p = logit(choice, k) - total;
            mean = mean + probability(choice, total, k) * larger(-LARGEST_FLOAT, log_p);  // a masked choice's is −inf
            *log_prob = *log_prob + (choice.action == static_cast<float>(k) ? log_p : 0.0f);
        }
        return {total, mean};
    }

    // δ = logit − logit₀; 0 where both mask a choice.
    __device__ __forceinline__ float change(const Choice& choice, int64_t k) const {
        const float x = logit(choice, k), x0 = logit0(choice, k);
        return x == x0 ? 0.0f : x - x0;
    }

    // d = −log1p(Σ_{k≠a} p₀_k·expm1(e_k)), e_k = δ_k − δ_a; far away δ_a − ΔLSE.
    __device__ __forceinline__ float residual(const Choice& choice, float total) const {
        const float total0 = log_sum_exp(choice.n, [&](int64_t k) { return logit0(choice, k); });
        float of_action = 0.0f, sum = 0.0f, largest = -INFINITY;
        for (int64_t k = 0; k < choice.n; ++k)
            of_action = of_action + (choice.action == static_cast<float>(k) ? change(choice, k) : 0.0f);
        for (int64_t k = 0; k < choice.n; ++k) {
            const float e = change(choice, k) - of_action;
            largest = larger(e, largest);
            sum = sum + exponential(logit0(choice, k) - total0) * exponential_minus_1(smaller(LARGEST_LOGIT_CHANGE, e));
        }
        const float near = -logarithm_1_plus(sum), far = of_action - (total - total0);
        return largest > LARGEST_LOGIT_CHANGE || near > LARGEST_LOGIT_CHANGE ? far : near;
    }
};

// Sums over the samples of one thread.
struct Sums {
    float policy, value, entropy, clipped, kl;
};

// The clipped surrogate −Â·e^{d̄} of a sample, and its head's signals.
template <class F, class C, class HeadOf>
__device__ __forceinline__ void policy_loss(const Numbers<F, C>& numbers, const HeadOf& head, const Sample& sample, Sums& sums) {
    const LossSettings& settings = numbers.settings;
    const float scale = settings.scales[0] / static_cast<float>(settings.count);
    const float correction = settings.correction ? numbers.stored(settings.correction, sample.row) : 0.0f;
    float entropy = 0.0f;
    const float d = head.log_ratio(sample, &entropy) - correction;
    const float advantage = (numbers.stored(settings.advantages, sample.row) - settings.statistics->mean) / settings.statistics->deviation;
    const bool gains = advantage >= 0.0f;
    const float lower = gains ? -INFINITY : settings.clip->lower;
    const float upper = smaller(gains ? settings.clip->upper : INFINITY, LARGEST_EXPONENT);
    const float gain = advantage * exponential(smaller(upper, larger(lower, d)));  // of NaN: NaN
    const bool clipped = d < lower || d > upper, outside = d > settings.clip->upper || d < settings.clip->lower;
    head.backward(sample, clipped ? 0.0f : -gain * scale, -settings.ent_coef * scale);

    sums.policy = sums.policy - gain;
    sums.entropy = sums.entropy + entropy;
    sums.clipped = sums.clipped + (outside ? 1.0f : 0.0f);
    sums.kl = sums.kl + (exponential_minus_1(d) - d);
}

// Squared error of a sample, the prediction clipped around the old one if asked for.
template <class F, class C>
__device__ __forceinline__ void value_loss(const Numbers<F, C>& numbers, const Sample& sample, Sums& sums) {
    const LossSettings& settings = numbers.settings;
    const float scale = settings.scales[settings.networks - 1] / static_cast<float>(settings.count), range = settings.clip->value_range;
    float predicted = numbers.computed(settings.predictions, sample.position);
    bool moves = true;
    if (range >= 0.0f) {
        const float old_value = numbers.stored(settings.values, sample.row), off = predicted - old_value;
        moves = off >= -range && off <= range;
        predicted = old_value + clamped(off, -range, range);
    }
    const float error = predicted - numbers.stored(settings.returns, sample.row);
    sums.value = sums.value + error * error;
    numbers.set_signal(settings.value_signal, sample.position, moves ? 2.0f * settings.vf_coef * scale * error : 0.0f);
}

// Both, over all samples.
template <class F, class C, class HeadOf>
__device__ __forceinline__ Sums sum_losses(const Numbers<F, C>& numbers, const HeadOf& head) {
    Sums sums{};
    for (int64_t b = threadIdx.x; b < numbers.settings.count; b += blockDim.x) {
        const Sample sample{b, numbers.settings.indices[b]};
        policy_loss(numbers, head, sample, sums), value_loss(numbers, sample, sums);
    }
    return sums;
}

// Means for the logs, and whether the KL estimate ends the update.
template <class HeadOf>
__device__ __forceinline__ void finish(const LossSettings& settings, const HeadOf& head, const Sums& sums, float* shared) {
    const float n = static_cast<float>(settings.count);
    const float policy = over_block<Sum>(sums.policy, shared) / n, value = over_block<Sum>(sums.value, shared) / n;
    const float clipped = over_block<Sum>(sums.clipped, shared) / n, kl = over_block<Sum>(sums.kl, shared) / n;
    const float entropy = head.mean_entropy(sums.entropy, shared);
    if (threadIdx.x != 0) return;
    settings.logs[policy_loss_log] = policy, settings.logs[value_loss_log] = value, settings.logs[entropy_loss_log] = -entropy;
    settings.logs[clip_fraction_log] = clipped, settings.logs[approx_kl_log] = kl;
    settings.logs[loss_log] = policy - settings.ent_coef * entropy + settings.vf_coef * value;
    if (settings.stopped && settings.target_kl >= 0.0f && kl > 1.5f * settings.target_kl) *settings.stopped = true;
}

// A minibatch after the update has stopped is not evaluated: its logs are NaN.
__device__ __forceinline__ bool has_stopped(const LossSettings& settings) {
    if (!settings.stopped || !*settings.stopped) return false;
    if (threadIdx.x < LOGS) settings.logs[threadIdx.x] = NAN;
    return true;
}

template <class F, class C>
__global__ void __launch_bounds__(LOSS_THREADS, 1) gaussian_losses(const __grid_constant__ LossSettings settings) {
    __shared__ float per_warp[LOSS_THREADS / 32];
    if (has_stopped(settings)) return;
    const Numbers<F, C> numbers(settings);
    const GaussianHead<F, C> head(numbers);
    const Sums sums = sum_losses(numbers, head);
    head.write_log_std_gradient(per_warp);
    finish(settings, head, sums, per_warp);
}

template <class F, class C>
__global__ void __launch_bounds__(LOSS_THREADS, 1) categorical_losses(const __grid_constant__ LossSettings settings) {
    __shared__ float per_warp[LOSS_THREADS / 32];
    if (has_stopped(settings)) return;
    const Numbers<F, C> numbers(settings);
    const CategoricalHead<F, C> head(numbers);
    const Sums sums = sum_losses(numbers, head);
    finish(settings, head, sums, per_warp);
}

}  // namespace sb3_fp16
