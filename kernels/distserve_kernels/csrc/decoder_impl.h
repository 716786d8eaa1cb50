/* Included once per element type: T and FN(name) are set by decoder.c. No include guard, on purpose. */

EXPORT void FN(rms_norm)(const T *x, int64_t x_stride, T *residual, const T *weight, T *out, int64_t rows, int n, float eps);
EXPORT void FN(silu_mul)(const T *x, int64_t x_stride, T *out, int64_t rows, int n);
EXPORT void FN(rotary)(T *q, int64_t q_stride, T *k, int64_t k_stride, const float *cosine, const float *sine, int64_t rows,
                int q_heads, int k_heads, int dim, int half);
EXPORT int FN(gemm)(const T *x, int64_t x_stride, const T *packed, const T *bias, T *y, int rows, int64_t outputs,
             int64_t inputs, int threads);
EXPORT void FN(paged_store)(const T *k, int64_t k_stride, const T *v, int64_t v_stride, T *key_pages, T *value_pages,
                     const int64_t *slots, int tokens, int kv_heads, int dim, int block_size);
EXPORT void FN(paged_decode)(const T *q, int64_t q_stride, T *out, const T *key_pages, const T *value_pages,
                      const int32_t *tables, int64_t table_stride, const int32_t *lengths, int batch, int heads,
                      int kv_heads, int dim, int block_size, float scale, int window, int threads);

/* y = x W^T + b for all rows, both packed. */
INLINE int FN(product)(const decoder_layer *l, int which, const T *x, int64_t inputs, T *y, int64_t outputs,
                       const decoder_rows *r) {
    return FN(gemm)(x, inputs, l->weights[which], l->biases[which], y, (int)r->rows, outputs, inputs, (int)r->threads);
}

/* Attention of one layer: x [rows][hidden], normalised, to delta [rows][hidden], its share of the residual stream. */
static int FN(attend)(const decoder_layer *l, const decoder_shape *s, const decoder_rows *r, void *const *pages, const T *x,
                      T *qkv, T *attended, T *delta) {
    const int dim = (int)s->dim, q_heads = (int)s->q_heads, kv_heads = (int)s->kv_heads, size = (int)r->block_size;
    const int rows = (int)r->rows, threads = (int)r->threads;
    const int64_t width = (q_heads + 2 * kv_heads) * s->dim;
    T *q = qkv, *k = q + q_heads * s->dim, *v = k + kv_heads * s->dim;
    int failed = FN(product)(l, QKV, x, s->hidden, qkv, width, r);
    for (int64_t i = 0; i < rows && l->q_norm; i++) {
        FN(rms_norm)(q + i * width, dim, NULL, l->q_norm, q + i * width, q_heads, dim, s->eps);
        FN(rms_norm)(k + i * width, dim, NULL, l->k_norm, k + i * width, kv_heads, dim, s->eps);
    }
    FN(rotary)(q, width, k, width, r->cosine, r->sine, rows, q_heads, kv_heads, dim, (int)s->half);
    FN(paged_store)(k, width, v, width, pages[0], pages[1], r->slots, rows, kv_heads, dim, size);
    FN(paged_decode)(q, width, attended, pages[0], pages[1], r->tables, r->table_stride, r->lengths, rows, q_heads,
                     kv_heads, dim, size, s->scale, (int)l->window, threads);
    return failed | FN(product)(l, OUT, attended, q_heads * s->dim, delta, s->hidden, r);
}

/* All layers on residual [rows][hidden], in place. Returns 0, or 1 if memory is short (the residual is then undefined). */
EXPORT int FN(decoder_layers)(const decoder_layer *layers, int count, const decoder_shape *s, const decoder_rows *r,
                              T *residual, T *scratch) {
    const int64_t rows = r->rows, hidden = s->hidden, ffn = s->ffn;
    T *x = scratch, *delta = x + rows * hidden, *qkv = delta + rows * hidden;
    T *attended = qkv + rows * (s->q_heads + 2 * s->kv_heads) * s->dim, *gate_up = attended + rows * s->q_heads * s->dim;
    T *active = gate_up + 2 * rows * ffn;
    int failed = 0;
    for (int i = 0; i < count && !failed; i++) {
        const decoder_layer *l = layers + i;
        FN(rms_norm)(i ? delta : residual, hidden, i ? residual : NULL, l->attention_norm, x, rows, (int)hidden, s->eps);
        failed |= FN(attend)(l, s, r, r->pages + 2 * i, x, qkv, attended, delta);
        FN(rms_norm)(delta, hidden, residual, l->mlp_norm, x, rows, (int)hidden, s->eps);
        failed |= FN(product)(l, GATE_UP, x, hidden, gate_up, 2 * ffn, r);
        FN(silu_mul)(gate_up, 2 * ffn, active, rows, (int)ffn);
        failed |= FN(product)(l, DOWN, active, ffn, delta, hidden, r);
    }
    for (int64_t i = 0; i < rows * hidden; i++) residual[i] = FN(narrow)(FN(widen)(residual[i]) + FN(widen)(delta[i]));
    return failed;
}
