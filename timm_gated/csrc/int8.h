/* Kernels of quantised networks, one set per instruction set.
 *
 * Feature maps are uint8: value = scale * (q - zero). Four neighbouring channels of a pixel, a quad, share 32 bits,
 * and pixels of a quad follow one another in a plane, row by row, with a border of `zero` between and around the rows.
 * So the pixels that a tap of a convolution reads are contiguous for all positions of the map, and one dot-product
 * instruction multiplies the four channels of several pixels with the four weights of a filter.
 *
 * Weights are int8 in [-63, 63], so that sums of two products fit into the 16 bits that AVX2 adds up. Everything up to
 * the rounding of a result is defined to the bit, and so the same on all machines:
 *
 *     sum    = sum of weight * input + bias + round(ratio * residual)    int32
 *     output = clamp(round(multiplier * sum) + zero)                     to uint8, with ReLU from zero
 *
 * where `round` is to the nearest, halves to even, and products with ratio and multiplier are in float32. */
#ifndef TIMM_GATED_INT8_H
#define TIMM_GATED_INT8_H

#include "kernels.h"

#define QUAD 4       /* channels that share 32 bits */
#define POSITIONS 16 /* that are computed together: 64 bytes of a quad */
#define ROW_GROUP 64 /* filters whose weights are regrouped together */

/* out[k / 4][n], byte k % 4: the output of filter k at position n, for positions first, ..., in planes of quads. */
typedef struct {
    const int32_t *const *rows; /* four weights of a filter each, `step` apart */
    ptrdiff_t step;
    const ptrdiff_t *offsets; /* of the inputs that the weights of a row belong to, from x on */
    int first, depth;         /* weights [first, depth) of the rows */
    /* Sums of the weights before `first` and, unless `is_last`, of those before `depth`: [row][position]. */
    int32_t *sums;
    ptrdiff_t sums_row;
    int is_last;
    const uint32_t *x;
    uint32_t *out;
    ptrdiff_t out_plane;
    const int32_t *bias; /* of each filter, as are multipliers and ratios */
    const float *multiplier, *ratio;
    const uint32_t *residual; /* NULL: none */
    ptrdiff_t residual_plane;
    int zero, relu;
    /* Weights to fetch meanwhile, NULL: none. Lines of ROW_GROUP bytes, [QUAD][depth]: of each input of a quad. */
    const int8_t *ahead;
    const int32_t *lines;
    const uint32_t *mask; /* all bits of the positions within the map; NULL: all are */
} product8_t;

typedef struct {
    const char *name;
    /* Compute filters [begin, end), a multiple of QUAD, at `count` times POSITIONS positions. */
    void (*product)(const product8_t *product, int begin, int end, int count);
    /* Interleave the weights of ROW_GROUP filters for four inputs: out[place] holds those of filter order(place). */
    void (*regroup)(const int8_t *const inputs[QUAD], int32_t *out);
    /* Quantise `count` values of each of four channels: clamp(round(x * inverse) + zero). NULL: zero. */
    void (*quantise)(const float *const x[QUAD], int count, float inverse, int zero, uint32_t *out);
    /* scale * (q - zero) of four channels; NULL: not wanted. */
    void (*dequantise)(const uint32_t *x, int count, float scale, int zero, float *const out[QUAD]);
    /* Sum of products of the bytes of `count` quads. */
    int32_t (*dot)(const uint32_t *x, const int32_t *w, int count);
    /* Maximum of each byte. */
    void (*maximum)(uint32_t *x, const uint32_t *y, int count);
    /* Add the bytes of `count` quads to four sums. */
    void (*sum)(const uint32_t *x, int count, uint32_t sums[QUAD]);
    /* Logits of a gate, without fused operations, so that they are the same everywhere: weights are [inputs][hidden]
     * and [hidden][size]; `hidden` is memory for the inner layer. */
    void (*gate)(
        const float *x, int inputs, const float *weight, const float *bias, int num_hidden, const float *weight2,
        const float *bias2, int size, float *hidden, float *logits);
    /* Bytes of a vector. Regrouping interleaves within 16 bytes of vectors, see regrouped_place. */
    int vector;
} int8_kernels_t;

/* Where the weights of a filter of a group must be, among those of an input, so that regrouping sorts them. */
INLINE int regrouped_place(const int8_kernels_t *kernels, int filter) {
    const int vector = kernels->vector, within = filter % vector, lanes = vector / 16;
    /* Dword d of lane l of the s-th result comes from byte 4 s + d of lane l. */
    const int s = within / (4 * lanes), l = within / 4 % lanes, d = within % 4;
    return filter - within + 16 * l + 4 * s + d;
}

extern const int8_kernels_t int8_portable;
#if defined(__x86_64__)
extern const int8_kernels_t int8_avx2, int8_avxvnni, int8_avx512;
#endif

#endif
