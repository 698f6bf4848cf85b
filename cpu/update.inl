// One PPO update for one instruction set: forward, loss, backward, norm and optimizer step of every minibatch.
//
// Weights live in FP32 tiles that hold storage's values, unpacked once per optimizer step. Activations and backward
// signals are FP32 numbers rounded to storage where the reference engine rounds them.

using Floats = std::vector<float>;

static Floats zeros(int64_t count) { return Floats(static_cast<size_t>(count), 0.0f); }

// A layer's FP32 workspace.
struct LayerSpace {
    Layer shape;
    int in_stride, out_stride;
    Floats weight;      // [out][in], for the signal to the layer below
    Floats transposed;  // [in][out], for the forward pass
    Floats bias;
    Floats output;         // [batch][out], after the activation
    Floats signal;         // [batch][out], gradient of the output, then of the product
    Floats weight_gradient;  // [out][in]
    Floats bias_gradient;
};

struct NetworkSpace {
    std::vector<LayerSpace> layers;
    Floats input;  // [batch][in]
    int input_stride;
};

template <bool HALF>
struct Engine {
    const Plan& plan;
    const Rollout& rollout;
    const Settings& settings;
    int64_t batch;
    int dims;
    NetworkSpace policy, value;
    Floats log_std, log_std0, log_std_gradient;
    Floats actions, mean0, advantages, returns, old_values, correction, old_log_prob;
    Floats scratch[8];

    Engine(const Plan& plan_, const Rollout& rollout_, const Settings& settings_)
        : plan(plan_), rollout(rollout_), settings(settings_), batch(std::min(settings_.batch_size, settings_.samples)),
          dims(static_cast<int>(rollout_.action_size)) {
        reserve(policy, plan.policy);
        reserve(value, plan.value);
        log_std = zeros(dims), log_std0 = zeros(dims), log_std_gradient = zeros(dims);
        actions = zeros(batch * dims), mean0 = zeros(batch * dims);
        for (Floats* per_sample : {&advantages, &returns, &old_values, &correction, &old_log_prob})
            *per_sample = zeros(batch);
        int64_t largest = 0;
        for (const Parameter& p : plan.parameters) largest = std::max(largest, p.rows * p.columns);
        for (Floats& space : scratch) space = zeros(largest + PAD);
        refresh();
        if (rollout.log_std) load(rollout.log_std, 0, dims, log_std0.data());
    }

    void reserve(NetworkSpace& space, const Network& network) {
        space.input_stride = padded(network.layers.front().inputs);
        space.input = zeros(batch * space.input_stride);
        for (const Layer& shape : network.layers) {
            LayerSpace layer{shape, padded(shape.inputs), padded(shape.outputs), {}, {}, {}, {}, {}, {}, {}};
            layer.weight = zeros(static_cast<int64_t>(shape.outputs) * layer.in_stride);
            layer.transposed = zeros(static_cast<int64_t>(shape.inputs) * layer.out_stride);
            layer.bias = zeros(layer.out_stride);
            layer.output = zeros(batch * layer.out_stride);
            layer.signal = zeros(batch * layer.out_stride);
            layer.weight_gradient = zeros(static_cast<int64_t>(shape.outputs) * layer.in_stride);
            layer.bias_gradient = zeros(layer.out_stride);
            space.layers.push_back(layer);
        }
    }

    // Values of an array in storage, as FP32.
    static void load(const void* storage, int64_t start, int64_t count, float* values) {
        if (HALF)
            unpack(static_cast<const uint16_t*>(storage) + start, values, count);
        else
            memcpy(values, static_cast<const float*>(storage) + start, static_cast<size_t>(count) * sizeof(float));
    }

    static void store(const float* values, int64_t count, void* storage) {
        if (HALF)
            pack(values, static_cast<uint16_t*>(storage), count);
        else
            memcpy(storage, values, static_cast<size_t>(count) * sizeof(float));
    }

    static void round_storage(float* values, int64_t count) {
        if (HALF) round_half(values, count);
    }

