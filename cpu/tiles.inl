// Matrix products in register tiles, and FP16 conversion, for one instruction set.
//
// C = A·B accumulates in FP32 over the inner dimension in order, whatever tile an element falls into: a row of C has
// the same bits for every number of rows. Columns are padded to PAD, so no tile is cut there.

#if defined(SB3_FP16_AVX512)
using Lane = __m512;
constexpr int WIDTH = 16, TILE_ROWS = 8;
SB3_FP16_FUNCTION Lane lane_load(const float* p) { return _mm512_loadu_ps(p); }
SB3_FP16_FUNCTION void lane_store(float* p, Lane x) { _mm512_storeu_ps(p, x); }
SB3_FP16_FUNCTION Lane lane_set(float x) { return _mm512_set1_ps(x); }
SB3_FP16_FUNCTION Lane multiply_add(Lane a, Lane b, Lane c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(SB3_FP16_AVX2)
using Lane = __m256;
constexpr int WIDTH = 8, TILE_ROWS = 6;
SB3_FP16_FUNCTION Lane lane_load(const float* p) { return _mm256_loadu_ps(p); }
SB3_FP16_FUNCTION void lane_store(float* p, Lane x) { _mm256_storeu_ps(p, x); }
SB3_FP16_FUNCTION Lane lane_set(float x) { return _mm256_set1_ps(x); }
SB3_FP16_FUNCTION Lane multiply_add(Lane a, Lane b, Lane c) { return _mm256_fmadd_ps(a, b, c); }
#else
typedef float Lane __attribute__((vector_size(16)));
constexpr int WIDTH = 4, TILE_ROWS = 4;
SB3_FP16_FUNCTION Lane lane_load(const float* p) {
    Lane x;
    memcpy(&x, p, sizeof x);
    return x;
}
SB3_FP16_FUNCTION void lane_store(float* p, Lane x) { memcpy(p, &x, sizeof x); }
SB3_FP16_FUNCTION Lane lane_set(float x) { return Lane{x, x, x, x}; }
SB3_FP16_FUNCTION Lane multiply_add(Lane a, Lane b, Lane c) { return a * b + c; }
#endif

constexpr int PAD = 16;

SB3_FP16_FUNCTION int padded(int columns) { return (columns + PAD - 1) / PAD * PAD; }

// An element of A lies at a[row · row_stride + k · inner_stride], so that A may be a transpose.
struct Matrix {
    const float* data;
    int64_t row_stride, inner_stride;
};

template <int ROWS, int LANES>
SB3_FP16_FUNCTION void tile(Matrix a, const float* b, int64_t b_stride, float* c, int64_t c_stride, int inner) {
    Lane sum[ROWS][LANES];
    for (int r = 0; r < ROWS; ++r)
        for (int l = 0; l < LANES; ++l) sum[r][l] = lane_set(0.0f);
    for (int k = 0; k < inner; ++k) {
        Lane right[LANES];
        for (int l = 0; l < LANES; ++l) right[l] = lane_load(b + k * b_stride + l * WIDTH);
        for (int r = 0; r < ROWS; ++r) {
            const Lane left = lane_set(a.data[r * a.row_stride + k * a.inner_stride]);
            for (int l = 0; l < LANES; ++l) sum[r][l] = multiply_add(left, right[l], sum[r][l]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int l = 0; l < LANES; ++l) lane_store(c + r * c_stride + l * WIDTH, sum[r][l]);
}

template <int LANES>
SB3_FP16_FUNCTION void rows_of_tiles(Matrix a, const float* b, int64_t b_stride, float* c, int64_t c_stride, int rows,
                                     int inner) {
    int row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
        tile<TILE_ROWS, LANES>({a.data + row * a.row_stride, a.row_stride, a.inner_stride}, b, b_stride,
                               c + row * c_stride, c_stride, inner);
    for (; row + 2 <= rows; row += 2)
        tile<2, LANES>({a.data + row * a.row_stride, a.row_stride, a.inner_stride}, b, b_stride, c + row * c_stride,
                       c_stride, inner);
    if (row < rows)
        tile<1, LANES>({a.data + row * a.row_stride, a.row_stride, a.inner_stride}, b, b_stride, c + row * c_stride,
                       c_stride, inner);
}

// C (rows × columns) = A (rows × inner) · B (inner × columns); columns is a multiple of PAD.
static void multiply(Matrix a, const float* b, int64_t b_stride, float* c, int64_t c_stride, int rows, int inner,
                     int columns) {
    int column = 0;
    for (; column + 2 * WIDTH <= columns; column += 2 * WIDTH)
        rows_of_tiles<2>(a, b + column, b_stride, c + column, c_stride, rows, inner);
    for (; column < columns; column += WIDTH)
        rows_of_tiles<1>(a, b + column, b_stride, c + column, c_stride, rows, inner);
}

SB3_FP16_FUNCTION float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t rest = half & 0x7fffu;
    // Shifted into an FP32 word the exponent is 112 too small; a multiplication corrects it, subnormals included.
    const float scaled = as_float(rest << 13) * 5.192296858534828e33f;  // 2^112
    const uint32_t word = rest >= 0x7c00u ? (rest << 13) | 0x7f800000u : as_word(scaled);
    return as_float(word | sign);
}

SB3_FP16_FUNCTION uint16_t float_to_half(float value) {
    const uint32_t word = as_word(value), sign = (word >> 16) & 0x8000u, rest = word & 0x7fffffffu;
    // Normal: add half a unit, less one unless the kept significand is odd, and let the carry run.
    const uint32_t normal = (rest + 0xfffu + ((rest >> 13) & 1u) - 0x38000000u) >> 13;
    // Subnormal: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits.
    const uint32_t subnormal = as_word(as_float(rest) + 0.5f) - 0x3f000000u;
    uint32_t half = rest < 0x38800000u ? subnormal : normal;
    half = rest >= 0x477ff000u ? 0x7c00u : half;
    half = rest > 0x7f800000u ? 0x7e00u | ((rest >> 13) & 0x3ffu) : half;
    return static_cast<uint16_t>(half | sign);
}

static void unpack(const uint16_t* half, float* values, int64_t count) {
    int64_t i = 0;
#if defined(SB3_FP16_F16C)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(values + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i))));
#endif
    for (; i < count; ++i) values[i] = half_to_float(half[i]);
}

static void pack(const float* values, uint16_t* half, int64_t count) {
    int64_t i = 0;
#if defined(SB3_FP16_F16C)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(values + i), 0));
#endif
    for (; i < count; ++i) half[i] = float_to_half(values[i]);
}

// Round values to FP16 in place.
static void round_half(float* values, int64_t count) {
    int64_t i = 0;
#if defined(SB3_FP16_F16C)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(values + i, _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_loadu_ps(values + i), 0)));
#endif
    for (; i < count; ++i) values[i] = half_to_float(float_to_half(values[i]));
}

// Reductions in PAD interleaved lanes, folded in a fixed order: fast without reassociating anything at compile time.
static float largest_magnitude(const float* x, int64_t count) {
    float lanes[PAD] = {};
    int64_t i = 0;
    for (; i + PAD <= count; i += PAD)
        for (int l = 0; l < PAD; ++l) lanes[l] = larger(absolute(x[i + l]), lanes[l]);
    for (int l = 0; i + l < count; ++l) lanes[l] = larger(absolute(x[i + l]), lanes[l]);
    float largest = 0.0f;
    for (int l = 0; l < PAD; ++l) largest = larger(lanes[l], largest);
    return largest;
}

// Σ (x/divisor)².
static float sum_of_squares(const float* x, int64_t count, float divisor) {
    float lanes[PAD] = {}, sum = 0.0f;
    int64_t i = 0;
    for (; i + PAD <= count; i += PAD)
        for (int l = 0; l < PAD; ++l) lanes[l] += (x[i + l] / divisor) * (x[i + l] / divisor);
    for (int l = 0; i + l < count; ++l) lanes[l] += (x[i + l] / divisor) * (x[i + l] / divisor);
    for (int l = 0; l < PAD; ++l) sum += lanes[l];
    return sum;
}

// Whether any number is infinite or NaN.
static bool poisoned(const float* x, int64_t count) {
    uint32_t found = 0;
    for (int64_t i = 0; i < count; ++i) found |= (as_word(x[i]) & 0x7f800000u) == 0x7f800000u;
    return found != 0;
}

// to[column][row] = from[row][column], in blocks that stay in cache lines.
static void transpose(const float* from, int64_t from_stride, int rows, int columns, float* to, int64_t to_stride) {
    constexpr int BLOCK = 8;
    int r = 0;
    for (; r + BLOCK <= rows; r += BLOCK)
        for (int c = 0; c < columns; ++c)
            for (int k = 0; k < BLOCK; ++k) to[c * to_stride + r + k] = from[(r + k) * from_stride + c];
    for (; r < rows; ++r)
        for (int c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
}
