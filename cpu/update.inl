// One PPO update: forward, loss, backward, norm and optimizer step of every minibatch. Nothing is allocated meanwhile.

template <class S, class C>
class Update {
public:
    Update(const Plan& plan, const Rollout& rollout_, const Settings& settings_)
        : rollout(rollout_), settings(settings_), model(plan, std::min(settings_.batch_size, settings_.samples), true),
          head(model.storage, model.plan), samples(model.batch, outputs(), action_size()),
          sharp(model.storage, model.storage, settings, model.workers, model.plan.parameters),
          adam(settings, model.workers), naive{model.storage, settings},
          log_std0(model.log_std), log_std_gradient(model.log_std),
          row(zeros(padded(std::max({model.observation_size, outputs(), action_size()})))) {
        for (Floats* per_sample : {&advantages, &returns, &old_values, &predictions, &value_signal})
            *per_sample = zeros(padded(model.batch));
        model.refresh();
        find_targets();
        if (rollout.log_std) {
            const int64_t dims = outputs();
            for (int64_t j = 0; j < dims; j += WIDTH)
                store_lane(&log_std0[static_cast<size_t>(j)], model.storage.load(rollout.log_std, j, dims - j));
        }
    }

    Stats run(const int64_t* order, Scale& scale, Interrupted interrupted) {
        Stats stats{};
        Means means{};
        for (int64_t epoch = 0; epoch < settings.n_epochs && !stats.stopped && !stats.diverged; ++epoch) {
            ++stats.epochs;
            means.kl_of_epoch = 0, means.minibatches_of_epoch = 0;
            for (int64_t start = 0; start < settings.samples && !stats.stopped && !stats.diverged; start += model.batch) {
                if (interrupted && interrupted()) return stats;
                const int64_t count = std::min(model.batch, settings.samples - start);
                gather(order + epoch * settings.samples + start, count);
                normalize(count);
                model.forward(model.policy, count), model.forward(model.value, count);
                const double kl = evaluate(count, scale, means, stats);
                if (settings.target_kl >= 0 && kl > 1.5 * static_cast<double>(settings.target_kl))
                    stats.stopped = true, stats.stopped_at_kl = static_cast<float>(kl);
                else
                    step(count, scale, means, stats);
            }
        }
        means.finish(stats);
        return stats;
    }

private:
    // Sums over minibatches.
    struct Means {
        double policy, value, entropy, clipped, kl_of_epoch, norm;
        int64_t minibatches, minibatches_of_epoch, steps;
        void finish(Stats& stats) const {
            const double n = static_cast<double>(minibatches);
            stats.policy_loss = policy / n, stats.value_loss = value / n, stats.entropy_loss = -entropy / n;
            stats.clip_fraction = clipped / n, stats.approx_kl = kl_of_epoch / static_cast<double>(minibatches_of_epoch);
            stats.grad_norm = steps ? norm / static_cast<double>(steps) : static_cast<double>(NAN);
        }
    };

    // Sums over the samples of a minibatch.
    struct Sums {
        double policy, value, entropy, clipped, kl;
    };

    const Rollout rollout;
    const Settings settings;
    Model<S, C> model;
    ActionHead<S> head;
    Samples samples;
    Sharp<S, S> sharp;
    Adam adam;
    Naive<S> naive;
    std::vector<Target> targets;  // of the parameters
    Floats log_std0, log_std_gradient, row;
    Floats advantages, returns, old_values, predictions, value_signal;

    int64_t outputs() const { return model.outputs(); }
    int64_t action_size() const { return model.action_size(); }

