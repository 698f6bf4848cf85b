// Names and constants that the CPU engine and the CUDA kernels share.
#pragma once

#include <cstdint>

namespace sb3_fp16 {

enum class Storage { fp32, fp16, bf16, short_half };
enum class Sharing { elementwise, row, rank1 };
enum class Rounding { nearest, stochastic, dithered, residual, swallowed, fp32 };
enum class Head { gaussian, categorical, bernoulli };
enum class LogRatio { absolute, residual, two_sum };

constexpr float LOG_SQRT_2PI = 0.918938533204672742f;
constexpr float LARGEST_EXPONENT = 80.0f, LARGEST_FLOAT = 3.40282347e38f, SMALLEST = 1.17549435e-38f, ROW_CLIP = 4.0f;
constexpr float LARGEST_LOGIT_CHANGE = 10.0f;  // beyond it the sum of expm1 terms loses what log-sum-exp keeps
constexpr uint32_t PARAMETER_SALT = 0x5851F42Du, ROOT_SALT = 0x14057B7Eu, COPY_SALT = 0x2545F491u;

// Sums of squares: in so many lanes along a row, and over so many rows at a time along a column. With the same order on
// every device they have the same bits.
constexpr int LANES = 16;
constexpr int64_t ROWS_TOGETHER = 32;

}  // namespace sb3_fp16
