// Module C, SHARP, for one parameter (sb3_fp16/sharp.py, _TorchBucket.step), and Adam of the FP32 presets.
//
// Gradients come in padded rows. What a step writes to storage it also writes to the tile that forward passes read.

struct Shape {
    int64_t rows, columns;
};

// A parameter's workspace: its gradient, and its tile, in rows of a length. What lies between a gradient's rows is 0.
struct Target {
    Shape shape;  // as second moments are shared
    Shape flat;   // the same elements in as few rows as possible
    float* gradient;
    float* tile;
    int64_t stride;
    float unit;                          // a power of two near the largest |g|, or 1
    Floats row_squares, column_squares;  // Σ (g/unit)² of rows and columns that share a second moment

    Lane at(int64_t row, int64_t column) const { return load_lane(gradient + row * stride + column); }
};

// The sum of PAD lanes, the same for every instruction set.
SB3_FP16_LANE float sum_of_lanes(Lane* parts) {
    for (int distance = PAD / WIDTH / 2; distance; distance /= 2)
        for (int l = 0; l < distance; ++l) parts[l] = parts[l] + parts[l + distance];
    return sum_of(parts[0]);
}

static float largest_magnitude(const Target& t) {
    Lane largest{};
    for (int64_t r = 0; r < t.flat.rows; ++r)
        for (int64_t c = 0; c < t.flat.columns; c += WIDTH) largest = larger(absolute(t.at(r, c)), largest);
    return largest_of(largest);
}

// Without padding between rows, a register at a row's end holds some of the next row.
template <bool IS_DENSE>
SB3_FP16_LANE Lane square_of(const Target& t, int64_t row, int64_t column, Lane inverse) {
    const Lane scaled = t.at(row, column) * inverse, square = scaled * scaled;
    return IS_DENSE ? select(first_lanes(t.shape.columns - column), square, Lane{}) : square;
}

// Σ (g/unit)² of all elements, and of rows and columns if asked for; of rows in PAD lanes for every instruction set.
template <bool IS_DENSE>
static double sum_squares(Target& t) {
    const Lane inverse = inverse_of_power(lane_of(t.unit));
    std::fill(t.column_squares.begin(), t.column_squares.end(), 0.0f);
    double total = 0.0;
    for (int64_t row = 0; row < t.shape.rows; row += ROWS_TOGETHER) {  // they stay in the cache from one sum to the other
        const int64_t end = std::min(row + ROWS_TOGETHER, t.shape.rows);
        for (int64_t r = row; r < end; ++r) {
            Lane sum[PAD / WIDTH] = {};
            for (int64_t c = 0; c < t.shape.columns; c += PAD)
                for (int l = 0; l < PAD / WIDTH; ++l) sum[l] = sum[l] + square_of<IS_DENSE>(t, r, c + l * WIDTH, inverse);
            const float squares = sum_of_lanes(sum);
            if (!t.row_squares.empty()) t.row_squares[static_cast<size_t>(r)] = squares;
            total += static_cast<double>(squares);
        }
        for (int64_t c = 0; c < static_cast<int64_t>(t.column_squares.size()); c += WIDTH) {
            float* column = &t.column_squares[static_cast<size_t>(c)];
            Lane sum{};
            for (int64_t r = row; r < end; ++r) sum = sum + square_of<IS_DENSE>(t, r, c, inverse);
            store_lane(column, load_lane(column) + sum);
        }
    }
    return total;
}

static double sum_squares(Target& t) { return t.stride < padded(t.shape.columns) ? sum_squares<true>(t) : sum_squares<false>(t); }

constexpr int64_t WORK = 32;  // per element of an optimizer step, with its memory traffic

// s·sqrt(mean (x/s)²), s a power of two near max|x|; x is padded with 0.
static float root_mean_square(const float* x, int64_t count) {
    Lane largest{}, sum[PAD / WIDTH] = {};
    for (int64_t i = 0; i < count; i += WIDTH) largest = larger(absolute(load_lane(x + i)), largest);
    const Lane power = power_of_two(lane_of(largest_of(largest))), inverse = inverse_of_power(power);
    for (int64_t i = 0; i < count; i += PAD)
        for (int l = 0; l < PAD / WIDTH; ++l) {
            const Lane scaled = load_lane(x + i + l * WIDTH) * inverse;
            sum[l] = sum[l] + scaled * scaled;
        }
    return power[0] * std::sqrt(sum_of_lanes(sum) / static_cast<float>(count));
}

