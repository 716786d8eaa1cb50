/* The small operations between the matrix products, fp32 and bf16; statistics and products in fp32. */
#include "vec.h"

#include <math.h>

#define T float
#define FN(name) name##_float
#include "ops_impl.h"
#undef T
#undef FN

#define T bf16
#define FN(name) name##_bf16
#include "ops_impl.h"
