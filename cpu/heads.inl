// Module B: action distributions, their log-ratio to the behaviour policy and its gradient.
//
// Arrays are [output][sample], so that a register holds one output of WIDTH samples; `s` is the first of them. A head
// first answers with the log-ratio d, then turns ∂loss/∂d of each sample into gradients of its outputs.

// The samples of a minibatch, or of one step of all environments.
struct Samples {
    int64_t stride;
    Floats outputs, signal;    // means or logits, and their gradient
    Floats actions, behaviour;
    Floats correction, old_log_prob;  // [sample]

    Samples(int64_t batch, int64_t outputs_, int64_t actions_) : stride(padded(batch)) {
        outputs = zeros(outputs_ * stride), signal = zeros(outputs_ * stride), behaviour = zeros(outputs_ * stride);
        actions = zeros(actions_ * stride);
        correction = zeros(stride), old_log_prob = zeros(stride);
    }
    SB3_FP16_LANE Lane at(const Floats& array, int64_t row, int64_t s, int64_t stride) {
        return load_lane(&array[static_cast<size_t>(row * stride + s)]);
    }
    Lane output(int64_t j, int64_t s) const { return at(outputs, j, s, stride); }
    Lane action(int64_t j, int64_t s) const { return at(actions, j, s, stride); }
    Lane output0(int64_t j, int64_t s) const { return at(behaviour, j, s, stride); }
    void set_signal(int64_t j, int64_t s, Lane x) { store_lane(&signal[static_cast<size_t>(j * stride + s)], x); }
};

// a + b = high + low exactly, in a format's own operations (Ogita et al. 2005).
template <class C>
SB3_FP16_LANE Lane two_sum(const C& format, Lane a, Lane b, Lane* low) {
    const Lane high = format.round(a + b), b_part = format.round(high - a);
    *low = format.round(format.round(a - format.round(high - b_part)) + format.round(b - b_part));
    return high;
}

template <class C>
struct GaussianHead {
    struct Dimension {
        float log_std, inverse_std, inverse_std0, change, t;  // t = expm1(−Δl)
        float rounded_inverse_std0, rounded_change, rounded_t;
    };
    const C& format;
    int64_t dims;
    std::vector<Dimension> dimensions;
    Floats z;  // [dim] of WIDTH samples
    std::vector<double> log_std_gradient, through_exp;

    GaussianHead(const C& format_, int64_t dims_)
        : format(format_), dims(dims_), dimensions(static_cast<size_t>(dims_)), z(zeros(dims_ * WIDTH)),
          log_std_gradient(static_cast<size_t>(dims_)), through_exp(log_std_gradient) {}

    void begin(const float* log_std, const float* log_std0) {
        for (int64_t j = 0; j < dims; ++j) {
            Dimension& at = dimensions[static_cast<size_t>(j)];
            at.log_std = log_std[j], at.change = log_std[j] - log_std0[j];
            at.inverse_std = exponential(-log_std[j]), at.inverse_std0 = exponential(-log_std0[j]);
            at.t = exponential_minus_1(-at.change);
            at.rounded_inverse_std0 = rounded(at.inverse_std0), at.rounded_change = rounded(at.change);
            at.rounded_t = rounded(exponential_minus_1(-at.rounded_change));
            log_std_gradient[static_cast<size_t>(j)] = through_exp[static_cast<size_t>(j)] = 0.0;
        }
    }

    float entropy() const {
        double sum = 0.0;
        for (const Dimension& at : dimensions) sum += static_cast<double>(at.log_std) + 0.5 + static_cast<double>(LOG_SQRT_2PI);
        return static_cast<float>(sum);
    }

    float rounded(float x) const { return format.round(lane_of(x))[0]; }

    void keep_z(int64_t j, Lane x) { store_lane(&z[static_cast<size_t>(j * WIDTH)], x); }