// Parameters are stored as P, their moments as M.
template <class P, class M>
class Sharp {
public:
    Sharp(const P& parameters_, const M& state_, const OptimizerSettings& settings_, Workers& workers_,
          const std::vector<Parameter>& all)
        : parameters(parameters_), state(state_), settings(settings_), workers(workers_),
          mean_square(zeros(most(all, &Parameter::rows) + most(all, &Parameter::columns) + 2 * PAD)), root(mean_square),
          share(zeros(padded(most(all, &Parameter::rows)))),
          decay(settings.decoupled_weight_decay ? 0.0f : static_cast<float>(settings.weight_decay)) {}

    void step(const Parameter& p, Target& target, float coefficient, StepCounts& total) {
        Step now = begin(p);
        now.coefficient = coefficient;
        if (decay != 0.0f) now.coefficient = 1.0f, penalize(p, target, coefficient);
        Counts counts{};
        if (p.sharing != Sharing::elementwise) update_shared_roots(p, target, now, counts);
        all_rows(p, target, now, counts);
        // A register's lanes beyond a row hold zeros.
        const int64_t lanes = target.flat.rows * ((target.flat.columns + WIDTH - 1) / WIDTH * WIDTH);
        total.nonzero += lanes - counts.zero, total.stuck += counts.stuck, total.saturated += counts.saturated;
    }

private:
    // What all elements of one step share.
    struct Step {
        uint32_t parameter_key, root_key;
        float coefficient, unbias_first, unbias_root, lr, eps, beta1, blend, beta2, rest, scale, shrink;
    };

    struct Counts {
        int64_t zero, stuck, saturated;
    };

    const P& parameters;
    const M& state;
    const OptimizerSettings& settings;
    Workers& workers;
    Floats mean_square, root;  // of rows, then columns; `root` without bias
    Floats share;              // a row's part of ŵ
    Floats preconditioner;     // ŵ of elements in rows without padding
    const float decay;         // of Adam's L2 penalty

    // Of parameters that share second moments.
    static int64_t most(const std::vector<Parameter>& all, int64_t Parameter::* extent) {
        int64_t found = 0;
        for (const Parameter& p : all)
            if (p.sharing != Sharing::elementwise) found = std::max(found, p.*extent);
        return found;
    }

    // All elements.
    void all_rows(const Parameter& p, const Target& target, const Step& now, Counts& counts) const {
        if constexpr (!P::rounds) return all_rows<Rounding::nearest>(p, target, now, counts);
        switch (p.writeback) {
            case Rounding::stochastic: return all_rows<Rounding::stochastic>(p, target, now, counts);
            case Rounding::dithered: return all_rows<Rounding::dithered>(p, target, now, counts);
            case Rounding::residual: return all_rows<Rounding::residual>(p, target, now, counts);
            case Rounding::swallowed: return all_rows<Rounding::swallowed>(p, target, now, counts);
            default: return all_rows<Rounding::nearest>(p, target, now, counts);
        }
    }

    template <Rounding WRITEBACK>
    void all_rows(const Parameter& p, const Target& target, const Step& now, Counts& counts) const {
        std::mutex mutex;
        workers.each(target.flat.rows, 1, WORK * target.flat.columns, [&](int64_t first, int64_t last) {
            const Counts of_part = rows<WRITEBACK>(p, target, now, first, last);
            const std::lock_guard<std::mutex> lock(mutex);
            counts.zero += of_part.zero, counts.stuck += of_part.stuck, counts.saturated += of_part.saturated;
        });
    }

    // Some rows; arguments by value, that no store may alias.
    template <Rounding WRITEBACK>
    Counts rows(const Parameter p, const Target& target, const Step now, int64_t first, int64_t last) const {
        Counts counts{};
        const bool shared = p.sharing != Sharing::elementwise, spread = shared && target.flat.rows != target.shape.rows;
        for (int64_t r = first; r < last; ++r)
            for (int64_t c = 0; c < target.flat.columns; c += WIDTH) {
                const int64_t i = r * target.flat.columns + c, count = target.flat.columns - c;
                const Lane gradient = target.at(r, c) * now.coefficient;
                const Lane preconditioner = spread   ? load_lane(&this->preconditioner[static_cast<size_t>(c)])
                                            : shared ? shared_root(p, target, r, c)
                                                     : own_root(p, i, count, absolute(gradient), now, counts) * now.unbias_root;
                store_lane(target.tile + r * target.stride + c, element<WRITEBACK>(p, i, count, gradient, preconditioner, now, counts));
            }
        return counts;
    }

