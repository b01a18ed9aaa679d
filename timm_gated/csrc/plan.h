/* What the plans of operations share. */
#ifndef TIMM_GATED_PLAN_H
#define TIMM_GATED_PLAN_H

#include "network.h"

INLINE int max(int a, int b) { return a > b ? a : b; }
INLINE int min(int a, int b) { return a < b ? a : b; }
INLINE ptrdiff_t round_up(ptrdiff_t value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
INLINE void at_least(size_t *size, size_t floats) { *size = *size > floats ? *size : floats; }

/* Whether Winograd's algorithm is the fastest for a convolution, and its tiling then. */
int find_tiling(const kernels_t *kernels, const op_t *op, const shape_t *out, tiling_t *best);

int plan_winograd(plan_t *plan, const op_t *op, step_t *step);

/* Plan an operation that reads or writes a quantised map, whose channels and size are known (plan_int8.c). */
int plan_int8(plan_t *plan, const op_t *op, step_t *step, const shape_t *residual);

#endif
