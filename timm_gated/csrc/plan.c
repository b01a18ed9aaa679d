/* Plans for one image size: shapes of all maps, algorithms of the convolutions, and memory. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

#define MAX_PIXELS ((ptrdiff_t)1 << 26) /* per map, so that offsets fit into 31 bits; also in inference/native.py */

static int greatest_common_divisor(int a, int b) { return b ? greatest_common_divisor(b, a % b) : a; }

static int out_size(int size, const op_t *op) {
    int span = size + 2 * op->padding - op->dilation * (op->kernel - 1) - 1 + (op->ceil_mode ? op->stride - 1 : 0);
    if (span < 0)
        return 0;
    int out = span / op->stride + 1;
    /* Like torch: the last window starts within the map or its left padding. */
    return op->ceil_mode && (out - 1) * op->stride >= size + op->padding ? out - 1 : out;
}

/* Split the padded input of a convolution into phases. */
static int lay_out_phases(const op_t *op, step_t *step) {
    int stride = op->stride, reach = (op->kernel - 1) * op->dilation / stride;
    step->phases = min(op->kernel, stride / greatest_common_divisor(stride, op->dilation));
    step->pitch = step->out.width + reach;
    step->phase_rows = step->out.height + reach;
    /* the last vectors of the last tap read beyond the last row */
    step->phase_plane = spread((ptrdiff_t)step->phase_rows * step->pitch + reach + PANEL);
    step->tap_offsets = malloc((size_t)op->kernel * op->kernel * sizeof *step->tap_offsets);
    if (!step->tap_offsets)
        return fail("out of memory");
    for (int y = 0; y < op->kernel; y++)
        for (int x = 0; x < op->kernel; x++) {
            int phase = y % step->phases * step->phases + x % step->phases;
            step->tap_offsets[y * op->kernel + x] = phase * step->phase_plane
                + (ptrdiff_t)(y * op->dilation / stride) * step->pitch + x * op->dilation / stride;
        }
    return 0;
}

/* The planes of a group, then rows of outputs. */
static int plan_grouped(plan_t *plan, const op_t *op, step_t *step) {
    step->algorithm = GROUPED;
    plan->max_depth = max(plan->max_depth, op->c_in);
    if (lay_out_phases(op, step))
        return -1;
    const size_t planes = times((size_t)(op->c_in / op->groups), (size_t)step->phases * step->phases);
    step->plane_floats = (ptrdiff_t)times(planes, (size_t)step->phase_plane);
    const size_t lines = times((size_t)plan->network->kernels->row_block, (size_t)grouped_line(step));
    at_least(&plan->thread_floats, times((size_t)step->plane_floats + lines, 1));
    return 0;
}

static int plan_direct(plan_t *plan, const op_t *op, step_t *step) {
    if (lay_out_phases(op, step))
        return -1;
    const size_t taps = (size_t)op->kernel * op->kernel, depth = taps > BLOCK_DEPTH ? taps : BLOCK_DEPTH;
    if (taps == 1) { /* the pixels that it reads, in panels */
        at_least(&plan->scratch_floats, times((size_t)num_panels(&step->out), (size_t)op->c_in * PANEL + PANEL));
        return 0;
    }
    const size_t planes = times((size_t)op->c_in, (size_t)step->phases * step->phases);
    at_least(&plan->scratch_floats, times(planes, (size_t)step->phase_plane));
    at_least(&plan->thread_floats, depth * PANEL); /* packed input */
    at_least(&plan->thread_floats, (size_t)plan->network->block_floats);
    return 0;
}

static int plan_conv(plan_t *plan, op_t *op, step_t *step) {
    if (op->groups > 1)
        return plan_grouped(plan, op, step);
    plan->max_depth = max(plan->max_depth, op->c_in * op->kernel * op->kernel);
    at_least(&plan->thread_floats, (size_t)op->c_in); /* values of a single pixel */
    if (op->kernel == 1 && op->stride == 1 && op->padding == 0) {
        step->algorithm = POINTWISE;
        return 0;
    }
    step->algorithm = find_tiling(plan->network->kernels, op, &step->out, &step->tiling) ? WINOGRAD : DIRECT;
    return step->algorithm == WINOGRAD ? plan_winograd(plan, op, step) : plan_direct(plan, op, step);
}

