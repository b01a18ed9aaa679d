/* A gated network, and how it is run:
 *
 *     network_t    operations with packed weights; made once, by tg_network_new and tg_add_*   network.c
 *     plan_t       shapes, algorithms and sizes of memory for one image size; tg_plan_new      plan.c
 *     workspace_t  memory and threads for one call at a time; tg_workspace_new                 workspace.c, threads.c
 *     tg_run       runs a batch in a workspace                                                 run.c, run_*.c, panels.c
 *
 * Kernels (kernels.h) do the arithmetic, once per instruction set. Python calls the tg_ functions; their signatures are
 * in inference/native.py, and tg_version must change with them. */
#ifndef TIMM_GATED_NETWORK_H
#define TIMM_GATED_NETWORK_H

#include "kernels.h"
#include "threads.h"

#if defined(_WIN32)
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

/* Convolutions work on blocks of their input: at most BLOCK_DEPTH inputs (channels times taps), whose products are
 * added up, and as many panels of them as fit into half of the L2 cache. */
#define BLOCK_DEPTH 1024

/* Channels that are copied from panels to planes together: neighbouring cache lines. */
#define GROUP 8

/* Columns that the windows of a pooled row of so many outputs read. */
#define pooled_columns(op, width) (((width) - 1) * (op)->stride + (op)->kernel)

#define MAX_DEPTH (1 << 28) /* channels times taps of a convolution */
#define MAX_SIZE (1 << 20)  /* of channels, maps, gates, dilation and padding; also in inference/program.py */

/* Sizes of memory, in bytes or floats, saturate at this value, and allocations of it fail. */
#define MAX_MEMORY ((size_t)1 << 40)
_Static_assert(sizeof(size_t) == 8, "size_t must have 64 bits");

INLINE size_t times(size_t count, size_t size) {
    return !size || count < MAX_MEMORY / size ? count * size : MAX_MEMORY;
}

typedef enum { CONV, MAX_POOL, AVG_POOL, ADAPTIVE_POOL, SUBSAMPLE, PLACE, GATE, SKIP, OUTPUT } kind_t;

/* A convolution as the caller describes it; _ConvSpec in inference/native.py has the same fields. Buffers and gates
 * that do not apply are -1. */
typedef struct {
    int in, out, residual;
    int gate_in, gate_out;
    int c_in, c_out;
    int kernel, stride, dilation, padding;
    int relu;
} conv_spec_t;

typedef struct {
    kind_t kind;
    int in, out, residual; /* buffers, or -1 */
    int gate_in, gate_out; /* gates of the inputs and outputs of a convolution, or -1 */
    int count;             /* convolutions that a skip omits */
    int c_in, c_out;
    int kernel, stride, dilation, padding;
    int relu;
    int ceil_mode;          /* pooling */
    int before, after;      /* subsampling: channels of zeros */
    int like;               /* buffer whose size a placed map is resized to */
    int align_corners;      /* of that resizing */
    int hidden;             /* width of the hidden layer of a gate */
    float *weight, *bias;   /* convolution: packed; gate: first layer, [c_in][hidden] */
    float *weight2, *bias2; /* gate: second layer, [hidden][c_out] */
} op_t;

typedef struct {
    const kernels_t *kernels;
    int in_channels;
    int num_buffers, num_gates;
    int num_ops, capacity;
    op_t *ops;
    int *gate_sizes;        /* 0 until the gate is added */
    ptrdiff_t block_floats; /* of the input of a convolution, that fit into the cache */
} network_t;

/* Layout of packed weights: by taps, then by inputs. With gated outputs, a row is one filter. Otherwise filters are
 * interleaved such that their weights for one input fill a cache line. */
#define INTERLEAVED 16

typedef struct {
    int side_by_side;             /* interleaved filters */
    ptrdiff_t floats;             /* in all */
    ptrdiff_t block, column, tap; /* strides; block: between groups of interleaved filters */
} packing_t;

