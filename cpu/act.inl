// One step of all environments: means or logits, values, actions and their log-probabilities.

template <class S, class C>
class ActorOf final : public Actor {
public:
    explicit ActorOf(const Plan& plan)
        : model(plan, 1, false), head(model.storage, model.plan), samples(1, model.outputs(), model.action_size()) {}

    int act(const Acting& step) override {
        const bool is_new = (model.plan.compares ? differs() : step.look) || unread;
        if (is_new) refresh();
        if (step.count > capacity) reserve(step.count);
        int flags = observe(step) | (is_new ? changed : 0);
        if (flags & not_finite) return flags;
        if (step.values) {
            model.forward(model.value, step.count);
            const LayerSpace& critic = model.value.head();
            for (int64_t b = 0; b < step.count; ++b)
                step.values[b] = clamped(critic.output[static_cast<size_t>(b * critic.out_stride)], -model.storage.largest,
                                         model.storage.largest);
        }
        if (step.actions) flags |= choose(step);
        return flags;
    }

private:
    Model<S, C> model;
    ActionHead<S> head;
    Samples samples;
    int64_t capacity = 1;
    static constexpr int STREAMS = 4;
    Words fingerprint[STREAMS] = {};  // of the parameters that the tiles were made from
    bool unread = true;

    size_t bytes_of(const Parameter& p) const {
        return static_cast<size_t>(p.rows * p.columns) * (model.plan.storage == Storage::fp32 ? sizeof(float) : sizeof(uint16_t));
    }
    void refresh() {
        model.refresh();
        unread = false;
    }

    // Whether any parameter differs from what the tiles were made from, whoever wrote it. Each step is a bijection of a
    // lane's state, so that one changed word is always seen.
    bool differs() {
        Words state[STREAMS] = {};
        for (const Parameter& p : model.plan.parameters) {
            const char* at = static_cast<const char*>(p.data);
            size_t left = bytes_of(p);
            for (; left >= sizeof state; left -= sizeof state, at += sizeof state)
                for (int k = 0; k < STREAMS; ++k) take(state[k], at + k * sizeof(Words), sizeof(Words));
            for (; left > 0; at += std::min(left, sizeof(Words)), left -= std::min(left, sizeof(Words)))
                take(state[0], at, std::min(left, sizeof(Words)));
        }
        const bool same = memcmp(state, fingerprint, sizeof state) == 0;
        memcpy(fingerprint, state, sizeof state);
        return !same;
    }

    SB3_FP16_LANE void take(Words& state, const char* at, size_t bytes) {
        Words words{};
        memcpy(&words, at, bytes);
        state = (state ^ words) * 0x9E3779B1u + 0x85EBCA77u;
    }

    void reserve(int64_t count) {
        capacity = model.batch = count;
        model.input = zeros(count * model.input_stride);
        for (NetworkSpace* space : {&model.policy, &model.value})
            for (LayerSpace& layer : space->layers) layer.output = zeros(count * layer.out_stride);
        samples = Samples(count, model.outputs(), model.action_size());
    }

    // Round observations to storage, saturating.
    int observe(const Acting& step) {
        const int64_t size = model.observation_size;
        Lane poison{}, largest{};
        for (int64_t b = 0; b < step.count; ++b) {
            float* row = model.input.data() + b * model.input_stride;
            if (step.observations_are_double)
                for (int64_t c = 0; c < size; ++c) row[c] = static_cast<float>(static_cast<const double*>(step.observations)[b * size + c]);
            else
                memcpy(row, static_cast<const float*>(step.observations) + b * size, static_cast<size_t>(size) * sizeof(float));
            for (int64_t c = 0; c < size; c += WIDTH) {
                const Lane x = load_lane(row + c);
                poison = poison + (x - x), largest = larger(absolute(x), largest);
                const Lane stored = model.storage.round(clamped(x, -model.storage.largest, model.storage.largest));
                store_lane(row + c, S::rounds ? stored : model.compute.round(stored));
            }
        }
        if (!(sum_of(poison) == 0.0f)) return not_finite;
        return largest_of(largest) > model.storage.largest ? saturated : 0;
    }

