// Number formats: how a kernel reads numbers from storage as FP32, rounds them, and writes them.
#pragma once

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

#include "modes.h"
#include "numerics.h"

namespace sb3_fp16 {

constexpr int PACK = 8;  // numbers that a thread reads and writes at once

// PACK neighbouring numbers of an array, or as many as there are.
template <class Word>
struct alignas(16) Pack {
    Word words[PACK];
};

template <class Word>
SB3_FP16_FUNCTION bool is_whole(const Word* p, int64_t count) {
    return count >= PACK && reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

template <class Word>
SB3_FP16_FUNCTION Pack<Word> read_pack(const Word* p, int64_t count) {
    if (is_whole(p, count)) return *reinterpret_cast<const Pack<Word>*>(p);
    Pack<Word> pack{};
    SB3_FP16_UNROLL
    for (int i = 0; i < PACK; ++i)
        if (i < count) pack.words[i] = p[i];
    return pack;
}

template <class Word>
SB3_FP16_FUNCTION void write_pack(Word* p, int64_t count, const Pack<Word>& pack) {
    if (is_whole(p, count)) {
        *reinterpret_cast<Pack<Word>*>(p) = pack;
        return;
    }
    SB3_FP16_UNROLL
    for (int i = 0; i < PACK; ++i)
        if (i < count) p[i] = pack.words[i];
}

// Rounded to FP16's exponents with a significand of so many bits, by integer arithmetic alone.
SB3_FP16_FUNCTION float round_short(float x, int significand_bits) {
    const uint32_t word = as_word(x), magnitude = word & 0x7fffffffu;
    const int dropped = 23 - significand_bits;
    // Normal: add half a unit, less one unless the kept significand is odd, and let the carry run.
    const uint32_t normal = (magnitude + ((1u << (dropped - 1)) - 1u) + ((magnitude >> dropped) & 1u)) & ~((1u << dropped) - 1u);
    // Subnormal: the sum with 2^(9 - bits) has the format's smallest tick as its own.
    const float shift = as_float(static_cast<uint32_t>(127 + 9 - significand_bits) << 23);
    const uint32_t subnormal = as_word((as_float(magnitude) + shift) - shift);
    uint32_t rounded = magnitude < 0x38800000u ? subnormal : normal;
    rounded = rounded >= 0x47800000u ? 0x7f800000u : rounded;        // from 2^16 on
    rounded = magnitude > 0x7f800000u ? magnitude : rounded;         // NaN
    return as_float(rounded | (word & 0x80000000u));
}

// FP16, and formats with its exponents and a shorter significand. `load` of a word, `store` of a number that the format
// holds; `round` to nearest, beyond the range to infinity, or up where the covered fraction exceeds a threshold.
struct Half {
    using Word = uint16_t;
    static constexpr bool squares_fit = true;  // of its numbers, in FP32: neither over- nor underflow
    int significand_bits;

    SB3_FP16_METHOD float largest() const { return 65536.0f - as_float(static_cast<uint32_t>(127 + 15 - significand_bits) << 23); }
#ifdef __CUDACC__
    SB3_FP16_METHOD float load(Word word) const { return __half2float(__ushort_as_half(word)); }
    SB3_FP16_METHOD Word store(float x) const { return __half_as_ushort(__float2half_rn(x)); }
#else
    float load(Word word) const {
        const uint32_t rest = word & 0x7fffu;
        const uint32_t finite = as_word(as_float(rest << 13) * 5.192296858534828e33f);  // 2^112
        return as_float((rest >= 0x7c00u ? (rest << 13) | 0x7f800000u : finite) | (word & 0x8000u) << 16);
    }
    Word store(float x) const {
        const uint32_t word = as_word(round_short(x, 10)), magnitude = word & 0x7fffffffu;
        uint32_t half = magnitude < 0x38800000u ? as_word(as_float(magnitude) + 0.5f) - 0x3f000000u : (magnitude - 0x38000000u) >> 13;
        if (magnitude >= 0x7f800000u) half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
        return static_cast<Word>(half | (word >> 16 & 0x8000u));
    }
#endif
    SB3_FP16_METHOD float round(float x) const { return significand_bits == 10 ? load(store(x)) : round_short(x, significand_bits); }
    SB3_FP16_METHOD float round(float x, float threshold) const { return round_by_threshold(x, threshold, significand_bits); }
};

struct Brain {
    using Word = uint16_t;
    static constexpr bool squares_fit = false;
    int significand_bits;

    SB3_FP16_METHOD float largest() const { return 3.38953138925e38f; }
    SB3_FP16_METHOD float load(Word word) const { return as_float(static_cast<uint32_t>(word) << 16); }
    SB3_FP16_METHOD Word store(float x) const { return static_cast<Word>(as_word(round(x)) >> 16); }
    SB3_FP16_METHOD float round(float x) const {
        const uint32_t word = as_word(x);
        return x != x ? x : as_float((word + 0x7fffu + (word >> 16 & 1u)) & 0xffff0000u);
    }
    SB3_FP16_METHOD float round(float x, float threshold) const { return round_by_threshold_bf16(x, threshold); }
};

struct Single {
    using Word = float;
    static constexpr bool squares_fit = false;
    int significand_bits;

    SB3_FP16_METHOD float largest() const { return LARGEST_FLOAT; }
    SB3_FP16_METHOD float load(Word word) const { return word; }
    SB3_FP16_METHOD Word store(float x) const { return x; }
    SB3_FP16_METHOD float round(float x) const { return x; }
    SB3_FP16_METHOD float round(float x, float) const { return x; }
};

}  // namespace sb3_fp16
