// What Python hands to the engine: pointers, sizes and settings. Nothing here knows of torch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../cuda/modes.h"

namespace sb3_fp16 {

enum class Activation { none, tanh, relu, leaky_relu, elu, silu, gelu, gelu_tanh };

// One parameter with its optimizer state; an actor needs the first line only.
struct Parameter {
    void* data;
    int64_t rows, columns;
    void* first_moment;
    void* root_second_moment;  // of Adam: the second moment
    float* carry;              // null unless the writeback keeps one
    int64_t* step;             // of SHARP; Adam's, at the same address, is a float
    float* adam_step;
    uint32_t first_element;  // of the threshold sequences
    int network;             // whose coefficient κ is its own; alone, simply which
    Sharing sharing;
    Rounding writeback;
};

// y = activation(x Wᵀ + b); a network's last layer has none.
struct Layer {
    int weight, bias;  // positions among the parameters
    int64_t inputs, outputs;
    Activation activation;
    float slope;  // of leaky_relu for x < 0; of elu: alpha
};

using Network = std::vector<Layer>;

struct Plan {
    Storage storage;  // of parameters, optimizer state and rollout
    Storage compute;  // what layers round to
    int significand_bits;
    bool stochastic_copy;  // round the compute format's copy of FP32 weights stochastically
    std::vector<Parameter> parameters;
    Network policy, value;
    Head head;
    std::vector<int64_t> choices;  // of each categorical head
    int log_std;                   // position among the parameters; negative but for a Gaussian
    bool two_sum;                  // residual log-ratio in the compute format's own operations
    bool naive;                    // every operation rounded, torch's Adam on the rounded state (naive.inl)
    bool round_actions;
    int networks;  // that have a gradient scale of their own
    int threads;
    bool compares;  // an actor looks at each step whether any parameter has changed
};

struct OptimizerSettings {
    double lr, beta1, beta2, eps, weight_decay, state_scale;
    bool decoupled_weight_decay;
    Rounding root_rounding;
    uint32_t seed;
};

struct Settings : OptimizerSettings {
    int64_t samples, batch_size, n_epochs;
    float clip_lower, clip_upper;  // log-domain bounds
    float clip_range_vf;           // negative: off
    bool normalize_advantage;
    float ent_coef, vf_coef;
    float max_grad_norm;
    float target_kl;  // negative: off
    float scale_floor[2], scale_ceiling[2];
};

// The rollout in storage format, rows in the order that indices refer to; null where there is no such array.
struct Rollout {
    const void* observations;
    const void* actions;  // FP32 numbers where they are discrete
    const void* values;
    const void* advantages;
    const void* returns;
    const void* behaviour;     // means or logits of the behaviour policy; null where old_log_prob serves
    const void* log_std;       // shape (dims,)
    const void* correction;
    const void* old_log_prob;  // FP32, but in storage format for a naive plan
};

struct Scale {
    float scales[2];
    int64_t good_steps, skipped_steps, skips_at_floor;
};

// Updates that are not zero, those of them that changed nothing, and numbers beyond their format's range.
struct StepCounts {
    int64_t nonzero, stuck, saturated;
};

struct Stats : StepCounts {
    double entropy_loss, policy_loss, value_loss, approx_kl, clip_fraction, loss, grad_norm;
    int64_t epochs;
    bool stopped, diverged;  // diverged: a step made parameters infinite or NaN and was not written
    float stopped_at_kl;
};

// One step of all environments; null where a caller does not want it.
struct Acting {
    const void* observations;  // FP32 or FP64
    bool observations_are_double;
    int64_t count;
    bool look;  // whether parameters may have changed, for an actor that does not compare them
    const float* noise;  // standard normal, exponential or uniform draws; null: the distribution's mode
    float* actions;
    float* values;
    float* log_prob;
    float* behaviour;   // means or logits
    float* correction;  // c = log π₀(a) − log π₀(a as stored)
};

enum Flags { not_finite = 1, saturated = 2, changed = 4 };  // changed: parameters, since the last step

// What GAE(λ) reads and fills, in storage format.
struct Advantages {
    Storage storage;
    int significand_bits;
    int64_t steps, envs;
    const void *rewards, *values;
    const uint8_t* episode_starts;
    const float* last_values;
    const float* last_continues;  // 1 − done
    double gamma, lambda;
    void *advantages, *returns;
};

// One step of SHARP with no update around it. A parameter whose second moments are not shared may be one row.
struct SharpStep {
    Storage storage, state;  // of parameters and their gradients; of moments
    int storage_bits, state_bits;
    const std::vector<Parameter>& parameters;
    const void* const* gradients;
    const float* coefficients;
    float* workspace;  // for the largest gradient, in rows of a multiple of LANES
    int threads;
    OptimizerSettings settings;
};

using Interrupted = bool (*)();

// Acts for a policy; notices when its parameters have changed.
class Actor {
public:
    virtual ~Actor() = default;
    virtual int act(const Acting&) = 0;  // returns Flags
};

// One instruction set.
struct Engine {
    Stats (*update)(const Plan&, const Rollout&, const Settings&, const int64_t* order, Scale&, Interrupted);
    std::unique_ptr<Actor> (*make_actor)(const Plan&);
    StepCounts (*sharp)(const SharpStep&);
    // Generalized advantage estimation over arrays in storage, shape (steps, envs); returns how many saturated.
    int64_t (*gae)(const Advantages&);
    // How many values were beyond the format's range, or −1 if one was not finite; stores nothing then.
    int64_t (*store)(Storage, int significand_bits, const float*, void*, int64_t);
    void (*load)(Storage, int significand_bits, const void*, float*, int64_t);
    void (*round)(Storage, int significand_bits, const float*, float*, int64_t);
    void (*elementwise)(int function, const float*, float*, int64_t);  // in the order of the bindings' table
};

extern const Engine engine_portable, engine_avx2, engine_avx512;

}  // namespace sb3_fp16
