// A register full of floats for one instruction set, and the primitives that cuda/numerics.h is written in.

#if defined(SB3_FP16_AVX512)
constexpr int WIDTH = 16, TILE_ROWS = 8;
#elif defined(SB3_FP16_AVX2)
constexpr int WIDTH = 8, TILE_ROWS = 6;
#else
constexpr int WIDTH = 4, TILE_ROWS = 4;
#endif

#define SB3_FP16_INLINE inline __attribute__((always_inline))
#define SB3_FP16_LANE static SB3_FP16_INLINE

typedef float Lane __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Mask __attribute__((vector_size(4 * WIDTH)));  // of a comparison: all bits or none
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

SB3_FP16_LANE Lane as_float(Words words) { return reinterpret_cast<Lane>(words); }
SB3_FP16_LANE Words as_word(Lane x) { return reinterpret_cast<Words>(x); }
SB3_FP16_LANE Lane select(Mask condition, Lane yes, Lane no) { return condition ? yes : no; }
SB3_FP16_LANE Words select(Mask condition, Words yes, Words no) { return condition ? yes : no; }
SB3_FP16_LANE Lane truncated(Lane x) { return __builtin_convertvector(__builtin_convertvector(x, Mask), Lane); }
SB3_FP16_LANE Lane number_of(Words words) { return __builtin_convertvector(reinterpret_cast<Mask>(words), Lane); }

SB3_FP16_LANE Lane load_lane(const float* p) {
    Lane x;
    memcpy(&x, p, sizeof x);
    return x;
}
SB3_FP16_LANE void store_lane(float* p, Lane x) { memcpy(p, &x, sizeof x); }

#if defined(SB3_FP16_AVX512)
SB3_FP16_LANE Lane lane_of(float x) { return _mm512_set1_ps(x); }
SB3_FP16_LANE Lane larger(Lane a, Lane b) { return _mm512_max_ps(a, b); }  // of NaN and b: b, as a > b ? a : b
SB3_FP16_LANE Lane smaller(Lane a, Lane b) { return _mm512_min_ps(a, b); }
SB3_FP16_LANE Lane square_root(Lane x) { return _mm512_sqrt_ps(x); }
SB3_FP16_LANE Lane multiply_add(Lane a, Lane b, Lane c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(SB3_FP16_AVX2)
SB3_FP16_LANE Lane lane_of(float x) { return _mm256_set1_ps(x); }
SB3_FP16_LANE Lane larger(Lane a, Lane b) { return _mm256_max_ps(a, b); }
SB3_FP16_LANE Lane smaller(Lane a, Lane b) { return _mm256_min_ps(a, b); }
SB3_FP16_LANE Lane square_root(Lane x) { return _mm256_sqrt_ps(x); }
SB3_FP16_LANE Lane multiply_add(Lane a, Lane b, Lane c) { return _mm256_fmadd_ps(a, b, c); }
#else
SB3_FP16_LANE Lane lane_of(float x) { return Lane{x, x, x, x}; }
SB3_FP16_LANE Lane larger(Lane a, Lane b) { return a > b ? a : b; }
SB3_FP16_LANE Lane smaller(Lane a, Lane b) { return a < b ? a : b; }
SB3_FP16_LANE Lane square_root(Lane x) {
    for (int l = 0; l < WIDTH; ++l) x[l] = std::sqrt(x[l]);
    return x;
}
SB3_FP16_LANE Lane multiply_add(Lane a, Lane b, Lane c) { return a * b + c; }
#endif

// 0, 1, 2, ...
SB3_FP16_LANE Words positions() {
    Words words;
    for (int l = 0; l < WIDTH; ++l) words[l] = static_cast<uint32_t>(l);
    return words;
}

// The first `count` lanes, all from WIDTH on.
SB3_FP16_LANE Mask first_lanes(int64_t count) {
    return reinterpret_cast<Mask>(positions()) < static_cast<int32_t>(std::min<int64_t>(count, WIDTH));
}

// One bit per lane in which a comparison holds.
#if defined(SB3_FP16_AVX512)
SB3_FP16_LANE uint32_t where_above(Lane a, Lane b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
SB3_FP16_LANE uint32_t where_equal(Lane a, Lane b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
#elif defined(SB3_FP16_AVX2)
SB3_FP16_LANE uint32_t where_above(Lane a, Lane b) { return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ))); }
SB3_FP16_LANE uint32_t where_equal(Lane a, Lane b) { return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ))); }
#else
SB3_FP16_LANE uint32_t bits_of(Mask mask) {
    const Mask bits = mask & Mask{1, 2, 4, 8};
    return static_cast<uint32_t>(bits[0] | bits[1] | bits[2] | bits[3]);
}
SB3_FP16_LANE uint32_t where_above(Lane a, Lane b) { return bits_of(a > b); }
SB3_FP16_LANE uint32_t where_equal(Lane a, Lane b) { return bits_of(a == b); }
#endif
SB3_FP16_LANE int64_t number_of_bits(uint32_t bits) { return __builtin_popcount(bits); }
constexpr uint32_t ALL_LANES = (1u << WIDTH) - 1u;

// Lanes are added in halves, so that a sum in 16 lanes is the same on every instruction set.
SB3_FP16_LANE float sum_of(Lane x) {
    for (int width = WIDTH / 2; width; width /= 2)
        for (int l = 0; l < width; ++l) x[l] = x[l] + x[l + width];
    return x[0];
}

SB3_FP16_LANE float largest_of(Lane x) {
    for (int width = WIDTH / 2; width; width /= 2)
        for (int l = 0; l < width; ++l) x[l] = x[l + width] > x[l] ? x[l + width] : x[l];
    return x[0];
}