    uint32_t key(Rounding mode, int64_t t, uint32_t salt) const {
        const uint32_t step = static_cast<uint32_t>(t);
        return mode == Rounding::dithered ? dither_key(step, salt) : random_key(step, salt, settings.seed);
    }

    Step begin(const Parameter& p) const {
        const int64_t t = ++*p.step;
        const double steps = static_cast<double>(t);
        Step now{};
        now.parameter_key = key(p.writeback, t, PARAMETER_SALT), now.root_key = key(settings.root_rounding, t, ROOT_SALT);
        now.unbias_first = static_cast<float>(1 / (1 - std::pow(settings.beta1, steps)));
        now.unbias_root = static_cast<float>(1 / std::sqrt(1 - std::pow(settings.beta2, steps)));
        now.lr = static_cast<float>(settings.lr), now.eps = static_cast<float>(settings.state_scale * settings.eps);
        now.beta1 = static_cast<float>(settings.beta1), now.beta2 = static_cast<float>(settings.beta2);
        now.blend = static_cast<float>((1 - settings.beta1) * settings.state_scale);
        now.rest = static_cast<float>(1 - settings.beta2), now.scale = static_cast<float>(settings.state_scale);
        now.shrink = settings.decoupled_weight_decay ? now.lr * static_cast<float>(settings.weight_decay) : 0.0f;
        return now;
    }

    // g ← κ·g + λθ, and what follows from it.
    void penalize(const Parameter& p, Target& target, float coefficient) const {
        const Shape& shape = target.flat;
        for (int64_t r = 0; r < shape.rows; ++r)
            for (int64_t c = 0; c < shape.columns; c += WIDTH) {
                const Lane theta = parameters.load(p.data, r * shape.columns + c, shape.columns - c);
                store_lane(target.gradient + r * target.stride + c, target.at(r, c) * coefficient + decay * theta);
            }
        if (p.sharing == Sharing::elementwise) return;
        target.unit = power_of_two(lane_of(largest_magnitude(target)))[0];
        sum_squares(target);
    }

    SB3_FP16_INLINE Lane threshold(Rounding mode, uint32_t index, uint32_t key) const {
        const Words indices = positions() + index;
        return mode == Rounding::dithered ? dither_threshold(indices, key) : random_threshold(indices, key);
    }

    template <class Format>
    static Lane saturate(const Format& format, Lane x) {
        return clamped(x, -format.largest, format.largest);
    }

    template <class Format>
    SB3_FP16_INLINE Lane rounded(const Format& format, Rounding mode, Lane x, uint32_t index, uint32_t key) const {
        if (mode == Rounding::stochastic || mode == Rounding::dithered) return format.round(x, threshold(mode, index, key));
        return format.round(x);
    }

    // w ← sqrt(β₂w² + (1 − β₂)rms²), scaled by the larger of the two as the norm is.
    SB3_FP16_LANE Lane next_root(Lane w, Lane rms, const Step& now) {
        const Lane power = power_of_two(larger(w, rms)), inverse = inverse_of_power(power);
        const Lane a = w * inverse, b = rms * inverse;
        return power * square_root(now.beta2 * (a * a) + now.rest * (b * b));
    }

    SB3_FP16_INLINE Lane load_root(const Parameter& p, int64_t i, int64_t count) const {
        return settings.root_rounding == Rounding::fp32 ? Single(0).load(p.root_second_moment, i, count)
                                                        : state.load(p.root_second_moment, i, count);
    }

    SB3_FP16_INLINE void store_root(const Parameter& p, int64_t i, int64_t count, Lane w, const Step& now, Counts& counts) const {
        if (settings.root_rounding == Rounding::fp32) return Single(0).store(p.root_second_moment, i, count, w);
        const uint32_t above = where_above(w, lane_of(state.largest));
        counts.saturated += number_of_bits(count < WIDTH ? above & ((1u << count) - 1u) : above);
        const uint32_t index = p.first_element + static_cast<uint32_t>(i);
        const Lane stored = rounded(state, settings.root_rounding, saturate(state, w), index, now.root_key);
        state.store(p.root_second_moment, i, count, stored);
    }

    // The updated root of elements that share theirs with none.
    SB3_FP16_INLINE Lane own_root(const Parameter& p, int64_t i, int64_t count, Lane magnitude, const Step& now, Counts& counts) const {
        const Lane w = next_root(load_root(p, i, count), now.scale * magnitude, now);
        store_root(p, i, count, w, now, counts);
        return w;
    }

