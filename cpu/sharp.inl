
    // Module C for one parameter: sb3_fp16/sharp.py, _Bucket.step, same operations in the same order.
    void sharp(const Parameter& p, Gradient gradient, float coefficient, Stats& stats) {
        const int64_t n = p.rows * p.columns;
        float *g = scratch[0].data(), *theta = scratch[1].data(), *m = scratch[2].data(), *w = scratch[3].data();
        float *update = scratch[4].data(), *next = scratch[5].data();
        const int64_t roots = p.sharing == Sharing::elementwise ? n : p.sharing == Sharing::row ? p.rows : p.rows + p.columns;
        const int64_t t = ++*p.step;
        const float scale = static_cast<float>(settings.state_scale), lr = static_cast<float>(settings.lr);
        const float decay = static_cast<float>(settings.weight_decay);

        unscale(p, gradient, coefficient, g);
        load(p.data, 0, n, theta);
        load(p.first_moment, 0, n, m);
        if (settings.root_rounding == Rounding::fp32)
            memcpy(w, p.root_second_moment, static_cast<size_t>(roots) * sizeof(float));
        else
            load(p.root_second_moment, 0, roots, w);
        if (decay != 0.0f && !settings.decoupled_weight_decay)
            for (int64_t i = 0; i < n; ++i) g[i] += decay * theta[i];

        const float beta1 = static_cast<float>(settings.beta1);
        const float blend = static_cast<float>((1 - settings.beta1) * settings.state_scale);
        for (int64_t i = 0; i < n; ++i) m[i] = beta1 * m[i] + blend * g[i];
        root_mean_squares(p, g, update);
        const float beta2 = static_cast<float>(settings.beta2), rest = static_cast<float>(1 - settings.beta2);
        for (int64_t i = 0; i < roots; ++i) {
            const float rms = scale * update[i], largest = larger(larger(w[i], rms), SMALLEST);
            const float a = w[i] / largest, b = rms / largest;
            w[i] = largest * std::sqrt(beta2 * (a * a) + rest * (b * b));
        }

        const double steps = static_cast<double>(t);
        const float unbias1 = static_cast<float>(1 / (1 - std::pow(settings.beta1, steps)));
        const float unbias2 = static_cast<float>(1 / std::sqrt(1 - std::pow(settings.beta2, steps)));
        preconditioner(p, w, unbias2, update);
        const float eps = static_cast<float>(settings.state_scale * settings.eps);
        for (int64_t i = 0; i < n; ++i) update[i] = lr * (m[i] * unbias1) / (update[i] + eps);
        if (decay != 0.0f && settings.decoupled_weight_decay) {
            const float shrink = static_cast<float>(settings.lr * settings.weight_decay);
            for (int64_t i = 0; i < n; ++i) update[i] += shrink * theta[i];
        }

        write_back(p, theta, update, next, t);
        int64_t nonzero = 0, stuck = 0, saturated = 0;
        for (int64_t i = 0; i < n; ++i) {
            nonzero += update[i] != 0.0f;
            stuck += update[i] != 0.0f && next[i] == theta[i];
            saturated += absolute(theta[i] - update[i]) > LARGEST_HALF;
            saturated += absolute(m[i]) > LARGEST_HALF;
        }
        if (settings.root_rounding != Rounding::fp32)
            for (int64_t i = 0; i < roots; ++i) saturated += absolute(w[i]) > LARGEST_HALF;
        stats.nonzero += nonzero, stats.stuck += stuck, stats.saturated += saturated;

        saturate(m, n);
        store(m, n, p.first_moment);
        if (settings.root_rounding == Rounding::fp32) {
            memcpy(p.root_second_moment, w, static_cast<size_t>(roots) * sizeof(float));
        } else {
            threshold_round(settings.root_rounding, w, roots, p.first_element, t, ROOT_SALT);
            saturate(w, roots);
            store(w, roots, p.root_second_moment);
        }
        store(next, n, p.data);
    }

    static void saturate(float* values, int64_t count) {
        for (int64_t i = 0; i < count; ++i)
            values[i] = smaller(larger(values[i], -LARGEST_HALF), LARGEST_HALF);
    }

    void threshold_round(Rounding mode, float* values, int64_t count, uint32_t first, int64_t t, uint32_t salt) {
        const uint32_t step = static_cast<uint32_t>(t);
        if (mode == Rounding::dithered) {
            const uint32_t key = dither_key(step, salt);
            for (int64_t i = 0; i < count; ++i)
                values[i] = round_by_threshold(values[i], dither_threshold(first + static_cast<uint32_t>(i), key));
        } else if (mode == Rounding::stochastic) {
            const uint32_t key = random_key(step, salt, settings.seed);
            for (int64_t i = 0; i < count; ++i)
                values[i] = round_by_threshold(values[i], random_threshold(first + static_cast<uint32_t>(i), key));
        }
    }

    // θ − u as storage holds it.
    void write_back(const Parameter& p, const float* theta, const float* update, float* next, int64_t t) {
        const int64_t n = p.rows * p.columns;
        if (p.writeback == Rounding::residual || p.writeback == Rounding::swallowed) {
            float* due = scratch[6].data();
            for (int64_t i = 0; i < n; ++i) due[i] = p.carry[i] - update[i];
            for (int64_t i = 0; i < n; ++i) next[i] = theta[i] + due[i];
            saturate(next, n);
            round_storage(next, n);
            for (int64_t i = 0; i < n; ++i) {
                const float written = next[i] - theta[i];
                p.carry[i] = p.writeback == Rounding::residual ? due[i] - written : written == 0.0f ? due[i] : 0.0f;
            }
            return;
        }
        for (int64_t i = 0; i < n; ++i) next[i] = theta[i] - update[i];
        threshold_round(p.writeback, next, n, p.first_element, t, PARAMETER_SALT);
        saturate(next, n);
        round_storage(next, n);
    }

    // s·sqrt(mean (x/s)²), s = max|x|.
    static float root_mean_square(const float* x, int64_t count) {
        const float largest = largest_magnitude(x, count);
        return largest * std::sqrt(sum_of_squares(x, count, larger(largest, SMALLEST)) / static_cast<float>(count));
    }

    void root_mean_squares(const Parameter& p, const float* g, float* result) {
        if (p.sharing == Sharing::elementwise) {
            for (int64_t i = 0; i < p.rows * p.columns; ++i) result[i] = absolute(g[i]);
            return;
        }
        for (int64_t r = 0; r < p.rows; ++r) result[r] = root_mean_square(g + r * p.columns, p.columns);
        if (p.sharing == Sharing::rank1) columns_root_mean_squares(p, g, result + p.rows);
    }

    // All columns at once, row after row.
    void columns_root_mean_squares(const Parameter& p, const float* g, float* result) {
        const int64_t n = p.columns;
        float *largest = scratch[6].data(), *sum = scratch[7].data();
        for (int64_t c = 0; c < n; ++c) largest[c] = sum[c] = 0.0f;
        for (int64_t r = 0; r < p.rows; ++r)
            for (int64_t c = 0; c < n; ++c) largest[c] = larger(absolute(g[r * n + c]), largest[c]);
        for (int64_t c = 0; c < n; ++c) result[c] = larger(largest[c], SMALLEST);
        for (int64_t r = 0; r < p.rows; ++r)
            for (int64_t c = 0; c < n; ++c) sum[c] += (g[r * n + c] / result[c]) * (g[r * n + c] / result[c]);
        for (int64_t c = 0; c < n; ++c) result[c] = largest[c] * std::sqrt(sum[c] / static_cast<float>(p.rows));
    }

    // ŵ of every element: its own, its row's, or r̂_i·ĉ_j/L, rows clipped to [L/4, 4L] (paper Sec. 3.3).
    void preconditioner(const Parameter& p, const float* w, float unbias, float* result) {
        if (p.sharing == Sharing::elementwise) {
            for (int64_t i = 0; i < p.rows * p.columns; ++i) result[i] = w[i] * unbias;
            return;
        }
        float* unbiased = scratch[7].data();
        for (int64_t i = 0; i < p.rows + (p.sharing == Sharing::rank1 ? p.columns : 0); ++i) unbiased[i] = w[i] * unbias;
        const float layer = root_mean_square(unbiased, p.rows);
        for (int64_t r = 0; r < p.rows; ++r) {
            const float row = smaller(larger(unbiased[r], layer / ROW_CLIP), layer * ROW_CLIP);
            float* out = result + r * p.columns;
            if (p.sharing == Sharing::row) {
                for (int64_t c = 0; c < p.columns; ++c) out[c] = row;
            } else {
                const float share = row / larger(layer, SMALLEST);
                for (int64_t c = 0; c < p.columns; ++c) out[c] = share * unbiased[p.rows + c];
            }
        }
    }
};
