/* fp32 linear layers y = x W^T + b on packed weights, for machines with 32 vector registers of 16 floats (AVX-512).
 *
 * Packed: panels of PANEL outputs, each [K][PANEL], the last one padded with zeros. A panel is walked in steps of at
 * most STEP inputs, so that the piece in use and the next one, which is prefetched meanwhile, both stay in the second
 * level cache: the weights stream from memory at full speed while the multipliers work. Every output is summed over k
 * in the same order whatever the number of rows, so results do not depend on the batch. */
#include "vec.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define PANEL 32
#define STEP 1024
#define STREAMED_ROWS 6 /* up to here memory is the limit, and the hardware's own prefetch is best left alone */
#define ALIASED_BYTES 2048 /* rows this far apart (or a multiple) fall on the same few sets of the first level cache */
#ifdef __AVX512F__
#define TILE 12 /* rows at once: 12 x 2 accumulators of the 32 registers */
#else
#define TILE 2
#endif

/* 1 if this build has the registers that the kernel is laid out for. */
EXPORT int gemm_is_native(void) { return TILE == 12; }

/* packed [ceil(N / PANEL)][K][PANEL] from w [N][K]. */
EXPORT void gemm_pack_float(const float *w, float *packed, int64_t outputs, int64_t inputs) {
    for (int64_t n = 0; n < outputs; n += PANEL, packed += PANEL * inputs)
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t j = 0; j < PANEL; j++)
                packed[k * PANEL + j] = n + j < outputs ? w[(n + j) * inputs + k] : 0.0f;
}

/* rows x PANEL outputs over `depth` inputs. `next` is prefetched, one line pair every `every` inputs. */
INLINE void tile(const float *x, int64_t x_stride, const float *w, const float *next, int every, int depth, float *y,
                 int64_t y_stride, const int rows, int begin) {
    v16f acc[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        acc[i][0] = begin ? splat(0) : load_float(y + i * y_stride);
        acc[i][1] = begin ? splat(0) : load_float(y + i * y_stride + LANES);
    }
    for (int k0 = 0; k0 < depth; k0 += every) {
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(next + LANES, 0, 2);
        next += PANEL;
        const int stop = k0 + every < depth ? k0 + every : depth;
        for (int k = k0; k < stop; k++) {
            const v16f w0 = load_float(w), w1 = load_float(w + LANES);
            w += PANEL;
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                const float a = x[i * x_stride + k];
                acc[i][0] += w0 * a;
                acc[i][1] += w1 * a;
            }
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        store_float(y + i * y_stride, acc[i][0]);
        store_float(y + i * y_stride + LANES, acc[i][1]);
    }
}

#define ROWS(n) \
    case n: tile(x, x_stride, w, next, every, depth, y, y_stride, n, begin); break;
static void any_tile(const float *x, int64_t x_stride, const float *w, const float *next, int every, int depth, float *y,
                     int64_t y_stride, int rows, int begin) {
    switch (rows) {
        ROWS(1) ROWS(2)
#ifdef __AVX512F__
        ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
    }
}

/* One panel for all rows: y [rows] with a row stride of at least PANEL. */
static void panel(const float *x, int64_t x_stride, const float *w, int rows, int64_t inputs, float *y,
                  int64_t y_stride) {
    const int tiles = (rows + TILE - 1) / TILE;
    for (int64_t k = 0; k < inputs; k += STEP) {
        const int depth = inputs - k < STEP ? (int)(inputs - k) : STEP;
        const float *piece = w + k * PANEL, *next = piece + (int64_t)depth * PANEL;
        for (int t = 0, r = 0; t < tiles; t++) { /* as even as possible: 32 rows are 11 + 11 + 10 */
            const int n = (rows - r) / (tiles - t) + ((rows - r) % (tiles - t) != 0);
            const float *ahead = rows <= STREAMED_ROWS ? piece : next + (int64_t)depth * t / tiles * PANEL;
            any_tile(x + r * x_stride + k, x_stride, piece, ahead, tiles, depth, y + r * y_stride,
                     y_stride, n, k == 0);
            r += n;
        }
    }
}

/* A copy of x whose rows do not alias, or NULL if x is good as it is or memory is short. */
static float *spread_rows(const float *x, int64_t x_stride, int rows, int64_t inputs) {
    if (rows < 4 || x_stride * sizeof(float) % ALIASED_BYTES) return NULL;
    float *copy = malloc(sizeof(float) * rows * (inputs + LANES));
    for (int r = 0; copy && r < rows; r++)
        memcpy(copy + r * (inputs + LANES), x + r * x_stride, sizeof(float) * inputs);
    return copy;
}

/* y [rows][outputs] = x [rows] (row stride in elements) times the packed weights, + bias if there is one. */
EXPORT void gemm_float(const float *x, int64_t x_stride, const float *packed, const float *bias, float *y, int rows,
                       int64_t outputs, int64_t inputs, int threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    float *copy = spread_rows(x, x_stride, rows, inputs);
    if (copy) {
        x = copy;
        x_stride = inputs + LANES;
    }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        const int64_t n = p * PANEL, width = outputs - n < PANEL ? outputs - n : PANEL;
        const float *w = packed + n * inputs;
        if (width == PANEL) {
            panel(x, x_stride, w, rows, inputs, y + n, outputs);
        } else {
            for (int r = 0; r < rows; r += TILE) {
                float part[TILE * PANEL];
                const int count = rows - r < TILE ? rows - r : TILE;
                panel(x + r * x_stride, x_stride, w, count, inputs, part, PANEL);
                for (int i = 0; i < count; i++) memcpy(y + (r + i) * outputs + n, part + i * PANEL, sizeof(float) * width);
            }
        }
        if (bias)
            for (int r = 0; r < rows; r++)
                for (int64_t j = 0; j < width; j++) y[r * outputs + n + j] += bias[n + j];
    }
    free(copy);
}
