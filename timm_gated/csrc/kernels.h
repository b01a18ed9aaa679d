/* The arithmetic of the native backend, once for each instruction set.
 *
 * Feature maps are compact planes, [channels][plane] with plane >= height * width. What gates switch off is never
 * touched: a product reads its weights through a list of rows (open outputs) and a list of columns (open inputs), and
 * maps between gated convolutions hold their open channels only, side by side.
 */
#ifndef TIMM_GATED_KERNELS_H
#define TIMM_GATED_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Floats of the widest vector. Kernels read and write whole vectors, so planes are padded to a multiple of it. */
#define MAX_LANES 16

#define INLINE static inline __attribute__((always_inline, unused))

/* The first of the fewest, nearly equal parts of at most `limit`: a last part of one would waste most registers. */
INLINE int even_part(int count, int limit) {
    int parts = (count + limit - 1) / limit;
    return (count + parts - 1) / parts;
}

INLINE int divide_up(int value, int divisor) { return (value + divisor - 1) / divisor; }

/* out[m][n] = sum over j < channels, t < taps of
 *     rows[m][row_offset + columns[j] + t * tap_stride] * x[j][tap_offsets[t] + n]
 * plus bias[m], plus residual[m][n], clipped at zero: each of these if asked for. Strides say where the vectors of x,
 * out and residual are, so that these may be planes (a row after the other) or panels (a vector of all rows after the
 * other). Taps need planes. */
typedef struct {
    const float *const *rows;
    ptrdiff_t row_offset;
    ptrdiff_t then;  /* the row_offset of what is computed after this, to fetch its weights ahead */
    const ptrdiff_t *columns;
    int channels;
    int taps;
    ptrdiff_t tap_stride;
    const ptrdiff_t *tap_offsets;
    const float *x;
    ptrdiff_t x_row, x_vector;
    float *out;
    ptrdiff_t out_row, out_vector;
    const float *bias;
    const float *residual;  /* strides like those of out */
    int relu;
} product_t;

/* A run of neighbouring tiles that is loaded and stored together. */
typedef struct {
    int32_t in;            /* offset in the padded plane */
    int32_t out;           /* offset in the compact plane, or in those of the phases */
    int32_t pixel;         /* of the map: its first one */
    int32_t rows, columns; /* of the map: less than whole tiles at its edges */
} piece_t;

/* How Winograd's algorithm cuts a map into tiles of size x size outputs, and these into vectors. */
typedef struct {
    int size;    /* 4 or 2 */
    int points;  /* products: (size + 2)^2 */
    int width;       /* of the map, or of its phases */
    int pitch;       /* of the padded planes */
    int phase_rows;  /* of a padded plane */
    int vectors;
    int pieces_per_vector;
    const piece_t *pieces;  /* for all vectors; the last ones may have no rows */
} tiling_t;

typedef struct {
    const char *name;
    int lanes;
    int row_block;     /* rows of a product that are computed together */
    int piece_pixels;  /* of a piece of tiles */
    /* Rows [begin, end) of a product, over `vectors` vectors. */
    void (*product)(const product_t *product, int begin, int end, int vectors);
    /* `rows` planes, `stride` apart, as panels: vector after vector of all planes. */
    void (*pack)(const float *x, ptrdiff_t stride, int rows, int vectors, float *panels);
    /* Vectors [begin, end) of the tiles of a padded plane into v: a vector and a point every so many floats. */
    void (*transform_input)(
        const tiling_t *tiling, const float *padded, int begin, int end, float *v, ptrdiff_t vector_stride,
        ptrdiff_t point_stride);
    /* The way back, into a compact plane, with what follows a convolution. */
    void (*transform_output)(
        const tiling_t *tiling, const float *m, ptrdiff_t vector_stride, ptrdiff_t point_stride, int begin, int end,
        float *out, const float *residual, float bias, int relu);
    /* Elementwise maximum of rows; NaN stays, as in torch. */
    void (*maximum)(float *x, const float *y, int count);
    /* Maximum of windows along a row: out[j] = max x[j * stride + t], t < window. Reads up to MAX_LANES floats more. */
    void (*max_windows)(const float *x, int window, int stride, float *out, int count);
    /* A plane of a certain pitch into a compact one, with what follows a convolution. */
    void (*finish)(
        const float *from, ptrdiff_t pitch, float *out, const float *residual, int height, int width, float bias,
        int relu);
    double (*sum)(const float *x, ptrdiff_t count);
} kernels_t;

extern const kernels_t kernels_portable;
#if defined(__x86_64__)
extern const kernels_t kernels_avx2, kernels_avx512;
#endif

#endif
