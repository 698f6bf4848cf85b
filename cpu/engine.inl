// The engine for one instruction set: included by a file that names it and sets the compiler's target.
#include "../cuda/numerics.h"

namespace sb3_fp16 {
namespace {

constexpr int MAX_DIMS = 4096;
constexpr float LOG_SQRT_2PI = 0.918938533204672742f;
constexpr float LARGEST_EXPONENT = 80.0f, LARGEST_HALF = 65504.0f, SMALLEST = 1.17549435e-38f, ROW_CLIP = 4.0f;
constexpr uint32_t PARAMETER_SALT = 0x5851F42Du, ROOT_SALT = 0x14057B7Eu;

#include "tiles.inl"
#include "update.inl"
#include "sharp.inl"

template <float (*FUNCTION)(float)>
void apply(const float* x, float* y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = FUNCTION(x[i]);
}

float tanh_of(float x) { return tangent(x); }
float exp_of(float x) { return exponential(x); }
float expm1_of(float x) { return exponential_minus_1(x); }

}  // namespace

const Functions SB3_FP16_FUNCTIONS = {pack, unpack, apply<tanh_of>, apply<exp_of>, apply<expm1_of>};

Stats SB3_FP16_UPDATE(const Plan& plan, const Rollout& rollout, const Settings& settings, const int64_t* order,
                      Scale& scale, Interrupted interrupted) {
    if (plan.half) return Engine<true>(plan, rollout, settings).run(order, scale, interrupted);
    return Engine<false>(plan, rollout, settings).run(order, scale, interrupted);
}

}  // namespace sb3_fp16
