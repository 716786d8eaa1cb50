/* Whole layers of the LLaMA family for rows that are one token of a sequence each: what the functions of the other files
 * do one by one, without the way back to the interpreter between them. */
#include "vec.h"

#include <stddef.h>

enum { QKV, OUT, GATE_UP, DOWN, PRODUCTS };

typedef struct {
    const void *attention_norm, *mlp_norm, *q_norm, *k_norm; /* the last two may be NULL */
    const void *weights[PRODUCTS], *biases[PRODUCTS];        /* packed by gemm_pack; each bias may be NULL */
    int64_t window;                                          /* 0: all tokens are seen */
} decoder_layer;

typedef struct {
    int64_t hidden, ffn, q_heads, kv_heads, dim, half; /* half: rotated pairs of a head */
    float eps, scale;
} decoder_shape;

typedef struct {
    int64_t rows;
    const float *cosine, *sine; /* [rows][half] */
    const int64_t *slots;       /* [rows] */
    const int32_t *tables;      /* [rows], table_stride apart */
    int64_t table_stride;
    const int32_t *lengths;     /* [rows] */
    void *const *pages;         /* [layers][2]: K, V */
    int64_t block_size;
    int64_t threads;
} decoder_rows;

#define T float
#define FN(name) name##_float
#include "decoder_impl.h"
#undef T
#undef FN

#define T bf16
#define FN(name) name##_bf16
#include "decoder_impl.h"
