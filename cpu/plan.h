// What Python hands to the engine: pointers, sizes and settings. Nothing here knows of torch.
#pragma once

#include <cstdint>
#include <vector>

namespace sb3_fp16 {

enum class Sharing { elementwise, row, rank1 };
enum class Rounding { nearest, stochastic, dithered, residual, swallowed, fp32 };

// One parameter with its optimizer state. Storage is FP16 words, or FP32 where Plan::half is false.
struct Parameter {
    void* data;
    void* first_moment;
    void* root_second_moment;  // of Adam: the second moment
    float* carry;              // null unless the writeback keeps one
    int64_t* step;             // of Adam: null, see adam_step
    float* adam_step;
    int64_t rows, columns;
    uint32_t first_element;  // of the threshold sequences
    int network;
    Sharing sharing;
    Rounding writeback;
};

// y = tanh(x Wᵀ + b); a network's last layer has no activation.
struct Layer {
    int weight, bias;  // positions among the parameters
    int inputs, outputs;
};

struct Network {
    std::vector<Layer> layers;
};

struct Settings {
    int64_t samples, batch_size, n_epochs;
    float clip_lower, clip_upper;  // log-domain bounds
    float clip_range_vf;           // negative: off
    bool normalize_advantage;
    float ent_coef, vf_coef;
    float max_grad_norm;
    float target_kl;  // negative: off
    double lr, beta1, beta2, eps, weight_decay, state_scale;
    bool decoupled_weight_decay;
    Rounding root_rounding;
    uint32_t seed;
    float scale_floor[2], scale_ceiling[2];
};

// The rollout, rows in the order that indices refer to.
struct Rollout {
    const void* observations;
    const void* actions;
    const void* values;
    const void* advantages;
    const void* returns;
    const void* mean;             // behaviour policy; null where old_log_prob serves
    const void* log_std;          // shape (dims,)
    const void* correction;       // null where it is 0
    const float* old_log_prob;
    int64_t observation_size, action_size;
};

struct Scale {
    float scales[2];
    int64_t good_steps, skipped_steps, skips_at_floor;
};

struct Stats {
    double entropy_loss, policy_loss, value_loss, approx_kl, clip_fraction, loss, grad_norm;
    int64_t nonzero, stuck, saturated, epochs;
    bool stopped;
    float stopped_at_kl;
};

struct Plan {
    bool half;
    std::vector<Parameter> parameters;
    Network policy, value;
    int log_std;
};

using Interrupted = bool (*)();

// What the engine is made of, for tests.
struct Functions {
    void (*pack)(const float*, uint16_t*, int64_t);
    void (*unpack)(const uint16_t*, float*, int64_t);
    void (*tanh)(const float*, float*, int64_t);
    void (*exp)(const float*, float*, int64_t);
    void (*expm1)(const float*, float*, int64_t);
};

extern const Functions functions_portable, functions_avx2, functions_avx512;

Stats update_portable(const Plan&, const Rollout&, const Settings&, const int64_t* order, Scale&, Interrupted);
Stats update_avx2(const Plan&, const Rollout&, const Settings&, const int64_t* order, Scale&, Interrupted);
Stats update_avx512(const Plan&, const Rollout&, const Settings&, const int64_t* order, Scale&, Interrupted);

}  // namespace sb3_fp16
