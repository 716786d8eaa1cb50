/* Attention over KV pages and the scatter into them, for fp32 and bf16 pages; prefill is in paged_prefill_impl.h.
 *
 * K pages [block][kv_head][D][block_size], V pages [block][kv_head][block_size][D]; block_size is a multiple of 16.
 * The scores of LANES tokens fill one vector without horizontal sums; all query heads of a KV head (GQA) share each
 * load of K and V. The heads of a block are walked together, because they lie together: long contiguous reads, with the
 * same place some kilobytes ahead in the order of the walk prefetched into the second level cache alongside. Softmax is
 * online over chunks (Milakov and Gimelshein, arXiv 1805.02867). */
#include "vec.h"

#include <math.h>
#include <stddef.h>

#define CHUNK 256     /* tokens whose scores are held at once */
#define MAX_GROUP 8   /* query heads that share one load of K */
#define MAX_ROWS 16   /* query heads of one walk, over all its KV heads */
#define MAX_HEAD_DIM 256
#define SPAN (16 / LANES)             /* vectors of scores that are summed at once, */
#define SCORE_HEADS (8 / SPAN)        /* for so many query heads: 8 accumulators */
#define VALUE_VECTORS (REGISTERS / 8) /* vectors of V that are summed at once, for several rows */
#define AHEAD_BYTES 16384             /* how far ahead of the loads to prefetch */

#define T float
#define FN(name) name##_float
#include "paged_attention_impl.h"
#include "paged_prefill_impl.h"
#undef T
#undef FN

#define T bf16
#define FN(name) name##_bf16
#include "paged_attention_impl.h"
#include "paged_prefill_impl.h"