    // Unpack all parameters into tiles.
    void refresh() {
        for (NetworkSpace* space : {&policy, &value})
            for (LayerSpace& layer : space->layers) {
                const Layer& s = layer.shape;
                const void* weight = plan.parameters[static_cast<size_t>(s.weight)].data;
                for (int o = 0; o < s.outputs; ++o) {
                    float* row = layer.weight.data() + static_cast<int64_t>(o) * layer.in_stride;
                    load(weight, static_cast<int64_t>(o) * s.inputs, s.inputs, row);
                }
                transpose(layer.weight.data(), layer.in_stride, s.outputs, s.inputs, layer.transposed.data(),
                          layer.out_stride);
                load(plan.parameters[static_cast<size_t>(s.bias)].data, 0, s.outputs, layer.bias.data());
            }
        load(plan.parameters[static_cast<size_t>(plan.log_std)].data, 0, dims, log_std.data());
    }

    void gather(const int64_t* rows, int64_t count) {
        const int64_t size = rollout.observation_size;
        for (int64_t b = 0; b < count; ++b) {
            const int64_t row = rows[b];
            load(rollout.observations, row * size, size, policy.input.data() + b * policy.input_stride);
            load(rollout.actions, row * dims, dims, actions.data() + b * dims);
            load(rollout.advantages, row, 1, &advantages[static_cast<size_t>(b)]);
            load(rollout.returns, row, 1, &returns[static_cast<size_t>(b)]);
            load(rollout.values, row, 1, &old_values[static_cast<size_t>(b)]);
            if (rollout.mean) load(rollout.mean, row * dims, dims, mean0.data() + b * dims);
            if (rollout.correction) load(rollout.correction, row, 1, &correction[static_cast<size_t>(b)]);
            if (rollout.old_log_prob) old_log_prob[static_cast<size_t>(b)] = rollout.old_log_prob[row];
        }
    }

    void forward(NetworkSpace& space, const float* input, int64_t count) {
        const float* x = input;
        int64_t x_stride = space.input_stride;
        for (LayerSpace& layer : space.layers) {
            const bool is_head = &layer == &space.layers.back();
            multiply({x, x_stride, 1}, layer.transposed.data(), layer.out_stride, layer.output.data(), layer.out_stride,
                     static_cast<int>(count), layer.shape.inputs, layer.out_stride);
            for (int64_t b = 0; b < count; ++b) {
                float* y = layer.output.data() + b * layer.out_stride;
                for (int o = 0; o < layer.out_stride; ++o) y[o] += layer.bias[static_cast<size_t>(o)];
            }
            round_storage(layer.output.data(), count * layer.out_stride);
            if (!is_head) {
                float* y = layer.output.data();
                for (int64_t i = 0; i < count * layer.out_stride; ++i) y[i] = tangent(y[i]);
                round_storage(y, count * layer.out_stride);
            }
            x = layer.output.data(), x_stride = layer.out_stride;
        }
    }

    // The head's signal is the gradient of its output; rounds it, and leaves rounded gradients of all parameters.
    void backward(NetworkSpace& space, const float* input, int64_t count) {
        for (size_t l = space.layers.size(); l-- > 0;) {
            LayerSpace& layer = space.layers[l];
            const int64_t n = count * layer.out_stride;
            float* signal = layer.signal.data();
            round_storage(signal, n);
            if (l + 1 < space.layers.size()) {
                const float* y = layer.output.data();
                for (int64_t i = 0; i < n; ++i) signal[i] = signal[i] * (1.0f - y[i] * y[i]);
                round_storage(signal, n);
            }
            const float* x = l ? space.layers[l - 1].output.data() : input;
            const int64_t x_stride = l ? space.layers[l - 1].out_stride : space.input_stride;
            multiply({signal, 1, layer.out_stride}, x, x_stride, layer.weight_gradient.data(), layer.in_stride,
                     layer.shape.outputs, static_cast<int>(count), layer.in_stride);
            round_storage(layer.weight_gradient.data(), static_cast<int64_t>(layer.shape.outputs) * layer.in_stride);
            float* bias = layer.bias_gradient.data();
            for (int o = 0; o < layer.out_stride; ++o) bias[o] = 0.0f;
            for (int64_t b = 0; b < count; ++b)
                for (int o = 0; o < layer.out_stride; ++o) bias[o] += signal[b * layer.out_stride + o];
            round_storage(bias, layer.out_stride);
            if (l) {
                LayerSpace& below = space.layers[l - 1];
                multiply({signal, layer.out_stride, 1}, layer.weight.data(), layer.in_stride, below.signal.data(),
                         below.out_stride, static_cast<int>(count), layer.shape.outputs, below.out_stride);
            }
        }
    }

