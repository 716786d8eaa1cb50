/* Prefill attention, included once per element type after paged_attention_impl.h. No include guard, on purpose.
 *
 * A tile is 12 rows (6 where there are 16 registers), a row being one query head of one token; all rows of a tile share
 * a KV head, so that grouped queries share its loads. A K page is [D][block_size] and a V page [block_size][D]: both are
 * the packed right-hand sides of small matrix products already, and are used in place. Whole prompts and chunks that
 * attend to earlier pages are the same to this code. */

#ifndef PREFILL_SIZES
#define PREFILL_SIZES
#define TILE_ROWS (REGISTERS == 32 ? 12 : 6) /* two accumulators each */
#define VALUE_ROWS 6                         /* VALUE_VECTORS accumulators each */
#define TILE_KEYS 128                        /* keys per softmax chunk, and the largest block */
#endif

/* s[r][0..LANES) and s[r][LANES..2 * LANES) = q[r] . K for two vectors of keys. */
INLINE void FN(tile_scores)(const T *k0, const T *k1, int k_stride, const float *q, int dim, const int rows, float *s) {
    vfloat acc[TILE_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = splat(0);
    for (int d = 0; d < dim; d++) {
        const vfloat a = FN(load)(k0 + d * k_stride), b = FN(load)(k1 + d * k_stride);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            acc[r][0] += a * q[r * MAX_HEAD_DIM + d];
            acc[r][1] += b * q[r * MAX_HEAD_DIM + d];
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        store_float(s + r * TILE_KEYS, acc[r][0]);
        store_float(s + r * TILE_KEYS + LANES, acc[r][1]);
    }
}

/* out[r][0..LANES * vectors) += p[r] V over the keys of one chunk, for up to VALUE_ROWS rows. */
INLINE void FN(tile_values)(const T *pages, size_t stride, const int32_t *table, int keys, int dim, int block_size,
                            const float *p, float *out, const int rows, const int vectors) {
    vfloat acc[VALUE_ROWS][VALUE_VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) acc[r][i] = load_float(out + r * MAX_HEAD_DIM + i * LANES);
    for (int t0 = 0; t0 < keys; t0 += block_size) {
        const T *v = pages + table[t0 / block_size] * stride;
        const int here = keys - t0 < block_size ? keys - t0 : block_size;
        for (int t = 0; t < here; t++, v += dim) {
            vfloat value[VALUE_VECTORS];
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++) value[i] = FN(load)(v + i * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int i = 0; i < vectors; i++) acc[r][i] += value[i] * p[r * TILE_KEYS + t0 + t];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) store_float(out + r * MAX_HEAD_DIM + i * LANES, acc[r][i]);
}

#define TILE_VALUES(n) \
    case n: FN(tile_values)(pages + d, stride, table, keys, dim, block_size, p, out + d, VALUE_ROWS, n); break;
/* All of a head's values for VALUE_ROWS rows. */
static void FN(chunk_values)(const T *pages, size_t stride, const int32_t *table, int keys, int dim, int block_size,
                             const float *p, float *out) {
    const int whole = dim / LANES * LANES;
    for (int d = 0; d < whole; d += VALUE_VECTORS * LANES)
        switch ((whole - d) / LANES < VALUE_VECTORS ? (whole - d) / LANES : VALUE_VECTORS) {
            TILE_VALUES(1) TILE_VALUES(2)
#if VALUE_VECTORS == 4
            TILE_VALUES(3) TILE_VALUES(4)
#endif
        }
    for (int t = 0; t < keys && whole < dim; t++) {
        const T *v = pages + table[t / block_size] * stride + t % block_size * dim;
        for (int r = 0; r < VALUE_ROWS; r++)
            for (int d = whole; d < dim; d++) out[r * MAX_HEAD_DIM + d] += FN(widen)(v[d]) * p[r * TILE_KEYS + t];
    }
}
#undef TILE_VALUES

typedef struct {
    const T *q, *key_pages, *value_pages;
    T *out;
    int64_t q_stride; /* elements from one token to the next */
    size_t stride, offset;
    const int32_t *table;
    int start, tokens, heads, group, head, dim, block_size, window;
    float scale;
} FN(prompt);

/* Rows [first, first + rows) of a sequence; row = token * group + query head within the KV head's group. */
static void FN(prefill_tile)(const FN(prompt) *p, int first, int rows) {
    float q[TILE_ROWS * MAX_HEAD_DIM], out[TILE_ROWS * MAX_HEAD_DIM], s[TILE_ROWS * TILE_KEYS];
    float top[TILE_ROWS], total[TILE_ROWS];
    const int dim = p->dim, size = p->block_size;
    for (int r = 0; r < TILE_ROWS; r++) {
        const int row = first + (r < rows ? r : rows - 1); /* a short tile repeats its last row */
        const T *from = p->q + row / p->group * p->q_stride + (p->head * p->group + row % p->group) * dim;
        for (int d = 0; d < dim; d++) {
            q[r * MAX_HEAD_DIM + d] = FN(widen)(from[d]) * p->scale;
            out[r * MAX_HEAD_DIM + d] = 0;
        }
        top[r] = -INFINITY;
        total[r] = 0;
    }
    const int end = p->start + (first + rows - 1) / p->group + 1; /* keys that the last row sees */
    const int earliest = p->start + first / p->group + 1 - p->window;
    const int chunk = TILE_KEYS / size * size; /* whole blocks */
    for (int begin = p->window > 0 && earliest > 0 ? earliest / chunk * chunk : 0; begin < end; begin += chunk) {
        const int keys = end - begin < chunk ? end - begin : chunk, width = (keys + LANES - 1) / LANES * LANES;
        const int32_t *table = p->table + begin / size;
        for (int t = 0; t < width; t += 2 * LANES) {
            const int t1 = t + LANES < width ? t + LANES : t;
            const T *k = p->key_pages + p->offset;
            FN(tile_scores)(k + table[t / size] * p->stride + t % size, k + table[t1 / size] * p->stride + t1 % size,
                            size, q, dim, TILE_ROWS, s + t);
        }
        for (int r = 0; r < TILE_ROWS; r++) {
            const int position = p->start + (first + (r < rows ? r : rows - 1)) / p->group;
            const int seen = p->window > 0 && position + 1 > p->window ? position + 1 - p->window : 0;
            const int low = seen > begin ? (seen - begin < width ? seen - begin : width) : 0;
            const int high = position + 1 - begin < width ? position + 1 - begin : width;
            FN(chunk_softmax)(s + r * TILE_KEYS, low, high, width, dim, top + r, total + r, out + r * MAX_HEAD_DIM);
        }
        for (int r = 0; r < rows; r += VALUE_ROWS)
            FN(chunk_values)(p->value_pages + p->offset, p->stride, table, keys, dim, size, s + r * TILE_KEYS, out + r * MAX_HEAD_DIM);
    }
    for (int r = 0; r < rows; r++) {
        const int row = first + r;
        T *to = p->out + ((int64_t)(row / p->group) * p->heads + p->head * p->group + row % p->group) * dim;
        for (int d = 0; d < dim; d++) to[d] = FN(narrow)(out[r * MAX_HEAD_DIM + d] / total[r]);
    }
}

/* One sequence: q [tokens] rows with a stride in elements, at positions start..; out [tokens][heads][dim]; the K and V
 * of all start + tokens positions are in the pages. */
EXPORT void FN(paged_prefill)(const T *q, int64_t q_stride, T *out, const T *key_pages, const T *value_pages,
                              const int32_t *table, int start, int tokens, int heads, int kv_heads, int dim,
                              int block_size, float scale, int window, int threads) {
    const int group = heads / kv_heads, rows = tokens * group, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 4)
    for (int item = 0; item < tiles * kv_heads; item++) {
        const int head = item / tiles, first = item % tiles * TILE_ROWS;
        const FN(prompt) prompt = {
            .q = q, .key_pages = key_pages, .value_pages = value_pages, .out = out, .q_stride = q_stride,
            .stride = (size_t)kv_heads * dim * block_size, .offset = (size_t)head * dim * block_size, .table = table,
            .start = start, .tokens = tokens, .heads = heads, .group = group, .head = head, .dim = dim,
            .block_size = block_size, .window = window, .scale = scale};
        FN(prefill_tile)(&prompt, first, rows - first < TILE_ROWS ? rows - first : TILE_ROWS);
    }
}
