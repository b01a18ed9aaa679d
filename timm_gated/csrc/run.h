/* Execution of single operations. Threads that share a sample call these functions together, each for its own range. */
#ifndef TIMM_GATED_RUN_H
#define TIMM_GATED_RUN_H

#include "network.h"

typedef struct {
    const plan_t *plan;
    sample_t *sample;
    const float *image; /* [channels][height][width] */
    thread_t *own;
    int thread, threads;  /* index and number of the threads that share the sample */
    team_t *team;         /* of these threads, if there are several */
    double *milliseconds; /* per operation, to add to; NULL if they are not measured */
} context_t;

typedef struct {
    int64_t begin, end;
} range_t;

/* The range of this thread. */
INLINE range_t part(const context_t *context, int64_t count) {
    return (range_t){count * context->thread / context->threads, count * (context->thread + 1) / context->threads};
}

/* Wait until all threads that share the sample are here. */
INLINE void meet(const context_t *context) {
    if (context->threads > 1)
        team_meet(context->team);
}

/* Channels of a map as planes, `stride` floats apart. */
typedef struct {
    const float *first;
    ptrdiff_t stride;
} planes_t;

/* Read pixels [begin, end) of `count` channels, at most GROUP, into memory of this thread, where pixels have their
 * places in complete planes. The image is not copied. */
planes_t read_planes(
    context_t *context, int buffer, const shape_t *shape, ptrdiff_t channel, int count, ptrdiff_t begin, ptrdiff_t end);

/* Write a plane, followed by PANEL readable floats, to a channel of a map. */
void write_plane(context_t *context, int buffer, const shape_t *shape, ptrdiff_t channel, const float *plane);

/* Number of channels from `channel` on that are read together. */
INLINE int in_group(ptrdiff_t channel, const range_t *channels) {
    return channels->end - channel < GROUP ? (int)(channels->end - channel) : GROUP;
}

/* A convolution of one sample. */
typedef struct {
    const op_t *op;
    const step_t *step;
    int n_in, n_out; /* open channels */
    int taps;
    int channels;           /* inputs at a time; the same for every number of threads, and so are the sums */
    const int32_t *open_in; /* open inputs, or NULL if all are */
    const float *residual;
    product_t product; /* over all open channels; the algorithms add the maps */
} conv_t;

/* Operations that read or write quantised maps (run_int8.c, run_int8_map.c). */
void run_int8_conv(context_t *context, const op_t *op, const step_t *step);
void run_int8_linear(context_t *context, const op_t *op);
void run_int8_pool(context_t *context, const op_t *op, const step_t *step);
void run_int8_subsample(context_t *context, const op_t *op, const step_t *step);
void run_int8_skip(context_t *context, const op_t *op, const step_t *step, const shape_t *out);
void run_quantize(context_t *context, const op_t *op, const step_t *step);
void run_dequantize(context_t *context, const op_t *op, const step_t *step);
/* Averages of channels [begin, end) of a quantised map. */
void int8_averages(context_t *context, int buffer, const shape_t *shape, int begin, int end, float *out);
/* A quantised map in float32, [channels][height][width]. */
void int8_copy_out(context_t *context, int buffer, const shape_t *shape, float *out);

/* Copy one phase of a padded plane: every stride-th pixel, starting at (y, x). */
void split_phase(
    const kernels_t *kernels, const op_t *op, const step_t *step, const float *plane, int y, int x, float *out);

void run_winograd(context_t *context, const conv_t *conv);
void run_grouped(context_t *context, const op_t *op, const step_t *step);
void run_blur(context_t *context, const op_t *op, const step_t *step);
void run_channel_conv(context_t *context, const op_t *op, const step_t *step);
void run_scale(context_t *context, const op_t *op, const step_t *step);
void run_conv(context_t *context, const op_t *op, const step_t *step);
void run_pool(context_t *context, const op_t *op, const step_t *step);
void run_adaptive_pool(context_t *context, const op_t *op, const step_t *step);
void run_concat(context_t *context, const op_t *op, const step_t *step);
void run_subsample(context_t *context, const op_t *op, const step_t *step);

#endif
