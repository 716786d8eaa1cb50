/* Included once per element type: T and FN(name) are set by paged_attention.c. No include guard, on purpose. */

/* s[g][0..tokens) = q[g] . k[., token] for one block; `next` is prefetched alongside. */
INLINE void FN(block_scores)(const T *k, const T *next, const float *q, int dim, int block_size, int group, float *s) {
    for (int t = 0; t < block_size; t += LANES) {
        v16f acc[MAX_GROUP];
        for (int g = 0; g < group; g++) acc[g] = splat(0);
        for (int d = 0; d < dim; d++) {
            v16f key = FN(load)(k + d * block_size + t);
            __builtin_prefetch(next + d * block_size + t);
            for (int g = 0; g < group; g++) acc[g] += key * q[g * MAX_HEAD_DIM + d];
        }
        for (int g = 0; g < group; g++) store_float(s + g * CHUNK + t, acc[g]);
    }
}

/* out[g][0..16 * vectors) += sum over tokens of p[g][token] * v[token][.], over the blocks of one chunk. */
INLINE void FN(chunk_values)(const T *pages, size_t block_stride, const int32_t *blocks, int num_blocks, int tokens,
                             int dim, int block_size, int group, int vectors, const float *p, float *out) {
    v16f acc[4][4];
    for (int g = 0; g < group; g++)
        for (int i = 0; i < vectors; i++) acc[g][i] = load_float(out + g * MAX_HEAD_DIM + i * LANES);
    for (int b = 0; b < num_blocks; b++) {
        const T *v = pages + blocks[b] * block_stride;
        const T *next = pages + blocks[b + 1 < num_blocks ? b + 1 : b] * block_stride;
        int here = tokens - b * block_size < block_size ? tokens - b * block_size : block_size;
        for (int t = 0; t < here; t++) {
            v16f value[4];
            for (int i = 0; i < vectors; i++) {
                value[i] = FN(load)(v + t * dim + i * LANES);
                __builtin_prefetch(next + t * dim + i * LANES);
            }
            for (int g = 0; g < group; g++)
                for (int i = 0; i < vectors; i++) acc[g][i] += value[i] * p[g * CHUNK + b * block_size + t];
        }
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < vectors; i++) store_float(out + g * MAX_HEAD_DIM + i * LANES, acc[g][i]);
}

/* The last dim % 16 values. */
static void FN(chunk_values_tail)(const T *pages, size_t block_stride, const int32_t *blocks, int tokens, int dim,
                                  int block_size, int group, int width, const float *p, float *out) {
    for (int t = 0; t < tokens; t++) {
        const T *v = pages + blocks[t / block_size] * block_stride + (t % block_size) * dim;
        for (int g = 0; g < group; g++)
            for (int i = 0; i < width; i++) out[g * MAX_HEAD_DIM + i] += FN(widen)(v[i]) * p[g * CHUNK + t];
    }
}

#define SCORES(n) \
    case n: FN(block_scores)(k, next, q, dim, block_size, n, s); break;
static void FN(scores)(const T *k, const T *next, const float *q, int dim, int block_size, int group, float *s) {
    switch (group) { SCORES(1) SCORES(2) SCORES(3) SCORES(4) SCORES(5) SCORES(6) SCORES(7) SCORES(8) }
}
#undef SCORES

#define VALUES(n, m) \
    case 10 * n + m: \
        FN(chunk_values)(pages, block_stride, blocks, num_blocks, tokens, dim, block_size, n, m, p, out); break;
#define VALUES4(n) VALUES(n, 1) VALUES(n, 2) VALUES(n, 3) VALUES(n, 4)
static void FN(values)(const T *pages, size_t block_stride, const int32_t *blocks, int num_blocks, int tokens, int dim,
                       int block_size, int group, int vectors, const float *p, float *out) {
    switch (10 * group + vectors) { VALUES4(1) VALUES4(2) VALUES4(3) VALUES4(4) }
}
#undef VALUES
#undef VALUES4

/* Masks scores outside [low, tokens), turns them into probabilities and rescales what was accumulated so far. */
INLINE void FN(chunk_softmax)(float *s, int low, int tokens, int dim, float *top, float *total, float *out) {
    int padded = (tokens + LANES - 1) / LANES * LANES;
    for (int t = 0; t < low; t++) s[t] = -INFINITY;
    for (int t = tokens; t < padded; t++) s[t] = -INFINITY;
    v16f most = splat(-INFINITY);
    for (int t = 0; t < padded; t += LANES) most = max16(most, load_float(s + t));
    float new_top = top16(most);
    if (new_top < *top) new_top = *top;
    float shrink = *top == -INFINITY ? 0.0f : exp16(splat(*top - new_top))[0];
    v16f sum = splat(0);
    for (int t = 0; t < padded; t += LANES) {
        v16f p = exp16(load_float(s + t) - new_top);
        store_float(s + t, p);
        sum += p;
    }
    if (shrink != 1.0f)
        for (int d = 0; d < dim; d++) out[d] *= shrink;
    *total = *total * shrink + sum16(sum);
    *top = new_top;
}

