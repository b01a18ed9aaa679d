/* Convolutions of quantised maps. */
#include <string.h>

#include "run_int8.h"

/* What a thread computes: filters, a multiple of QUAD of them, or positions, in groups. */
typedef struct {
    range_t rows, groups;
} share_t;

/* Threads split large maps by positions, and small ones, where weights dominate, by filters. */
static share_t share(const context_t *context, int num_rows, int groups) {
    share_t share = {{0, num_rows}, {0, groups}};
    if (groups >= 12 * context->threads)
        share.groups = part(context, groups);
    else {
        share.rows = part(context, num_quads(num_rows));
        share.rows.begin *= QUAD;
        share.rows.end *= QUAD;
    }
    return share;
}

/* A convolution of one sample. */
typedef struct {
    const op_t *op;
    const step_t *step;
    int n_in, n_out, taps;   /* open channels */
    const int32_t *open_in;  /* NULL: all */
    const int32_t *open_out; /* NULL: all */
    product8_t product;      /* of the first position */
    uint32_t *line;          /* a row of outputs, if the input has another pitch */
    int32_t *regrouped;      /* weights of the open inputs, [group][depth][ROW_GROUP] */
    int next_group;          /* that is not regrouped yet */
} conv8_t;

static int filter(const conv8_t *conv, int row) { return conv->open_out ? conv->open_out[row] : row; }

/* Interleave the weights of the open inputs for a group of filters. */
static void regroup(const context_t *context, const conv8_t *conv, int group) {
    static const int8_t zeros[ROW_GROUP];
    const op_t *op = conv->op;
    const int8_t *weights = op->weight8 + (size_t)group * op->c_in * conv->taps * ROW_GROUP;
    int32_t *to = conv->regrouped + (size_t)group * conv->product.depth * ROW_GROUP;
    for (int c = 0; c < conv->n_in; c += QUAD) {
        const int8_t *inputs[QUAD];
        ptrdiff_t steps[QUAD];
        for (int i = 0; i < QUAD; i++) {
            const int exists = c + i < conv->n_in;
            inputs[i] = exists ? weights + (size_t)conv->open_in[c + i] * conv->taps * ROW_GROUP : zeros;
            steps[i] = exists ? ROW_GROUP : 0;
        }
        for (int i = 0; i < QUAD && c + QUAD + i < conv->n_in; i++) /* the next ones */
            for (int t = 0; t < conv->taps; t++)
                __builtin_prefetch(
                    weights + ((size_t)conv->open_in[c + QUAD + i] * conv->taps + (size_t)t) * ROW_GROUP);
        for (int t = 0; t < conv->taps; t++, to += ROW_GROUP) {
            context->plan->network->int8->regroup(inputs, to);
            for (int i = 0; i < QUAD; i++)
                inputs[i] += steps[i];
        }
    }
}

/* Compute some filters at some groups of positions. */
static void run_rows(const context_t *context, const conv8_t *conv, int begin, int end, const range_t *groups) {
    const step_t *step = conv->step;
    const int8_kernels_t *kernels = context->plan->network->int8;
    product8_t product = conv->product;
    if (!step->by_rows) {
        /* As many positions at a time as fit into the cache. */
        const ptrdiff_t fit = context->plan->network->block_floats / (num_quads(conv->n_in) * POSITIONS + 1);
        const int chunk = even_part((int)(groups->end - groups->begin), fit < 4 ? 4 : (int)(fit < 1 << 20 ? fit : 1 << 20));
        for (int group = (int)groups->begin; group < groups->end; group += chunk) {
            const ptrdiff_t at = (ptrdiff_t)group * POSITIONS;
            const int count = groups->end - group < chunk ? (int)groups->end - group : chunk;
            product.x = conv->product.x + at;
            product.out = conv->product.out + at;
            product.residual = conv->product.residual ? conv->product.residual + at : NULL;
            product.mask = step->mask + at;
            kernels->product(&product, begin, end, count);
        }
        return;
    }
    const shape_t *out = &step->out;
    const int count = divide_up(out->width, POSITIONS);
    product.out = conv->line;
    product.out_plane = (ptrdiff_t)count * POSITIONS;
    for (int y = (int)groups->begin; y < groups->end; y++) {
        product.x = conv->product.x + (ptrdiff_t)y * step->pitch;
        kernels->product(&product, begin, end, count);
        for (int quad = begin / QUAD; quad < num_quads(end); quad++)
            write_row(
                out, conv->product.out - out->origin + quad * out->plane, y, conv->line + quad * product.out_plane);
    }
}

/* Weights of filters [begin, end): with gated inputs, those of the groups of filters that are regrouped so far. */
static void find_rows(const conv8_t *conv, const int32_t **rows, int begin, int end) {
    const size_t depth = (size_t)conv->product.depth;
    for (int m = begin; m < end; m++) {
        const int k = filter(conv, m < conv->n_out ? m : conv->n_out - 1); /* a quad may have less than four filters */
        rows[m] = conv->open_in
            ? conv->regrouped + (size_t)(k / ROW_GROUP) * depth * ROW_GROUP + k % ROW_GROUP
            : (const int32_t *)(const void *)(conv->op->weight8 + (size_t)k * depth * QUAD);
    }
}

