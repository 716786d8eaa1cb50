/* Included once per element type by gemm.c, which sets T, FN(name), DEPTH and OPERAND. No include guard, on purpose. */

/* packed [ceil(N / PANEL)][ceil(K / DEPTH)][PANEL][DEPTH] from w [N][K]. */
EXPORT void FN(gemm_pack)(const T *w, T *packed, int64_t outputs, int64_t inputs) {
    for (int64_t n = 0; n < outputs; n += PANEL)
        for (int64_t k = 0; k < inputs; k += DEPTH)
            for (int64_t j = 0; j < PANEL; j++)
                for (int64_t d = 0; d < DEPTH; d++)
                    *packed++ = n + j < outputs && k + d < inputs ? w[(n + j) * inputs + k + d] : 0;
}

/* y[rows][PANEL] (+)= x w over `depth` steps. `next` is prefetched, the lines of one step every `every` steps. */
INLINE void FN(tile)(const T *x, int64_t x_stride, const T *w, const T *next, int every, int depth, float *y,
                     const int rows, int begin) {
    vfloat acc[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        acc[i][0] = begin ? splat(0) : load_float(y + i * PANEL);
        acc[i][1] = begin ? splat(0) : load_float(y + i * PANEL + LANES);
    }
    for (int k0 = 0; k0 < depth; k0 += every) {
        for (size_t line = 0; line < PANEL * DEPTH * sizeof(T); line += 64)
            __builtin_prefetch((const char *)next + line, 0, 2);
        next += PANEL * DEPTH;
        const int stop = k0 + every < depth ? k0 + every : depth;
        for (int k = k0; k < stop; k++) {
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                OPERAND a;
                memcpy(&a, x + i * x_stride + k * DEPTH, sizeof a);
                acc[i][0] = FN(step)(acc[i][0], w, a);
                acc[i][1] = FN(step)(acc[i][1], w + LANES * DEPTH, a);
            }
            w += PANEL * DEPTH;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        store_float(y + i * PANEL, acc[i][0]);
        store_float(y + i * PANEL + LANES, acc[i][1]);
    }
}

#define ROWS(n) \
    case n: FN(tile)(x, x_stride, w, next, every, depth, y, n, begin); break;
static void FN(any_tile)(const T *x, int64_t x_stride, const T *w, const T *next, int every, int depth, float *y,
                         int rows, int begin) {
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if REGISTERS == 32
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
    }
}
#undef ROWS

/* One panel for all rows: y [rows][PANEL]. `steps` is K / DEPTH, rounded up. */
static void FN(panel)(const T *x, int64_t x_stride, const T *w, int rows, int64_t steps, float *y) {
    const int tiles = (rows + TILE - 1) / TILE, most = STEP_BYTES / (int)(sizeof(T) * DEPTH * PANEL);
    for (int64_t k = 0; k < steps; k += most) {
        const int depth = steps - k < most ? (int)(steps - k) : most;
        const T *piece = w + k * DEPTH * PANEL, *next = piece + (int64_t)depth * DEPTH * PANEL;
        for (int t = 0, r = 0; t < tiles; t++) { /* as even as possible: 32 rows are 11 + 11 + 10 */
            const int n = (rows - r) / (tiles - t) + ((rows - r) % (tiles - t) != 0);
            const T *ahead = rows <= STREAMED_ROWS ? piece : next + (int64_t)depth * t / tiles * DEPTH * PANEL;
            FN(any_tile)(x + r * x_stride + k * DEPTH, x_stride, piece, ahead, tiles, depth, y + r * PANEL, n, k == 0);
            r += n;
        }
    }
}

/* Adds the bias, if there is one, and writes `width` of the PANEL outputs of each row. */
static void FN(finish)(const float *part, const T *bias, T *y, int64_t y_stride, int rows, int width) {
    if (width < PANEL) {
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < width; j++)
                y[r * y_stride + j] = FN(narrow)(part[r * PANEL + j] + (bias ? FN(widen)(bias[j]) : 0.0f));
        return;
    }
    const vfloat b0 = bias ? FN(load)(bias) : splat(0), b1 = bias ? FN(load)(bias + LANES) : splat(0);
    for (int r = 0; r < rows; r++) {
        FN(store)(y + r * y_stride, load_float(part + r * PANEL) + b0);
        FN(store)(y + r * y_stride + LANES, load_float(part + r * PANEL + LANES) + b1);
    }
}

/* A copy of x whose rows do not alias and end with zeros up to a whole step; NULL if x is good as it is. */
static T *FN(spread_rows)(const T *x, int64_t x_stride, int rows, int64_t inputs, int64_t *stride) {
    const int64_t padded = (inputs + LANES) / LANES * LANES + LANES;
    const int aliased = rows >= 4 && x_stride * sizeof(T) % ALIASED_BYTES == 0;
    if (!aliased && inputs % DEPTH == 0) return NULL;
    T *copy = calloc((size_t)rows * padded, sizeof(T));
    for (int r = 0; copy && r < rows; r++) memcpy(copy + r * padded, x + r * x_stride, sizeof(T) * inputs);
    *stride = padded;
    return copy;
}

/* y [rows][outputs] = x [rows] (row stride in elements) times the packed weights, + bias if there is one.
 * Returns 0, or 1 if memory is short (y is then undefined). */
EXPORT int FN(gemm)(const T *x, int64_t x_stride, const T *packed, const T *bias, T *y, int rows, int64_t outputs,
                    int64_t inputs, int threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL, steps = (inputs + DEPTH - 1) / DEPTH;
    int64_t stride = x_stride;
    T *copy = FN(spread_rows)(x, x_stride, rows, inputs, &stride);
    if (!copy && inputs % DEPTH) return 1;
    const T *from = copy ? copy : x;
    if (!copy) stride = x_stride;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        float small[2 * TILE * PANEL], *part = rows <= 2 * TILE ? small : malloc(sizeof(float) * rows * PANEL);
        failed |= part == NULL;
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            const int64_t n = p * PANEL;
            if (!part) continue;
            FN(panel)(from, stride, packed + p * steps * DEPTH * PANEL, rows, steps, part);
            FN(finish)(part, bias ? bias + n : NULL, y + n, outputs, rows, outputs - n < PANEL ? (int)(outputs - n) : PANEL);
        }
        if (part != small) free(part);
    }
    free(copy);
    return failed;
}
