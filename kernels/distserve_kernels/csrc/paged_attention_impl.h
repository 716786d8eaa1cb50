/* Included once per element type: T and FN(name) are set by paged_attention.c. No include guard, on purpose. */

/* s[g][0..block_size) = q[g] . k[., token] for one head of one block; the same place at `next` is prefetched. */
INLINE void FN(block_scores)(const T *k, const T *next, const float *q, int dim, int block_size, int group, float *s) {
    for (int t = 0; t < block_size; t += SPAN * LANES) {
        vfloat acc[SCORE_HEADS][SPAN];
        for (int g = 0; g < group; g++)
            for (int i = 0; i < SPAN; i++) acc[g][i] = splat(0);
        for (int d = 0; d < dim; d++) {
            vfloat key[SPAN];
            __builtin_prefetch(next + d * block_size + t, 0, 2);
            for (int i = 0; i < SPAN; i++) key[i] = FN(load)(k + d * block_size + t + i * LANES);
            for (int g = 0; g < group; g++)
                for (int i = 0; i < SPAN; i++) acc[g][i] += key[i] * q[g * MAX_HEAD_DIM + d];
        }
        for (int g = 0; g < group; g++)
            for (int i = 0; i < SPAN; i++) store_float(s + g * CHUNK + t + i * LANES, acc[g][i]);
    }
}

/* out[g][0..LANES * vectors) += sum over tokens of p[g][token] * v[token][.], for one head of one block. */
INLINE void FN(block_values)(const T *v, const T *next, int tokens, int dim, int group, int vectors, const float *p,
                             float *out) {
    vfloat acc[4][VALUE_VECTORS];
    for (int g = 0; g < group; g++)
        for (int i = 0; i < vectors; i++) acc[g][i] = load_float(out + g * MAX_HEAD_DIM + i * LANES);
    for (int t = 0; t < tokens; t++) {
        vfloat value[VALUE_VECTORS];
        for (int i = 0; i < vectors; i++) {
            value[i] = FN(load)(v + t * dim + i * LANES);
            __builtin_prefetch(next + t * dim + i * LANES, 0, 2);
        }
        for (int g = 0; g < group; g++)
            for (int i = 0; i < vectors; i++) acc[g][i] += value[i] * p[g * CHUNK + t];
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < vectors; i++) store_float(out + g * MAX_HEAD_DIM + i * LANES, acc[g][i]);
}

#define SCORES(n) \
    case n: FN(block_scores)(k, next, q + g * MAX_HEAD_DIM, dim, block_size, n, s + g * CHUNK); break;
static void FN(scores)(const T *k, const T *next, const float *q, int dim, int block_size, int group, float *s) {
    for (int g = 0; g < group; g += SCORE_HEADS)
        switch (group - g < SCORE_HEADS ? group - g : SCORE_HEADS) {
            SCORES(1) SCORES(2) SCORES(3) SCORES(4)
#if SCORE_HEADS == 8
            SCORES(5) SCORES(6) SCORES(7) SCORES(8)
#endif
        }
}
#undef SCORES

#define VALUES(n, m) \
    case 10 * n + m: FN(block_values)(v, next, tokens, dim, n, m, p, out); break;
#if VALUE_VECTORS == 4
#define ALL_VALUES(n) VALUES(n, 1) VALUES(n, 2) VALUES(n, 3) VALUES(n, 4)
#else
#define ALL_VALUES(n) VALUES(n, 1) VALUES(n, 2)
#endif
static void FN(values_part)(const T *v, const T *next, int tokens, int dim, int group, int vectors, const float *p,
                            float *out) {
    switch (10 * group + vectors) { ALL_VALUES(1) ALL_VALUES(2) ALL_VALUES(3) ALL_VALUES(4) }
}
#undef VALUES
#undef ALL_VALUES

/* As block_values, for any group and any head dimension: in parts of 4 heads by VALUE_VECTORS vectors, then the last
 * dim % LANES values. */
static void FN(values)(const T *v, const T *next, int tokens, int dim, int group, const float *p, float *out) {
    const int whole = dim / LANES * LANES;
    for (int d = 0; d < whole; d += VALUE_VECTORS * LANES) {
        const int vectors = (whole - d) / LANES < VALUE_VECTORS ? (whole - d) / LANES : VALUE_VECTORS;
        for (int g = 0; g < group; g += 4)
            FN(values_part)(v + d, next + d, tokens, dim, group - g < 4 ? group - g : 4, vectors, p + g * CHUNK,
                            out + g * MAX_HEAD_DIM + d);
    }
    for (int t = 0; t < tokens && whole < dim; t++)
        for (int g = 0; g < group; g++)
            for (int d = whole; d < dim; d++) out[g * MAX_HEAD_DIM + d] += FN(widen)(v[t * dim + d]) * p[g * CHUNK + t];
}

