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
    /* Weights of the open inputs for groups of filters, [slot][depth][ROW_GROUP]: a quad of filters needs at most QUAD
     * groups, and few slots stay in the cache. */
    int32_t *regrouped;
    int groups[QUAD]; /* in the slots, or -1 */
} conv8_t;

static int least(int a, int b) { return a < b ? a : b; }

static int filter(const conv8_t *conv, int row) { return conv->open_out ? conv->open_out[row] : row; }

/* Interleave the weights of the open inputs for a group of filters. */
static void regroup(const context_t *context, const conv8_t *conv, int group, int32_t *to) {
    static const int8_t zeros[ROW_GROUP];
    const op_t *op = conv->op;
    const int taps = conv->taps;
    const int8_t *weights = op->weight8 + (size_t)group * op->c_in * taps * ROW_GROUP;
    for (int c = 0; c < conv->n_in; c += QUAD) {
        const int8_t *inputs[QUAD];
        ptrdiff_t steps[QUAD];
        for (int i = 0; i < QUAD; i++) {
            const int exists = c + i < conv->n_in;
            inputs[i] = exists ? weights + (size_t)conv->open_in[c + i] * taps * ROW_GROUP : zeros;
            steps[i] = exists ? ROW_GROUP : 0;
        }
        for (int t = 0; t < taps; t++, to += ROW_GROUP) {
            context->plan->network->int8->regroup(inputs, to);
            for (int i = 0; i < QUAD; i++)
                inputs[i] += steps[i];
        }
    }
}

/* The weights of a group of filters, in a slot: that of the lowest group, if no slot has it. */
static const int32_t *find_group(const context_t *context, conv8_t *conv, int group) {
    const size_t slot_size = (size_t)conv->product.depth * ROW_GROUP;
    int slot = 0;
    for (int i = 0; i < QUAD; i++) {
        if (conv->groups[i] == group)
            return conv->regrouped + i * slot_size;
        if (conv->groups[i] < conv->groups[slot])
            slot = i;
    }
    conv->groups[slot] = group;
    regroup(context, conv, group, conv->regrouped + slot * slot_size);
    return conv->regrouped + slot * slot_size;
}

/* Compute some filters at some groups of positions. */
static void run_rows(const context_t *context, const conv8_t *conv, int begin, int end, const range_t *groups) {
    const step_t *step = conv->step;
    const int8_kernels_t *kernels = context->plan->network->int8;
    product8_t product = conv->product;
    if (!step->by_rows) {
        /* As many positions at a time as fit into the cache. */
        const ptrdiff_t fit = context->plan->network->block_floats / (num_quads(conv->n_in) * POSITIONS + 1);
        const int most = step->is_split ? SPLIT_CHUNK : fit < 4 ? 4 : (int)(fit < 1 << 20 ? fit : 1 << 20);
        const int chunk = even_part((int)(groups->end - groups->begin), most);
        const int part = step->is_split ? even_part(product.depth, SPLIT_DEPTH) : product.depth;
        for (int group = (int)groups->begin; group < groups->end; group += chunk) {
            const ptrdiff_t at = (ptrdiff_t)group * POSITIONS;
            const int count = groups->end - group < chunk ? (int)groups->end - group : chunk;
            product.x = conv->product.x + at;
            product.out = conv->product.out + at;
            product.residual = conv->product.residual ? conv->product.residual + at : NULL;
            product.mask = step->mask + at;
            product.first = 0;
            do { /* at least once: without inputs, outputs are biases */
                product.depth = least(product.first + part, conv->product.depth);
                product.is_last = product.depth == conv->product.depth;
                kernels->product(&product, begin, end, count);
                product.first += part;
            } while (!product.is_last);
            product.ahead = NULL;
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

/* Weights of filters [begin, end). */
static void find_rows(const context_t *context, conv8_t *conv, const int32_t **rows, int begin, int end) {
    for (int m = begin; m < end; m++) {
        const int k = filter(conv, m < conv->n_out ? m : conv->n_out - 1); /* a quad may have less than four filters */
        rows[m] = conv->open_in
            ? find_group(context, conv, k / ROW_GROUP) + k % ROW_GROUP
            : (const int32_t *)(const void *)(conv->op->weight8 + (size_t)k * conv->product.depth * QUAD);
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

/* Lines of the weights of the open inputs, within those of a group of filters. */
static void find_lines(const conv8_t *conv, int32_t *lines) {
    for (int i = 0; i < QUAD; i++)
        for (int c = i; c < num_quads(conv->n_in) * QUAD; c += QUAD)
            for (int t = 0; t < conv->taps; t++)
                *lines++ = conv->open_in[least(c, conv->n_in - 1)] * conv->taps + t;
}

/* Offsets of the inputs: quads, and within them taps. */
static void find_offsets(const conv8_t *conv, ptrdiff_t *offsets) {
    const step_t *step = conv->step;
    const ptrdiff_t stride = conv->op->stride > 1 ? step->phases * step->phases * step->phase_plane : step->in.plane;
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
        .groups = {-1, -1, -1, -1},
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
        .zero = op->zero,
        .relu = op->relu,
        .sums = (int32_t *)own->scratch,
        .sums_row = SPLIT_CHUNK * POSITIONS,
        .is_last = 1,
    };
    const share_t share_of = share(context, num_rows, step->by_rows ? out->height : num_groups(out));
    const int32_t **rows = (const int32_t **)own->rows;
    const int begin = (int)share_of.rows.begin, end = (int)share_of.rows.end;
    if (begin == end || share_of.groups.begin == share_of.groups.end)
        return;
    if (conv.open_in) {
        find_lines(&conv, own->lines);
        conv.product.lines = own->lines;
    }
    for (int m = begin, next; m < end; m = next) {
        next = end;
        if (conv.open_in) { /* the next quad, and all further ones of the same groups */
            const int last = filter(&conv, least(m + QUAD, conv.n_out) - 1) / ROW_GROUP;
            for (next = m + QUAD; next < end && filter(&conv, least(next + QUAD, conv.n_out) - 1) / ROW_GROUP <= last;)
                next += QUAD;
        }
        find_rows(context, &conv, rows, m, next);
        conv.product.ahead = NULL;
        if (next < end && conv.open_in)
            conv.product.ahead = op->weight8
                + (size_t)(filter(&conv, least(next + QUAD, conv.n_out) - 1) / ROW_GROUP) * op->c_in * conv.taps
                    * ROW_GROUP;
        run_rows(context, &conv, m, next, &share_of.groups);
    }
}
