/* Rows, borders and phases of quantised maps. */
#ifndef TIMM_GATED_RUN_INT8_H
#define TIMM_GATED_RUN_INT8_H

#include "run.h"

/* Fill what precedes and follows the rows of a plane, with the value of zero. */
void fill_margins(const shape_t *shape, uint32_t *plane);

/* Write a row of pixels and its border. */
void write_row(const shape_t *shape, uint32_t *plane, int y, const uint32_t *pixels);

/* Split a plane into the phases that the taps of an operation read; `fill` is the value beyond the map. */
void split_phases(
    const context_t *context, const op_t *op, const step_t *step, const uint32_t *plane, int fill, uint32_t *phases);

#endif
