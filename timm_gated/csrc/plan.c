/* Plans for one image size: shapes of all maps, algorithms of the convolutions, and memory. */
#include <stdlib.h>
#include <string.h>

#include "network.h"

#define MAX_WINOGRAD_DILATION 64 /* limits the number of phases */
#define MAX_OFFSET (1 << 30)     /* in the padded planes of the phases, so that offsets fit into 31 bits */
#define MAX_PIXELS \
    ((ptrdiff_t)1 << 26) /* per map, so that padded offsets fit into 31 bits; also in inference/native.py */
/* Floats of transformed maps, all channels counted, that Winograd's algorithm works on at a time: larger
 * blocks read the weights less often. */
#ifndef WINOGRAD_FLOATS
#define WINOGRAD_FLOATS (1 << 19)
#endif

static int max(int a, int b) { return a > b ? a : b; }
static int min(int a, int b) { return a < b ? a : b; }
static ptrdiff_t round_up(ptrdiff_t value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
static void at_least(size_t *size, size_t floats) { *size = *size > floats ? *size : floats; }
static int greatest_common_divisor(int a, int b) { return b ? greatest_common_divisor(b, a % b) : a; }

static int out_size(int size, const op_t *op) {
    int span = size + 2 * op->padding - op->dilation * (op->kernel - 1) - 1 + (op->ceil_mode ? op->stride - 1 : 0);
    if (span < 0)
        return 0;
    int out = span / op->stride + 1;
    /* Like torch: the last window starts within the map or its left padding. */
    return op->ceil_mode && (out - 1) * op->stride >= size + op->padding ? out - 1 : out;
}

/* A convolution of dilation d is d * d plain ones on the phases of a map: every d-th row and column from (y, x) on. The
 * tiles of the phases follow one another, and so do their padded planes. */
static void tile(const kernels_t *kernels, int size, int dilation, const shape_t *map, tiling_t *tiling) {
    int per_row = divide_up(divide_up(map->width, dilation), kernels->piece_pixels);
    int pieces = 0;
    for (int y = 0; y < dilation && y < map->height; y++)
        for (int x = 0; x < dilation && x < map->width; x++)
            pieces += divide_up(divide_up(map->height - y, dilation), size)
                * divide_up(divide_up(map->width - x, dilation), kernels->piece_pixels);
    tiling->size = size;
    tiling->points = (size + 2) * (size + 2);
    tiling->pitch = per_row * kernels->piece_pixels + 4; /* input tiles overlap */
    tiling->phase_rows = (int)round_up(divide_up(map->height, dilation), size) + 2;
    tiling->out_pitch = per_row * kernels->piece_pixels;
    tiling->out_rows = dilation * dilation * (tiling->phase_rows - 2);
    tiling->pieces_per_vector = size * kernels->lanes / kernels->piece_pixels;
    tiling->vectors = divide_up(pieces, tiling->pieces_per_vector);
}

static piece_t *cut(const kernels_t *kernels, const tiling_t *tiling, int dilation, const shape_t *map) {
    int count = tiling->vectors * tiling->pieces_per_vector;
    piece_t *pieces = calloc((size_t)count, sizeof *pieces);
    if (!pieces)
        return NULL;
    int i = 0;
    for (int phase = 0; phase < dilation * dilation; phase++) {
        int first_y = phase / dilation, first_x = phase % dilation;
        int height = divide_up(max(0, map->height - first_y), dilation);
        int width = divide_up(max(0, map->width - first_x), dilation);
        for (int y = 0; y < height; y += tiling->size)
            for (int x = 0; x < width; x += kernels->piece_pixels)
                pieces[i++] = (piece_t){
                    .in = (phase * tiling->phase_rows + y) * tiling->pitch + x,
                    .out = (phase * (tiling->phase_rows - 2) + y) * tiling->out_pitch + x,
                    .pixel = (y * dilation + first_y) * map->width + x * dilation + first_x,
                    .rows = min(tiling->size, height - y),
                    .columns = min(kernels->piece_pixels, width - x),
                };
    }
    for (; i < count; i++) /* unused: read the first tile, no rows */
        pieces[i].out = tiling->out_rows * tiling->out_pitch;
    return pieces;
}

/* Transform the weights for Winograd: G w G^T per filter and input. */
static int transform_weights(network_t *network, op_t *op, int size) {
    static const double g4[6][3] = {
        {1. / 4, 0, 0},
        {-1. / 6, -1. / 6, -1. / 6},
        {-1. / 6, 1. / 6, -1. / 6},
        {1. / 24, 1. / 12, 1. / 6},
        {1. / 24, -1. / 12, 1. / 6},
        {0, 0, 1}};
    static const double g2[4][3] = {{1, 0, 0}, {.5, .5, .5}, {.5, -.5, .5}, {0, 0, 1}};
    const double (*g)[3] = size == 4 ? g4 : g2;
    float **out = &op->transformed[size == 2];
    if (*out)
        return 0;
    int side = size + 2;
    packing_t from = packing(op, 9), to = winograd_packing(op, side * side);
    size_t bytes = (size_t)to.floats * sizeof **out;
    *out = allocate(bytes);
    if (!*out)
        return fail("out of memory: %zu bytes for transformed weights", bytes);
    network->transformed_bytes += bytes;
    for (int k = 0; k < op->c_out; k++)
        for (int c = 0; c < op->c_in; c++) {
            const float *w = op->weight + row_offset(&from, k) + c * from.column;
            double half[6][3];
            for (int i = 0; i < side; i++)
                for (int x = 0; x < 3; x++)
                    half[i][x] =
                        g[i][0] * w[x * from.tap] + g[i][1] * w[(3 + x) * from.tap] + g[i][2] * w[(6 + x) * from.tap];
            float *u = *out + row_offset(&to, k) + c * to.column;
            for (int i = 0; i < side; i++)
                for (int j = 0; j < side; j++)
                    u[(i * side + j) * to.point] =
                        (float)(g[j][0] * half[i][0] + g[j][1] * half[i][1] + g[j][2] * half[i][2]);
        }
    return 0;
}

static int plan_direct(plan_t *plan, const op_t *op, step_t *step) {
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
    size_t taps = (size_t)op->kernel * op->kernel, block = (size_t)plan->network->block_floats;
    if (taps == 1) { /* the pixels that it reads, in panels */
        at_least(&plan->scratch_floats, times((size_t)num_panels(&step->out), (size_t)op->c_in * PANEL + PANEL));
        return 0;
    }
    const size_t planes = times((size_t)op->c_in, (size_t)step->phases * step->phases);
    at_least(&plan->scratch_floats, times(planes, (size_t)step->phase_plane));
    at_least(&plan->thread_floats, taps * PANEL > block ? taps * PANEL : block); /* packed input */
    return 0;
}

static int plan_winograd(plan_t *plan, op_t *op, step_t *step, int size) {
    const kernels_t *kernels = plan->network->kernels;
    tiling_t *tiling = &step->tiling;
    tile(kernels, size, op->dilation, &step->out, tiling);
    step->pieces = cut(kernels, tiling, op->dilation, &step->out);
    if (!step->pieces)
        return fail("out of memory");
    tiling->pieces = step->pieces;
    const int panel = tiling->points * PANEL * (op->c_in + op->c_out);
    step->block = even_part(divide_up(tiling->vectors * kernels->lanes, PANEL), max(1, WINOGRAD_FLOATS / panel));
    step->v_point = point_floats(op->c_in, step->block);
    step->m_point = point_floats(op->c_out, step->block);
    /* for two threads; more of them work on smaller blocks */
    at_least(&plan->scratch_floats, times(2 * (size_t)tiling->points, (size_t)(step->v_point + step->m_point)));
    /* padded input, then output, both of all phases */
    size_t phases = (size_t)op->dilation * op->dilation;
    at_least(&plan->thread_floats, times(times(phases, tiling->phase_rows), tiling->pitch) + PANEL);
    at_least(&plan->thread_floats, times((size_t)tiling->out_rows + size, (size_t)tiling->out_pitch) + PANEL);
    return transform_weights(plan->network, op, size);
}

/* Select the cheapest algorithm: multiplications per weight, padding included, plus the cost of loading the weight.
 * Returns a tile size, or 0 for direct convolution.
 *
 * The constants were fitted to the times of all 3 x 3 convolutions of ResNet-34 and 50 at 224 x 224 by all algorithms,
 * on Zen 4 with AVX2 and AVX-512: the cheapest one is the fastest one. If inputs and outputs are gated, a part of each
 * loaded cache line is not used. */
static int best_tile_size(const kernels_t *kernels, const op_t *op, const shape_t *out) {
    if (op->kernel != 3 || op->stride != 1 || op->padding != op->dilation || op->dilation > MAX_WINOGRAD_DILATION)
        return 0;
    const double fetch = op->gate_in >= 0 && op->gate_out >= 0 ? 36 : 20, transforms = 1.25;
    double least = 9 * (round_up((ptrdiff_t)out->height * out->width, kernels->lanes) + fetch);
    int best = 0;
    for (int size = 4; size >= 2; size -= 2) {
        tiling_t tiling;
        tile(kernels, size, op->dilation, out, &tiling);
        double cost = tiling.points * (transforms * tiling.vectors * kernels->lanes + fetch);
        double padded = (double)op->dilation * op->dilation * tiling.phase_rows * tiling.pitch;
        if (cost < least && padded < MAX_OFFSET) {
            least = cost;
            best = size;
        }
    }
    return best;
}

static int plan_conv(plan_t *plan, op_t *op, step_t *step) {
    plan->max_depth = max(plan->max_depth, op->c_in * op->kernel * op->kernel);
    at_least(&plan->thread_floats, (size_t)op->c_in); /* values of a single pixel */
    if (op->kernel == 1 && op->stride == 1 && op->padding == 0) {
        step->algorithm = POINTWISE;
        return 0;
    }
    int size = best_tile_size(plan->network->kernels, op, &step->out);
    step->algorithm = size ? WINOGRAD : DIRECT;
    return size ? plan_winograd(plan, op, step, size) : plan_direct(plan, op, step);
}

API void tg_plan_free(plan_t *plan) {
    if (!plan)
        return;
    for (int i = 0; i < plan->num_steps; i++) { /* the network may have been freed already */
        free(plan->steps[i].tap_offsets);
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
    return op->kind == GATE || op->kind == SKIP || op->kind == PLACE
        || (op->kind == CONV && op->kernel == 1 && op->stride == 1 && op->padding == 0);
}

static int plan_step(plan_t *plan, walk_t *walk, op_t *op, step_t *step) {
    const shape_t *in = &walk->shapes[op->in];
    if (!in->channels)
        return fail("buffer %d is read before it is written", op->in);
    if (walk->gates[op->in] != (op->kind == CONV ? op->gate_in : -1))
        return fail(
            "buffer %d is read under gate %d, but was written under gate %d", op->in, op->gate_in, walk->gates[op->in]);
    if ((op->kind == CONV || op->kind == GATE) && op->c_in != in->channels)
        return fail("an operation on %d channels reads a map of %d", op->c_in, in->channels);
    step->in = step->out = *in;
    plan->packs_image |= (op->in == 0 && reads_panels(op)) || op->residual == 0;
    plan->max_hidden = max(plan->max_hidden, op->hidden);
    plan->max_channels = max(plan->max_channels, op->c_out);
    if (op->kind == GATE || op->kind == OUTPUT || op->kind == SKIP)
        return 0;

    shape_t *out = &step->out;
    if (op->kind == PLACE) {
        const shape_t *like = &walk->shapes[op->like];
        if (!like->channels || op->before > op->c_out - in->channels)
            return fail(
                "a map of %d channels does not fit into %d from channel %d on, or has no size", in->channels, op->c_out,
                op->before);
        out->height = like->height;
        out->width = like->width;
        out->channels = op->c_out;
    } else {
        out->height = op->kind == ADAPTIVE_POOL ? op->kernel : out_size(in->height, op);
        out->width = op->kind == ADAPTIVE_POOL ? op->kernel : out_size(in->width, op);
        out->channels = op->kind == CONV ? op->c_out : in->channels + op->before + op->after;
    }
    if (out->height < 1 || out->width < 1)
        return fail(
            "images of %d x %d are too small: a map is %d x %d before a kernel of %d", plan->height, plan->width,
            in->height, in->width, op->kernel);
    if (out->channels > MAX_SIZE)
        return fail("a map of %d channels, at most %d are supported", out->channels, MAX_SIZE);
    plan->max_channels = max(plan->max_channels, out->channels);
    ptrdiff_t pixels = (ptrdiff_t)out->height * out->width;
    if (pixels > MAX_PIXELS)
        return fail("images of %d x %d are too large", plan->height, plan->width);
    out->panel = spread(times((size_t)out->channels, PANEL));
    plan->plane = pixels + PANEL > plan->plane ? round_up(pixels, PANEL) + PANEL : plan->plane;
    if (op->residual >= 0) {
        const shape_t *residual = &walk->shapes[op->residual];
        if (residual->channels != out->channels || residual->height != out->height || residual->width != out->width
            || walk->gates[op->residual] != -1 || op->gate_out != -1)
            return fail(
                "a shortcut of %d x %d x %d does not fit a map of %d x %d x %d", residual->channels, residual->height,
                residual->width, out->channels, out->height, out->width);
    }
    walk->shapes[op->out] = *out;
    walk->gates[op->out] = op->kind == CONV ? op->gate_out : -1;
    at_least(&plan->buffer_floats[op->out], times((size_t)num_panels(out), (size_t)out->panel));
    if (op->kind == MAX_POOL || op->kind == AVG_POOL) /* one row with its borders */
        at_least(
            &plan->thread_floats, (size_t)max(pooled_columns(op, out->width), in->width + op->padding) + 2 * PANEL);
    if (op->kind == ADAPTIVE_POOL)
        at_least(&plan->thread_floats, in->width);
    if (op->kind == PLACE) /* the rows of a map, resized along them */
        at_least(&plan->thread_floats, times((size_t)in->height, (size_t)out->width));
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

/* Create a plan for one image size. Not thread-safe for the same network. */
API plan_t *tg_plan_new(network_t *network, int height, int width) {
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
        walk.shapes[0] = (shape_t){network->in_channels, height, width, panel};
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
    tg_plan_free(plan);
    return NULL;
}

/* Get channels, height and width of the index-th output; returns 0 after the last. */
API int tg_plan_output(const plan_t *plan, int index, int size[3]) {
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

/* Name of the algorithm of an operation, or NULL if the operation is not a convolution. */
API const char *tg_plan_algorithm(const plan_t *plan, int op) {
    if (op < 0 || op >= plan->num_steps || plan->network->ops[op].kind != CONV)
        return NULL;
    const step_t *step = &plan->steps[op];
    switch (step->algorithm) {
        case POINTWISE: return "pointwise";
        case DIRECT: return "direct";
        default: return step->tiling.size == 4 ? "winograd 4x4" : "winograd 2x2";
    }
}