/* The walk over a chunk of a sequence: its K blocks, its V blocks; what follows (`after`, K blocks of the next chunk or
 * the next sequence) matters for prefetching only. */
typedef struct {
    const T *key_pages, *value_pages;
    size_t stride, offset;
    const int32_t *table, *after;
    int blocks, after_blocks;
} FN(walk);

INLINE const T *FN(page)(const FN(walk) *w, int i) {
    const T *pages = w->key_pages;
    const int32_t *table = w->table;
    if (i >= 2 * w->blocks + w->after_blocks) i = 2 * w->blocks - 1; /* nothing follows: a line that is there anyway */
    if (i >= 2 * w->blocks) {
        table = w->after;
        i -= 2 * w->blocks;
    } else if (i >= w->blocks) {
        pages = w->value_pages;
        i -= w->blocks;
    }
    return pages + table[i] * w->stride + w->offset;
}

/* Turns the scores of one row into probabilities, 0 outside the visible [low, high), and rescales what was accumulated
 * so far. `width` is a multiple of LANES. */
static void FN(chunk_softmax)(float *s, int low, int high, int width, int dim, float *top, float *total, float *out) {
    if (high <= low) {
        memset(s, 0, sizeof(float) * width);
        return;
    }
    for (int t = 0; t < low; t++) s[t] = -INFINITY;
    for (int t = high; t < width; t++) s[t] = -INFINITY;
    vfloat most = splat(-INFINITY);
    for (int t = 0; t < width; t += LANES) most = vmax(most, load_float(s + t));
    float new_top = vtop(most);
    if (new_top < *top) new_top = *top;
    const float shrink = *top == -INFINITY ? 0.0f : vexp(splat(*top - new_top))[0];
    vfloat sum = splat(0);
    for (int t = 0; t < width; t += LANES) {
        vfloat p = vexp(load_float(s + t) - new_top);
        store_float(s + t, p);
        sum += p;
    }
    if (shrink != 1.0f)
        for (int d = 0; d < dim; d++) out[d] *= shrink;
    *total = *total * shrink + vsum(sum);
    *top = new_top;
}

/* One sequence, `heads` neighbouring KV heads with `group` query heads each; heads * group <= MAX_ROWS. Query head g of
 * KV head h is at (h * head_rows + g) * dim of `query` and `result`. */
static void FN(decode_walk)(const T *query, T *result, FN(walk) walk, int length, int window, int heads, int head_rows,
                            int group, int dim, int block_size, float scale) {
    float q[MAX_ROWS * MAX_HEAD_DIM], out[MAX_ROWS * MAX_HEAD_DIM], s[MAX_ROWS * CHUNK];
    float top[MAX_ROWS], total[MAX_ROWS];
    const int rows = heads * group, head_size = dim * block_size, last = (length - 1) / block_size;
    const int first = window > 0 && window < length ? length - window : 0; /* first visible position */
    const int per_chunk = CHUNK / block_size, ahead = 1 + (int)(AHEAD_BYTES / (sizeof(T) * heads * head_size + 1));
    const int32_t *table = walk.table, *following = walk.after;
    const int following_blocks = walk.after_blocks;
    for (int r = 0; r < rows; r++) {
        const T *from = query + (r / group * head_rows + r % group) * dim;
        for (int d = 0; d < dim; d++) {
            q[r * MAX_HEAD_DIM + d] = FN(widen)(from[d]) * scale;
            out[r * MAX_HEAD_DIM + d] = 0;
        }
        top[r] = -INFINITY;
        total[r] = 0;
    }
    for (int b0 = first / block_size; b0 <= last; b0 += per_chunk) {
        const int begin = b0 * block_size;
        walk.blocks = last - b0 + 1 < per_chunk ? last - b0 + 1 : per_chunk;
        walk.table = table + b0;
        const int left = last + 1 - b0 - walk.blocks;
        walk.after = left ? walk.table + walk.blocks : following;
        walk.after_blocks = left ? left : following_blocks;
        const int tokens = length - begin < walk.blocks * block_size ? length - begin : walk.blocks * block_size;
        for (int b = 0; b < walk.blocks; b++) {
            const T *k = FN(page)(&walk, b), *next = FN(page)(&walk, b + ahead);
            for (int h = 0; h < heads; h++)
                FN(scores)(k + h * head_size, next + h * head_size, q + h * group * MAX_HEAD_DIM, dim, block_size, group,
                           s + h * group * CHUNK + b * block_size);
        }
        for (int r = 0; r < rows; r++)
            FN(chunk_softmax)(s + r * CHUNK, first > begin ? first - begin : 0, tokens,
                              (tokens + LANES - 1) / LANES * LANES, dim, top + r, total + r, out + r * MAX_HEAD_DIM);
        for (int b = 0; b < walk.blocks; b++) {
            const T *v = FN(page)(&walk, walk.blocks + b), *next = FN(page)(&walk, walk.blocks + b + ahead);
            const int here = tokens - b * block_size < block_size ? tokens - b * block_size : block_size;
            for (int h = 0; h < heads; h++)
                FN(values)(v + h * head_size, next + h * head_size, here, dim, group,
                           s + h * group * CHUNK + b * block_size, out + h * group * MAX_HEAD_DIM);
        }
    }
    for (int r = 0; r < rows; r++) {
        T *to = result + (r / group * head_rows + r % group) * dim;
        for (int d = 0; d < dim; d++) to[d] = FN(narrow)(out[r * MAX_HEAD_DIM + d] / total[r]);
    }
}

