// Module C, SHARP, for all parameters at once (sb3_fp16/sharp.py; cpu/optimizers.inl, with the same bits), and Adam of
// the FP32 presets. A step is: square_sums, gradient_norm (norm.cuh) if asked for, begin_step, square_roots, sharp_elements.
#pragma once

#include "formats.cuh"
#include "layout.h"
#include "reduce.cuh"

namespace sb3_fp16 {

constexpr int64_t PIECE = 512;  // elements of an unshared parameter whose squares LANES lanes add
constexpr int ROWS_OF_BLOCK = THREADS / LANES;
constexpr int64_t ELEMENTS_OF_BLOCK = THREADS * PACK;

SB3_FP16_FUNCTION int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
SB3_FP16_FUNCTION int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// How a parameter's elements are cut into rows for sums of squares.
struct Rows {
    int64_t count, length, elements;
    SB3_FP16_METHOD explicit Rows(const Slice& slice)
        : count(slice.rows), length(slice.columns), elements(slice.rows * slice.columns) {
        if (slice.sharing == Sharing::elementwise) length = PIECE, count = divided_up(elements, PIECE);
    }
};

SB3_FP16_FUNCTION int64_t column_blocks(const Slice& slice) {
    return slice.sharing == Sharing::rank1 ? divided_up(slice.columns, THREADS) * divided_up(slice.rows, ROWS_TOGETHER) : 0;
}
SB3_FP16_FUNCTION int64_t square_blocks(const Slice& slice) {
    return divided_up(Rows(slice).count, ROWS_OF_BLOCK) + column_blocks(slice);
}
SB3_FP16_FUNCTION int64_t element_blocks(const Slice& slice) { return divided_up(slice.rows * slice.columns, ELEMENTS_OF_BLOCK); }

// The parameter that a block works on, by the number of each one's first block.
template <int64_t Slice::* FIRST_BLOCK>
__device__ __forceinline__ const Slice& slice_of_block(const Table& table) {
    int64_t i = table.count - 1;
    while (i > 0 && table.slices[i].*FIRST_BLOCK > blockIdx.x) --i;
    return table.slices[i];
}

// g as the optimizer sees it before κ; with Adam's L2 penalty κ·g + λθ, and then no κ.
template <class P>
struct Gradient {
    P format;
    const typename P::Word *gradient, *data;
    float coefficient, weight_decay;  // of the penalty: 0 where there is none

    __device__ __forceinline__ Gradient(const Slice& slice, const SharpSettings& settings, bool penalizes)
        : format{settings.parameter_bits}, gradient(static_cast<const typename P::Word*>(slice.gradient)),
          data(static_cast<const typename P::Word*>(slice.data)), coefficient(settings.coefficients[slice.coefficient]),
          weight_decay(penalizes && !settings.decoupled_weight_decay ? settings.weight_decay : 0.0f) {}