    // Roots of rows and columns, and from them ŵ: its row's, or r̂_i·ĉ_j/L, rows clipped to [L/4, 4L] (paper Sec. 3.3).
    void update_shared_roots(const Parameter& p, const Target& target, const Step& now, Counts& counts) {
        const Shape& shape = target.shape;
        const bool rank1 = p.sharing == Sharing::rank1;
        const float unit = now.scale * now.coefficient * target.unit;
        const auto mean = [&](const Floats& squares, int64_t n, int64_t over, float* result) {
            for (int64_t i = 0; i < n; i += WIDTH)
                store_lane(result + i, unit * square_root(load_lane(&squares[static_cast<size_t>(i)]) / static_cast<float>(over)));
        };
        mean(target.row_squares, shape.rows, shape.columns, mean_square.data());
        if (rank1) mean(target.column_squares, shape.columns, shape.rows, mean_square.data() + shape.rows);
        const int64_t roots = shape.rows + (rank1 ? shape.columns : 0);
        for (int64_t i = 0; i < roots; i += WIDTH) {
            const Lane w = next_root(load_root(p, i, roots - i), load_lane(&mean_square[static_cast<size_t>(i)]), now);
            store_root(p, i, roots - i, w, now, counts);
            store_lane(&root[static_cast<size_t>(i)], w * now.unbias_root);
        }
        clip_rows(shape.rows, rank1);
        if (target.flat.rows == shape.rows) return;
        preconditioner.resize(static_cast<size_t>(shape.rows * shape.columns + PAD));
        for (int64_t r = 0; r < shape.rows; ++r)
            for (int64_t c = 0; c < shape.columns; c += WIDTH)  // beyond a row's end the next row writes again
                store_lane(&preconditioner[static_cast<size_t>(r * shape.columns + c)], shared_root(p, target, r, c));
    }

    // ŵ of elements that share theirs.
    SB3_FP16_INLINE Lane shared_root(const Parameter& p, const Target& target, int64_t r, int64_t c) const {
        const Lane row = lane_of(share[static_cast<size_t>(r)]);
        return p.sharing == Sharing::row ? row : row * load_lane(&root[static_cast<size_t>(target.shape.rows + c)]);
    }

    void clip_rows(int64_t rows, bool rank1) {
        for (int64_t r = 0; r < padded(rows); ++r)
            share[static_cast<size_t>(r)] = r < rows ? root[static_cast<size_t>(r)] : 0.0f;
        const float layer = root_mean_square(share.data(), rows);
        for (int64_t r = 0; r < rows; ++r) {
            float& row = share[static_cast<size_t>(r)];
            row = smaller(larger(row, layer / ROW_CLIP), layer * ROW_CLIP);
            if (rank1) row = row / larger(layer, SMALLEST);
        }
    }

    // m, θ ← θ − lr·m̂/(ŵ + eps), and the carry; returns the new θ.
    template <Rounding WRITEBACK>
    SB3_FP16_INLINE Lane element(const Parameter& p, int64_t i, int64_t count, Lane gradient, Lane preconditioner, const Step& now,
                 Counts& counts) const {
        const Lane theta = parameters.load(p.data, i, count);
        const Lane m = now.beta1 * state.load(p.first_moment, i, count) + now.blend * gradient;
        Lane update = now.lr * (m * now.unbias_first) / (preconditioner + now.eps);
        if (now.shrink != 0.0f) update = update + now.shrink * theta;
        // Rarely beyond the range: only then does anything need clamping.
        const uint32_t of_theta = where_above(absolute(theta - update), lane_of(parameters.largest));
        const uint32_t of_m = where_above(absolute(m), lane_of(state.largest));
        const bool beyond = of_theta | of_m;
        const Lane next = beyond ? write_back<WRITEBACK, true>(p, i, count, theta, update, now)
                                 : write_back<WRITEBACK, false>(p, i, count, theta, update, now);
        const uint32_t zero = where_equal(update, Lane{}), same = where_equal(next, theta);
        counts.zero += number_of_bits(zero), counts.stuck += number_of_bits(same & ~zero);
        if (beyond) counts.saturated += number_of_bits(of_theta) + number_of_bits(of_m);
        state.write(p.first_moment, i, count, beyond ? saturate(state, m) : m);
        parameters.store(p.data, i, count, next);
        return next;
    }

