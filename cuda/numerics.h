// Elementary functions and rounding, written once for host and device.
//
// Plain FP32 arithmetic in a fixed order and no library functions, so that a CPU and a GPU give the same bits. Nothing
// here is contracted to fused multiply-adds: compile with -ffp-contract=off, or -fmad=false.
//
// T is float, or a vector of floats for which the primitives below are overloaded before this file is included.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define SB3_FP16_FUNCTION __host__ __device__ __forceinline__
#define SB3_FP16_METHOD __host__ __device__ __forceinline__
#else
#define SB3_FP16_FUNCTION static inline __attribute__((always_inline))
#define SB3_FP16_METHOD inline __attribute__((always_inline))
#endif

#ifdef __CUDA_ARCH__
#define SB3_FP16_UNROLL _Pragma("unroll")
#else
#define SB3_FP16_UNROLL
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

SB3_FP16_FUNCTION uint32_t select(bool condition, uint32_t yes, uint32_t no) { return condition ? yes : no; }

SB3_FP16_FUNCTION float larger(float a, float b) { return a > b ? a : b; }

SB3_FP16_FUNCTION float smaller(float a, float b) { return a < b ? a : b; }

SB3_FP16_FUNCTION float truncated(float x) { return static_cast<float>(static_cast<int32_t>(x)); }

SB3_FP16_FUNCTION float number_of(uint32_t word) { return static_cast<float>(static_cast<int32_t>(word)); }

template <class T>
SB3_FP16_FUNCTION T absolute(T x) {
    return as_float(as_word(x) & 0x7fffffffu);
}

template <class T>
SB3_FP16_FUNCTION T with_sign_of(T magnitude, T x) {
    return as_float(as_word(magnitude) | (as_word(x) & 0x80000000u));
}

// NaN stays NaN.
template <class T>
SB3_FP16_FUNCTION T clamped(T x, float lower, float upper) {
    return smaller(T{} + upper, larger(T{} + lower, x));
}

// A power of two near a magnitude, and its inverse: for scaling exactly.
template <class T>
SB3_FP16_FUNCTION T power_of_two(T magnitude) {
    return as_float(as_word(smaller(larger(magnitude, T{} + 1.17549435e-38f), T{} + 8.5e37f)) & 0x7f800000u);
}

template <class T>
SB3_FP16_FUNCTION T inverse_of_power(T power) {
    return as_float(0x7f000000u - as_word(power));
}

// e^r for |r| <= ln(2)/2, minus 1: Taylor to r^7, error below 2^-26 relative.
template <class T>
SB3_FP16_FUNCTION T expm1_reduced(T r) {
    T p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    return r + r * r * p;
}

// x = n·ln 2 + r and 2^n; the shift leaves n in the low bits of the sum. Beyond ±88 the result would leave FP32.
template <class T>
SB3_FP16_FUNCTION T reduce(T x, T* power) {
    const float shift = 12582912.0f;  // 1.5 · 2^23
    const T shifted = x * 1.44269504f + shift;
    const T n = shifted - shift;
    *power = as_float((as_word(shifted) - (0x4b400000u - 127u)) << 23);
    return (x - n * 0.693359375f) + n * 2.12194440e-4f;
}

template <class T>
SB3_FP16_FUNCTION T exponential(T x) {
    T power;
    const T r = reduce(clamped(x, -87.0f, 88.0f), &power);
    return power + power * expm1_reduced(r);
}

template <class T>
SB3_FP16_FUNCTION T exponential_minus_1(T x) {
    T power;
    const T r = reduce(clamped(x, -87.0f, 88.0f), &power);
    return (power - 1.0f) + power * expm1_reduced(r);
}

// log x for normal x > 0: with x = 2^e·f, f near 1, log f = 2 artanh s, s = (f − 1)/(f + 1), to s^9.
template <class T>
SB3_FP16_FUNCTION T logarithm(T x) {
    const auto offset = as_word(x) - 0x3f3504f3u;  // f from sqrt(1/2) to sqrt(2)
    const T e = number_of(offset >> 23) - select(as_word(x) < 0x3f3504f3u, T{} + 512.0f, T{});
    const T f = as_float((offset & 0x007fffffu) + 0x3f3504f3u);
    const T s = (f - 1.0f) / (f + 1.0f), square = s * s;
    T p = square * (2.0f / 9) + 2.0f / 7;
    p = p * square + 2.0f / 5;
    p = p * square + 2.0f / 3;
    const T log_f = 2.0f * s + s * square * p;
    const T result = e * 0.693359375f + (log_f - e * 2.12194440e-4f);
    return select(x < INFINITY, result, x);
}