    // Module A: Â = (A − mean)/(std + 1e-8), in FP32.
    void normalize(int64_t count) {
        if (!settings.normalize_advantage || count < 2) return;
        double sum = 0.0, squares = 0.0;
        for (int64_t b = 0; b < count; ++b) sum += advantages[static_cast<size_t>(b)];
        const float mean = static_cast<float>(sum / static_cast<double>(count));
        for (int64_t b = 0; b < count; ++b) {
            const double off = static_cast<double>(advantages[static_cast<size_t>(b)]) - mean;
            squares += off * off;
        }
        const float deviation = static_cast<float>(std::sqrt(squares / static_cast<double>(count - 1))) + 1e-8f;
        for (int64_t b = 0; b < count; ++b) {
            float& a = advantages[static_cast<size_t>(b)];
            a = (a - mean) / deviation;
        }
    }

    struct Sums {
        double policy = 0, value = 0, clipped = 0, kl = 0;
    };

    // Module B, the clipped loss and the value loss: fills the heads' signals and log_std's gradient.
    Sums losses(int64_t count, const Scale& scale) {
        LayerSpace &actor = policy.layers.back(), &critic = value.layers.back();
        const float samples = static_cast<float>(count);
        const float actor_scale = scale.scales[0] / samples, critic_scale = scale.scales[1] / samples;
        float inverse_std[MAX_DIMS], inverse_std0[MAX_DIMS], change[MAX_DIMS], t[MAX_DIMS];
        for (int j = 0; j < dims; ++j) {
            inverse_std[j] = exponential(-log_std[static_cast<size_t>(j)]);
            inverse_std0[j] = exponential(-log_std0[static_cast<size_t>(j)]);
            change[j] = log_std[static_cast<size_t>(j)] - log_std0[static_cast<size_t>(j)];
            t[j] = exponential_minus_1(-change[j]);
            log_std_gradient[static_cast<size_t>(j)] = 0.0f;
        }
        Sums sums;
        for (int64_t b = 0; b < count; ++b) {
            const float* mean = actor.output.data() + b * actor.out_stride;
            const float *action = actions.data() + b * dims, *behaviour = mean0.data() + b * dims;
            float* signal = actor.signal.data() + b * actor.out_stride;
            float d = 0.0f, z[MAX_DIMS];
            if (rollout.mean) {
                for (int j = 0; j < dims; ++j) {
                    const float z0 = (action[j] - behaviour[j]) * inverse_std0[j];
                    const float q = (mean[j] - behaviour[j]) * inverse_std0[j];
                    const float dz = z0 * t[j] - q * (1.0f + t[j]);       // Δz = z₀t − q(1 + t)
                    d += -change[j] - z0 * dz - 0.5f * dz * dz;           // Δlog p = −Δl − z₀Δz − ½Δz²
                    z[j] = z0 + dz;
                }
                if (rollout.correction) d -= correction[static_cast<size_t>(b)];
            } else {
                for (int j = 0; j < dims; ++j) {
                    z[j] = (action[j] - mean[j]) * inverse_std[j];
                    d += -log_std[static_cast<size_t>(j)] - 0.5f * z[j] * z[j] - LOG_SQRT_2PI;
                }
                d -= old_log_prob[static_cast<size_t>(b)];
            }
            const float advantage = advantages[static_cast<size_t>(b)];
            const float lower = advantage >= 0 ? -INFINITY : settings.clip_lower;
            const float upper = smaller(advantage >= 0 ? settings.clip_upper : INFINITY, LARGEST_EXPONENT);
            const bool inside = d >= lower && d <= upper;
            const float ratio = exponential(d < lower ? lower : d > upper ? upper : d);
            const float slope = inside || d != d ? -advantage * ratio * actor_scale : 0.0f;
            sums.policy -= static_cast<double>(advantage * ratio);
            sums.clipped += d > settings.clip_upper || d < settings.clip_lower ? 1.0 : 0.0;
            sums.kl += static_cast<double>(exponential_minus_1(d) - d);
            for (int j = 0; j < dims; ++j) {
                signal[j] = slope * z[j] * inverse_std[j];                               // ∂d/∂μ = z e^{−l}
                log_std_gradient[static_cast<size_t>(j)] += slope * (z[j] * z[j] - 1.0f);  // ∂d/∂l = z² − 1
            }
            const float old_value = old_values[static_cast<size_t>(b)];
            float predicted = critic.output[static_cast<size_t>(b * critic.out_stride)];
            bool moves = true;
            if (settings.clip_range_vf >= 0) {
                const float off = predicted - old_value, bound = settings.clip_range_vf;
                moves = off >= -bound && off <= bound;
                predicted = old_value + smaller(larger(off, -bound), bound);
            }
            const float error = predicted - returns[static_cast<size_t>(b)];
            sums.value += static_cast<double>(error * error);
            critic.signal[static_cast<size_t>(b * critic.out_stride)] =
                moves ? 2.0f * settings.vf_coef * critic_scale * error : 0.0f;
        }
        for (int j = 0; j < dims; ++j) log_std_gradient[static_cast<size_t>(j)] -= settings.ent_coef * scale.scales[0];
        round_storage(log_std_gradient.data(), dims);
        return sums;
    }