    __device__ __forceinline__ float at(int64_t i) const {
        const float g = format.load(gradient[i]);
        return weight_decay != 0.0f ? g * coefficient + weight_decay * format.load(data[i]) : g;
    }
    __device__ __forceinline__ float later_coefficient() const { return weight_decay != 0.0f ? 1.0f : coefficient; }
};

// Σ (g/unit)² along a row, by LANES lanes.
template <class P>
__device__ __forceinline__ void square_row(const Slice& slice, const Gradient<P>& gradient, int64_t row) {
    const Rows rows(slice);
    const int64_t first = row * rows.length, end = row < rows.count ? least(first + rows.length, rows.elements) : first;
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    float unit = 1.0f;
    if (!P::squares_fit) {
        float largest = 0.0f;
        for (int64_t i = first + lane; i < end; i += LANES) largest = larger(absolute(gradient.at(i)), largest);
        unit = power_of_two(__shfl_sync(ALL_LANES, over_lanes<Largest>(largest), 0, LANES));
    }
    const float inverse = inverse_of_power(unit);
    float sum = 0.0f;
    for (int64_t i = first + lane; i < end; i += LANES) {
        const float scaled = gradient.at(i) * inverse;
        sum = sum + scaled * scaled;
    }
    sum = over_lanes<Sum>(sum);
    if (lane == 0 && row < rows.count) slice.partials[row] = {sum, unit};
}

// The same down a column, over ROWS_TOGETHER rows, by one thread.
template <class P>
__device__ __forceinline__ void square_column(const Slice& slice, const Gradient<P>& gradient, int64_t block) {
    const int64_t across = divided_up(slice.columns, THREADS), part = block / across;
    const int64_t column = block % across * THREADS + threadIdx.x;
    if (column >= slice.columns) return;
    const int64_t first = part * ROWS_TOGETHER, end = least(first + ROWS_TOGETHER, slice.rows);
    float unit = 1.0f;
    if (!P::squares_fit) {
        float largest = 0.0f;
        for (int64_t r = first; r < end; ++r) largest = larger(absolute(gradient.at(r * slice.columns + column)), largest);
        unit = power_of_two(largest);
    }
    const float inverse = inverse_of_power(unit);
    float sum = 0.0f;
    for (int64_t r = first; r < end; ++r) {
        const float scaled = gradient.at(r * slice.columns + column) * inverse;
        sum = sum + scaled * scaled;
    }
    slice.column_partials[part * slice.columns + column] = {sum, unit};
}

// Sums of squares of all gradients, for the norm and for shared second moments.
template <class P>
__global__ void __launch_bounds__(THREADS) square_sums(const __grid_constant__ Table table, const __grid_constant__ SharpSettings settings, bool penalizes) {
    const Slice& slice = slice_of_block<&Slice::first_square_block>(table);
    if (penalizes && settings.skip && *settings.skip) return;
    const Gradient<P> gradient(slice, settings, penalizes);
    const int64_t block = blockIdx.x - slice.first_square_block, row_blocks = divided_up(Rows(slice).count, ROWS_OF_BLOCK);
    if (block < row_blocks)
        square_row(slice, gradient, block * ROWS_OF_BLOCK + threadIdx.x / LANES);
    else
        square_column(slice, gradient, block - row_blocks);
}

// t ← t + 1.
__global__ void __launch_bounds__(32) begin_step(const __grid_constant__ Table table, const bool* skip) {
    if (!(skip && *skip) && threadIdx.x < table.count) ++*table.slices[threadIdx.x].step;
}

// What all elements of a parameter share in one step.
struct Step {
    uint32_t parameter_key, root_key;
    float unbias_first, unbias_root;

