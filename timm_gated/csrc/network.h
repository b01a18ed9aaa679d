/* A gated network, and how it is run:
 *
 *     tg_model     a network with its plans and workspaces; what callers see (timm_gated.h)    model.c, load.c
 *     network_t    operations with packed weights; made once, operation by operation          network.c, operations.c
 *     plan_t       shapes, algorithms and sizes of memory for one image size                   plan.c, plan_*.c
 *     workspace_t  memory and threads for one call at a time                                   workspace.c, threads.c
 *     run_batch    runs a batch in a workspace                                                 run.c, run_*.c, panels.c
 *
 * Kernels (kernels.h) do the arithmetic, once per instruction set. Python and the loader of files create networks with
 * tg_model_new and tg_model_add, whose signatures are also in inference/native.py. */
#ifndef TIMM_GATED_NETWORK_H
#define TIMM_GATED_NETWORK_H

#include "int8.h"
#include "kernels.h"
#include "threads.h"
#include "timm_gated.h"

/* Convolutions work on blocks of their input: at most BLOCK_DEPTH inputs (channels times taps), whose products are
 * added up, and as many panels of them as fit into half of the L2 cache. */
#define BLOCK_DEPTH 1024

/* Int8 convolutions of so many weights per filter, in quads, are split: inputs and sums of SPLIT_CHUNK groups of
 * positions stay in the cache. */
#if defined(CACHE_BYTES)
#define SPLIT_DEPTH 24
#else
#define SPLIT_DEPTH 2560
#endif
#define SPLIT_CHUNK 8

/* Channels that are copied from panels to planes together: neighbouring cache lines. */
#define GROUP 8

/* Columns that the windows of a pooled row of so many outputs read. */
#define pooled_columns(op, width) (((width) - 1) * (op)->stride + (op)->kernel)

#define MAX_DEPTH (1 << 28) /* channels times taps of a convolution */
#define MAX_KERNEL 64       /* kernel size and stride */
#define MAX_SIZE (1 << 20)  /* of channels, maps, gates, dilation and padding; also in inference/validation.py */

/* Sizes of memory, in bytes or floats, saturate at this value, and allocations of it fail. */
#define MAX_MEMORY ((size_t)1 << 40)
_Static_assert(sizeof(size_t) == 8, "size_t must have 64 bits");

INLINE size_t times(size_t count, size_t size) {
    return !size || count < MAX_MEMORY / size ? count * size : MAX_MEMORY;
}

/* Kinds of operations, and columns of the rows that describe them; KINDS and COLUMNS of inference/serialize.py. */
typedef enum {
    CONV,
    GATE,
    POOL,
    ADAPTIVE_POOL,
    CONCAT,
    SUBSAMPLE,
    SKIP,
    OUTPUT,
    QUANTIZE,
    DEQUANTIZE,
    INT8_CONV, /* an operation of kind CONV, with weight8 */
    INT8_LINEAR,
    BLUR,
    CHANNEL_CONV,
    SCALE,
    NUM_KINDS
} kind_t;
typedef enum {
    KIND,
    SOURCE,
    TARGET,
    RESIDUAL,
    GATE_DEFINED, /* by a gate, or that decides about a skip */
    GATE_IN,
    GATE_OUT,
    KERNEL,
    STRIDE,
    DILATION,
    PADDING,
    RELU,
    AVERAGE,
    CEIL_MODE,
    BINS,
    ALIGN_CORNERS,
    BEFORE,
    AFTER,
    COUNT,
    MACS,
    ZERO,
    GROUPS,
    FACTORS,
    NUM_COLUMNS
} column_t;

typedef enum { INT64, FLOAT32, UINT8, INT8, INT32 } type_t; /* _TYPES in inference/native.py */

/* A tensor of an operation, in the layout of a file; _Tensor in inference/native.py has the same fields. */
typedef struct {
    const void *data;
    type_t type;
    int num_dims;
    int64_t shape[4];
} tensor_t;

/* Of an operation: load.c names them, in their order. */
#define MAX_TENSORS 5

typedef struct {
    kind_t kind;
    int in, out, residual; /* buffers, or -1 */
    int factors;           /* buffer with the logits of what a map is scaled with, or -1 */
    int gate_in, gate_out; /* gates of the inputs and outputs of a convolution, or -1 */
    int groups;            /* of a convolution */
    int pairs;             /* count of open pairs of a convolution that is grouped and gated on both sides, or -1 */
    int taps;              /* of a convolution over channels */
    int count;             /* convolutions that a skip omits */
    int c_in, c_out;
    int kernel, stride, dilation, padding;
    int relu;
    int average, ceil_mode; /* pooling */
    int before, after;      /* subsampling: channels of zeros */
    int *sources;           /* concatenation: buffers, resized to the size of the first */
    int num_sources;
    int align_corners;      /* of that resizing */
    int hidden;             /* width of the hidden layer of a gate */
    float *weight, *bias;   /* convolution: packed, or with groups, as in a file; gate: first layer, [c_in][hidden] */
    float *weight2, *bias2; /* gate: second layer, [hidden][c_out] */
    /* int8 convolution; with gated inputs, weights are [c_out / ROW_GROUP][c_in][taps][ROW_GROUP], otherwise
     * [c_out][c_in / QUAD][taps][QUAD] */
    int8_t *weight8;
    int32_t *bias8;
    float *multiplier, *ratio;
    float scale; /* of its output, or of that of a quantisation; of a linear layer, of its input */
    int zero;
} op_t;