    // Gradient of a parameter: where it lies and how far apart its rows are.
    struct Gradient {
        const float* data;
        int64_t stride;
    };

    std::vector<Gradient> gradients() {
        std::vector<Gradient> found(plan.parameters.size());
        for (NetworkSpace* space : {&policy, &value})
            for (LayerSpace& layer : space->layers) {
                found[static_cast<size_t>(layer.shape.weight)] = {layer.weight_gradient.data(), layer.in_stride};
                found[static_cast<size_t>(layer.shape.bias)] = {layer.bias_gradient.data(), 1};
            }
        found[static_cast<size_t>(plan.log_std)] = {log_std_gradient.data(), 1};
        return found;
    }

    // Module A: G = s·sqrt(Σ (g/s)²) with s = max|g| of one network; not finite where a gradient is not.
    float norm(const std::vector<Gradient>& all, int network) {
        float largest = 0.0f;
        bool overflowed = false;
        each_row(all, network, [&](const float* row, int64_t count) {
            largest = larger(largest_magnitude(row, count), largest);
            overflowed |= poisoned(row, count);
        });
        if (overflowed) return NAN;
        if (largest == 0.0f) return 0.0f;
        double sum = 0.0;
        each_row(all, network,
                 [&](const float* row, int64_t count) { sum += static_cast<double>(sum_of_squares(row, count, largest)); });
        return largest * static_cast<float>(std::sqrt(sum));
    }

    // Rows of one network's gradients; neighbouring ones as a whole where nothing lies between.
    template <class Visit>
    void each_row(const std::vector<Gradient>& all, int network, Visit visit) {
        for (size_t i = 0; i < all.size(); ++i) {
            const Parameter& p = plan.parameters[i];
            if (p.network != network) continue;
            if (all[i].stride == p.columns)
                visit(all[i].data, p.rows * p.columns);
            else
                for (int64_t r = 0; r < p.rows; ++r) visit(all[i].data + r * all[i].stride, p.columns);
        }
    }

    // The scale's rules: sb3_fp16/scalars.py, GradientScale.update. Returns whether to skip the step.
    bool adapt(Scale& scale, const float* norms) {
        bool skip = false, at_floor = false, overflowed[2];
        for (int k = 0; k < 2; ++k) {
            overflowed[k] = !(norms[k] - norms[k] == 0.0f);
            skip = skip || overflowed[k];
            at_floor = at_floor || (overflowed[k] && scale.scales[k] <= settings.scale_floor[k]);
        }
        scale.skips_at_floor = at_floor ? scale.skips_at_floor + 1 : 0;
        scale.skipped_steps += skip;
        scale.good_steps = skip ? 0 : scale.good_steps + 1;
        const bool grow = scale.good_steps >= 2000;
        if (grow) scale.good_steps = 0;
        for (int k = 0; k < 2; ++k) {
            const float halved = larger(scale.scales[k] / 2, settings.scale_floor[k]);
            const float grown = smaller(scale.scales[k] * (grow ? 2.0f : 1.0f), settings.scale_ceiling[k]);
            scale.scales[k] = overflowed[k] ? halved : grown;
        }
        return skip;
    }

