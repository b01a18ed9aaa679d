/* A gated network as a list of operations, and a plan of how they run on images of one size. */
#ifndef TIMM_GATED_NETWORK_H
#define TIMM_GATED_NETWORK_H

#include "kernels.h"
#include "threads.h"

#if defined(_WIN32)
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

/* Floats of maps that a step works on at a time, to stay in a core's second-level cache; but at least so many vectors,
 * as the weights are read anew for each part. */
#define CACHED_FLOATS (1 << 16)
#define MIN_VECTORS 12

/* Columns that the windows of a pooled row of so many outputs read. */
#define pooled_columns(op, width) (((width) - 1) * (op)->stride + (op)->kernel)

/* Vectors of a map of so many channels to work on at a time. */
INLINE int cached_vectors(int channels, int lanes, int64_t vectors) {
    int limit = CACHED_FLOATS / ((channels + 1) * lanes);
    return even_part((int)vectors, limit < MIN_VECTORS ? MIN_VECTORS : limit);
}

#define MAX_SIZE (1 << 20)  /* of channels and the like */

/* Sizes of memory, in bytes or in floats, stop at this instead of wrapping, and memory of such a size is refused. */
#define MAX_MEMORY ((size_t)1 << 40)
_Static_assert(sizeof(size_t) == 8, "sizes of memory are counted in 64 bits");

INLINE size_t times(size_t count, size_t size) { return count < MAX_MEMORY / size ? count * size : MAX_MEMORY; }

typedef enum { CONV, MAX_POOL, AVG_POOL, SUBSAMPLE, GATE, SKIP, OUTPUT } kind_t;

typedef struct {
    kind_t kind;
    int in, out, residual;  /* buffers; -1 where there is none */
    int gate_in, gate_out;  /* gates over the inputs and the outputs of a convolution; -1: all are open */
    int count;              /* convolutions that a skip, if its gate is closed, leaves out */
    int c_in, c_out;
    int kernel, stride, dilation, padding;
    int relu;
    int ceil_mode;       /* of a pooling */
    int before, after;   /* of a subsampling: channels of zeros */
    int hidden;          /* width of a gate's hidden layer */
    float *weight, *bias;    /* of a convolution, packed; of the first layer of a gate, [c_in][hidden] */
    float *weight2, *bias2;  /* of the second layer of a gate, [hidden][c_out] */
    float *transformed[2];   /* weights in Winograd's domain for tiles of size 4 and 2, made when first needed */
} op_t;

typedef struct {
    const kernels_t *kernels;
    int in_channels;
    int num_buffers, num_gates;
    int num_ops, capacity;
    op_t *ops;
    int *gate_sizes;  /* 0 until the gate is added */
    size_t transformed_bytes;
} network_t;

/* Weights are packed for the way they are read. Where a gate picks outputs, a row is one filter. Where all outputs are
 * computed from open inputs, so many filters lie side by side that an input, for all of them, fills a cache line. */
typedef struct {
    int side_by_side;  /* filters */
    ptrdiff_t block;   /* from these filters to the next */
    ptrdiff_t column, tap, point;  /* strides */
} packing_t;

INLINE packing_t packing(const op_t *op, int taps) {
    packing_t packing;
    packing.side_by_side = op->gate_out >= 0 ? 1 : 16;
    packing.tap = packing.side_by_side;
    packing.column = taps * packing.tap;
    packing.block = op->c_in * packing.column + 16;  /* (a power of two would strain the sets of a cache) */
    packing.point = (op->c_out + packing.side_by_side - 1) / packing.side_by_side * packing.block;
    return packing;
}

INLINE ptrdiff_t row_offset(const packing_t *packing, int filter) {
    return filter / packing->side_by_side * packing->block + filter % packing->side_by_side;
}

typedef struct {
    int channels, height, width;
    ptrdiff_t plane;
} shape_t;

typedef enum { POINTWISE, DIRECT, WINOGRAD } algorithm_t;

typedef struct {
    shape_t in, out;
    algorithm_t algorithm;
    /* Direct: the padded input is split into stride x stride phases, so that every tap reads neighbouring pixels. The
     * rows of phases are `pitch` wide, and so are those of the sums, before the superfluous columns are left out. */
    int phases;  /* in each dimension, those that some tap reads */
    int pitch, phase_rows, chunk_rows;
    ptrdiff_t phase_plane;
    ptrdiff_t *tap_offsets;
    /* Winograd: blocks of so many vectors of tiles run together. */
    tiling_t tiling;
    piece_t *pieces;
    int block;
    ptrdiff_t v_point, m_point;  /* strides of the transformed inputs and outputs */
} step_t;

typedef struct {
    network_t *network;
    int height, width;
    int num_steps;
    step_t *steps;
    size_t *buffer_floats;
    size_t scratch_floats;  /* shared by the threads of a sample */
    size_t thread_floats;   /* of scratch for each thread */
    int max_channels, max_hidden;
} plan_t;

/* What is needed to run: for each sample at a time its maps, for each thread its scratch. */
typedef struct {
    float **buffers;
    float *scratch;
    float *pooled;
    int32_t **open;  /* by gate: the open channels */
    int *num_open;
} sample_t;

typedef struct {
    float *plane;
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
    size_t bytes;  /* of memory */
} workspace_t;

/* Note what is wrong, for the caller; returns -1. */
int fail(const char *format, ...);

/* Memory, aligned and zeroed, or NULL; of MAX_MEMORY there is none. */
void *allocate(size_t bytes);
void release(void *memory);

#endif
