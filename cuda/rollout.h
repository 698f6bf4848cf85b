// What the host hands to the kernels of an update that read the rollout: advantages and losses. Pointers lead to the
// device. Arrays of the rollout have one row per sample, those of a minibatch one per position in it.
#pragma once

#include <cstdint>

#include "modes.h"

namespace sb3_fp16 {

// Of a minibatch's advantages: the mean, and what to divide by.
struct Statistics {
    float mean, deviation;
};

// Minibatches as an update takes them: each epoch's samples in pieces of batch_size, the last one possibly shorter.
struct StatisticsSettings {
    const void* advantages;
    const int64_t* indices;  // [epochs][samples]
    Statistics* statistics;  // out, one per minibatch
    int64_t samples, batch_size, epochs;
    bool normalize;  // false: advantages stay as they are
    int significand_bits;
};

struct GaeSettings {
    const void *rewards, *values;         // [steps][envs], as the next three
    const uint8_t* episode_starts;
    void *advantages, *returns;           // out
    const float *last_values, *last_continues;  // [envs]; 1 − done
    unsigned long long* saturated;        // adds how many numbers were beyond the format's range
    int64_t steps, envs;
    float gamma, decay;  // γ and γλ, the product taken in FP64
    int significand_bits;
};

// Bounds that a schedule may move: of the log-ratio, and of a value's change (negative: none).
struct Clip {
    float lower, upper, value_range;
};

// One minibatch. Arrays are in storage format and those of networks in the compute format, unless they say FP32.
struct LossSettings {
    const int64_t* indices;  // of its samples in the rollout
    int64_t count;
    // Of the rollout. A Gaussian's actions are in storage format, choices are FP32 numbers.
    const void *actions, *advantages, *returns, *values;
    const void* behaviour;      // means or logits; null for LogRatio::absolute
    const void* correction;     // null: none
    const float* old_log_prob;  // FP32; for LogRatio::absolute alone
    const Statistics* statistics;
    // Of the networks.
    const void *outputs, *predictions;    // [count][size] means or logits, and [count]
    void *policy_signal, *value_signal;   // out, the same shapes
    int64_t size;
    // A Gaussian's, [size] in storage format (log_std0: not for LogRatio::absolute), and room for it on the device: gaussian_workspace(count, size) bytes.
    const void *log_std, *log_std0;
    void *log_std_gradient, *workspace;
    // Categorical choices, logits of the heads side by side.
    const int64_t* choices;  // [heads]
    int64_t heads;
    const float* scales;  // S per network
    float* logs;          // out, one row: Log
    bool* stopped;        // by target_kl; null: never
    int networks;
    LogRatio log_ratio;
    const Clip* clip;
    float ent_coef, vf_coef;
    float target_kl;  // negative: off
    int storage_bits, compute_bits;  // significands
};

enum Log { policy_loss_log, value_loss_log, entropy_loss_log, clip_fraction_log, approx_kl_log, loss_log, LOGS };

}  // namespace sb3_fp16
