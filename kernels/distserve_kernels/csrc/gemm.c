/* Linear layers y = x W^T + b on packed weights, for AVX-512 (bf16: with its bf16 dot product) and AVX2 with FMA.
 *
 * Packed: panels of PANEL outputs, each [K][PANEL] (bf16: [K / 2][PANEL][2]), zeros where W ends. A panel is walked in
 * steps of at most STEP_BYTES, so that the piece in use and the next one, which is prefetched meanwhile, both stay in
 * the second level cache: the weights stream from memory at full speed while the multipliers work. Every output is
 * summed over k in the same order whatever the number of rows, so results do not depend on the batch. */
#include "vec.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define PANEL (2 * LANES)
#define STEP_BYTES 131072
#define STREAMED_ROWS 6 /* up to here memory is the limit, and the hardware's own prefetch is best left alone */
#define ALIASED_BYTES 2048 /* rows this far apart (or a multiple) fall on the same few sets of the first level cache */
#define TILE (REGISTERS == 32 ? 12 : 6) /* rows at once, two accumulators each */

/* Outputs of a panel; 0 if this build lacks the instructions that the kernel is laid out for. */
EXPORT int gemm_panel_float(void) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return PANEL;
#else
    return 0;
#endif
}
EXPORT int gemm_panel_bf16(void) {
#if defined(__AVX512BF16__) || (!defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__))
    return PANEL;
#else
    return 0;
#endif
}

/* acc += w * a, for one k of a vector of outputs (fp32), or two (bf16). */
INLINE vfloat step_float(vfloat acc, const float *w, float a) { return acc + load_float(w) * a; }
INLINE vfloat step_bf16(vfloat acc, const bf16 *w, int32_t pair) {
#ifdef __AVX512BF16__
    const __m512i even_odd = _mm512_loadu_si512(w);
    return (vfloat)_mm512_dpbf16_ps((__m512)acc, (__m512bh)even_odd, (__m512bh)_mm512_set1_epi32(pair));
#else
    vuint pairs;
    memcpy(&pairs, w, sizeof pairs);
    const vuint x = (uint32_t)pair - (vuint){0};
    acc += (vfloat)(pairs << 16) * (vfloat)(x << 16);
    return acc + (vfloat)(pairs & 0xffff0000u) * (vfloat)(x & 0xffff0000u);
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
