/* Included once per element type: T and FN(name) are set by ops.c. No include guard, on purpose. */

/* out = x / rms(x) * weight, row by row. With `residual` that becomes residual += x first, and is what is normalised. */
EXPORT void FN(rms_norm)(const T *x, int64_t x_stride, T *residual, const T *weight, T *out, int64_t rows, int n,
                         float eps) {
    for (int64_t r = 0; r < rows; r++) {
        const T *row = x + r * x_stride;
        T *to = out + r * n;
        vfloat squares = splat(0);
        float rest = 0;
        int i = 0;
        if (residual) {
            T *sum = residual + r * n;
            for (; i + LANES <= n; i += LANES) FN(store)(sum + i, FN(load)(sum + i) + FN(load)(row + i));
            for (; i < n; i++) sum[i] = FN(narrow)(FN(widen)(sum[i]) + FN(widen)(row[i]));
            row = sum;
        }
        for (i = 0; i + LANES <= n; i += LANES) {
            vfloat part = FN(load)(row + i);
            squares += part * part;
        }
        for (; i < n; i++) rest += FN(widen)(row[i]) * FN(widen)(row[i]);
        const float scale = 1.0f / sqrtf((vsum(squares) + rest) / n + eps);
        for (i = 0; i + LANES <= n; i += LANES) FN(store)(to + i, FN(load)(row + i) * scale * FN(load)(weight + i));
        for (; i < n; i++) to[i] = FN(narrow)(FN(widen)(row[i]) * scale * FN(widen)(weight[i]));
    }
}

/* out[r][i] = silu(x[r][i]) * x[r][n + i] */
EXPORT void FN(silu_mul)(const T *x, int64_t x_stride, T *out, int64_t rows, int n) {
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = x + r * x_stride, *up = gate + n;
        T *to = out + r * n;
        int i = 0;
        for (; i + LANES <= n; i += LANES) {
            vfloat g = FN(load)(gate + i);
            FN(store)(to + i, g / (1.0f + vexp(-g)) * FN(load)(up + i));
        }
        for (; i < n; i++) {
            float g = FN(widen)(gate[i]);
            to[i] = FN(narrow)(g / (1.0f + expf(-g)) * FN(widen)(up[i]));
        }
    }
}

/* Rotates pairs (i, i + half) of each of `heads` heads of `dim` values, in place. */
INLINE void FN(rotate_row)(T *x, int heads, int dim, const float *cosine, const float *sine, int half) {
    for (int h = 0; h < heads; h++, x += dim) {
        T *a = x, *b = x + half;
        int i = 0;
        for (; i + LANES <= half; i += LANES) {
            vfloat p = FN(load)(a + i), q = FN(load)(b + i), c = load_float(cosine + i), s = load_float(sine + i);
            FN(store)(a + i, p * c - q * s);
            FN(store)(b + i, q * c + p * s);
        }
        for (; i < half; i++) {
            float p = FN(widen)(a[i]), q = FN(widen)(b[i]);
            a[i] = FN(narrow)(p * cosine[i] - q * sine[i]);
            b[i] = FN(narrow)(q * cosine[i] + p * sine[i]);
        }
    }
}

EXPORT void FN(rotary)(T *q, int64_t q_stride, T *k, int64_t k_stride, const float *cosine, const float *sine,
                       int64_t rows, int q_heads, int k_heads, int dim, int half) {
    for (int64_t r = 0; r < rows; r++) {
        FN(rotate_row)(q + r * q_stride, q_heads, dim, cosine + r * half, sine + r * half, half);
        FN(rotate_row)(k + r * k_stride, k_heads, dim, cosine + r * half, sine + r * half, half);
    }
}