void plan_free(plan_t *plan) {
    if (!plan)
        return;
    for (int i = 0; i < plan->num_steps; i++) { /* the network may have been freed already */
        free(plan->steps[i].sources);
        free(plan->steps[i].tap_offsets);
        free(plan->steps[i].mask);
        free(plan->steps[i].pieces);
    }
    free(plan->steps);
    free(plan->buffer_floats);
    free(plan);
}

/* Shapes and gates of the maps while the operations are planned. */
typedef struct {
    shape_t *shapes;
    int *gates;
} walk_t;

/* Whether an operation reads its input in panels, not in planes that are copied from them. */
static int reads_panels(const op_t *op) {
    return op->kind == GATE || op->kind == SKIP || op->kind == CONCAT || op->kind == INT8_LINEAR
        || op->kind == CHANNEL_CONV || op->kind == SCALE
        || (op->kind == CONV && op->groups == 1 && op->kernel == 1 && op->stride == 1 && op->padding == 0);
}

static int plan_concat(plan_t *plan, walk_t *walk, const op_t *op, step_t *step) {
    shape_t *out = &step->out;
    step->sources = malloc((size_t)op->num_sources * sizeof *step->sources);
    if (!step->sources)
        return fail("out of memory");
    out->channels = 0;
    for (int i = 0; i < op->num_sources; i++) {
        const int buffer = op->sources[i];
        const shape_t *in = &walk->shapes[buffer];
        if (!in->channels || walk->gates[buffer] != -1 || in->scale > 0.f)
            return fail("buffer %d is concatenated, but it was not written, is gated or quantised", buffer);
        plan->packs_image |= buffer == 0;
        at_least(&plan->thread_floats, times((size_t)in->height, (size_t)out->width)); /* resized along rows */
        step->sources[i] = *in;
        if (in->channels > MAX_SIZE - out->channels)
            return fail("a map of more than %d channels", MAX_SIZE);
        out->channels += in->channels;
    }
    return 0;
}

/* Whether a map holds a value for each channel of another one. */
static int are_factors(const walk_t *walk, int buffer, const shape_t *map) {
    const shape_t *factors = &walk->shapes[buffer];
    return factors->channels == map->channels && num_pixels(factors) == 1 && walk->gates[buffer] == -1
        && !(factors->scale > 0.f);
}

