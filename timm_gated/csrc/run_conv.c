/* Convolutions as products on panels: 1 x 1 directly, others on packed taps. Winograd's algorithm is in run_winograd.c.
 * */
#include <string.h>

#include "run.h"

static conv_t prepare(context_t *context, const op_t *op, const step_t *step, algorithm_t algorithm) {
    sample_t *sample = context->sample;
    thread_t *own = context->own;
    conv_t conv = {
        .op = op,
        .step = step,
        .n_in = op->gate_in >= 0 ? sample->num_open[op->gate_in] : op->c_in,
        .n_out = op->gate_out >= 0 ? sample->num_open[op->gate_out] : op->c_out,
        .taps = algorithm == DIRECT ? op->kernel * op->kernel : 1,
        .channels = 1,
        .open_in = op->gate_in >= 0 ? sample->open[op->gate_in] : NULL,
        .residual = op->residual >= 0 ? sample->buffers[op->residual] : NULL,
    };
    if (conv.n_in)
        conv.channels = even_part(conv.n_in, conv.taps < BLOCK_DEPTH ? BLOCK_DEPTH / conv.taps : 1);
    const int32_t *open_out = op->gate_out >= 0 ? sample->open[op->gate_out] : NULL;
    const packing_t packed = packing(op);
    for (int m = 0; m < conv.n_out; m++) {
        int k = open_out ? open_out[m] : m;
        own->rows[m] = op->weight + row_offset(&packed, k);
        own->bias[m] = op->bias[k];
    }
    const int compact = algorithm == WINOGRAD && packed.side_by_side > 1; /* transformed weights of open inputs only */
    ptrdiff_t *column = own->columns;
    for (int begin = 0, end; begin < conv.n_in; begin = end) {
        end = conv.n_in - begin < conv.channels ? conv.n_in : begin + conv.channels;
        for (int t = 0; t < conv.taps; t++)
            for (int j = begin; j < end; j++)
                *column++ = (conv.open_in && !compact ? conv.open_in[j] : j) * packed.column + t * packed.tap;
    }
    conv.product = (product_t){
        .rows = (const float *const *)own->rows,
        .interleaved = packed.side_by_side,
        .row_floats = packed.block,
        .columns = own->columns,
        .depth = conv.n_in * conv.taps,
        .out = sample->buffers[op->out],
        .out_panel = step->out.panel,
        .bias = own->bias,
        .residual = conv.residual,
        .relu = op->relu,
    };
    return conv;
}

/* Panels that are computed at a time if the weights stay in the cache: the outputs are then written nearly in order. 3
 * to 24 were tried; 6 is best on the widest maps, where 24 takes 10 % longer. */
#define FEW_PANELS 6

/* What a thread computes of a convolution. */
typedef struct {
    range_t panels, rows;
    int chunk; /* panels at a time */
} share_t;

/* Threads split large maps by panels, and small ones, where weights dominate, by rows. */
static share_t share(const context_t *context, const conv_t *conv) {
    const int panels = num_panels(&conv->step->out), interleaved = conv->product.interleaved;
    share_t share = {{0, panels}, {0, conv->n_out}, 1};
    if (panels >= 12 * context->threads)
        share.panels = part(context, panels);
    else {
        share.rows = part(context, divide_up(conv->n_out, interleaved));
        share.rows.begin *= interleaved;
        share.rows.end *= interleaved;
        share.rows.end = share.rows.end < conv->n_out ? share.rows.end : conv->n_out;
    }
    const ptrdiff_t floats = context->plan->network->block_floats;
    ptrdiff_t fit = floats / ((ptrdiff_t)conv->channels * conv->taps * PANEL);
    if ((ptrdiff_t)conv->n_out * conv->n_in * conv->taps <= floats && fit > FEW_PANELS)
        fit = FEW_PANELS;
    ptrdiff_t own = share.panels.end - share.panels.begin;
    if (own)
        share.chunk = even_part((int)own, fit < 1 ? 1 : fit < own ? (int)fit : (int)own);
    return share;
}

/* Compute the part of a product that reads `channels` channels from `channel` on, in x, for a number of pixels from
 * `panel` on. Further channels are added to the sums so far. */