/* One sequence, one KV head, at most MAX_GROUP query heads. */
static void FN(decode_head)(const T *query, T *result, const T *key_pages, const T *value_pages, const int32_t *table,
                            int length, int window, int kv_heads, int head, int group, int dim, int block_size,
                            float scale) {
    float q[MAX_GROUP * MAX_HEAD_DIM], out[MAX_GROUP * MAX_HEAD_DIM], s[MAX_GROUP * CHUNK];
    float top[MAX_GROUP], total[MAX_GROUP];
    const size_t stride = (size_t)kv_heads * dim * block_size, offset = (size_t)head * dim * block_size;
    for (int g = 0; g < group; g++) {
        for (int d = 0; d < dim; d++) {
            q[g * MAX_HEAD_DIM + d] = FN(widen)(query[g * dim + d]) * scale;
            out[g * MAX_HEAD_DIM + d] = 0;
        }
        top[g] = -INFINITY;
        total[g] = 0;
    }
    const int first = window > 0 && window < length ? length - window : 0; /* first visible position */
    const int last_block = (length - 1) / block_size, chunk_blocks = CHUNK / block_size;
    for (int b0 = first / block_size; b0 <= last_block; b0 += chunk_blocks) {
        int n = last_block - b0 + 1 < chunk_blocks ? last_block - b0 + 1 : chunk_blocks;
        int begin = b0 * block_size, tokens = length - begin < n * block_size ? length - begin : n * block_size;
        for (int b = 0; b < n; b++) {
            const T *next = (b + 1 < n ? key_pages + table[b0 + b + 1] * stride : value_pages + table[b0] * stride);
            FN(scores)(key_pages + table[b0 + b] * stride + offset, next + offset, q, dim, block_size, group,
                       s + b * block_size);
        }
        for (int g = 0; g < group; g++)
            FN(chunk_softmax)(s + g * CHUNK, first > begin ? first - begin : 0, tokens, dim, top + g, total + g,
                              out + g * MAX_HEAD_DIM);
        for (int d = 0; d < dim; d += 4 * LANES) {
            int vectors = (dim - d) / LANES < 4 ? (dim - d) / LANES : 4, rest = dim - d < 4 * LANES ? dim % LANES : 0;
            const T *pages = value_pages + offset + d;
            for (int g = 0; g < group && vectors; g += 4)
                FN(values)(pages, stride, table + b0, n, tokens, dim, block_size, group - g < 4 ? group - g : 4,
                           vectors, s + g * CHUNK, out + g * MAX_HEAD_DIM + d);
            if (rest)
                FN(chunk_values_tail)(pages + vectors * LANES, stride, table + b0, tokens, dim, block_size, group,
                                      rest, s, out + d + vectors * LANES);
        }
    }
    for (int g = 0; g < group; g++)
        for (int d = 0; d < dim; d++) result[g * dim + d] = FN(narrow)(out[g * MAX_HEAD_DIM + d] / total[g]);
}

/* q [batch] rows of heads * dim with a row stride in elements, out [batch][heads][dim], tables [batch][table_stride]. */
EXPORT void FN(paged_decode)(const T *q, int64_t q_stride, T *out, const T *key_pages, const T *value_pages,
                             const int32_t *tables, int64_t table_stride, const int32_t *lengths, int batch, int heads,
                             int kv_heads, int dim, int block_size, float scale, int window, int threads) {
    const int group = heads / kv_heads;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
    for (int item = 0; item < batch * kv_heads; item++) {
        const int b = item / kv_heads, h = item % kv_heads;
        T *row = out + ((size_t)b * heads + h * group) * dim;
        if (lengths[b] <= 0) {
            memset(row, 0, sizeof(T) * group * dim);
            continue;
        }
        for (int g = 0; g < group; g += MAX_GROUP)
            FN(decode_head)(q + b * q_stride + (h * group + g) * dim, row + g * dim, key_pages, value_pages,
                            tables + b * table_stride, lengths[b], window, kv_heads, h,
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
