// Matrix products in register tiles.
//
// C = A·B accumulates in FP32 over the inner dimension in order, whatever tile an element falls into, and rounds once:
// a row of C has the same bits for every number of rows. Columns are padded to PAD, so no tile is cut there.

constexpr int PAD = LANES;

SB3_FP16_LANE int64_t padded(int64_t columns) { return (columns + PAD - 1) / PAD * PAD; }

// A row's length that keeps neighbouring rows out of each other's cache set.
SB3_FP16_LANE int64_t spaced(int64_t columns) {
    const int64_t length = padded(columns);
    return length % 256 ? length : length + PAD;
}

// An element of A lies at data[row · row_stride + k · inner_stride], so that A may be a transpose.
struct Matrix {
    const float* data;
    int64_t row_stride, inner_stride;
};

// One product: C (rows × columns) = A (rows × inner) · B (inner × columns) + initial (one row, or null).
struct Product {
    Matrix a;
    const float* b;
    int64_t b_stride;
    const float* initial;
    float* c;
    int64_t c_stride;
    int64_t rows, inner, columns;
};

template <int ROWS, int LANES, class Format>
SB3_FP16_LANE void tile(const Format format, const Product& p, int64_t row, int64_t column) {
    Lane sum[ROWS][LANES];
    for (int l = 0; l < LANES; ++l) {
        const Lane start = p.initial ? load_lane(p.initial + column + l * WIDTH) : Lane{};
        for (int r = 0; r < ROWS; ++r) sum[r][l] = start;
    }
    const float *a = p.a.data + row * p.a.row_stride, *b = p.b + column;
    for (int64_t k = 0; k < p.inner; ++k, a += p.a.inner_stride, b += p.b_stride) {
        Lane right[LANES];
        for (int l = 0; l < LANES; ++l) right[l] = load_lane(b + l * WIDTH);
        for (int r = 0; r < ROWS; ++r) {
            const Lane left = lane_of(a[r * p.a.row_stride]);
            for (int l = 0; l < LANES; ++l) sum[r][l] = multiply_add(left, right[l], sum[r][l]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int l = 0; l < LANES; ++l)
            store_lane(p.c + (row + r) * p.c_stride + column + l * WIDTH, format.round(sum[r][l]));
}

template <int LANES, class Format>
static inline void column_of_tiles(const Format format, const Product& p, int64_t column) {
    int64_t row = 0;
    for (; row + TILE_ROWS <= p.rows; row += TILE_ROWS) tile<TILE_ROWS, LANES>(format, p, row, column);
    if (row + 4 <= p.rows) tile<4, LANES>(format, p, row, column), row += 4;
    if (row + 2 <= p.rows) tile<2, LANES>(format, p, row, column), row += 2;
    if (row < p.rows) tile<1, LANES>(format, p, row, column);
}

template <class Format>
static void multiply(Workers& workers, const Format format, const Product& p) {
    workers.each(p.columns, 2 * WIDTH, 2 * p.rows * p.inner, [&](int64_t column, int64_t end) {
        if (p.rows == 1)  // more sums at a time than one row of two lanes has
            for (; column + 4 * WIDTH <= end; column += 4 * WIDTH) tile<1, 4>(format, p, 0, column);
        for (; column + 2 * WIDTH <= end; column += 2 * WIDTH) column_of_tiles<2>(format, p, column);
        for (; column < end; column += WIDTH) column_of_tiles<1>(format, p, column);
    });
}

// The same product for few columns, from B's transpose: each element is summed in the lanes of a register.
template <class Format>
static void multiply_narrow(const Format format, const Product& p, const float* b_transposed, int64_t b_stride) {
    for (int64_t row = 0; row < p.rows; ++row)
        for (int64_t column = 0; column < p.columns; ++column) {
            Lane sum{};
            for (int64_t k = 0; k < p.inner; k += WIDTH)
                sum = multiply_add(load_lane(p.a.data + row * p.a.row_stride + k), load_lane(b_transposed + column * b_stride + k), sum);
            p.c[row * p.c_stride + column] = format.round(lane_of(sum_of(sum) + p.initial[column]))[0];
        }
}

// to[column][row] = from[row][column]: four by four in registers, in blocks that stay in the cache.
typedef float Quad __attribute__((vector_size(16)));
#if defined(__clang__)
#define SB3_FP16_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t QuadIndex __attribute__((vector_size(16)));
#define SB3_FP16_PICK(a, b, ...) __builtin_shuffle(a, b, QuadIndex{__VA_ARGS__})
#endif

SB3_FP16_LANE void transpose_quads(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    Quad x[4];
    for (int k = 0; k < 4; ++k) memcpy(&x[k], from + k * from_stride, sizeof(Quad));
    const Quad low01 = SB3_FP16_PICK(x[0], x[1], 0, 4, 1, 5);
    const Quad low23 = SB3_FP16_PICK(x[2], x[3], 0, 4, 1, 5);
    const Quad high01 = SB3_FP16_PICK(x[0], x[1], 2, 6, 3, 7);
    const Quad high23 = SB3_FP16_PICK(x[2], x[3], 2, 6, 3, 7);
    const Quad y[4] = {SB3_FP16_PICK(low01, low23, 0, 1, 4, 5),
                       SB3_FP16_PICK(low01, low23, 2, 3, 6, 7),
                       SB3_FP16_PICK(high01, high23, 0, 1, 4, 5),
                       SB3_FP16_PICK(high01, high23, 2, 3, 6, 7)};
    for (int k = 0; k < 4; ++k) memcpy(to + k * to_stride, &y[k], sizeof(Quad));
}

constexpr int64_t BLOCK = 64;

static void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
    const int64_t whole_rows = rows / 4 * 4, whole_columns = columns / 4 * 4;
    for (int64_t row = 0; row < whole_rows; row += BLOCK)
        for (int64_t column = 0; column < whole_columns; column += BLOCK)
            for (int64_t r = row; r < std::min(row + BLOCK, whole_rows); r += 4)
                for (int64_t c = column; c < std::min(column + BLOCK, whole_columns); c += 4)
                    transpose_quads(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
}

static void transpose(Workers& workers, const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
                      int64_t to_stride) {
    workers.each(rows, BLOCK, 4 * columns, [&](int64_t row, int64_t end) {
        transpose(from + row * from_stride, from_stride, end - row, columns, to + row, to_stride);
    });
}
