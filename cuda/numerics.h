// Elementary functions and rounding, written once for host and device.
//
// Plain FP32 arithmetic in a fixed order and no library functions, so that a CPU and a GPU give the same bits. Nothing
// here is contracted to fused multiply-adds: compile with -ffp-contract=off, or -fmad=false.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define SB3_FP16_FUNCTION __host__ __device__ __forceinline__
#else
#define SB3_FP16_FUNCTION static inline __attribute__((always_inline))
#endif

namespace sb3_fp16 {
namespace {

SB3_FP16_FUNCTION float as_float(uint32_t word) {
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

SB3_FP16_FUNCTION uint32_t as_word(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return word;
}

SB3_FP16_FUNCTION float select(bool condition, float yes, float no) { return condition ? yes : no; }

SB3_FP16_FUNCTION float absolute(float x) { return as_float(as_word(x) & 0x7fffffffu); }

SB3_FP16_FUNCTION float larger(float a, float b) { return a > b ? a : b; }

SB3_FP16_FUNCTION float smaller(float a, float b) { return a < b ? a : b; }

// e^r for |r| <= ln(2)/2, minus 1: Taylor to r^7, error below 2^-26 relative.
SB3_FP16_FUNCTION float expm1_reduced(float r) {
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    return r + r * r * p;
}

// x = n·ln 2 + r; the shift rounds to the nearest integer without a conversion. Beyond ±88 the result would leave FP32.
SB3_FP16_FUNCTION float reduce(float x, float* power) {
    const float shift = 12582912.0f;  // 1.5 · 2^23
    const float n = (x * 1.44269504f + shift) - shift;
    *power = as_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
    return (x - n * 0.693359375f) + n * 2.12194440e-4f;
}

SB3_FP16_FUNCTION float exponential(float x) {
    float power;
    const float clamped = smaller(larger(x, -87.0f), 88.0f);
    const float r = reduce(clamped, &power);
    const float result = power + power * expm1_reduced(r);
    return x != x ? x : result;
}

SB3_FP16_FUNCTION float exponential_minus_1(float x) {
    float power;
    const float clamped = smaller(larger(x, -87.0f), 88.0f);
    const float r = reduce(clamped, &power);
    const float result = (power - 1.0f) + power * expm1_reduced(r);
    return x != x ? x : result;
}

// tanh x = -u/(2 + u) with u = expm1(-2|x|): no cancellation near 0, no overflow far away.
SB3_FP16_FUNCTION float tangent(float x) {
    const float u = exponential_minus_1(-2.0f * absolute(x));
    const float magnitude = -u / (2.0f + u);
    return as_float(as_word(magnitude) | (as_word(x) & 0x80000000u));
}

// A threshold sequence is a function of (step, element index) alone: sb3_fp16/rounding.py.
constexpr uint32_t STEP_STRIDE = 0x9E3779B9u;
constexpr uint32_t INDEX_STRIDE = 0xC13FA9A9u;

SB3_FP16_FUNCTION uint32_t mix(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x7FEB352Du;
    word = (word ^ (word >> 15)) * 0x846CA68Bu;
    return word ^ (word >> 16);
}

SB3_FP16_FUNCTION float unit_interval(uint32_t word) {
    return static_cast<float>(static_cast<int32_t>(word >> 8)) * 5.9604644775390625e-8f;  // 2^-24
}

SB3_FP16_FUNCTION uint32_t dither_key(uint32_t step, uint32_t salt) { return step * STEP_STRIDE + salt; }

SB3_FP16_FUNCTION float dither_threshold(uint32_t index, uint32_t key) {
    return unit_interval(index * INDEX_STRIDE + key);
}

SB3_FP16_FUNCTION uint32_t random_key(uint32_t step, uint32_t salt, uint32_t seed) {
    return mix(mix((step * STEP_STRIDE) ^ seed) ^ salt);
}

SB3_FP16_FUNCTION float random_threshold(uint32_t index, uint32_t key) {
    return unit_interval(mix((index * INDEX_STRIDE) ^ key));
}

// Round the magnitude to FP16's grid, up where the covered fraction of a step exceeds the threshold.
SB3_FP16_FUNCTION float round_by_threshold(float value, float threshold) {
    const float power_of_two = as_float(as_word(value) & 0x7f800000u);
    const float tick = larger(power_of_two, 6.103515625e-5f) * 9.765625e-4f;  // 2^-14, 2^-10
    const float covered = absolute(value) / tick;
    const float whole = static_cast<float>(static_cast<int32_t>(covered));
    const float rounded = (whole + select(covered - whole > threshold, 1.0f, 0.0f)) * tick;
    return as_float(as_word(rounded) | (as_word(value) & 0x80000000u));
}

}  // namespace
}  // namespace sb3_fp16