/* q [batch] rows of heads * dim with a row stride in elements, out [batch][heads][dim], tables [batch][table_stride]. */
EXPORT void FN(paged_decode)(const T *q, int64_t q_stride, T *out, const T *key_pages, const T *value_pages,
                             const int32_t *tables, int64_t table_stride, const int32_t *lengths, int batch, int heads,
                             int kv_heads, int dim, int block_size, float scale, int window, int threads) {
    const int group = heads / kv_heads;
    int together = group > MAX_ROWS ? 1 : MAX_ROWS / group; /* KV heads of one walk */
    if (together > kv_heads) together = kv_heads;
    while (together > 1 && batch * ((kv_heads + together - 1) / together) < threads) together = (together + 1) / 2;
    const int parts = (kv_heads + together - 1) / together;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
    for (int item = 0; item < batch * parts; item++) {
        const int b = item / parts, h = item % parts * together, n = kv_heads - h < together ? kv_heads - h : together;
        T *row = out + ((size_t)b * heads + h * group) * dim;
        if (lengths[b] <= 0) {
            memset(row, 0, sizeof(T) * n * group * dim);
            continue;
        }
        FN(walk) walk = {.key_pages = key_pages, .value_pages = value_pages, .table = tables + b * table_stride};
        walk.stride = (size_t)kv_heads * dim * block_size;
        walk.offset = (size_t)h * dim * block_size;
        if (parts == 1 && b + 1 < batch && lengths[b + 1] > 0 && window <= 0) {
            walk.after = tables + (b + 1) * table_stride;
            walk.after_blocks = (lengths[b + 1] + block_size - 1) / block_size;
        }
        for (int g = 0; g < group; g += MAX_GROUP)
            FN(decode_walk)(q + b * q_stride + (h * group + g) * dim, row + g * dim, walk, lengths[b], window, n, group,
                            group - g < MAX_GROUP ? group - g : MAX_GROUP, dim, block_size, scale);
    }
}

/* k, v: [tokens] rows of kv_heads * dim with row strides in elements; negative slots are skipped. Tokens that follow
 * each other in one block are transposed together, so that a prompt writes whole cache lines of K. */
EXPORT void FN(paged_store)(const T *k, int64_t k_stride, const T *v, int64_t v_stride, T *key_pages, T *value_pages,
                            const int64_t *slots, int tokens, int kv_heads, int dim, int block_size) {
    const size_t stride = (size_t)kv_heads * dim * block_size;
    for (int t = 0, run; t < tokens; t += run) {
        run = 1;
        if (slots[t] < 0) continue;
        const int64_t block = slots[t] / block_size;
        const int at = (int)(slots[t] % block_size);
        while (t + run < tokens && at + run < block_size && slots[t + run] == slots[t] + run) run++;
        for (int h = 0; h < kv_heads; h++) {
            const T *from = k + t * k_stride + h * dim;
            T *to = key_pages + block * stride + (size_t)h * dim * block_size + at;
            for (int d = 0; d < dim; d++)
                for (int i = 0; i < run; i++) to[d * block_size + i] = from[i * k_stride + d];
            for (int i = 0; i < run; i++)
                memcpy(value_pages + block * stride + ((size_t)h * block_size + at + i) * dim,
                       v + (t + i) * v_stride + h * dim, sizeof(T) * dim);
        }
    }
}
