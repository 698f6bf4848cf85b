// Half precision without protection: PyTorch's own operations one by one, each result rounded (the preset naive-fp16).
//
// A study of what goes wrong, op for op as the reference's autograd runs them. Reductions accumulate in FP32 inside
// their operation. `r` rounds.

template <class S>
struct Naive {
    const S& format;
    const Settings& settings;

    Lane r(Lane x) const { return format.round(x); }
    float r(float x) const { return format.round(lane_of(x))[0]; }

    // Â = (A − mean)/(std + 1e-8), whose 1e-8 vanishes.
    void normalize(Floats& advantages, int64_t count) const {
        double sum = 0.0, squares = 0.0;
        for (int64_t b = 0; b < count; ++b) sum += static_cast<double>(advantages[static_cast<size_t>(b)]);
        const double center = sum / static_cast<double>(count);
        for (int64_t b = 0; b < count; ++b) {
            const double off = static_cast<double>(advantages[static_cast<size_t>(b)]) - center;
            squares += off * off;
        }
        const float rounded_mean = r(static_cast<float>(center));
        const float deviation = r(r(static_cast<float>(std::sqrt(squares / static_cast<double>(count - 1)))) + 1e-8f);
        for (int64_t b = 0; b < count; ++b) {
            float& a = advantages[static_cast<size_t>(b)];
            a = r(r(a - rounded_mean) / deviation);
        }
    }

    // PPO's surrogate on ratios, of WIDTH samples: min(Âρ, Â·clamp(ρ)), and its gradient by d. Ties share the gradient.
    Lane surrogate(Lane d, Lane advantage, float clip_lower, float clip_upper, float mean_gradient, Lane* slope) const {
        const float lower = r(clip_lower), upper = r(clip_upper);
        const Lane ratio = r(exponential(d)), clipped = clamped(ratio, lower, upper);
        const Lane free = r(advantage * ratio), bound = r(advantage * clipped);
        const Lane share = lane_of(mean_gradient), half = lane_of(r(mean_gradient / 2));
        const Lane to_free = select(free == bound, half, select(free > bound, Lane{}, share));
        const Lane to_bound = select(free == bound, half, select(bound > free, Lane{}, share));
        const Lane through_clamp = select((ratio >= lower) & (ratio <= upper), r(to_bound * advantage), Lane{});
        *slope = r(r(r(to_free * advantage) + through_clamp) * ratio);
        return select(free < bound, free, select(bound <= free, bound, free + bound));  // of NaN: NaN
    }

    // Squared error of WIDTH samples, and its gradient by the prediction.
    Lane squared_error(Lane predicted, Lane old_value, Lane wanted, float mean_gradient, Lane* signal) const {
        Mask moves = predicted == predicted;
        if (settings.clip_range_vf >= 0) {
            const float bound = r(settings.clip_range_vf);
            const Lane off = r(predicted - old_value);
            moves = (off >= -bound) & (off <= bound);
            predicted = r(old_value + clamped(off, -bound, bound));
        }
        const Lane error = r(wanted - predicted);
        *signal = select(moves | (error != error), -r(mean_gradient * r(2.0f * error)), Lane{});
        return r(error * error);
    }

    // The square of a tensor's norm, and of all of them the coefficient that clips.
    float square(const Target& t) const {
        float sum = 0.0f;
        for (int64_t row = 0; row < t.flat.rows; ++row)
            for (int64_t c = 0; c < t.flat.columns; c += WIDTH) sum += sum_of(r(t.at(row, c) * t.at(row, c)));
        return r(sum);
    }

    float coefficient(float norm) const { return smaller(r(settings.max_grad_norm / r(norm + 1e-6f)), 1.0f); }

    // torch's Adam on FP16 parameters and state. Writes parameters to the tile only; returns whether they are finite.
    bool adam(const Parameter& p, const Target& t, float coefficient) const {
        const double steps = static_cast<double>(*p.adam_step += 1.0f);
        const float step_size = static_cast<float>(settings.lr / (1 - std::pow(settings.beta1, steps)));
        const float unbias = static_cast<float>(std::sqrt(1 - std::pow(settings.beta2, steps)));
        const float blend = static_cast<float>(1 - settings.beta1), keep = static_cast<float>(settings.beta2);
        const float add = static_cast<float>(1 - settings.beta2), eps = static_cast<float>(settings.eps);
        const float decay = static_cast<float>(settings.weight_decay);
        Lane poison{};
        for (int64_t row = 0; row < t.flat.rows; ++row)
            for (int64_t c = 0; c < t.flat.columns; c += WIDTH) {
                const int64_t i = row * t.flat.columns + c, count = t.flat.columns - c;
                const Lane theta = format.load(p.data, i, count);
                Lane g = r(t.at(row, c) * coefficient), m = format.load(p.first_moment, i, count);
                if (decay != 0.0f) g = r(g + decay * theta);
                m = r(m + blend * (g - m));
                const Lane v = r(r(format.load(p.root_second_moment, i, count) * keep) + add * g * g);
                const Lane denominator = r(r(r(square_root(v)) / unbias) + eps);
                const Lane next = select(first_lanes(count), r(theta - step_size * m / denominator), Lane{});
                poison = poison + (next - next);
                format.store(p.first_moment, i, count, m), format.store(p.root_second_moment, i, count, v);
                store_lane(t.tile + row * t.stride + c, next);
            }
        return sum_of(poison) == 0.0f;
    }

    void write(const Parameter& p, const Target& t) const {
        for (int64_t row = 0; row < t.flat.rows; ++row)
            for (int64_t c = 0; c < t.flat.columns; c += WIDTH)
                format.store(p.data, row * t.flat.columns + c, t.flat.columns - c, load_lane(t.tile + row * t.stride + c));
    }
};