typedef struct {
    const kernels_t *kernels;
    const int8_kernels_t *int8;
    int border; /* of quantised maps, in pixels: what convolutions read beyond them */
    int in_channels;
    int num_buffers, num_gates;
    int num_pairs; /* counts of open pairs, which follow those of open channels by gate */
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
    /* A quantised map; of a float32 map, scale is 0. Planes have `pitch` pixels per row, the border included. */
    float scale;
    int zero, pitch;
    ptrdiff_t plane, origin; /* stride between planes of quads; place of the first pixel */
} shape_t;

INLINE int num_quads(int channels) { return divide_up(channels, QUAD); }

/* Positions of a quantised map, in groups of POSITIONS. */
INLINE int num_groups(const shape_t *shape) { return divide_up(shape->height * shape->pitch, POSITIONS); }

/* Rows of a map that a grouped convolution computes at a time: they begin with a complete panel. */
#define GROUPED_ROWS PANEL

INLINE int num_pixels(const shape_t *shape) { return shape->height * shape->width; }
INLINE int num_panels(const shape_t *shape) { return divide_up(num_pixels(shape), PANEL); }

typedef enum { POINTWISE, DIRECT, WINOGRAD, GROUPED } algorithm_t;

typedef struct {
    shape_t in, out;
    shape_t *sources; /* of a concatenation */
    algorithm_t algorithm;
    int gate; /* of a map that is pooled, or -1 */
    /* Direct: the padded input is split into stride * stride phases, so that every tap reads contiguous pixels. The
     * rows of phases are `pitch` wide. */
    int phases; /* per dimension, those that some tap reads */
    int pitch, phase_rows;
    ptrdiff_t phase_plane;
    ptrdiff_t *tap_offsets;
    /* int8 */
    uint32_t *mask; /* all bits of positions within the output map */
    int by_rows;    /* the phases of the input have another pitch than the output */
    int is_split;   /* the weights of a filter are split, see SPLIT_DEPTH */
    /* Winograd */
    tiling_t tiling;
    piece_t *pieces;
    ptrdiff_t plane_floats; /* of planes at the beginning of a thread's memory: one, or those of a group */
    ptrdiff_t u_floats;     /* of transformed weights, which follow; then sums */
} step_t;

/* Floats of these rows, of one output. */
INLINE ptrdiff_t grouped_line(const step_t *step) {
    const ptrdiff_t rows = step->out.height < GROUPED_ROWS ? step->out.height : GROUPED_ROWS;
    return odd_lines(rows * step->pitch + PANEL);
}

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
    int max_lines; /* the same of an int8 convolution with gated inputs, in whole quads */
} plan_t;

/* Memory to run a plan: maps per sample, scratch per thread. */
typedef struct {
    float **buffers;
    float *scratch;
    float *pooled;
    int32_t **open; /* open channels by gate */
    int *num_open;  /* by gate, then open pairs */
} sample_t;

typedef struct {
    float *scratch; /* of an operation */
    float *planes;  /* GROUP channels of its input */
    float *line;    /* a channel of its output */
    float *bias;
    float *logits;
    const void **rows;
    ptrdiff_t *columns;
    int32_t *bias8, *lines;
    float *multiplier, *ratio;
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

/* Half of the L2 cache, in bytes. */
ptrdiff_t half_of_cache(void);

network_t *network_new(const char *isa, int64_t in_channels, int64_t num_buffers, int64_t num_gates);
void network_free(network_t *network);
int network_outputs(const network_t *network);

/* Add an operation: the row that describes it, and its tensors, which are copied. */
int network_add(network_t *network, const int64_t row[NUM_COLUMNS], const tensor_t tensors[MAX_TENSORS]);

/* Copy the weights of a convolution or a gate, in the layout of a file; a convolution has only the first two. */
int network_weights(const network_t *network, int index, float *weight, float *bias, float *weight2, float *bias2);

/* Not for two calls with the same network at once. */
plan_t *plan_new(network_t *network, int height, int width);
void plan_free(plan_t *plan);

/* Channels, height and width of an output; 0 if there are fewer outputs. */
int plan_output(const plan_t *plan, int index, int size[3]);

/* Name of the algorithm of an operation, or NULL if the operation is not a convolution. */
const char *plan_algorithm(const plan_t *plan, int op);

/* Memory to run a plan. Concurrent calls need a workspace each. */
workspace_t *workspace_new(const plan_t *plan, int num_samples, int num_threads);
void workspace_free(workspace_t *workspace);

/* Images to run and where to store the results. */
typedef struct {
    const float *images; /* [count][channels][height][width] */
    int64_t count;
    float *const *outputs; /* [outputs][count][channels][height][width]; NULL: not wanted */
    int32_t *num_open;     /* open channels and open pairs, [count][gates + pairs], or NULL */
    uint8_t *is_open;      /* whether each channel of each gate is open, [count][channels of all gates], or NULL */
    double *milliseconds;  /* per operation, to add to, or NULL; complete for a single image */
} batch_t;

void run_batch(workspace_t *workspace, const batch_t *batch);

/* Store an error message for tg_error and return -1. */
int fail(const char *format, ...);

/* Allocate aligned and zeroed memory; NULL on failure. */
void *allocate(size_t bytes);
void release(void *memory);

#endif
