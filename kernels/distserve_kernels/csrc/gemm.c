/* Linear layers y = x W^T + b on packed weights, for machines with 32 vector registers of 16 floats (AVX-512); bf16
 * needs their bf16 dot product too.
 *
 * Packed: panels of PANEL outputs, each [K][PANEL] (bf16: [K / 2][PANEL][2]), zeros where W ends. A panel is walked in
 * steps of at most STEP_BYTES, so that the piece in use and the next one, which is prefetched meanwhile, both stay in
 * the second level cache: the weights stream from memory at full speed while the multipliers work. Every output is
 * summed over k in the same order whatever the number of rows, so results do not depend on the batch. */
#include "vec.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define PANEL 32
#define STEP_BYTES 131072
#define STREAMED_ROWS 6 /* up to here memory is the limit, and the hardware's own prefetch is best left alone */
#define ALIASED_BYTES 2048 /* rows this far apart (or a multiple) fall on the same few sets of the first level cache */
#ifdef __AVX512F__
#define TILE 12 /* rows at once: 12 x 2 accumulators of the 32 registers */
#else
#define TILE 2
#endif

/* 1 if this build has the registers that the kernel is laid out for. */
EXPORT int gemm_native_float(void) { return TILE == 12; }
EXPORT int gemm_native_bf16(void) {
#ifdef __AVX512BF16__
    return TILE == 12;
#else
    return 0;
#endif
}

/* acc += w * a, for one k of 16 outputs (fp32), or two (bf16). */
INLINE v16f step_float(v16f acc, const float *w, float a) { return acc + load_float(w) * a; }
INLINE v16f step_bf16(v16f acc, const bf16 *w, int32_t pair) {
#ifdef __AVX512BF16__
    const __m512i even_odd = _mm512_loadu_si512(w);
    return (v16f)_mm512_dpbf16_ps((__m512)acc, (__m512bh)even_odd, (__m512bh)_mm512_set1_epi32(pair));
#else
    const v16f a = splat(widen_bf16((bf16)pair)), b = splat(widen_bf16((bf16)((uint32_t)pair >> 16)));
    v16f even, odd;
    for (int i = 0; i < LANES; i++) {
        even[i] = widen_bf16(w[2 * i]);
        odd[i] = widen_bf16(w[2 * i + 1]);
    }
    return acc + even * a + odd * b;
#endif
}

#define T float
#define FN(name) name##_float
#define DEPTH 1 /* inputs of one step */
#define OPERAND float
#include "gemm_impl.h"
#undef T
#undef FN
#undef DEPTH
#undef OPERAND

#define T bf16
#define FN(name) name##_bf16
#define DEPTH 2
#define OPERAND int32_t
#include "gemm_impl.h"