static void add_channels(
    context_t *context, const conv_t *conv, const share_t *share, int channel, int channels, int panel, int pixels,
    const float *x, ptrdiff_t x_panel) {
    const kernels_t *kernels = context->plan->network->kernels;
    product_t product = conv->product;
    const ptrdiff_t at = panel * product.out_panel;
    product.x = x;
    product.x_panel = x_panel;
    product.columns += (ptrdiff_t)channel * conv->taps;
    product.depth = channels * conv->taps;
    product.out += at;
    product.residual = channel ? product.out : conv->residual ? conv->residual + at : NULL;
    product.bias = channel ? NULL : product.bias;
    product.relu = product.relu && channel + channels == conv->n_in;
    kernels->product(&product, (int)share->rows.begin, (int)share->rows.end, divide_up(pixels, kernels->lanes));
}

/* A pixel alone in its panel, as in maps of 7 x 7 or 1 x 1 pixels. */
static void run_pixel(context_t *context, const conv_t *conv, const share_t *share, int panel, const float *x) {
    product_t product = conv->product;
    product.out += panel * product.out_panel;
    if (product.residual)
        product.residual += panel * product.out_panel;
    float *values = context->own->scratch;
    if (product.interleaved == 1)
        memset(values, 0, (size_t)conv->op->c_in * sizeof *values);
    for (int j = 0; j < conv->n_in; j++)
        values[product.interleaved == 1 ? product.columns[j] : j] = x[(ptrdiff_t)j * PANEL];
    context->plan->network->kernels->product_pixel(
        &product, (int)share->rows.begin, (int)share->rows.end, values, conv->op->c_in);
}

/* Run a 1 x 1 convolution on the panels that it reads. */
static void run_pointwise(context_t *context, const conv_t *conv, const float *x, ptrdiff_t x_panel) {
    share_t own = share(context, conv);
    int pixels = num_pixels(&conv->step->out);
    const int alone = pixels % PANEL == 1 && (conv->product.interleaved == 1 || conv->product.interleaved == PANEL);
    if (own.rows.begin == own.rows.end || own.panels.begin == own.panels.end)
        return;
    if (alone && own.panels.end == num_panels(&conv->step->out)) {
        own.panels.end--;
        run_pixel(context, conv, &own, (int)own.panels.end, x + own.panels.end * x_panel);
    }
    for (int panel = (int)own.panels.begin; panel < own.panels.end; panel += own.chunk) {
        int end = panel + own.chunk < own.panels.end ? panel + own.chunk : (int)own.panels.end;
        int count = (end * PANEL < pixels ? end * PANEL : pixels) - panel * PANEL;
        for (int channel = 0; channel == 0 || channel < conv->n_in; channel += conv->channels)
            add_channels(
                context, conv, &own, channel,
                conv->n_in - channel < conv->channels ? conv->n_in - channel : conv->channels, panel, count,
                x + panel * x_panel + channel * PANEL, x_panel);
    }
}

void split_phase(
    const kernels_t *kernels, const op_t *op, const step_t *step, const float *plane, int y, int x, float *out) {
    const shape_t *in = &step->in;
    int stride = op->stride, first = x - op->padding;
    int begin = first < 0 ? divide_up(-first, stride) : 0;
    int end = in->width > first ? divide_up(in->width - first, stride) : 0;
    end = end < step->pitch ? end : step->pitch;
    begin = begin < end ? begin : end;
    for (int i = 0; i < step->phase_rows; i++, out += step->pitch) {
        int row = i * stride + y - op->padding;
        if (row < 0 || row >= in->height) {
            memset(out, 0, (size_t)step->pitch * sizeof *out);
            continue;
        }
        const float *from = plane + (ptrdiff_t)row * in->width + first;
        memset(out, 0, (size_t)begin * sizeof *out);
        if (stride == 1)
            memcpy(out + begin, from + begin, (size_t)(end - begin) * sizeof *out);
        else
            kernels->subsample(from + (ptrdiff_t)begin * stride, stride, out + begin, end - begin);
        memset(out + end, 0, (size_t)(step->pitch - end) * sizeof *out);
    }
}