    void find_targets() {
        for (const Parameter& p : model.plan.parameters) {
            const Shape shape{p.rows, p.columns};
            targets.push_back({shape, shape, nullptr, nullptr, 0, 1.0f, {}, {}});
            if (p.sharing == Sharing::elementwise || !S::rounds) continue;
            targets.back().row_squares = zeros(padded(p.rows));
            if (p.sharing == Sharing::rank1) targets.back().column_squares = zeros(padded(p.columns));
        }
        const auto set = [this](int position, Floats& gradient, Floats& tile, int64_t stride) {
            Target& target = targets[static_cast<size_t>(position)];
            target.gradient = gradient.data(), target.tile = tile.data(), target.stride = stride;
            if (stride == target.shape.columns && stride % WIDTH) target.flat = {1, target.shape.rows * stride};
        };
        for (NetworkSpace* space : {&model.policy, &model.value})
            for (LayerSpace& layer : space->layers) {
                set(layer.shape.weight, layer.weight_gradient, layer.weight, layer.in_stride);
                set(layer.shape.bias, layer.bias_gradient, layer.bias, layer.out_stride);
            }
        if (model.plan.log_std >= 0) set(model.plan.log_std, log_std_gradient, model.log_std, padded(outputs()));
    }

    // Row `index` of an array in storage to a dense row of FP32 numbers.
    template <class Format>
    void read(const Format& format, const void* array, int64_t index, int64_t size, float* values) const {
        for (int64_t c = 0; c < size; c += WIDTH) store_lane(values + c, format.load(array, index * size + c, size - c));
    }

    template <class Format>
    void read_column(const Format& format, const void* array, int64_t index, int64_t size, int64_t b, Floats& columns) {
        read(format, array, index, size, row.data());
        for (int64_t j = 0; j < size; ++j) columns[static_cast<size_t>(j * samples.stride + b)] = row[static_cast<size_t>(j)];
    }

    void gather(const int64_t* rows, int64_t count) {
        const S& storage = model.storage;
        const bool discrete = model.plan.head != Head::gaussian;
        for (int64_t b = 0; b < count; ++b) {
            const int64_t index = rows[b];
            const size_t at = static_cast<size_t>(b);
            float* observation = model.input.data() + b * model.input_stride;
            for (int64_t c = 0; c < model.observation_size; c += WIDTH) {
                const Lane x = storage.load(rollout.observations, index * model.observation_size + c, model.observation_size - c);
                store_lane(observation + c, S::rounds ? x : model.compute.round(x));
            }
            if (discrete)
                read_column(Single(0), rollout.actions, index, action_size(), b, samples.actions);
            else
                read_column(storage, rollout.actions, index, action_size(), b, samples.actions);
            if (rollout.behaviour) read_column(storage, rollout.behaviour, index, outputs(), b, samples.behaviour);
            advantages[at] = storage.load(rollout.advantages, index, 1)[0];
            returns[at] = storage.load(rollout.returns, index, 1)[0];
            old_values[at] = storage.load(rollout.values, index, 1)[0];
            if (rollout.correction) samples.correction[at] = storage.load(rollout.correction, index, 1)[0];
            if (rollout.old_log_prob)
                samples.old_log_prob[at] = model.plan.naive ? storage.load(rollout.old_log_prob, index, 1)[0]
                                                            : static_cast<const float*>(rollout.old_log_prob)[index];
        }
    }

    // Module A: Â = (A − mean)/(std + 1e-8), in FP32.
    void normalize(int64_t count) {
        if (!settings.normalize_advantage || count < 2) return;
        if (model.plan.naive) return naive.normalize(advantages, count);
        double sum = 0.0, squares = 0.0;
        for (int64_t b = 0; b < count; ++b) sum += static_cast<double>(advantages[static_cast<size_t>(b)]);
        const float mean = static_cast<float>(sum / static_cast<double>(count));
        for (int64_t b = 0; b < count; ++b) {
            const double off = static_cast<double>(advantages[static_cast<size_t>(b)] - mean);
            squares += off * off;
        }
        const float deviation = static_cast<float>(std::sqrt(squares / static_cast<double>(count - 1))) + 1e-8f;
        for (int64_t b = 0; b < count; ++b) {
            float& a = advantages[static_cast<size_t>(b)];
            a = (a - mean) / deviation;
        }
    }

