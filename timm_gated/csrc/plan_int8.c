/* Plans of operations on quantised maps. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

#define MAX_POSITIONS (1 << 30) /* of a map with its border, so that they fit into 31 bits */

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }
static ptrdiff_t to_groups(ptrdiff_t count) { return (count + POSITIONS - 1) / POSITIONS * POSITIONS; }

/* Places of the rows and of the border of a map. Taps read up to `border` rows and pixels beyond, in whole groups. */
static int lay_out_map(const plan_t *plan, shape_t *shape, float scale, int zero) {
    const ptrdiff_t border = plan->network->border;
    shape->scale = scale;
    shape->zero = zero;
    shape->pitch = shape->width + plan->network->border;
    if (shape->height > MAX_POSITIONS / shape->pitch)
        return fail("images of %d x %d are too large for a border of %d", plan->height, plan->width, (int)border);
    const ptrdiff_t margin = border * shape->pitch + border;
    shape->origin = to_groups(margin);
    shape->plane = odd_lines(shape->origin + to_groups((ptrdiff_t)shape->height * shape->pitch) + margin + POSITIONS);
    return 0;
}

static int make_mask(const shape_t *out, step_t *step) {
    const size_t positions = (size_t)num_groups(out) * POSITIONS;
    step->mask = calloc(positions, sizeof *step->mask);
    if (!step->mask)
        return fail("out of memory");
    for (int y = 0; y < out->height; y++)
        memset(step->mask + (ptrdiff_t)y * out->pitch, 255, (size_t)out->width * sizeof *step->mask);
    return 0;
}

/* The input of a strided convolution or pooling is split into phases: every stride-th pixel of every stride-th row. */
static void plan_phases(plan_t *plan, const op_t *op, step_t *step, int quads) {
    const int reach = (op->kernel - 1) * op->dilation / op->stride;
    step->phases = op->kernel < op->stride ? op->kernel : op->stride;
    step->by_rows = op->kind == POOL || reach > plan->network->border;
    step->pitch = step->by_rows ? step->out.width + reach : step->out.pitch;
    step->phase_rows = step->out.height + reach;
    step->phase_plane = odd_lines((ptrdiff_t)(step->phase_rows + 1) * step->pitch + reach + 2 * POSITIONS);
    const size_t planes = times((size_t)quads, (size_t)step->phases * step->phases);
    size_t *floats = op->kind == POOL ? &plan->thread_floats : &plan->scratch_floats;
    *floats = larger(*floats, times(planes, (size_t)step->phase_plane));
    if (step->by_rows && op->kind == CONV) /* a row of all filters */
        step->plane_floats = to_groups(step->out.width) * num_quads(op->c_out);
}

static int plan_taps(const op_t *op, step_t *step) {
    const int side = op->kernel, strided = op->stride > 1 || op->kind == POOL;
    step->tap_offsets = malloc((size_t)side * side * sizeof *step->tap_offsets);
    if (!step->tap_offsets)
        return fail("out of memory");
    for (int y = 0; y < side; y++)
        for (int x = 0; x < side; x++) {
            const int down = y * op->dilation, right = x * op->dilation;
            const int phase = down % op->stride * step->phases + right % op->stride;
            step->tap_offsets[y * side + x] = strided
                ? phase * step->phase_plane + (ptrdiff_t)(down / op->stride) * step->pitch + right / op->stride
                : (ptrdiff_t)(down - op->padding) * step->in.pitch + right - op->padding;
        }
    return 0;
}

static int plan_conv(plan_t *plan, const op_t *op, step_t *step, const shape_t *residual) {
    const shape_t *in = &step->in;
    const size_t taps = (size_t)op->kernel * op->kernel, depth = taps * num_quads(op->c_in);
    if (!(in->scale > 0.f) || (op->gate_in >= 0 && in->zero) || (residual && !(residual->scale > 0.f)))
        return fail("an int8 convolution reads a map that is not quantised, or is gated with a zero of %d", in->zero);
    if (op->stride == 1 && (step->out.height != in->height || step->out.width != in->width))
        return fail("an int8 convolution of stride 1 changes the size of its map");
    if (op->stride > 1 && op->dilation > 1)
        return fail("an int8 convolution of stride %d and dilation %d", op->stride, op->dilation);
    if (lay_out_map(plan, &step->out, op->scale, op->zero))
        return -1;
    if (op->stride > 1)
        plan_phases(plan, op, step, num_quads(op->c_in));
    if (plan->max_depth < op->c_in * op->kernel * op->kernel)
        plan->max_depth = op->c_in * op->kernel * op->kernel;
    if (op->gate_in >= 0 && plan->max_lines < (int)depth * QUAD)
        plan->max_lines = (int)depth * QUAD;
    step->algorithm = op->kernel == 1 && op->stride == 1 ? POINTWISE : DIRECT;
    step->is_split = depth > SPLIT_DEPTH && op->gate_in < 0 && !step->by_rows;
    const size_t regrouped = op->gate_in >= 0 ? times(depth, QUAD * ROW_GROUP) : 0;
    const size_t sums = step->is_split ? (size_t)num_quads(op->c_out) * QUAD * SPLIT_CHUNK * POSITIONS : 0;
    plan->thread_floats = larger(plan->thread_floats, (size_t)step->plane_floats + regrouped + sums);
    return plan_taps(op, step) || make_mask(&step->out, step) ? -1 : 0;
}

int plan_int8(plan_t *plan, const op_t *op, step_t *step, const shape_t *residual) {
    const shape_t *in = &step->in;
    shape_t *out = &step->out;
    const int is_quantised = in->scale > 0.f;
    size_t floats;
    switch (op->kind) {
        case CONV:
            if (!op->weight8)
                return fail("a float32 convolution reads a quantised map");
            if (plan_conv(plan, op, step, residual))
                return -1;
            break;
        case QUANTIZE:
            if (is_quantised)
                return fail("a quantised map is quantised again");
            if (lay_out_map(plan, out, op->scale, op->zero))
                return -1;
            break;
        case DEQUANTIZE:
            if (!is_quantised)
                return fail("a map is dequantised that is not quantised");
            break;
        case POOL:
            if (op->average)
                return fail("a quantised map is pooled to averages");
            if (lay_out_map(plan, out, in->scale, in->zero))
                return -1;
            plan_phases(plan, op, step, 1);
            if (plan_taps(op, step))
                return -1;
            break;
        case SUBSAMPLE:
            if (op->before % QUAD || in->channels % QUAD)
                return fail("%d channels are subsampled after %d zeros", in->channels, op->before);
            if (lay_out_map(plan, out, in->scale, in->zero))
                return -1;
            break;
        case ADAPTIVE_POOL:
            if (op->kernel != 1)
                return fail("a quantised map is pooled to %d x %d", op->kernel, op->kernel);
            break;
        default: return fail("an operation of kind %d reads a quantised map", (int)op->kind);
    }
    floats = out->scale > 0.f ? times((size_t)num_quads(out->channels), (size_t)out->plane)
                              : times((size_t)num_panels(out), (size_t)out->panel);
    plan->buffer_floats[op->out] = larger(plan->buffer_floats[op->out], floats);
    return 0;
}