/* Taps are odd in cache lines, since powers of two cause cache conflicts. Vectors may read beyond the last input. */
INLINE packing_t packing(const op_t *op) {
    const int side_by_side = op->gate_out >= 0 ? 1 : INTERLEAVED;
    const ptrdiff_t tap = (ptrdiff_t)op->c_in * side_by_side + INTERLEAVED, block = op->kernel * op->kernel * tap;
    return (packing_t){
        .side_by_side = side_by_side,
        .floats = divide_up(op->c_out, side_by_side) * block,
        .block = block,
        .column = side_by_side,
        .tap = tap,
    };
}

INLINE ptrdiff_t row_offset(const packing_t *packing, int filter) {
    return filter / packing->side_by_side * packing->block + filter % packing->side_by_side;
}

/* Whole panels of so many floats, with a stride that avoids cache conflicts. */
INLINE ptrdiff_t spread(ptrdiff_t floats) {
    floats = (floats + PANEL - 1) / PANEL * PANEL;
    return floats % 1024 ? floats : floats + PANEL;
}

/* At least so many floats: an odd number of cache lines. */
INLINE ptrdiff_t odd_lines(ptrdiff_t floats) { return ((floats + PANEL - 1) / PANEL | 1) * PANEL; }

typedef struct {
    int channels, height, width;
    ptrdiff_t panel; /* stride between panels */
} shape_t;

INLINE int num_pixels(const shape_t *shape) { return shape->height * shape->width; }
INLINE int num_panels(const shape_t *shape) { return divide_up(num_pixels(shape), PANEL); }

typedef enum { POINTWISE, DIRECT, WINOGRAD } algorithm_t;

typedef struct {
    shape_t in, out;
    algorithm_t algorithm;
    /* Direct: the padded input is split into stride * stride phases, so that every tap reads contiguous pixels. The
     * rows of phases are `pitch` wide. */
    int phases; /* per dimension, those that some tap reads */
    int pitch, phase_rows;
    ptrdiff_t phase_plane;
    ptrdiff_t *tap_offsets;
    /* Winograd */
    tiling_t tiling;
    piece_t *pieces;
    ptrdiff_t plane_floats; /* of the padded plane or output plane at the beginning of a thread's memory */
    ptrdiff_t u_floats;     /* of transformed weights, which follow; then sums */
} step_t;

/* What Winograd's algorithm processes at a time. Strides of its memory: between the points of transformed inputs,
 * weights and sums, and between (groups of interleaved) filters of transformed weights. */
typedef struct {
    int panels, inputs;        /* of tiles, and their inputs, that are transformed */
    int rows, weights_per_row; /* filters whose weights are transformed, and for how many inputs */
    int sum_rows;              /* filters with sums: all, if there are several blocks of inputs */
    ptrdiff_t v_point, u_point, m_point;
    ptrdiff_t u_row;
} blocking_t;

#define MAX_WINOGRAD_ROWS 48 /* filters whose weights are transformed together */

blocking_t winograd_blocking(
    const network_t *network, const op_t *op, const tiling_t *tiling, int num_inputs, int threads);

typedef struct {
    network_t *network;
    int height, width;
    int num_steps;
    step_t *steps;
    size_t *buffer_floats;
    size_t scratch_floats; /* shared by the threads of a sample */
    size_t thread_floats;  /* scratch per thread */
    ptrdiff_t plane;       /* stride between the planes that a thread copies from panels */
    int packs_image;       /* an operation reads the image in panels */
    int max_channels, max_hidden;
    int max_depth; /* input channels times taps of a convolution */
} plan_t;

/* Memory to run a plan: maps per sample, scratch per thread. */
typedef struct {
    float **buffers;
    float *scratch;
    float *pooled;
    int32_t **open; /* open channels by gate */
    int *num_open;
} sample_t;

typedef struct {
    float *scratch; /* of an operation */
    float *planes;  /* GROUP channels of its input */
    float *line;    /* a channel of its output */
    float *bias;
    float *logits;
    const float **rows;
    ptrdiff_t *columns;
} thread_t;

typedef struct {
    const plan_t *plan;
    int num_samples, num_threads;
    sample_t *samples;
    thread_t *threads;
    team_t *team;
    void *memory;
    size_t bytes; /* size of memory */
} workspace_t;

/* Store an error message for tg_error and return -1. */
int fail(const char *format, ...);

/* Allocate aligned and zeroed memory; NULL on failure. */
void *allocate(size_t bytes);
void release(void *memory);

#endif