    // Losses of a minibatch and the heads' signals; returns the KL estimate.
    double evaluate(int64_t count, const Scale& scale, Means& means, Stats& stats) {
        LayerSpace &actor = model.policy.head(), &critic = model.value.head();
        transpose(actor.output.data(), actor.out_stride, count, outputs(), samples.outputs.data(), samples.stride);
        for (int64_t b = 0; b < count; ++b)
            predictions[static_cast<size_t>(b)] = critic.output[static_cast<size_t>(b * critic.out_stride)];
        if (model.plan.head == Head::gaussian) head.gaussian.begin(model.log_std.data(), log_std0.data());

        const float n = static_cast<float>(count);
        const float policy_scale = scale.scales[0] / n, value_scale = scale.scales[model.plan.networks - 1] / n;
        Sums sums{};
        for (int64_t s = 0; s < count; s += WIDTH) {
            const Mask valid = first_lanes(count - s);
            if (model.plan.naive) {
                naive_losses(s, valid, n, sums);
                continue;
            }
            policy_loss(s, valid, policy_scale, sums);
            value_loss(s, valid, value_scale, sums);
        }
        if (model.plan.head == Head::gaussian)
            for (int64_t j = 0; j < outputs(); ++j) {
                const float of_ratio = model.plan.naive ? head.gaussian.naive_log_std_gradient(j)
                                                        : static_cast<float>(head.gaussian.log_std_gradient[static_cast<size_t>(j)]);
                log_std_gradient[static_cast<size_t>(j)] = of_ratio - settings.ent_coef * scale.scales[0];
            }
        round_signals(actor, critic, count);

        const auto mean = [&](double sum) {
            const double result = sum / static_cast<double>(count);
            return model.plan.naive ? static_cast<double>(naive.r(static_cast<float>(result))) : result;
        };
        const double policy = mean(sums.policy), value = mean(sums.value), entropy = mean(sums.entropy);
        const double kl = sums.kl / static_cast<double>(count);
        means.policy += policy, means.value += value, means.entropy += entropy;
        means.clipped += sums.clipped / static_cast<double>(count);
        means.kl_of_epoch += kl, ++means.minibatches, ++means.minibatches_of_epoch;
        stats.loss = policy - static_cast<double>(settings.ent_coef) * entropy + static_cast<double>(settings.vf_coef) * value;
        return kl;
    }

    // Module B and the clipped surrogate −Â·e^{d̄} of WIDTH samples.
    void policy_loss(int64_t s, Mask valid, float scale, Sums& sums) {
        Lane entropy;
        const LogRatio form = !rollout.behaviour ? LogRatio::absolute : model.plan.two_sum ? LogRatio::two_sum : LogRatio::residual;
        const Lane d = head.log_ratio(form, samples, s, &entropy) - load_lane(&samples.correction[static_cast<size_t>(s)]);
        const Lane advantage = load_lane(&advantages[static_cast<size_t>(s)]);
        const Mask gains = advantage >= 0.0f;
        const Lane lower = select(gains, lane_of(-INFINITY), lane_of(settings.clip_lower));
        const Lane upper = smaller(select(gains, lane_of(settings.clip_upper), lane_of(INFINITY)), lane_of(LARGEST_EXPONENT));
        const Lane ratio = exponential(smaller(upper, larger(lower, d)));  // of NaN: NaN
        const Mask clipped = (d < lower) | (d > upper);
        const Lane gain = advantage * ratio;
        const Lane slope = select(valid & ~clipped, -gain * scale, Lane{});
        head.backward(samples, s, slope, -settings.ent_coef * scale, valid);

        const Mask outside = (d > settings.clip_upper) | (d < settings.clip_lower);
        sums.policy -= static_cast<double>(sum_of(select(valid, gain, Lane{})));
        sums.entropy += static_cast<double>(sum_of(select(valid, entropy, Lane{})));
        sums.clipped += static_cast<double>(sum_of(select(valid & outside, lane_of(1.0f), Lane{})));
        sums.kl += static_cast<double>(sum_of(select(valid, exponential_minus_1(d) - d, Lane{})));
    }