    __device__ __forceinline__ Step(const Slice& slice, const SharpSettings& settings) {
        const int64_t t = *slice.step;
        const int64_t known = least(t, settings.unbias_steps) - 1;
        unbias_first = settings.unbias_first[known], unbias_root = settings.unbias_root[known];
        parameter_key = key(slice.writeback, t, PARAMETER_SALT, settings.seed);
        root_key = key(settings.root_rounding, t, ROOT_SALT, settings.seed);
    }
    static __device__ __forceinline__ uint32_t key(Rounding mode, int64_t t, uint32_t salt, uint32_t seed) {
        const uint32_t step = static_cast<uint32_t>(t);
        return mode == Rounding::dithered ? dither_key(step, salt) : random_key(step, salt, seed);
    }
};

// A number as storage holds it, saturating; counts what was beyond the range.
template <class Format>
__device__ __forceinline__ float rounded(const Format& format, Rounding mode, float x, uint32_t index, uint32_t key, int* saturated) {
    const float largest = format.largest();
    *saturated += absolute(x) > largest;
    x = clamped(x, -largest, largest);
    if (mode == Rounding::stochastic) return format.round(x, random_threshold(index, key));
    if (mode == Rounding::dithered) return format.round(x, dither_threshold(index, key));
    return format.round(x);
}

// w ← sqrt(β₂w² + (1 − β₂)rms²), scaled by the larger of the two as the norm is.
__device__ __forceinline__ float next_root(float w, float rms, const SharpSettings& settings) {
    const float power = power_of_two(larger(w, rms)), inverse = inverse_of_power(power);
    const float a = w * inverse, b = rms * inverse;
    return power * sqrtf(settings.beta2 * (a * a) + settings.rest * (b * b));
}

// A second moment as storage holds it.
template <class M>
__device__ __forceinline__ typename M::Word rounded_root(const Slice& slice, const SharpSettings& settings, const Step& now, int64_t i, float w, int* saturated) {
    const M format{settings.state_bits};
    const uint32_t index = slice.first_element + static_cast<uint32_t>(i);
    return format.store(rounded(format, settings.root_rounding, w, index, now.root_key, saturated));
}

// One second moment where it lies in the parameter's state, there possibly in FP32: returns it updated.
template <class M>
__device__ __forceinline__ float update_root(const Slice& slice, const SharpSettings& settings, const Step& now, int64_t i, float rms, int* saturated) {
    if (settings.root_rounding == Rounding::fp32) {
        float* root = static_cast<float*>(slice.root) + i;
        return *root = next_root(*root, rms, settings);
    }
    typename M::Word* root = static_cast<typename M::Word*>(slice.root) + i;
    const float w = next_root(M{settings.state_bits}.load(*root), rms, settings);
    *root = rounded_root<M>(slice, settings, now, i, w, saturated);
    return w;
}

// Σ (g/unit)² of a column, of what blocks of rows left.
__device__ __forceinline__ Squares column_squares(const Slice& slice, int64_t column) {
    const int64_t parts = divided_up(slice.rows, ROWS_TOGETHER);
    Squares total{0.0f, 0.0f};
    for (int64_t part = 0; part < parts; ++part) total.unit = larger(slice.column_partials[part * slice.columns + column].unit, total.unit);
    const float inverse = inverse_of_power(total.unit);
    for (int64_t part = 0; part < parts; ++part) {
        const Squares squares = slice.column_partials[part * slice.columns + column];
        const float ratio = squares.unit * inverse;
        total.sum = total.sum + squares.sum * (ratio * ratio);
    }
    return total;
}

// L: s·sqrt(mean (x/s)²), s a power of two near max|x|, by one block; added in LANES lanes.
__device__ __forceinline__ float root_mean_square(const float* x, int64_t count, float* shared) {
    float largest = 0.0f, sum = 0.0f;
    for (int64_t i = threadIdx.x; i < count; i += THREADS) largest = larger(absolute(x[i]), largest);
    const float power = power_of_two(over_block<Largest>(largest, shared)), inverse = inverse_of_power(power);
    __syncthreads();  // everyone has read the maximum
    if (threadIdx.x < 32) {
        for (int64_t i = threadIdx.x < LANES ? static_cast<int64_t>(threadIdx.x) : count; i < count; i += LANES) {
            const float scaled = x[i] * inverse;
            sum = sum + scaled * scaled;
        }
        sum = over_lanes<Sum>(sum);
        if (threadIdx.x == 0) shared[0] = sum;
    }
    __syncthreads();
    return power * sqrtf(shared[0] / static_cast<float>(count));
}

// Roots of rows and columns that share a second moment, and from them ŵ: its row's, or r̂_i·ĉ_j/L, rows clipped to
// [L/4, 4L] (paper Sec. 3.3). One block per parameter.
template <class P, class M>
__global__ void __launch_bounds__(THREADS) square_roots(const __grid_constant__ Table table, const __grid_constant__ SharpSettings settings) {
    __shared__ float per_warp[THREADS / 32];
    const Slice& slice = table.slices[blockIdx.x];
    if (slice.sharing == Sharing::elementwise || (settings.skip && *settings.skip)) return;
    const Step now(slice, settings);
    const float coefficient = Gradient<P>(slice, settings, true).later_coefficient();
    int saturated = 0;
    for (int64_t r = threadIdx.x; r < slice.rows; r += THREADS) {
        const Squares squares = slice.partials[r];
        const float rms = settings.scale * coefficient * squares.unit * sqrtf(squares.sum / static_cast<float>(slice.columns));
        slice.row_share[r] = update_root<M>(slice, settings, now, r, rms, &saturated) * now.unbias_root;
    }
    if (slice.sharing == Sharing::rank1)
        for (int64_t c = threadIdx.x; c < slice.columns; c += THREADS) {
            const Squares squares = column_squares(slice, c);
            const float rms = settings.scale * coefficient * squares.unit * sqrtf(squares.sum / static_cast<float>(slice.rows));
            slice.column_root[c] = update_root<M>(slice, settings, now, slice.rows + c, rms, &saturated) * now.unbias_root;
        }
    __syncthreads();
    const float layer = root_mean_square(slice.row_share, slice.rows, per_warp);
    for (int64_t r = threadIdx.x; r < slice.rows; r += THREADS) {
        const float row = smaller(larger(slice.row_share[r], layer / ROW_CLIP), layer * ROW_CLIP);
        slice.row_share[r] = slice.sharing == Sharing::rank1 ? row / larger(layer, SMALLEST) : row;
    }
    if (settings.counts) count(settings.counts + 2, saturated);
}

struct Counts {
    int nonzero, stuck, saturated;
};

// PACK elements of one parameter.
template <class P, class M>
class Elements {
public:
    __device__ __forceinline__ Elements(const Slice& slice_, const SharpSettings& settings_)
        : slice(slice_), settings(settings_), parameters{settings.parameter_bits}, state{settings.state_bits}, now(slice, settings),
          coefficient(settings.coefficients[slice.coefficient]), lr(*settings.lr),
          penalty(settings.decoupled_weight_decay ? 0.0f : settings.weight_decay),
          shrink(settings.decoupled_weight_decay ? lr * settings.weight_decay : 0.0f) {}