static int plan_step(plan_t *plan, walk_t *walk, op_t *op, step_t *step) {
    const shape_t *in = &walk->shapes[op->in];
    if (!in->channels)
        return fail("buffer %d is read before it is written", op->in);
    const int pools = op->kind == POOL || op->kind == BLUR; /* under any gate */
    step->gate = pools ? walk->gates[op->in] : -1;
    if (walk->gates[op->in] != (op->kind == CONV ? op->gate_in : step->gate))
        return fail(
            "buffer %d is read under gate %d, but was written under gate %d", op->in, op->gate_in, walk->gates[op->in]);
    if (step->gate >= 0 && in->scale > 0.f)
        return fail("quantised buffer %d is pooled under a gate", op->in);
    if ((op->kind == CHANNEL_CONV && num_pixels(in) != 1) || (op->kind == SCALE && !are_factors(walk, op->factors, in)))
        return fail("factors of a map of %d channels are not a map of as many channels and one pixel", in->channels);
    if ((op->kind == CONV || op->kind == GATE || op->kind == INT8_LINEAR) && op->c_in != in->channels)
        return fail("an operation on %d channels reads a map of %d", op->c_in, in->channels);
    step->in = step->out = *in;
    plan->packs_image |= (op->in == 0 && reads_panels(op)) || op->residual == 0 || op->factors == 0;
    plan->max_hidden = max(plan->max_hidden, op->hidden);
    plan->max_channels = max(plan->max_channels, op->c_out);
    if (op->kind == GATE || op->kind == OUTPUT || op->kind == SKIP)
        return 0;

    shape_t *out = &step->out;
    if (op->kind == CONCAT) {
        if (plan_concat(plan, walk, op, step))
            return -1;
    } else {
        out->height = op->kind == ADAPTIVE_POOL ? op->kernel : out_size(in->height, op);
        out->width = op->kind == ADAPTIVE_POOL ? op->kernel : out_size(in->width, op);
        const int has_filters = op->kind == CONV || op->kind == INT8_LINEAR;
        out->channels = has_filters ? op->c_out : in->channels + op->before + op->after;
    }
    const int reflects = op->kind == BLUR ? op->padding : 0; /* pixels next to the border */
    if (out->height < 1 || out->width < 1 || reflects >= in->height || reflects >= in->width)
        return fail(
            "images of %d x %d are too small: a map is %d x %d before a kernel of %d", plan->height, plan->width,
            in->height, in->width, op->kernel);
    if (out->channels > MAX_SIZE)
        return fail("a map of %d channels, at most %d are supported", out->channels, MAX_SIZE);
    plan->max_channels = max(plan->max_channels, out->channels);
    ptrdiff_t pixels = (ptrdiff_t)out->height * out->width;
    if (pixels > MAX_PIXELS)
        return fail("images of %d x %d are too large", plan->height, plan->width);
    *out = (shape_t){
        .channels = out->channels,
        .height = out->height,
        .width = out->width,
        .panel = spread(times((size_t)out->channels, PANEL)),
    };
    if (op->kind == INT8_LINEAR && num_pixels(in) != 1)
        return fail("an int8 linear layer reads a map of %d x %d pixels", in->height, in->width);
    if (op->kind == INT8_LINEAR)
        plan->max_depth = max(plan->max_depth, op->c_in);
    const int is_int8 =
        op->kind == QUANTIZE || op->kind == DEQUANTIZE || (op->kind == CONV && op->weight8) || in->scale > 0.f;
    if (is_int8 && plan_int8(plan, op, step, op->residual >= 0 ? &walk->shapes[op->residual] : NULL))
        return -1;
    plan->plane = pixels + PANEL > plan->plane ? round_up(pixels, PANEL) + PANEL : plan->plane;
    if (op->residual >= 0) {
        const shape_t *residual = &walk->shapes[op->residual];
        if (residual->channels != out->channels || residual->height != out->height || residual->width != out->width
            || walk->gates[op->residual] != -1 || op->gate_out != -1 || (residual->scale > 0.f) != (out->scale > 0.f))
            return fail(
                "a shortcut of %d x %d x %d does not fit a map of %d x %d x %d", residual->channels, residual->height,
                residual->width, out->channels, out->height, out->width);
    }
    walk->shapes[op->out] = *out;
    walk->gates[op->out] = op->kind == CONV ? op->gate_out : step->gate;
    if (is_int8)
        return 0;
    at_least(&plan->buffer_floats[op->out], times((size_t)num_panels(out), (size_t)out->panel));
    if (op->kind == POOL) /* one row with its borders */
        at_least(
            &plan->thread_floats, (size_t)max(pooled_columns(op, out->width), in->width + op->padding) + 2 * PANEL);
    if (op->kind == BLUR) /* a padded row, and one with its sums */
        at_least(&plan->thread_floats, 2 * ((size_t)in->width + 2 * op->padding + PANEL));
    if (op->kind == ADAPTIVE_POOL)
        at_least(&plan->thread_floats, in->width);
    return op->kind == CONV ? plan_conv(plan, op, step) : 0;
}