    // Mean squared error of WIDTH samples, the prediction clipped around the old one if asked for.
    void value_loss(int64_t s, Mask valid, float scale, Sums& sums) {
        const size_t at = static_cast<size_t>(s);
        const Lane old_value = load_lane(&old_values[at]);
        Lane predicted = load_lane(&predictions[at]);
        Mask moves = valid;
        if (settings.clip_range_vf >= 0) {
            const Lane off = predicted - old_value;
            moves = valid & (off >= -settings.clip_range_vf) & (off <= settings.clip_range_vf);
            predicted = old_value + clamped(off, -settings.clip_range_vf, settings.clip_range_vf);
        }
        const Lane error = predicted - load_lane(&returns[at]);
        sums.value += static_cast<double>(sum_of(select(valid, error * error, Lane{})));
        store_lane(&value_signal[at], select(moves, 2.0f * settings.vf_coef * scale * error, Lane{}));
    }

    // Both losses of WIDTH samples in naive half precision.
    void naive_losses(int64_t s, Mask valid, float n, Sums& sums) {
        const size_t at = static_cast<size_t>(s);
        Lane entropy, slope, signal;
        const Lane log_prob = head.naive_log_prob(samples, s, &entropy);
        const Lane d = naive.r(log_prob - load_lane(&samples.old_log_prob[at]));
        const float lower = static_cast<float>(std::exp(static_cast<double>(settings.clip_lower)));
        const float upper = static_cast<float>(std::exp(static_cast<double>(settings.clip_upper)));
        const Lane gain = naive.surrogate(d, load_lane(&advantages[at]), lower, upper, naive.r(-1.0f / n), &slope);
        const float entropy_slope = naive.r(-naive.r(settings.ent_coef) / n);
        head.naive_backward(samples, s, select(valid, slope, Lane{}), entropy_slope, valid);
        const Lane error = naive.squared_error(load_lane(&predictions[at]), load_lane(&old_values[at]), load_lane(&returns[at]),
                                               naive.r(naive.r(settings.vf_coef) / n), &signal);
        store_lane(&value_signal[at], select(valid, signal, Lane{}));

        const Mask outside = (d > settings.clip_upper) | (d < settings.clip_lower);
        sums.policy -= static_cast<double>(sum_of(select(valid, gain, Lane{})));
        sums.value += static_cast<double>(sum_of(select(valid, error, Lane{})));
        sums.entropy += static_cast<double>(sum_of(select(valid, naive.r(entropy), Lane{})));
        sums.clipped += static_cast<double>(sum_of(select(valid & outside, lane_of(1.0f), Lane{})));
        sums.kl += static_cast<double>(sum_of(select(valid, exponential_minus_1(d) - d, Lane{})));
    }

    // Clip and step without module A: nothing is skipped. Parameters that would not be finite are not written.
    void naive_step(Means& means, Stats& stats) {
        float sum = 0.0f;
        for (const Target& t : targets) sum += naive.square(t);
        const float norm = naive.r(std::sqrt(naive.r(sum))), coefficient = naive.coefficient(norm);
        means.norm += static_cast<double>(norm), ++means.steps;
        for (size_t i = 0; i < targets.size(); ++i)
            stats.diverged |= !naive.adam(model.plan.parameters[i], targets[i], coefficient);
        if (stats.diverged) return;
        for (size_t i = 0; i < targets.size(); ++i) naive.write(model.plan.parameters[i], targets[i]);
        turn_weights();
    }

    void turn_weights() {
        for (NetworkSpace* space : {&model.policy, &model.value})
            for (LayerSpace& layer : space->layers)
                transpose(model.workers, layer.weight.data(), layer.in_stride, layer.shape.outputs, layer.shape.inputs, layer.transposed.data(),
                          layer.out_stride);
    }

