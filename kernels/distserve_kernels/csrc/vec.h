/* Sixteen floats at a time by gcc's vector extensions: one zmm, two ymm or four xmm/neon registers, as the target has. */
#ifndef DISTSERVE_VEC_H
#define DISTSERVE_VEC_H

#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define LANES 16

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef float v16f_u __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t v16h_u __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t bf16; /* the upper half of a float */

INLINE v16f splat(float x) { return x - (v16f){0}; }

INLINE float widen_float(float x) { return x; }
INLINE float widen_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}
INLINE float narrow_float(float x) { return x; }
INLINE bf16 narrow_bf16(float x) { /* to nearest even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE v16f load_float(const float *p) { return *(const v16f_u *)p; }
INLINE v16f load_bf16(const bf16 *p) {
    return (v16f)(__builtin_convertvector(*(const v16h_u *)p, v16u) << 16);
}
INLINE void store_float(float *p, v16f x) { *(v16f_u *)p = x; }
INLINE void store_bf16(bf16 *p, v16f x) {
    v16u bits = (v16u)x;
    v16u rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    v16u nan = (v16u)(x != x);
    rounded = (rounded & ~nan) | (nan & 0x7fc0);
    *(v16h_u *)p = __builtin_convertvector(rounded, v16h);
}

INLINE float sum16(v16f x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}
INLINE v16f max16(v16f a, v16f b) {
    v16i keep = a > b;
    return (v16f)(((v16i)a & keep) | ((v16i)b & ~keep));
}
INLINE float top16(v16f x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* exp for finite x and -inf; relative error below 2e-7. Range reduction to [-ln2/2, ln2/2], degree 6 (Cephes expf). */
INLINE v16f exp16(v16f x) {
    const float low = -87.0f, high = 88.0f;
    v16i below = x < splat(low);
    x = max16(x, splat(low));
    x = -max16(-x, splat(-high));
    v16f n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* round to nearest integer */
    v16f r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    v16f p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    v16i scale = (__builtin_convertvector(n, v16i) + 127) << 23;
    return (v16f)((v16i)(p * (v16f)scale) & ~below);
}

#endif