    // log p = Σ −l − ½z² − C with z = (a − μ)e^{−l}.
    Lane log_prob(const Samples& samples, int64_t s, Lane* entropy_) {
        Lane sum{};
        *entropy_ = lane_of(entropy());
        for (int64_t j = 0; j < dims; ++j) {
            const Dimension& at = dimensions[static_cast<size_t>(j)];
            const Lane zj = (samples.action(j, s) - samples.output(j, s)) * at.inverse_std;
            sum = sum + ((-at.log_std - 0.5f * zj * zj) - LOG_SQRT_2PI);
            keep_z(j, zj);
        }
        return sum;
    }

    Lane residual(const Samples& samples, int64_t s) {
        Lane d{};
        for (int64_t j = 0; j < dims; ++j) {
            const Dimension& at = dimensions[static_cast<size_t>(j)];
            const Lane mean0 = samples.output0(j, s);
            const Lane z0 = (samples.action(j, s) - mean0) * at.inverse_std0;
            const Lane q = (samples.output(j, s) - mean0) * at.inverse_std0;
            const Lane dz = z0 * at.t - q * (1.0f + at.t);         // Δz = z₀t − q(1 + t)
            d = d + ((-at.change - z0 * dz) - 0.5f * dz * dz);     // Δlog p = −Δl − z₀Δz − ½Δz²
            keep_z(j, z0 + dz);
        }
        return d;
    }

    // The same with every operation rounded; high and low parts are summed over the dimensions in FP32 (paper Sec. 3.2).
    Lane compensated(const Samples& samples, int64_t s) const {
        const auto r = [this](Lane x) { return format.round(x); };
        Lane high{}, low{};
        for (int64_t j = 0; j < dims; ++j) {
            const Dimension& at = dimensions[static_cast<size_t>(j)];
            const Lane mean0 = samples.output0(j, s);
            const float inverse_std0 = at.rounded_inverse_std0, dl = at.rounded_change, t = at.rounded_t;
            const Lane z0 = r(r(samples.action(j, s) - mean0) * inverse_std0);
            const Lane q = r(r(samples.output(j, s) - mean0) * inverse_std0);
            Lane dz_low, low1, low2;
            const Lane dz = two_sum(format, r(z0 * t), -r(q + r(q * t)), &dz_low);
            const Lane first = two_sum(format, lane_of(-dl), -r(z0 * dz), &low1);
            high = high + two_sum(format, first, -r(0.5f * r(dz * dz)), &low2);
            low = low + r(r(low1 + low2) - r(r(z0 + dz) * dz_low));
        }
        return high + low;
    }

    Lane log_ratio(LogRatio kind, const Samples& samples, int64_t s, Lane* entropy_) {
        if (kind == LogRatio::absolute)
            return log_prob(samples, s, entropy_) - load_lane(&samples.old_log_prob[static_cast<size_t>(s)]);
        *entropy_ = lane_of(entropy());
        const Lane d = residual(samples, s);
        if (kind == LogRatio::residual) return d;
        const Lane rounded = compensated(samples, s);
        return select(rounded - rounded == 0.0f, rounded, d);  // in FP16 ½Δz² overflows from |Δz| = 362 on
    }

    // log_prob with every operation rounded; the sum over the dimensions is one operation.
    Lane naive_log_prob(const Samples& samples, int64_t s) {
        const auto r = [this](Lane x) { return format.round(x); };
        Lane sum{};
        for (int64_t j = 0; j < dims; ++j) {
            const Dimension& at = dimensions[static_cast<size_t>(j)];
            const Lane zj = r(r(samples.action(j, s) - samples.output(j, s)) * r(lane_of(at.inverse_std)));
            sum = sum + r(r(-at.log_std - r(0.5f * r(zj * zj))) - LOG_SQRT_2PI);
            keep_z(j, zj);
        }
        return r(sum);
    }