    Stats run(const int64_t* order, Scale& scale, Interrupted interrupted) {
        Stats stats{};
        double policy_sum = 0, value_sum = 0, entropy_sum = 0, clip_sum = 0, norm_sum = 0, kl_sum = 0;
        int64_t minibatches = 0, steps = 0, of_epoch = 0;
        const std::vector<Gradient> all = gradients();
        for (int64_t epoch = 0; epoch < settings.n_epochs && !stats.stopped; ++epoch) {
            ++stats.epochs;
            kl_sum = 0, of_epoch = 0;
            for (int64_t start = 0; start < settings.samples; start += batch) {
                if (interrupted && interrupted()) return stats;
                const int64_t count = std::min(batch, settings.samples - start);
                gather(order + epoch * settings.samples + start, count);
                normalize(count);
                forward(policy, policy.input.data(), count);
                forward(value, policy.input.data(), count);
                const Sums sums = losses(count, scale);
                const double n = static_cast<double>(count);
                double entropy = 0;
                for (float l : log_std) entropy -= static_cast<double>(l) + 0.5 + static_cast<double>(LOG_SQRT_2PI);
                policy_sum += sums.policy / n, value_sum += sums.value / n, clip_sum += sums.clipped / n;
                entropy_sum += entropy, kl_sum += sums.kl / n;
                ++minibatches, ++of_epoch;
                stats.loss = sums.policy / n + static_cast<double>(settings.ent_coef) * entropy +
                             static_cast<double>(settings.vf_coef) * sums.value / n;
                if (settings.target_kl >= 0 && sums.kl / n > 1.5 * static_cast<double>(settings.target_kl)) {
                    stats.stopped = true, stats.stopped_at_kl = static_cast<float>(sums.kl / n);
                    break;
                }
                backward(policy, policy.input.data(), count);
                backward(value, policy.input.data(), count);
                const float norms[2] = {norm(all, 0), norm(all, 1)};
                const float g0 = norms[0] / scale.scales[0], g1 = norms[1] / scale.scales[1];
                const float total = std::sqrt(g0 * g0 + g1 * g1);
                const float clip = smaller(settings.max_grad_norm / (total + 1e-6f), 1.0f);
                const float coefficients[2] = {clip / scale.scales[0], clip / scale.scales[1]};
                if (adapt(scale, norms)) continue;
                norm_sum += static_cast<double>(total), ++steps;
                for (size_t i = 0; i < all.size(); ++i) {
                    const Parameter& p = plan.parameters[i];
                    if (HALF)
                        sharp(p, all[i], coefficients[p.network], stats);
                    else
                        adam(p, all[i], coefficients[p.network]);
                }
                refresh();
            }
        }
        const double n = static_cast<double>(minibatches);
        stats.policy_loss = policy_sum / n, stats.value_loss = value_sum / n, stats.entropy_loss = entropy_sum / n;
        stats.clip_fraction = clip_sum / n, stats.approx_kl = kl_sum / static_cast<double>(of_epoch);
        stats.grad_norm = steps ? norm_sum / static_cast<double>(steps) : NAN;
        return stats;
    }

    // The gradient, unscaled and clipped, dense.
    void unscale(const Parameter& p, Gradient gradient, float coefficient, float* g) {
        for (int64_t r = 0; r < p.rows; ++r)
            for (int64_t c = 0; c < p.columns; ++c) g[r * p.columns + c] = gradient.data[r * gradient.stride + c] * coefficient;
    }

    void adam(const Parameter& p, Gradient gradient, float coefficient) {
        const int64_t n = p.rows * p.columns;
        float *g = scratch[0].data(), *theta = static_cast<float*>(p.data);
        float *m = static_cast<float*>(p.first_moment), *v = static_cast<float*>(p.root_second_moment);
        unscale(p, gradient, coefficient, g);
        const double t = static_cast<double>(*p.adam_step += 1.0f);
        const float step_size = static_cast<float>(settings.lr / (1 - std::pow(settings.beta1, t)));
        const float unbias = static_cast<float>(std::sqrt(1 - std::pow(settings.beta2, t)));
        const float blend = static_cast<float>(1 - settings.beta1), keep = static_cast<float>(settings.beta2);
        const float add = static_cast<float>(1 - settings.beta2), eps = static_cast<float>(settings.eps);
        const float decay = static_cast<float>(settings.weight_decay);
        for (int64_t i = 0; i < n; ++i) {
            const float slope = g[i] + decay * theta[i];
            m[i] = m[i] + blend * (slope - m[i]);
            v[i] = v[i] * keep + add * slope * slope;
            theta[i] -= step_size * m[i] / (std::sqrt(v[i]) / unbias + eps);
        }
    }
