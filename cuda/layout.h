// What the host hands to the kernels of an optimizer step. Pointers lead to the device; numbers that may change from one
// replay of a captured graph to the next (κ, lr, the skip flag, t) lie there too.
#pragma once

#include <cstdint>

#include "modes.h"

namespace sb3_fp16 {

// A sum of (x/unit)², unit a power of two near the largest |x|, or 1.
struct Squares {
    float sum, unit;
};

// One parameter. Second moments are shared along rows and columns; where they are not, all elements are one row.
struct Slice {
    const void* gradient;
    void *data, *first_moment, *root;
    float* carry;      // null unless the writeback keeps one
    int64_t* step;     // t
    Squares* partials;         // of its rows, or of pieces of its one row
    Squares* column_partials;  // [⌈rows/32⌉][columns]
    float* row_share;          // a row's part of ŵ
    float* column_root;        // ŵ of columns
    int64_t rows, columns;
    int64_t first_element_block, first_square_block;  // among the blocks of a launch
    uint32_t first_element;  // of the threshold sequences
    int32_t coefficient;     // which κ
    Sharing sharing;
    Rounding writeback;
};

constexpr int MOST_SLICES = 24;  // a table travels as a kernel's argument, which may have 4 KiB

struct Table {
    int64_t count;
    Slice slices[MOST_SLICES];
};

// Settings of SHARP or Adam that a graph keeps, and where the rest lies on the device.
struct SharpSettings {
    const float *coefficients, *lr;
    const bool* skip;  // null: never
    // 1/(1 − β₁^t) and 1/sqrt(1 − β₂^t) for t = 1, 2, ..., from FP64; the last serves for all that follow.
    const float *unbias_first, *unbias_root;
    int64_t unbias_steps;
    unsigned long long* counts;  // nonzero updates, stuck ones, saturated numbers; null: not counted
    float beta1, blend, beta2, rest, scale, eps, weight_decay;
    bool decoupled_weight_decay;
    Rounding root_rounding;
    uint32_t seed;
    int parameter_bits, state_bits;  // significands
};

// Module A's state and limits for the gradient norm of one or two networks.
struct NormSettings {
    const Squares* partials[2];  // of each network's parameters
    int64_t partial_counts[2];
    float* scales;         // S
    float* coefficients;   // κ, out
    float* norm;           // G in true units, out; NaN where the step is skipped
    bool* skip;            // out
    const bool* stopped;   // by target_kl; null: never
    long long* counters;   // good steps, skipped steps, skips at the floor
    float floor[2], ceiling[2];
    float max_norm;
    int networks;
};

}  // namespace sb3_fp16
