/* From a row of logits to a token: arg max, or temperature, top-k, top-p, min-p and one draw.
 *
 * Nothing is sorted as a whole. Weights exp((x - max) / temperature) are positive floats, whose bits order as the floats
 * do; a histogram of their upper bits, with count and mass of each bucket, tells in which bucket the limit of top-k or
 * top-p falls, and only that bucket is sorted. Ties go to the lower id. The draw walks the kept tokens by id. */
#include "vec.h"

#include <math.h>
#include <stdlib.h>

#define BUCKETS 4096 /* sign (always 0), exponent and 4 bits of the mantissa: 1/16 of a power of two each */
#define BUCKET_SHIFT 19
#define LIKELY 0.0009765625f /* most limits fall among the weights above this; the largest weight is 1 */
#define COLDEST 1e-6f        /* below, the arg max is all that is left, and a division would overflow */
#define PART 128             /* weights summed together, by vectors, before they enter a double */

EXPORT void argmax_float(const float *x, int64_t stride, int rows, int vocabulary, int64_t *tokens) {
    for (int r = 0; r < rows; r++, x += stride) {
        vfloat most = splat(-INFINITY);
        int i = 0;
        for (; i + LANES <= vocabulary; i += LANES) most = vmax(most, load_float(x + i));
        float top = vtop(most);
        for (; i < vocabulary; i++) top = x[i] > top ? x[i] : top;
        int at = 0;
        while (at < vocabulary - 1 && x[at] != top) at++;
        tokens[r] = x[at] == top ? at : 0;
    }
}

typedef struct {
    float weight;
    int id;
} candidate;

static int by_weight(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->weight != y->weight) return x->weight < y->weight ? 1 : -1;
    return x->id - y->id;
}

static inline uint32_t bucket(float weight) {
    uint32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return bits >> BUCKET_SHIFT;
}

static inline float bucket_floor(int b) {
    const uint32_t bits = (uint32_t)b << BUCKET_SHIFT;
    float floor;
    memcpy(&floor, &bits, sizeof floor);
    return floor;
}

typedef struct {
    float *weights;      /* [vocabulary] */
    candidate *marginal; /* [vocabulary], the bucket in which the limit falls */
    double mass[BUCKETS];
    int count[BUCKETS];
} scratch;

static void weigh(const float *x, int n, float temperature, float *weights) {
    vfloat most = splat(-INFINITY);
    int i = 0;
    for (; i + LANES <= n; i += LANES) most = vmax(most, load_float(x + i));
    float top = vtop(most);
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    const float inverse = 1.0f / (temperature > COLDEST ? temperature : COLDEST);
    for (i = 0; i + LANES <= n; i += LANES) store_float(weights + i, vexp((load_float(x + i) - top) * inverse));
    for (; i < n; i++) weights[i] = expf((x[i] - top) * inverse);
}

static double part_sum(const float *w, int n) {
    vfloat sum = splat(0);
    int i = 0;
    for (; i + LANES <= n; i += LANES) sum += load_float(w + i);
    double total = vsum(sum);
    for (; i < n; i++) total += w[i];
    return total;
}

static double sum_of(const float *w, int n) {
    double total = 0;
    for (int i = 0; i < n; i += PART) total += part_sum(w + i, n - i < PART ? n - i : PART);
    return total;
}

/* The bucket in which the limit falls, counting weights from `floor` up; what comes before it, by mass and number. */
static int find_bucket(scratch *s, int n, float floor, int most, double mass, double *before, int *taken) {
    memset(s->mass, 0, sizeof s->mass);
    memset(s->count, 0, sizeof s->count);
    for (int i = 0; i < n; i++) {
        if (s->weights[i] < floor) continue;
        const uint32_t b = bucket(s->weights[i]);
        s->mass[b] += s->weights[i];
        s->count[b]++;
    }
    const int lowest = (int)bucket(floor);
    int b = BUCKETS - 1;
    *before = 0;
    *taken = 0;
    while (b >= lowest && *taken + s->count[b] <= most && *before + s->mass[b] < mass) {
        *before += s->mass[b];
        *taken += s->count[b--];
    }
    return b;
}

/* Drops (sets to 0) what is not among the `most` first tokens, or comes after the first ones that hold `mass`. */
static void keep(scratch *s, int n, int most, double mass) {
    double before;
    int taken, b = find_bucket(s, n, LIKELY, most, mass, &before, &taken);
    if (b < (int)bucket(LIKELY)) b = find_bucket(s, n, 0.0f, most, mass, &before, &taken);
    if (b < 0) return; /* everything is inside the limit */
    const float low = bucket_floor(b), high = bucket_floor(b + 1);
    int marginal = 0;
    for (int i = 0; i < n; i++)
        if (s->weights[i] >= low && s->weights[i] < high) s->marginal[marginal++] = (candidate){s->weights[i], i};
    for (int i = 0; i < n; i++) s->weights[i] = s->weights[i] < high ? 0 : s->weights[i];
    qsort(s->marginal, marginal, sizeof(candidate), by_weight);
    for (int i = 0; i < marginal && taken < most && (before < mass || !taken); i++, taken++) {
        s->weights[s->marginal[i].id] = s->marginal[i].weight;
        before += s->marginal[i].weight;
    }
}

/* The token whose interval of the cumulative distribution, by id, holds `uniform`. */
static int invert(const float *weights, int n, double uniform) {
    const double target = uniform * sum_of(weights, n);
    double sum = 0;
    int last = 0;
    for (int from = 0; from < n; from += PART) {
        const int length = n - from < PART ? n - from : PART;
        const double part = part_sum(weights + from, length);
        double inside = sum;
        sum += part;
        if (part <= 0) continue;
        for (int i = from + length - 1; i >= from; i--)
            if (weights[i] > 0) {
                last = i;
                break;
            }
        if (sum <= target) continue;
        for (int i = from; i < last; i++) {
            inside += weights[i];
            if (weights[i] > 0 && inside > target) return i;
        }
        return last;
    }
    return last;
}

/* One draw per row. top_k 0, top_p 1 and min_p 0 are off. Order: top_k, top_p over what is left, min_p. Returns 0, or 1
 * if memory is short. */
EXPORT int sample_float(const float *logits, int64_t stride, int rows, int vocabulary, const float *temperature,
                        const int64_t *top_k, const float *top_p, const float *min_p, const double *uniform,
                        int64_t *tokens) {
    scratch *s = malloc(sizeof *s);
    float *weights = malloc(sizeof(float) * vocabulary);
    candidate *marginal = malloc(sizeof(candidate) * vocabulary);
    const int failed = !s || !weights || !marginal;
    for (int r = 0; r < rows && !failed; r++) {
        s->weights = weights;
        s->marginal = marginal;
        weigh(logits + r * stride, vocabulary, temperature[r], weights);
        if (top_k[r] > 0 && top_k[r] < vocabulary) keep(s, vocabulary, (int)top_k[r], INFINITY);
        if (top_p[r] < 1) keep(s, vocabulary, vocabulary, top_p[r] * sum_of(weights, vocabulary));
        if (min_p[r] > 0)
            for (int i = 0; i < vocabulary; i++) weights[i] = weights[i] >= min_p[r] ? weights[i] : 0;
        tokens[r] = invert(weights, vocabulary, uniform[r]);
    }
    free(s);
    free(weights);
    free(marginal);
    return failed;
}
