/* Execution of single operations. Threads that share a sample call these functions together, each for its own range. */
#ifndef TIMM_GATED_RUN_H
#define TIMM_GATED_RUN_H

#include "network.h"

typedef struct {
    const plan_t *plan;
    sample_t *sample;
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

void run_conv(context_t *context, const op_t *op, const step_t *step);
void run_pool(context_t *context, const op_t *op, const step_t *step);
void run_adaptive_pool(context_t *context, const op_t *op, const step_t *step);
void run_place(context_t *context, const op_t *op, const step_t *step);
void run_subsample(context_t *context, const op_t *op, const step_t *step);

#endif