    // What autograd makes of it, gradient by gradient; `through_exp` is that of e^{−l}, summed over the batch.
    void naive_backward(Samples& samples, int64_t s, Lane slope, Mask valid) {
        const auto r = [this](Lane x) { return format.round(x); };
        const auto total = [&](Lane x) { return static_cast<double>(sum_of(select(valid, x, Lane{}))); };
        for (int64_t j = 0; j < dims; ++j) {
            const Lane inverse_std = r(lane_of(dimensions[static_cast<size_t>(j)].inverse_std));
            const Lane of_z = r(r(-0.5f * slope) * (2.0f * load_lane(&z[static_cast<size_t>(j * WIDTH)])));
            const Lane off = r(samples.action(j, s) - samples.output(j, s));
            samples.set_signal(j, s, -r(of_z * inverse_std));
            through_exp[static_cast<size_t>(j)] += total(r(of_z * off));
            log_std_gradient[static_cast<size_t>(j)] -= total(slope);
        }
    }

    float naive_log_std_gradient(int64_t j) const {
        const size_t at = static_cast<size_t>(j);
        const float of_exp = rounded(static_cast<float>(through_exp[at])), direct = rounded(static_cast<float>(log_std_gradient[at]));
        return rounded(direct - rounded(of_exp * rounded(dimensions[at].inverse_std)));
    }

    // ∂d/∂μ = z e^{−l}, ∂d/∂l = z² − 1; entropy does not depend on the state.
    void backward(Samples& samples, int64_t s, Lane slope, Mask valid) {
        for (int64_t j = 0; j < dims; ++j) {
            const Lane zj = load_lane(&z[static_cast<size_t>(j * WIDTH)]);
            samples.set_signal(j, s, slope * zj * dimensions[static_cast<size_t>(j)].inverse_std);
            log_std_gradient[static_cast<size_t>(j)] +=
                static_cast<double>(sum_of(select(valid, slope * (zj * zj - 1.0f), Lane{})));
        }
    }
};

// One or several categorical choices, their logits side by side.
struct CategoricalHead {
    std::vector<int64_t> choices;
    Floats probability;               // [choice] of WIDTH samples
    Floats normalizer, head_entropy;  // [head] of WIDTH samples

    explicit CategoricalHead(const std::vector<int64_t>& choices_)
        : choices(choices_) {
        normalizer = head_entropy = zeros(static_cast<int64_t>(choices.size()) * WIDTH);
        int64_t all = 0;
        for (const int64_t n : choices) all += n;
        probability = zeros(all * WIDTH);
    }

    template <class Logit>
    static Lane log_sum_exp(int64_t n, Logit logit) {
        Lane largest = logit(0), sum{};
        for (int64_t k = 1; k < n; ++k) largest = larger(logit(k), largest);
        for (int64_t k = 0; k < n; ++k) sum = sum + exponential(logit(k) - largest);
        return largest + logarithm(sum);
    }

    SB3_FP16_LANE Lane is(Lane action, int64_t k) {
        return select(action == static_cast<float>(k), lane_of(1.0f), Lane{});
    }

    // Probabilities, and entropy H = LSE − Σ p·logit; returns the log-probability of the actions.
    Lane log_prob(const Samples& samples, int64_t s, Lane* entropy) {
        Lane sum{};
        *entropy = Lane{};
        int64_t first = 0;
        for (size_t h = 0; h < choices.size(); first += choices[h++]) {
            const Lane action = samples.action(static_cast<int64_t>(h), s);
            const auto logit = [&](int64_t k) { return samples.output(first + k, s); };
            const Lane total = log_sum_exp(choices[h], logit);
            Lane mean_logit{};
            for (int64_t k = 0; k < choices[h]; ++k) {
                const Lane p = select(logit(k) == -INFINITY, Lane{}, exponential(logit(k) - total));
                store_lane(&probability[static_cast<size_t>((first + k) * WIDTH)], p);
                mean_logit = mean_logit + p * larger(lane_of(-LARGEST_FLOAT), logit(k) - total);  // a masked choice's is −inf
                sum = sum + select(action == static_cast<float>(k), logit(k) - total, Lane{});
            }
            store_lane(&normalizer[h * WIDTH], total), store_lane(&head_entropy[h * WIDTH], -mean_logit);
            *entropy = *entropy - mean_logit;
        }
        return sum;
    }