/* Check that a skip omits convolutions only, and that the last of them adds the shortcut that the skip outputs. */
static int check_skip(const network_t *network, int index) {
    const op_t *skip = &network->ops[index];
    if (skip->count >= network->num_ops - index)
        return fail("a skip of %d operations, but only %d follow", skip->count, network->num_ops - index - 1);
    for (int i = 1; i <= skip->count; i++)
        if (skip[i].kind != CONV || skip[i].out == skip->in)
            return fail("a skipped operation is not a convolution or overwrites buffer %d", skip->in);
    const op_t *last = &skip[skip->count];
    if (last->out != skip->out || last->residual != skip->in)
        return fail(
            "a skip from buffer %d to %d, but the last convolution writes %d and adds %d", skip->in, skip->out,
            last->out, last->residual);
    return 0;
}

/* After skipped convolutions, only the last of their maps is certain to exist. */
static void forget_skipped(walk_t *walk, const op_t *skip) {
    for (int i = 1; i < skip->count; i++)
        if (skip[i].out != skip->out)
            walk->shapes[skip[i].out].channels = 0;
}

plan_t *plan_new(network_t *network, int height, int width) {
    if (height < 1 || width < 1 || height > MAX_PIXELS / width) {
        fail("invalid image size: %d x %d", height, width);
        return NULL;
    }
    plan_t *plan = calloc(1, sizeof *plan);
    walk_t walk = {
        calloc((size_t)network->num_buffers, sizeof *walk.shapes),
        calloc((size_t)network->num_buffers, sizeof *walk.gates)};
    int failed = 1;
    if (plan && walk.shapes && walk.gates) {
        plan->network = network;
        plan->height = height;
        plan->width = width;
        plan->steps = calloc((size_t)network->num_ops + 1, sizeof *plan->steps);
        plan->buffer_floats = calloc((size_t)network->num_buffers, sizeof *plan->buffer_floats);
        failed = !plan->steps || !plan->buffer_floats;
        plan->num_steps = plan->steps ? network->num_ops : 0;
    }
    if (failed) {
        fail("out of memory");
    } else {
        const ptrdiff_t panel = spread((ptrdiff_t)network->in_channels * PANEL);
        walk.shapes[0] = (shape_t){.channels = network->in_channels, .height = height, .width = width, .panel = panel};
        plan->max_channels = network->in_channels;
        for (int i = 0; i < network->num_buffers; i++)
            walk.gates[i] = -1;
        const op_t *skip = NULL;
        for (int i = 0; i < network->num_ops && !failed; i++) {
            op_t *op = &network->ops[i];
            if (op->kind == SKIP)
                skip = op;
            failed = (op == skip && check_skip(network, i) != 0) || plan_step(plan, &walk, op, &plan->steps[i]) != 0;
            if (skip && op == skip + skip->count)
                forget_skipped(&walk, skip);
        }
    }
    if (plan && plan->packs_image)
        plan->buffer_floats[0] = times((size_t)num_panels(&walk.shapes[0]), (size_t)walk.shapes[0].panel);
    free(walk.shapes);
    free(walk.gates);
    if (!failed)
        return plan;
    plan_free(plan);
    return NULL;
}

int plan_output(const plan_t *plan, int index, int size[3]) {
    for (int i = 0; i < plan->network->num_ops; i++)
        if (plan->network->ops[i].kind == OUTPUT && index-- == 0) {
            const shape_t *shape = &plan->steps[i].in;
            size[0] = shape->channels;
            size[1] = shape->height;
            size[2] = shape->width;
            return 1;
        }
    return 0;
}

const char *plan_algorithm(const plan_t *plan, int op) {
    if (op < 0 || op >= plan->num_steps || plan->network->ops[op].kind != CONV)
        return NULL;
    const step_t *step = &plan->steps[op];
    switch (step->algorithm) {
        case POINTWISE: return "pointwise";
        case DIRECT: return "direct";
        case GROUPED: return "grouped";
        default: return step->tiling.size == 4 ? "winograd 4x4" : "winograd 2x2";
    }
}