/* Copy the pixels that a strided 1 x 1 convolution reads into panels, then run it. */
static void run_strided(context_t *context, const conv_t *conv) {
    const op_t *op = conv->op;
    const step_t *step = conv->step;
    const kernels_t *kernels = context->plan->network->kernels;
    float *panels = context->sample->scratch, *line = context->own->line;
    const ptrdiff_t panel = (ptrdiff_t)conv->n_in * PANEL + PANEL;
    range_t channels = part(context, conv->n_in);
    for (ptrdiff_t c = channels.begin; c < channels.end; c += GROUP) {
        const int count = in_group(c, &channels);
        planes_t planes = read_planes(context, op->in, &step->in, c, count, 0, num_pixels(&step->in));
        for (int i = 0; i < count; i++) {
            split_phase(kernels, op, step, planes.first + i * planes.stride, 0, 0, line);
            kernels->finish(line, 0, num_panels(&step->out) * PANEL, panels + (c + i) * PANEL, NULL, panel, 0.f, 0);
        }
    }
    meet(context);
    run_pointwise(context, conv, panels, panel);
}

/* Split the padded input into phases, then run a convolution on packed taps. */
static void run_direct(context_t *context, const conv_t *conv) {
    const op_t *op = conv->op;
    const step_t *step = conv->step;
    const kernels_t *kernels = context->plan->network->kernels;
    const ptrdiff_t stride = step->phases * step->phases * step->phase_plane;
    float *phases = context->sample->scratch;
    range_t channels = part(context, conv->n_in);
    for (ptrdiff_t c = channels.begin; c < channels.end; c += GROUP) {
        const int count = in_group(c, &channels);
        planes_t planes = read_planes(context, op->in, &step->in, c, count, 0, num_pixels(&step->in));
        for (int i = 0; i < count; i++) {
            float *phase = phases + (c + i) * stride;
            for (int y = 0; y < step->phases; y++)
                for (int x = 0; x < step->phases; x++, phase += step->phase_plane)
                    split_phase(
                        kernels, op, step, planes.first + i * planes.stride, y * op->dilation % op->stride,
                        x * op->dilation % op->stride, phase);
        }
    }
    meet(context);
    const share_t own = share(context, conv);
    if (own.rows.begin == own.rows.end)
        return;
    float *panels = context->own->scratch;
    const int pixels = num_pixels(&step->out);
    for (int panel = (int)own.panels.begin; panel < own.panels.end; panel += own.chunk) {
        int end = panel + own.chunk < own.panels.end ? panel + own.chunk : (int)own.panels.end;
        int count = (end * PANEL < pixels ? end * PANEL : pixels) - panel * PANEL;
        for (int channel = 0, some; channel < conv->n_in; channel += some) {
            some = conv->n_in - channel < conv->channels ? conv->n_in - channel : conv->channels;
            const ptrdiff_t x_panel = (ptrdiff_t)some * conv->taps * PANEL;
            for (int j = 0; j < some; j++)
                kernels->pack_taps(
                    phases + (channel + j) * stride, step->tap_offsets, conv->taps, step->pitch, step->out.width,
                    panel * PANEL, count, context->own->line, panels + (ptrdiff_t)j * PANEL, x_panel,
                    (ptrdiff_t)some * PANEL);
            add_channels(context, conv, &own, channel, some, panel, count, panels, x_panel);
        }
    }
}

void run_conv(context_t *context, const op_t *op, const step_t *step) {
    if (op->groups > 1) {
        run_grouped(context, op, step);
        return;
    }
    int no_input = op->gate_in >= 0 && context->sample->num_open[op->gate_in] == 0;
    algorithm_t algorithm = no_input ? POINTWISE : step->algorithm;
    conv_t conv = prepare(context, op, step, algorithm);
    if (conv.n_out == 0)
        return;
    if (algorithm == WINOGRAD)
        run_winograd(context, &conv);
    else if (algorithm == DIRECT)
        (conv.taps == 1 ? run_strided : run_direct)(context, &conv);
    else
        run_pointwise(context, &conv, context->sample->buffers[op->in], step->in.panel);
}
