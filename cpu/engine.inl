// The engine for one instruction set: included by a file that names it and sets the compiler's target.
namespace sb3_fp16 {
namespace {
#include "lanes.inl"
}
}  // namespace sb3_fp16

#include "../cuda/numerics.h"

namespace sb3_fp16 {
namespace {

#include "formats.inl"
#include "tiles.inl"
#include "network.inl"
#include "heads.inl"
#include "optimizers.inl"
#include "naive.inl"
#include "update.inl"
#include "act.inl"

// Calls `use` with the formats that a plan stores and computes in.
template <class Use>
auto with_formats(const Plan& plan, Use use) {
    const int bits = plan.significand_bits;
    if (plan.storage == Storage::fp16) return use(Half(bits), Half(bits));
    if (plan.storage == Storage::bf16) return use(Brain(bits), Brain(bits));
    if (plan.storage == Storage::short_half) return use(ShortHalf(bits), ShortHalf(bits));
    if (plan.compute == Storage::fp16) return use(Single(bits), Half(bits));
    if (plan.compute == Storage::bf16) return use(Single(bits), Brain(bits));
    return use(Single(bits), Single(bits));
}

Stats update(const Plan& plan, const Rollout& rollout, const Settings& settings, const int64_t* order, Scale& scale,
             Interrupted interrupted) {
    return with_formats(plan, [&](auto storage, auto compute) {
        return Update<decltype(storage), decltype(compute)>(plan, rollout, settings).run(order, scale, interrupted);
    });
}

std::unique_ptr<Actor> make_actor(const Plan& plan) {
    return with_formats(plan, [&](auto storage, auto compute) {
        return std::unique_ptr<Actor>(new ActorOf<decltype(storage), decltype(compute)>(plan));
    });
}

template <class Use>
auto with_format(Storage kind, int significand_bits, Use use) {
    if (kind == Storage::fp16) return use(Half(significand_bits));
    if (kind == Storage::bf16) return use(Brain(significand_bits));
    if (kind == Storage::short_half) return use(ShortHalf(significand_bits));
    return use(Single(significand_bits));
}

// Moments of 16-bit parameters have their format.
StepCounts sharp(const SharpStep& step) {
    if (step.storage == Storage::fp32)
        return with_format(step.state, step.state_bits, [&](auto state) { return step_alone(Single(0), state, step); });
    return with_format(step.storage, step.storage_bits, [&](auto both) { return step_alone(both, both, step); });
}

int64_t store(Storage kind, int significand_bits, const float* values, void* stored, int64_t count) {
    return with_format(kind, significand_bits, [&](auto format) -> int64_t {
        Lane poison{};
        Mask beyond{};
        const Single single(0);
        for (int64_t i = 0; i < count; i += WIDTH) {
            const Lane x = single.load(values, i, count - i);
            poison = poison + (x - x), beyond -= absolute(x) >= format.largest;
        }
        if (!(sum_of(poison) == 0.0f)) return -1;
        for (int64_t i = 0; i < count; i += WIDTH) {
            const Lane x = single.load(values, i, count - i);
            format.store(stored, i, count - i, format.round(clamped(x, -format.largest, format.largest)));
        }
        int64_t saturated = 0;
        for (int l = 0; l < WIDTH; ++l) saturated += beyond[l];
        return saturated;
    });
}

// δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1}, returns A + V: one FP32 recurrence state per environment, whose
// steps are rounded as they leave (sb3_fp16/buffers.py).
int64_t gae(const Advantages& a) {
    return with_format(a.storage, a.significand_bits, [&](auto format) -> int64_t {
        const float gamma = static_cast<float>(a.gamma), decay = static_cast<float>(a.gamma * a.lambda);
        int64_t beyond = 0;
        const auto write = [&](void* array, int64_t i, float x) {
            const Lane rounded = format.round(lane_of(x)), inside = clamped(rounded, -format.largest, format.largest);
            beyond += absolute(rounded[0]) > format.largest;
            format.store(array, i, 1, inside);
        };
        for (int64_t e = 0; e < a.envs; ++e) {
            float next = a.last_values[e], continues = a.last_continues[e], recurrence = 0.0f;
            for (int64_t i = (a.steps - 1) * a.envs + e; i >= 0; i -= a.envs) {
                const float value = format.load(a.values, i, 1)[0];
                const float delta = format.load(a.rewards, i, 1)[0] + gamma * next * continues - value;
                recurrence = delta + decay * continues * recurrence;
                write(a.advantages, i, recurrence), write(a.returns, i, recurrence + value);
                next = value, continues = a.episode_starts[i] ? 0.0f : 1.0f;
            }
        }
        return beyond;
    });
}

void load(Storage kind, int significand_bits, const void* stored, float* values, int64_t count) {
    with_format(kind, significand_bits, [&](auto format) {
        const Single single(0);
        for (int64_t i = 0; i < count; i += WIDTH) single.store(values, i, count - i, format.load(stored, i, count - i));
    });
}

void round(Storage kind, int significand_bits, const float* values, float* rounded, int64_t count) {
    with_format(kind, significand_bits, [&](auto format) {
        const Single single(0);
        for (int64_t i = 0; i < count; i += WIDTH) single.store(rounded, i, count - i, format.round(single.load(values, i, count - i)));
    });
}

template <Lane (*FUNCTION)(Lane)>
void apply(const float* x, float* y, int64_t count) {
    const Single single(0);
    for (int64_t i = 0; i < count; i += WIDTH) single.store(y, i, count - i, FUNCTION(single.load(x, i, count - i)));
}

Lane tanh_of(Lane x) { return tangent(x); }
Lane exp_of(Lane x) { return exponential(x); }
Lane expm1_of(Lane x) { return exponential_minus_1(x); }
Lane log_of(Lane x) { return logarithm(x); }
Lane log1p_of(Lane x) { return logarithm_1_plus(x); }
Lane erf_of(Lane x) { return error_function(x); }
void elementwise(int function, const float* x, float* y, int64_t count) {
    using Function = void (*)(const float*, float*, int64_t);
    constexpr Function functions[] = {apply<tanh_of>, apply<exp_of>,   apply<expm1_of>,
                                      apply<log_of>,  apply<log1p_of>, apply<erf_of>};
    functions[function](x, y, count);
}

}  // namespace

const Engine SB3_FP16_ENGINE = {update, make_actor, sharp, gae, store, load, round, elementwise};

}  // namespace sb3_fp16