    void round_signals(LayerSpace& actor, LayerSpace& critic, int64_t count) {
        const auto round = [](float* x, int64_t n, const auto& format) {
            for (int64_t i = 0; i < n; i += WIDTH) store_lane(x + i, format.round_words(load_lane(x + i)));
        };
        transpose(samples.signal.data(), samples.stride, outputs(), count, actor.signal.data(), actor.out_stride);
        for (int64_t b = 0; b < count; ++b)
            critic.signal[static_cast<size_t>(b * critic.out_stride)] = value_signal[static_cast<size_t>(b)];
        round(actor.signal.data(), count * actor.out_stride, model.compute);
        round(critic.signal.data(), count * critic.out_stride, model.compute);
        if (!log_std_gradient.empty())
            for (int64_t j = 0; j < outputs(); j += WIDTH) {
                float* gradient = &log_std_gradient[static_cast<size_t>(j)];
                store_lane(gradient, model.storage.round(load_lane(gradient)));
            }
    }

    // Backward pass, global norm, optimizer step.
    void step(int64_t count, Scale& scale, Means& means, Stats& stats) {
        model.backward(model.policy, count), model.backward(model.value, count);
        if (model.plan.naive) return naive_step(means, stats);
        const int networks = model.plan.networks;
        float norms[2] = {}, sum = 0.0f, coefficients[2];
        for (int k = 0; k < networks; ++k) {
            norms[k] = norm(k);
            sum += (norms[k] / scale.scales[k]) * (norms[k] / scale.scales[k]);
        }
        const float total = std::sqrt(sum), clip = smaller(settings.max_grad_norm / (total + 1e-6f), 1.0f);
        for (int k = 0; k < networks; ++k) coefficients[k] = clip / scale.scales[k];
        if (adapt(scale, norms)) return;
        means.norm += static_cast<double>(total), ++means.steps;
        for (size_t i = 0; i < targets.size(); ++i) {
            const Parameter& p = model.plan.parameters[i];
            if constexpr (S::rounds)
                sharp.step(p, targets[i], coefficients[p.network], stats);
            else if (static_cast<int>(i) == model.plan.log_std)  // which no layer copies
                adam.step(p, targets[i], coefficients[p.network], [](Lane x, uint32_t) { return x; });
            else
                adam.step(p, targets[i], coefficients[p.network], [this](Lane x, uint32_t at) { return model.copy_of(model, x, at); });
        }
        turn_weights();
    }

    // Module A: G = s·sqrt(Σ (g/s)²) with s near max|g| of one network, or 1 where squares fit FP32; not finite where a
    // gradient is not.
    float norm(int network) {
        float unit = 1.0f;
        if (!S::squares_fit || !C::squares_fit) {
            float largest = 0.0f;
            each_target(network, [&](const Target& t) { largest = larger(largest_magnitude(t), largest); });
            unit = power_of_two(lane_of(largest))[0];
        }
        double sum = 0.0;
        each_target(network, [&](Target& t) {
            t.unit = unit;
            sum += sum_squares(t);
        });
        return unit * static_cast<float>(std::sqrt(sum));
    }

    template <class Visit>
    void each_target(int network, Visit visit) {
        for (size_t i = 0; i < targets.size(); ++i)
            if (model.plan.parameters[i].network == network) visit(targets[i]);
    }

    // The scale's rules: sb3_fp16/scalars.py, GradientScale.update. Returns whether to skip the step.
    bool adapt(Scale& scale, const float* norms) const {
        bool skip = false, at_floor = false, overflowed[2];
        for (int k = 0; k < model.plan.networks; ++k) {
            overflowed[k] = !(norms[k] - norms[k] == 0.0f);
            skip = skip || overflowed[k];
            at_floor = at_floor || (overflowed[k] && scale.scales[k] <= settings.scale_floor[k]);
        }
        scale.skips_at_floor = at_floor ? scale.skips_at_floor + 1 : 0;
        scale.skipped_steps += skip;
        scale.good_steps = skip ? 0 : scale.good_steps + 1;
        const bool grow = scale.good_steps >= 2000;
        if (grow) scale.good_steps = 0;
        for (int k = 0; k < model.plan.networks; ++k) {
            const float halved = larger(scale.scales[k] / 2, settings.scale_floor[k]);
            const float grown = smaller(scale.scales[k] * (grow ? 2.0f : 1.0f), settings.scale_ceiling[k]);
            scale.scales[k] = overflowed[k] ? halved : grown;
        }
        return skip;
    }
};