    // d = −log1p(Σ_{k≠a} p₀_k·expm1(e_k)), e_k = δ_k − δ_a, δ = logits − logits₀; far away δ_a − ΔLSE.
    Lane residual(const Samples& samples, int64_t s) const {
        Lane d{};
        int64_t first = 0;
        for (size_t h = 0; h < choices.size(); first += choices[h++]) {
            const Lane action = samples.action(static_cast<int64_t>(h), s);
            const auto logit0 = [&](int64_t k) { return samples.output0(first + k, s); };
            const auto change = [&](int64_t k) {
                const Lane logit = samples.output(first + k, s);
                return select(logit == logit0(k), Lane{}, logit - logit0(k));  // 0 where both mask a choice
            };
            const Lane total0 = log_sum_exp(choices[h], logit0);
            Lane of_action{}, sum{}, largest = lane_of(-INFINITY);
            for (int64_t k = 0; k < choices[h]; ++k)
                of_action = of_action + select(action == static_cast<float>(k), change(k), Lane{});
            for (int64_t k = 0; k < choices[h]; ++k) {
                const Lane e = change(k) - of_action;
                largest = larger(e, largest);
                sum = sum + exponential(logit0(k) - total0) * exponential_minus_1(smaller(lane_of(LARGEST_LOGIT_CHANGE), e));
            }
            const Lane near = -logarithm_1_plus(sum), far = of_action - (load_lane(&normalizer[h * WIDTH]) - total0);
            const Mask is_far = (largest > LARGEST_LOGIT_CHANGE) | (near > LARGEST_LOGIT_CHANGE);
            d = d + select(is_far, far, near);
        }
        return d;
    }

    Lane log_ratio(LogRatio kind, const Samples& samples, int64_t s, Lane* entropy) {
        const Lane log_probs = log_prob(samples, s, entropy);
        if (kind == LogRatio::absolute) return log_probs - load_lane(&samples.old_log_prob[static_cast<size_t>(s)]);
        return residual(samples, s);
    }

    // ∂d/∂logit_k = 1[k=a] − p_k; ∂H/∂logit_k = −p_k(log p_k + H).
    void backward(Samples& samples, int64_t s, Lane slope, float entropy_slope) {
        int64_t first = 0;
        for (size_t h = 0; h < choices.size(); first += choices[h++]) {
            const Lane action = samples.action(static_cast<int64_t>(h), s);
            const Lane total = load_lane(&normalizer[h * WIDTH]), entropy = load_lane(&head_entropy[h * WIDTH]);
            for (int64_t k = 0; k < choices[h]; ++k) {
                const Lane p = load_lane(&probability[static_cast<size_t>((first + k) * WIDTH)]);
                const Lane log_p = larger(lane_of(-LARGEST_FLOAT), samples.output(first + k, s) - total);
                samples.set_signal(first + k, s, slope * (is(action, k) - p) - entropy_slope * p * (log_p + entropy));
            }
        }
    }
};

// Independent yes-or-no choices; u = (2a − 1)·logit.
struct BernoulliHead {
    int64_t dims;

    SB3_FP16_LANE Lane log_logistic(Lane u) { return smaller(u, Lane{}) - logarithm_1_plus(exponential(-absolute(u))); }

    Lane log_prob(const Samples& samples, int64_t s, Lane* entropy) const {
        Lane sum{};
        *entropy = Lane{};
        for (int64_t j = 0; j < dims; ++j) {
            const Lane logit = samples.output(j, s), p = logistic(logit);
            sum = sum + log_logistic((2.0f * samples.action(j, s) - 1.0f) * logit);
            *entropy = *entropy - (p * log_logistic(logit) + (1.0f - p) * log_logistic(-logit));
        }
        return sum;
    }

