// Number formats: how registers are read from storage, rounded to nearest, and written.
//
// A format's numbers are FP32 in registers. `round` is to the format, `round_words` to the words that hold it. `load` and `store` take an element index and how many lanes count; `store`
// expects numbers that the format holds.

// For FP16 and formats with its exponents and a shorter significand, by integer arithmetic alone.
SB3_FP16_LANE Lane round_short(Lane x, int significand_bits) {
    const Words word = as_word(x), magnitude = word & 0x7fffffffu;
    const int dropped = 23 - significand_bits;
    // Normal: add half a unit, less one unless the kept significand is odd, and let the carry run.
    const uint32_t below_half = (1u << (dropped - 1)) - 1u;
    const Words normal = (magnitude + below_half + ((magnitude >> dropped) & 1u)) & ~((1u << dropped) - 1u);
    // Subnormal: the sum with 2^(9 - bits) has the format's smallest tick as its own.
    const float shift = as_float(static_cast<uint32_t>(127 + 9 - significand_bits) << 23);
    const Words subnormal = as_word((as_float(magnitude) + shift) - shift);
    Words rounded = select(reinterpret_cast<Mask>(magnitude) < 0x38800000, subnormal, normal);
    rounded = select(reinterpret_cast<Mask>(rounded) >= 0x47800000, (word & 0u) + 0x7f800000u, rounded);  // from 2^16 on
    rounded = select(reinterpret_cast<Mask>(magnitude) > 0x7f800000, magnitude, rounded);                 // NaN
    return as_float(rounded | (word & 0x80000000u));
}

#if !defined(SB3_FP16_F16C)
// Numbers of FP16 from its words, and back.
SB3_FP16_LANE Lane from_halves(Halves halves) {
    const Words word = __builtin_convertvector(halves, Words), rest = word & 0x7fffu;
    // Shifted into an FP32 word the exponent is 112 too small; a multiplication corrects it, subnormals included.
    const Words finite = as_word(as_float(rest << 13) * 5.192296858534828e33f);  // 2^112
    const Words magnitude = select(reinterpret_cast<Mask>(rest) >= 0x7c00, (rest << 13) | 0x7f800000u, finite);
    return as_float(magnitude | ((word & 0x8000u) << 16));
}

SB3_FP16_LANE Halves to_halves(Lane x) {
    const Words word = as_word(x), magnitude = word & 0x7fffffffu;
    const Words normal = (magnitude - 0x38000000u) >> 13;
    const Words subnormal = as_word(as_float(magnitude) + 0.5f) - 0x3f000000u;
    Words half = select(reinterpret_cast<Mask>(magnitude) < 0x38800000, subnormal, normal);
    half = select(reinterpret_cast<Mask>(magnitude) >= 0x7f800000,
                  0x7c00u | select(reinterpret_cast<Mask>(magnitude) > 0x7f800000, (word & 0u) + 0x200u, word & 0u), half);
    return __builtin_convertvector(half | ((word >> 16) & 0x8000u), Halves);
}
#endif

// What 16-bit formats share: memory access.
struct Words16 {
    SB3_FP16_LANE Halves load_words(const void* base, int64_t index, int64_t count) {
        const uint16_t* p = static_cast<const uint16_t*>(base) + index;
        Halves halves{};
        if (count >= WIDTH)
            memcpy(&halves, p, sizeof halves);
        else
            memcpy(&halves, p, static_cast<size_t>(count) * sizeof *p);
        return halves;
    }

    SB3_FP16_LANE void store_words(void* base, int64_t index, int64_t count, Halves halves) {
        uint16_t* p = static_cast<uint16_t*>(base) + index;
        if (count >= WIDTH)
            memcpy(p, &halves, sizeof halves);
        else
            memcpy(p, &halves, static_cast<size_t>(count) * sizeof *p);
    }
};

struct Half : Words16 {
    static constexpr bool rounds = true, keeps_unrounded = false;
    static constexpr bool squares_fit = true;  // of its numbers, in FP32: neither over- nor underflow
    static constexpr float largest = 65504.0f;
    explicit Half(int) {}

#if defined(SB3_FP16_AVX512)
    Lane load(const void* base, int64_t index, int64_t count) const {
        const uint16_t* p = static_cast<const uint16_t*>(base) + index;
        if (count >= WIDTH) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1u), p));
    }
    void store(void* base, int64_t index, int64_t count, Lane x) const {
        uint16_t* p = static_cast<uint16_t*>(base) + index;
        const __m256i halves = _mm512_cvtps_ph(x, 0);
        if (count >= WIDTH)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
        else
            _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << count) - 1u), halves);
    }
    Lane round(Lane x) const { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, 0)); }
