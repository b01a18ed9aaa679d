/* Compute kernels of the native backend, one set per instruction set.
 *
 * Feature maps are stored in panels of PANEL pixels, [pixels / PANEL][channels][PANEL], so that a product reads its
 * input contiguously: panels of one map are `panel` floats apart, channels PANEL floats. Closed filters are never read:
 * a product reads its weights through a list of rows (open outputs) and a list of columns (open inputs), and maps
 * between gated convolutions hold their open channels only. */
#ifndef TIMM_GATED_KERNELS_H
#define TIMM_GATED_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Pixels per panel: a cache line of floats, and a multiple of every vector. Kernels read and write complete vectors. */
#define PANEL 16

#define INLINE static inline __attribute__((always_inline, unused))

/* Split `count` into the fewest, nearly equal parts of at most `limit` and return the first. */
INLINE int even_part(int count, int limit) {
    int parts = (count + limit - 1) / limit;
    return (count + parts - 1) / parts;
}

INLINE int divide_up(int value, int divisor) { return (value + divisor - 1) / divisor; }

/* out[m][n] = sum over j < depth of rows[m][row_offset + columns[j]] * x[j][n], with optional bias[m], residual[m][n]
 * and ReLU. x, out and residual are panels. */
typedef struct {
    const float *const *rows;
    ptrdiff_t row_offset;
    int interleaved;      /* filters whose weights for one input share a cache line */
    ptrdiff_t row_floats; /* weights of a row, or of a group of interleaved rows, including those of closed inputs */
    const ptrdiff_t *columns;
    int depth;
    const float *x;
    ptrdiff_t x_panel;
    float *out;
    ptrdiff_t out_panel;
    const float *bias;
    const float *residual; /* same layout as out */
    int relu;
} product_t;

/* out[m][n] = sum over i < inputs, t < taps of rows[m][columns[i] + t] * x[i][offsets[t] + n]: a convolution on padded
 * planes, x. Planes of x are `x_plane` floats apart, those of out `out_plane`. */
typedef struct {
    const float *const *rows;
    const ptrdiff_t *columns;
    int inputs, taps;
    const ptrdiff_t *offsets;
    const float *x;
    ptrdiff_t x_plane;
    float *out;
    ptrdiff_t out_plane;
} planes_product_t;

/* Neighbouring tiles that are loaded and stored together. */
typedef struct {
    int32_t in;            /* offset in the padded plane */
    int32_t out;           /* offset in the output plane, whose rows hold complete tiles */
    int32_t pixel;         /* index of its first pixel in the map */
    int32_t rows, columns; /* within the map; fewer than the tiles have at its edges */
} piece_t;

/* Partition of a map into Winograd tiles of size x size outputs, and of tiles into vectors. */
typedef struct {
    int size;       /* 4 or 2 */
    int points;     /* (size + 2)^2 products per tile */
    int pitch;      /* of the padded input planes */
    int phase_rows; /* rows of the padded input plane of a phase */
    int out_pitch;  /* of the output planes */
    int out_rows;   /* of the output planes of all phases; unused pieces are stored after them */
    int vectors;
    int pieces_per_vector;
    const piece_t *pieces; /* for all vectors; the last pieces may have no rows */
} tiling_t;

typedef struct {
    const char *name;
    int lanes;
    int row_block;    /* rows of a product that share a register block */
    int piece_pixels; /* width of a piece */
    /* Compute rows [begin, end) of a product for `vectors` vectors. */
    void (*product)(const product_t *product, int begin, int end, int vectors);
    /* Compute rows [begin, end) of a product for one pixel, the first of `out`. With interleaved rows, x[j] is the
     * value for columns[j], and begin is a multiple of `interleaved`. Otherwise, x has a value per column of the rows,
     * `length` in all, which is 0 if the column is not listed. */
    void (*product_pixel)(const product_t *product, int begin, int end, const float *x, int length);
    /* Compute `rows` rows, at most row_block, of a product on planes for `vectors` vectors. */
    void (*planes_product)(const planes_product_t *product, int rows, int vectors);
    /* Multiply the channels of a panel by factors, with optional residual and ReLU. */
    void (*scale)(const float *x, const float *factors, int channels, const float *residual, int relu, float *out);
    /* Copy pixels [first, first + count) of a convolution's taps, `offsets` into planes of a given pitch, into panels,
     * where taps are `tap` floats apart. `line` is scratch memory for the pixels and PANEL more. */
    void (*pack_taps)(
        const float *x, const ptrdiff_t *offsets, int taps, int pitch, int width, int first, int count, float *line,
        float *panels, ptrdiff_t panel, ptrdiff_t tap);
    /* Transform `count` successive 3 x 3 weights for tiles of a given size. Complete vectors are read and written. */
    void (*transform_weights)(
        int size, const float *weights, ptrdiff_t tap, int count, float *u, ptrdiff_t point_stride);
    /* Transform vectors [begin, end) of the tiles of a padded plane into panels of tiles. */
    void (*transform_input)(
        const tiling_t *tiling, const float *padded, int begin, int end, float *v, ptrdiff_t panel,
        ptrdiff_t point_stride);
    /* Inverse transform into an output plane. */
    void (*transform_output)(
        const tiling_t *tiling, const float *m, ptrdiff_t panel, ptrdiff_t point_stride, int begin, int end,
        float *out);
    /* Store pixels [first, first + count) of a channel into its map, with bias, optional residual and ReLU. */
    void (*finish)(
        const float *x, int first, int count, float *out, const float *residual, ptrdiff_t panel, float bias, int relu);
    /* Average each of so many channels over the pixels of a map. */
    void (*average)(const float *map, ptrdiff_t panel, int channels, int pixels, float *out);
    /* Copy every stride-th value: out[j] = x[j * stride]. */
    void (*subsample)(const float *x, int stride, float *out, int count);
    /* Elementwise maximum of two rows. Propagates NaN, like torch. */
    void (*maximum)(float *x, const float *y, int count);
    /* Maximum of windows along a row: out[j] = max of x[j * stride + t], t < window. May read PANEL floats beyond. */
    void (*max_windows)(const float *x, int window, int stride, float *out, int count);
    double (*sum)(const float *x, ptrdiff_t count);
    /* Run FMAs that depend on registers only, and return the number of floating-point operations. */
    double (*fma_peak)(int rounds, float start);
} kernels_t;

extern const kernels_t kernels_portable;
#if defined(__x86_64__)
extern const kernels_t kernels_avx2, kernels_avx512;
#endif

#endif