    // θ − u as storage holds it.
    template <Rounding WRITEBACK, bool SATURATES>
    SB3_FP16_INLINE Lane write_back(const Parameter& p, int64_t i, int64_t count, Lane theta, Lane update, const Step& now) const {
        if (WRITEBACK != Rounding::residual && WRITEBACK != Rounding::swallowed)
            return rounded(parameters, WRITEBACK, SATURATES ? saturate(parameters, theta - update) : theta - update,
                           p.first_element + static_cast<uint32_t>(i), now.parameter_key);
        const Single single(0);
        const Lane due = single.load(p.carry, i, count) - update;
        const Lane next = parameters.round(saturate(parameters, theta + due)), written = next - theta;
        const Lane left = WRITEBACK == Rounding::residual ? due - written : select(written == 0.0f, due, Lane{});
        single.store(p.carry, i, count, left);
        return next;
    }
};

// A gradient in storage as the only thing in a workspace, which the step may write over: nothing reads its tile.
template <class P>
static void unpack(const P& format, const void* gradient, const Parameter& p, float* workspace, Target& target) {
    target.shape = target.flat = {p.rows, p.columns}, target.stride = padded(p.columns);
    target.gradient = target.tile = workspace;
    for (int64_t r = 0; r < p.rows; ++r)
        for (int64_t c = 0; c < target.stride; c += WIDTH) {
            const Lane g = c < p.columns ? format.load(gradient, r * p.columns + c, p.columns - c) : Lane{};
            store_lane(workspace + r * target.stride + c, g);
        }
    target.row_squares.resize(p.sharing == Sharing::elementwise ? 0 : static_cast<size_t>(padded(p.rows)));
    target.column_squares.resize(p.sharing == Sharing::rank1 ? static_cast<size_t>(padded(p.columns)) : 0);
    if (p.sharing == Sharing::elementwise) return;
    target.unit = P::squares_fit ? 1.0f : power_of_two(lane_of(largest_magnitude(target)))[0];
    sum_squares(target);
}

// A step with no update around it.
template <class P, class M>
static StepCounts step_alone(const P& parameters, const M& state, const SharpStep& step) {
    int64_t most = 0;
    std::vector<int64_t> t;  // of each parameter: they may share one counter
    for (const Parameter& p : step.parameters) most = std::max(most, p.rows * p.columns), t.push_back(*p.step);
    Workers workers(most * WORK < Workers::WORTH_WAKING ? 1 : step.threads);
    Sharp<P, M> sharp(parameters, state, step.settings, workers, step.parameters);
    Target target{};
    StepCounts counts{};
    for (size_t i = 0; i < t.size(); ++i) {
        Parameter p = step.parameters[i];
        unpack(parameters, step.gradients[i], p, step.workspace, target);
        p.step = &t[i];
        sharp.step(p, target, step.coefficients[p.network], counts);
        *step.parameters[i].step = t[i];
    }
    return counts;
}

class Adam {
public:
    Adam(const Settings& settings_, Workers& workers_) : settings(settings_), workers(workers_) {}

    // `copy(θ, index)` gives the tile's numbers.
    template <class Copy>
    void step(const Parameter& p, const Target& target, float coefficient, Copy copy) const {
        const Shape& shape = target.flat;
        const double t = static_cast<double>(*p.adam_step += 1.0f);
        const float step_size = static_cast<float>(settings.lr / (1 - std::pow(settings.beta1, t)));
        const float unbias = static_cast<float>(1 / std::sqrt(1 - std::pow(settings.beta2, t)));
        const float blend = static_cast<float>(1 - settings.beta1), keep = static_cast<float>(settings.beta2);
        const float add = static_cast<float>(1 - settings.beta2), eps = static_cast<float>(settings.eps);
        const float decay = static_cast<float>(settings.weight_decay);
        const Single single(0);
        workers.each(shape.rows, 1, WORK * shape.columns, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; ++r)
                for (int64_t c = 0; c < shape.columns; c += WIDTH) {
                    const int64_t i = r * shape.columns + c, count = shape.columns - c;
                    const Lane theta = single.load(p.data, i, count);
                    Lane slope = target.at(r, c) * coefficient;
                    if (decay != 0.0f) slope = slope + decay * theta;
                    Lane m = single.load(p.first_moment, i, count), v = single.load(p.root_second_moment, i, count);
                    m = m + blend * (slope - m);
                    v = v * keep + add * slope * slope;
                    const Lane next = theta - step_size * m / (square_root(v) * unbias + eps);
                    single.store(p.first_moment, i, count, m), single.store(p.root_second_moment, i, count, v);
                    single.store(p.data, i, count, next);
                    store_lane(target.tile + r * target.stride + c, copy(next, static_cast<uint32_t>(i)));
                }
        });
    }

private:
    const Settings& settings;
    Workers& workers;
};