    // d = Σ −log1p(σ(−u₀)·expm1(−Δu)); far away the difference of log-probabilities.
    Lane residual(const Samples& samples, int64_t s) const {
        Lane d{};
        for (int64_t j = 0; j < dims; ++j) {
            const Lane sign = 2.0f * samples.action(j, s) - 1.0f;
            const Lane u = sign * samples.output(j, s), u0 = sign * samples.output0(j, s), shrink = u0 - u;
            const Lane sum = logistic(-u0) * exponential_minus_1(smaller(lane_of(LARGEST_LOGIT_CHANGE), shrink));
            const Lane near = -logarithm_1_plus(sum), far = log_logistic(u) - log_logistic(u0);
            const Mask is_far = (shrink > LARGEST_LOGIT_CHANGE) | (near > LARGEST_LOGIT_CHANGE);
            d = d + select(is_far, far, near);
        }
        return d;
    }

    Lane log_ratio(LogRatio kind, const Samples& samples, int64_t s, Lane* entropy) const {
        const Lane log_probs = log_prob(samples, s, entropy);
        if (kind == LogRatio::absolute) return log_probs - load_lane(&samples.old_log_prob[static_cast<size_t>(s)]);
        return residual(samples, s);
    }

    // ∂d/∂logit = a − σ(logit); ∂H/∂logit = −logit·p(1 − p).
    void backward(Samples& samples, int64_t s, Lane slope, float entropy_slope) const {
        for (int64_t j = 0; j < dims; ++j) {
            const Lane logit = samples.output(j, s), p = logistic(logit);
            samples.set_signal(j, s, slope * (samples.action(j, s) - p) - entropy_slope * logit * p * (1.0f - p));
        }
    }
};

// The head that a plan asks for.
template <class C>
struct ActionHead {
    Head kind;
    GaussianHead<C> gaussian;
    CategoricalHead categorical;
    BernoulliHead bernoulli;

    ActionHead(const C& format, const Plan& plan)
        : kind(plan.head), gaussian(format, kind == Head::gaussian ? plan.policy.back().outputs : 0),
          categorical(kind == Head::categorical ? plan.choices : std::vector<int64_t>{}),
          bernoulli{kind == Head::bernoulli ? plan.policy.back().outputs : 0} {}

    Lane log_prob(const Samples& samples, int64_t s, Lane* entropy) {
        if (kind == Head::gaussian) return gaussian.log_prob(samples, s, entropy);
        if (kind == Head::categorical) return categorical.log_prob(samples, s, entropy);
        return bernoulli.log_prob(samples, s, entropy);
    }

    Lane log_ratio(LogRatio form, const Samples& samples, int64_t s, Lane* entropy) {
        if (kind == Head::gaussian) return gaussian.log_ratio(form, samples, s, entropy);
        if (kind == Head::categorical) return categorical.log_ratio(form, samples, s, entropy);
        return bernoulli.log_ratio(form, samples, s, entropy);
    }

    // The log-probability as naive half precision has it: rounded op by op for a Gaussian, else once.
    Lane naive_log_prob(const Samples& samples, int64_t s, Lane* entropy) {
        if (kind != Head::gaussian) return gaussian.format.round(log_prob(samples, s, entropy));
        *entropy = lane_of(gaussian.entropy());
        return gaussian.naive_log_prob(samples, s);
    }

    void naive_backward(Samples& samples, int64_t s, Lane slope, float entropy_slope, Mask valid) {
        if (kind == Head::gaussian) return gaussian.naive_backward(samples, s, slope, valid);
        backward(samples, s, slope, entropy_slope, valid);
    }

    // `slope` is ∂loss/∂d of each sample, 0 outside `valid`; `entropy_slope` is ∂loss/∂H.
    void backward(Samples& samples, int64_t s, Lane slope, float entropy_slope, Mask valid) {
        if (kind == Head::gaussian) return gaussian.backward(samples, s, slope, valid);
        if (kind == Head::categorical) return categorical.backward(samples, s, slope, entropy_slope);
        bernoulli.backward(samples, s, slope, entropy_slope);
    }
};