    int choose(const Acting& step) {
        Samples& at = samples;
        model.forward(model.policy, step.count);
        LayerSpace& actor = model.policy.head();
        transpose(actor.output.data(), actor.out_stride, step.count, model.outputs(), at.outputs.data(), at.stride);
        Mask finite = Lane{} == Lane{};
        for (int64_t b = 0; b < step.count; ++b) {
            const float* row = actor.output.data() + b * actor.out_stride;
            for (int64_t c = 0; c < actor.out_stride; c += WIDTH) finite &= load_lane(row + c) < INFINITY;  // −inf masks a choice
            if (step.behaviour) memcpy(step.behaviour + b * model.outputs(), row, static_cast<size_t>(model.outputs()) * sizeof(float));
        }
        if (sum_of(select(finite, Lane{}, lane_of(1.0f))) > 0.0f) return not_finite;
        if (model.plan.head == Head::gaussian) head.gaussian.begin(model.log_std.data(), model.log_std.data());
        for (int64_t b = 0; b < step.count; ++b) sample(step, b);
        if (step.log_prob) log_probs(step);
        return 0;
    }

    // The action of environment b. Discrete ones are the largest p/e over exponential draws e, as in torch's multinomial.
    void sample(const Acting& step, int64_t b) {
        Samples& at = samples;
        const auto output = [&](int64_t j) { return at.outputs[static_cast<size_t>(j * at.stride + b)]; };
        const auto set = [&](int64_t j, float action) {
            step.actions[b * model.action_size() + j] = at.actions[static_cast<size_t>(j * at.stride + b)] = action;
        };
        if (model.plan.head == Head::gaussian) {
            for (int64_t j = 0; j < model.outputs(); ++j) {
                const float spread = step.noise ? exponential(model.log_std[static_cast<size_t>(j)]) * step.noise[b * model.outputs() + j] : 0.0f;
                const float action = output(j) + spread;
                set(j, step.noise && model.plan.round_actions ? stored(action) : action);
            }
        } else if (model.plan.head == Head::bernoulli) {
            for (int64_t j = 0; j < model.outputs(); ++j)
                set(j, (step.noise ? step.noise[b * model.outputs() + j] : 0.5f) < logistic(output(j)) ? 1.0f : 0.0f);
        } else {
            const float* noise = step.noise;
            int64_t first = 0, h = 0;
            for (const int64_t n : model.plan.choices) {
                float largest = output(first), best = -1.0f;
                int64_t chosen = 0;
                for (int64_t k = 1; k < n; ++k) largest = larger(output(first + k), largest);
                for (int64_t k = 0; k < n; ++k) {
                    const float probability = output(first + k) == -INFINITY ? 0.0f : exponential(output(first + k) - largest);
                    const float weight = probability / (noise ? noise[b * n + k] : 1.0f);
                    if (weight > best) best = weight, chosen = k;
                }
                set(h++, static_cast<float>(chosen));
                first += n;
                if (noise) noise += step.count * n;
            }
        }
    }

    float stored(float x) const {
        return model.storage.round(clamped(lane_of(x), -model.storage.largest, model.storage.largest))[0];
    }

    void log_probs(const Acting& step) {
        Samples& at = samples;
        Lane entropy;
        for (int64_t s = 0; s < step.count; s += WIDTH) {
            const Lane log_prob = model.plan.naive ? head.naive_log_prob(at, s, &entropy) : head.log_prob(at, s, &entropy);
            Lane correction{};
            if (step.correction) {
                for (int64_t j = 0; j < model.action_size(); ++j) {
                    float* actions = &at.actions[static_cast<size_t>(j * at.stride + s)];
                    store_lane(actions, model.storage.round(clamped(load_lane(actions), -model.storage.largest, model.storage.largest)));
                }
                correction = log_prob - head.log_prob(at, s, &entropy);
            }
            for (int l = 0; l < WIDTH && s + l < step.count; ++l) {
                step.log_prob[s + l] = log_prob[l];
                if (step.correction) step.correction[s + l] = correction[l];
            }
        }
    }
};