static void find_parameters(thread_t *own, const conv8_t *conv, int num_rows) {
    const op_t *op = conv->op;
    for (int m = 0; m < num_rows; m++) {
        const int exists = m < conv->n_out, k = filter(conv, exists ? m : 0);
        own->bias8[m] = exists ? op->bias8[k] : 0;
        own->multiplier[m] = exists ? op->multiplier[k] : 0.f;
        own->ratio[m] = exists && op->ratio ? op->ratio[k] : 0.f;
    }
}

/* Offsets of the inputs: quads, and within them taps. */
static void find_offsets(const conv8_t *conv, ptrdiff_t *offsets) {
    const step_t *step = conv->step;
    const ptrdiff_t stride =
        conv->op->stride > 1 ? step->phases * step->phases * step->phase_plane : step->in.plane;
    for (int quad = 0; quad < num_quads(conv->n_in); quad++)
        for (int t = 0; t < conv->taps; t++)
            *offsets++ = quad * stride + step->tap_offsets[t];
}

void run_int8_conv(context_t *context, const op_t *op, const step_t *step) {
    sample_t *sample = context->sample;
    thread_t *own = context->own;
    const shape_t *in = &step->in, *out = &step->out;
    conv8_t conv = {
        .op = op,
        .step = step,
        .n_in = op->gate_in >= 0 ? sample->num_open[op->gate_in] : op->c_in,
        .n_out = op->gate_out >= 0 ? sample->num_open[op->gate_out] : op->c_out,
        .taps = op->kernel * op->kernel,
        .open_in = op->gate_in >= 0 ? sample->open[op->gate_in] : NULL,
        .open_out = op->gate_out >= 0 ? sample->open[op->gate_out] : NULL,
        .line = (uint32_t *)own->scratch,
        .regrouped = (int32_t *)own->scratch + step->plane_floats,
    };
    const uint32_t *from = (const uint32_t *)sample->buffers[op->in];
    uint32_t *to = (uint32_t *)sample->buffers[op->out];
    const int num_rows = num_quads(conv.n_out) * QUAD;
    if (!num_rows)
        return;
    range_t quads = part(context, num_quads(conv.n_out));
    for (ptrdiff_t quad = quads.begin; quad < quads.end; quad++)
        fill_margins(out, to + quad * out->plane);
    if (op->stride > 1) {
        uint32_t *phases = (uint32_t *)sample->scratch;
        const ptrdiff_t stride = step->phases * step->phases * step->phase_plane;
        quads = part(context, num_quads(conv.n_in));
        for (ptrdiff_t quad = quads.begin; quad < quads.end; quad++)
            split_phases(context, op, step, from + quad * in->plane, in->zero, phases + quad * stride);
        meet(context);
        from = phases;
    } else
        from += in->origin;
    find_parameters(own, &conv, num_rows);
    find_offsets(&conv, own->columns);
    conv.product = (product8_t){
        .rows = (const int32_t *const *)own->rows,
        .step = conv.open_in ? ROW_GROUP : 1,
        .offsets = own->columns,
        .depth = num_quads(conv.n_in) * conv.taps,
        .x = from,
        .out = to + out->origin,
        .out_plane = out->plane,
        .bias = own->bias8,
        .multiplier = own->multiplier,
        .ratio = own->ratio,
        .residual = op->residual >= 0 ? (const uint32_t *)sample->buffers[op->residual] + out->origin : NULL,
        .residual_plane = out->plane,
        .residual_zero = op->residual >= 0 ? step->residual_zero : 0,
        .zero = op->zero,
        .relu = op->relu,
    };
    const share_t share_of = share(context, num_rows, step->by_rows ? out->height : num_groups(out));
    const int32_t **rows = (const int32_t **)own->rows;
    const int begin = (int)share_of.rows.begin, end = (int)share_of.rows.end;
    if (begin == end || share_of.groups.begin == share_of.groups.end)
        return;
    if (!conv.open_in) {
        find_rows(&conv, rows, begin, end);
        run_rows(context, &conv, begin, end, &share_of.groups);
        return;
    }
    conv.next_group = filter(&conv, begin) / ROW_GROUP;
    for (int m = begin, next; m < end; m = next) {
        /* The groups of the next quad, then all further quads of these groups. */
        next = m + QUAD;
        const int last = next < conv.n_out ? next : conv.n_out, group = filter(&conv, last - 1) / ROW_GROUP;
        for (; conv.next_group <= group; conv.next_group++)
            regroup(context, &conv, conv.next_group);
        while (next < end && filter(&conv, (next + QUAD < conv.n_out ? next + QUAD : conv.n_out) - 1) / ROW_GROUP <= group)
            next += QUAD;
        find_rows(&conv, rows, m, next);
        run_rows(context, &conv, m, next, &share_of.groups);
    }
}
