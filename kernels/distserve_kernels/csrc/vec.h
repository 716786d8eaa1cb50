/* Vectors of floats by gcc's vector extensions: one zmm register with AVX-512, else one ymm, or two xmm or neon. Wider
 * than a register they would live in memory. REGISTERS: how many an inner loop may fill. */
#ifndef DISTSERVE_VEC_H
#define DISTSERVE_VEC_H

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#ifdef __AVX512F__
#define LANES 16
#define REGISTERS 32
#else
#define LANES 8
#define REGISTERS 16
#endif

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * LANES)));
typedef uint16_t vhalf __attribute__((vector_size(2 * LANES)));
typedef float vfloat_u __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vhalf_u __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint16_t bf16; /* the upper half of a float */

INLINE vfloat splat(float x) { return x - (vfloat){0}; }

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

INLINE vfloat load_float(const float *p) { return *(const vfloat_u *)p; }
INLINE vfloat load_bf16(const bf16 *p) {
#if defined(__AVX2__) && !defined(__AVX512F__) /* gcc makes five instructions of the conversion */
    return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (vfloat)(__builtin_convertvector(*(const vhalf_u *)p, vuint) << 16);
#endif
}
INLINE void store_float(float *p, vfloat x) { *(vfloat_u *)p = x; }
INLINE void store_bf16(bf16 *p, vfloat x) {
    vuint bits = (vuint)x;
    vuint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vuint nan = (vuint)(x != x);
    rounded = (rounded & ~nan) | (nan & 0x7fc0);
    *(vhalf_u *)p = __builtin_convertvector(rounded, vhalf);
}

INLINE float vsum(vfloat x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}
INLINE vfloat vmax(vfloat a, vfloat b) {
    vint keep = a > b;
    return (vfloat)(((vint)a & keep) | ((vint)b & ~keep));
}
INLINE float vtop(vfloat x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* exp for finite x and -inf; relative error below 2e-7. Range reduction to [-ln2/2, ln2/2], degree 6 (Cephes expf). */
INLINE vfloat vexp(vfloat x) {
    const float low = -87.0f, high = 88.0f;
    vint below = x < splat(low);
    x = vmax(x, splat(low));
    x = -vmax(-x, splat(-high));
    vfloat n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* round to nearest integer */
    vfloat r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vfloat p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vint scale = (__builtin_convertvector(n, vint) + 127) << 23;
    return (vfloat)((vint)(p * (vfloat)scale) & ~below);
}

#endif