#elif defined(SB3_FP16_F16C)
    Lane load(const void* base, int64_t index, int64_t count) const {
        return _mm256_cvtph_ps(reinterpret_cast<__m128i>(load_words(base, index, count)));
    }
    void store(void* base, int64_t index, int64_t count, Lane x) const {
        store_words(base, index, count, reinterpret_cast<Halves>(_mm256_cvtps_ph(x, 0)));
    }
    Lane round(Lane x) const { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, 0)); }
#else
    Lane load(const void* base, int64_t index, int64_t count) const { return from_halves(load_words(base, index, count)); }
    void store(void* base, int64_t index, int64_t count, Lane x) const { store_words(base, index, count, to_halves(x)); }
    Lane round(Lane x) const { return round_short(x, 10); }
#endif
    Lane round_words(Lane x) const { return round(x); }
    // Round to nearest and store.
    void write(void* base, int64_t index, int64_t count, Lane x) const {
#if defined(SB3_FP16_F16C)
        store(base, index, count, x);  // the instruction rounds
#else
        store(base, index, count, round(x));
#endif
    }
    Lane round(Lane x, Lane threshold) const { return round_by_threshold(x, threshold, 10); }
};

// E5M9 to E5M5: FP16 words with a shorter significand.
struct ShortHalf {
    static constexpr bool rounds = true, squares_fit = true;
    static constexpr bool keeps_unrounded = true;  // the reference differentiates activations before it rounds them
    Half words;
    int significand_bits;
    float largest;
    explicit ShortHalf(int bits) : words(bits), significand_bits(bits), largest(65536.0f - as_float((127u + 15u - static_cast<uint32_t>(bits)) << 23)) {}

    Lane load(const void* base, int64_t index, int64_t count) const { return words.load(base, index, count); }
    void store(void* base, int64_t index, int64_t count, Lane x) const { words.store(base, index, count, x); }
    Lane round(Lane x) const { return round_short(x, significand_bits); }
    Lane round_words(Lane x) const { return words.round(x); }
    void write(void* base, int64_t index, int64_t count, Lane x) const { store(base, index, count, round(x)); }
    Lane round(Lane x, Lane threshold) const { return round_by_threshold(x, threshold, significand_bits); }
};

struct Brain : Words16 {
    static constexpr bool rounds = true, keeps_unrounded = false, squares_fit = false;
    static constexpr float largest = 3.38953138925e38f;
    explicit Brain(int) {}

    Lane load(const void* base, int64_t index, int64_t count) const {
        return as_float(__builtin_convertvector(load_words(base, index, count), Words) << 16);
    }
    void store(void* base, int64_t index, int64_t count, Lane x) const {
        store_words(base, index, count, __builtin_convertvector(as_word(x) >> 16, Halves));
    }
    Lane round(Lane x) const {
        const Words word = as_word(x);
        const Words rounded = (word + 0x7fffu + ((word >> 16) & 1u)) & 0xffff0000u;
        return select(x != x, x, as_float(rounded));
    }
    Lane round_words(Lane x) const { return round(x); }
    void write(void* base, int64_t index, int64_t count, Lane x) const { store(base, index, count, round(x)); }
    Lane round(Lane x, Lane threshold) const { return round_by_threshold_bf16(x, threshold); }
};

struct Single {
    static constexpr bool rounds = false, keeps_unrounded = false, squares_fit = false;
    static constexpr float largest = 3.40282347e38f;
    explicit Single(int) {}

    Lane load(const void* base, int64_t index, int64_t count) const {
        const float* p = static_cast<const float*>(base) + index;
        if (count >= WIDTH) return load_lane(p);
        Lane x{};
        memcpy(&x, p, static_cast<size_t>(count) * sizeof *p);
        return x;
    }
    void store(void* base, int64_t index, int64_t count, Lane x) const {
        float* p = static_cast<float*>(base) + index;
        if (count >= WIDTH)
            store_lane(p, x);
        else
            memcpy(p, &x, static_cast<size_t>(count) * sizeof *p);
    }
    Lane round(Lane x) const { return x; }
    Lane round_words(Lane x) const { return x; }
    void write(void* base, int64_t index, int64_t count, Lane x) const { store(base, index, count, x); }
    Lane round(Lane x, Lane) const { return x; }
};