// log(1 + x) for x > −1: what forming 1 + x loses is given back to first order.
template <class T>
SB3_FP16_FUNCTION T logarithm_1_plus(T x) {
    const T u = larger(1.0f + x, T{} + 1.17549435e-38f);
    const T result = logarithm(u) + (x - (u - 1.0f)) / u;
    return select(x < INFINITY, result, x);
}

template <class T>
SB3_FP16_FUNCTION T polynomial(T, float constant) {
    return T{} + constant;
}

// Coefficients from the constant on, by Horner's rule.
template <class T, class... Coefficients>
SB3_FP16_FUNCTION T polynomial(T x, float constant, Coefficients... others) {
    return polynomial(x, others...) * x + constant;
}

// tanh x = x·P(x²)/Q(x²), P and Q of degree 4 fitted to relative error 1.3e-8; 3.6e-7 in FP32. Reaches 1 at the clamp.
template <class T>
SB3_FP16_FUNCTION T tangent(T x) {
    const T y = clamped(x, -8.016659f, 8.016659f), square = y * y;
    const T p = polynomial(square, 1.0f, 0.134068504f, 3.526370972e-3f, 2.112187212e-5f, 1.4081750876e-8f);
    const T q = polynomial(square, 1.0f, 0.467401713f, 2.599378489e-2f, 3.336220106e-4f, 8.07034553e-7f);
    return y * p / q;
}

template <class T>
SB3_FP16_FUNCTION T logistic(T x) {
    return 1.0f / (1.0f + exponential(-x));
}

// erf x = x·P(x²)/Q(x²), P and Q of degree 5 fitted to relative error 2.1e-8; 3.8e-7 in FP32. Reaches 1 at the clamp.
template <class T>
SB3_FP16_FUNCTION T error_function(T x) {
    const T y = clamped(x, -3.5911348f, 3.5911348f), square = y * y;
    const T p = polynomial(square, 1.1283791065f, 0.1915492415f, 5.287493393e-2f, 3.808018286e-3f, 2.846681164e-4f, 2.025701178e-6f);
    const T q = polynomial(square, 1.0f, 0.5030887723f, 0.1145588458f, 1.505480986e-2f, 1.170660718e-3f, 3.782862769e-5f);
    return y * p / q;
}

// A threshold sequence is a function of (step, element index) alone: sb3_fp16/rounding.py.
constexpr uint32_t STEP_STRIDE = 0x9E3779B9u;
constexpr uint32_t INDEX_STRIDE = 0xC13FA9A9u;

template <class W>
SB3_FP16_FUNCTION W mix(W word) {
    word = (word ^ (word >> 16)) * 0x7FEB352Du;
    word = (word ^ (word >> 15)) * 0x846CA68Bu;
    return word ^ (word >> 16);
}

template <class W>
SB3_FP16_FUNCTION auto unit_interval(W word) {
    return number_of(word >> 8) * 5.9604644775390625e-8f;  // 2^-24
}

SB3_FP16_FUNCTION uint32_t dither_key(uint32_t step, uint32_t salt) { return step * STEP_STRIDE + salt; }

template <class W>
SB3_FP16_FUNCTION auto dither_threshold(W index, uint32_t key) {
    return unit_interval(index * INDEX_STRIDE + key);
}

template <class W>
SB3_FP16_FUNCTION W random_key(W step, uint32_t salt, uint32_t seed) {
    return mix(mix((step * STEP_STRIDE) ^ seed) ^ salt);
}

template <class W, class K>
SB3_FP16_FUNCTION auto random_threshold(W index, K key) {
    return unit_interval(mix((index * INDEX_STRIDE) ^ key));
}

// Round a magnitude to a format with FP16's exponents, up where the covered fraction of a step exceeds the threshold.
template <class T>
SB3_FP16_FUNCTION T round_by_threshold(T value, T threshold, int significand_bits) {
    const auto power_of_two = as_word(larger(as_float(as_word(value) & 0x7f800000u), T{} + 6.103515625e-5f));  // 2^-14
    const uint32_t exponents = static_cast<uint32_t>(significand_bits) << 23;
    const T tick = as_float(power_of_two - exponents), per_tick = as_float(0x7f000000u + exponents - power_of_two);
    const T covered = absolute(value) * per_tick, whole = truncated(covered);
    return with_sign_of((whole + select(covered - whole > threshold, T{} + 1.0f, T{})) * tick, value);
}

// The same for BF16, whose exponents are FP32's: the fraction is the lower half of the word.
template <class T>
SB3_FP16_FUNCTION T round_by_threshold_bf16(T value, T threshold) {
    const auto word = as_word(value);
    const T fraction = number_of(word & 0xffffu) * 1.52587890625e-5f;  // 2^-16
    return as_float((word & 0xffff0000u) + select(fraction > threshold, (word & 0u) + 0x10000u, word & 0u));
}

}  // namespace
}  // namespace sb3_fp16