    __device__ __forceinline__ void step(int64_t first, Counts* counts) const {
        const int64_t left = slice.rows * slice.columns - first;
        const bool has_own = slice.sharing == Sharing::elementwise && settings.root_rounding != Rounding::fp32;
        PWord* data = static_cast<PWord*>(slice.data) + first;
        MWord* moments = static_cast<MWord*>(slice.first_moment) + first;
        MWord* roots = static_cast<MWord*>(slice.root) + first;
        const Pack<PWord> g = read_pack(static_cast<const PWord*>(slice.gradient) + first, left);
        Pack<PWord> theta = read_pack(data, left);
        Pack<MWord> m = read_pack(moments, left), w{};
        if (has_own) w = read_pack(roots, left);
        int64_t row = first / slice.columns, column = first - row * slice.columns;
        SB3_FP16_UNROLL
        for (int i = 0; i < PACK; ++i) {
            if (i >= left) continue;
            const float old = parameters.load(theta.words[i]);
            float gradient = parameters.load(g.words[i]) * coefficient;
            if (penalty != 0.0f) gradient = gradient + penalty * old;
            const float root = slice.sharing != Sharing::elementwise ? shared_root(row, column)
                               : has_own ? own_root(first + i, absolute(gradient), w.words[i], counts)
                                         : update_root<M>(slice, settings, now, first + i, settings.scale * absolute(gradient), &counts->saturated) * now.unbias_root;
            theta.words[i] = parameters.store(element(first + i, old, gradient, root, m.words[i], counts));
            if (++column == slice.columns) column = 0, ++row;
        }
        write_pack(data, left, theta), write_pack(moments, left, m);
        if (has_own) write_pack(roots, left, w);
    }

private:
    using PWord = typename P::Word;
    using MWord = typename M::Word;
    const Slice& slice;
    const SharpSettings& settings;
    const P parameters;
    const M state;
    const Step now;
    const float coefficient, lr, penalty, shrink;

    // ŵ of an element, from its row's second moment, its row's and column's, or its own at hand.
    __device__ __forceinline__ float shared_root(int64_t row, int64_t column) const {
        const float of_row = slice.row_share[row];
        return slice.sharing == Sharing::row ? of_row : of_row * slice.column_root[column];
    }
    __device__ __forceinline__ float own_root(int64_t i, float magnitude, MWord& stored, Counts* counts) const {
        const float w = next_root(state.load(stored), settings.scale * magnitude, settings);
        stored = rounded_root<M>(slice, settings, now, i, w, &counts->saturated);
        return w * now.unbias_root;
    }

    // m and the carry; returns the new θ.
    __device__ __forceinline__ float element(int64_t i, float theta, float gradient, float root, MWord& moment, Counts* counts) const {
        const float m = settings.beta1 * state.load(moment) + settings.blend * gradient;
        float update = lr * (m * now.unbias_first) / (root + settings.eps);
        if (shrink != 0.0f) update = update + shrink * theta;
        const float next = write_back(i, theta, update, counts);
        moment = state.store(rounded(state, Rounding::nearest, m, 0u, 0u, &counts->saturated));
        counts->nonzero += update != 0.0f, counts->stuck += update != 0.0f && next == theta;
        return next;
    }

    // θ − u as storage holds it.
    __device__ __forceinline__ float write_back(int64_t i, float theta, float update, Counts* counts) const {
        const uint32_t index = slice.first_element + static_cast<uint32_t>(i);
        const float plain = rounded(parameters, slice.writeback, theta - update, index, now.parameter_key, &counts->saturated);
        if (slice.writeback != Rounding::residual && slice.writeback != Rounding::swallowed) return plain;
        const float due = slice.carry[i] - update, largest = parameters.largest();
        const float next = parameters.round(clamped(theta + due, -largest, largest)), written = next - theta;
        slice.carry[i] = slice.writeback == Rounding::residual ? due - written : written == 0.0f ? due : 0.0f;
        return next;
    }
};

// m, θ ← θ − lr·m̂/(ŵ + eps), and the carry, of all elements of all parameters.
template <class P, class M>
__global__ void __launch_bounds__(THREADS) sharp_elements(const __grid_constant__ Table table, const __grid_constant__ SharpSettings settings) {
    const Slice& slice = slice_of_block<&Slice::first_element_block>(table);
    if (settings.skip && *settings.skip) return;
    const int64_t first = (blockIdx.x - slice.first_element_block) * ELEMENTS_OF_BLOCK + static_cast<int64_t>(threadIdx.x) * PACK;
    Counts counts{};
    if (first < slice.rows * slice.columns) Elements<P, M>(slice, settings).step(first, &counts);
    if (!settings.counts) return;
    count(settings.counts, counts.nonzero), count(settings.counts + 1, counts.stuck), count(settings.counts + 2, counts.saturated);
}

}  // namespace sb3_fp16
