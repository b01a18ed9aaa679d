/* Operations on quantised maps other than convolutions. */
#include <math.h>
#include <string.h>

#include "run_int8.h"

static void fill(uint32_t *to, ptrdiff_t count, int value) { memset(to, value, (size_t)count * sizeof *to); }

void fill_margins(const shape_t *shape, uint32_t *plane) {
    const ptrdiff_t end = shape->origin + (ptrdiff_t)num_groups(shape) * POSITIONS;
    fill(plane, shape->origin, shape->zero);
    fill(plane + end, shape->plane - end, shape->zero);
}

void write_row(const shape_t *shape, uint32_t *plane, int y, const uint32_t *pixels) {
    uint32_t *row = plane + shape->origin + (ptrdiff_t)y * shape->pitch;
    memcpy(row, pixels, (size_t)shape->width * sizeof *row);
    ptrdiff_t border = shape->pitch - shape->width;
    if (y == shape->height - 1) /* up to the end of the last group */
        border += (ptrdiff_t)num_groups(shape) * POSITIONS - (ptrdiff_t)shape->height * shape->pitch;
    fill(row + shape->width, border, shape->zero);
}

void split_phases(
    const context_t *context, const op_t *op, const step_t *step, const uint32_t *plane, int value, uint32_t *phases) {
    const shape_t *in = &step->in;
    const int stride = op->stride;
    for (int phase = 0; phase < step->phases * step->phases; phase++) {
        const int top = phase / step->phases - op->padding, left = phase % step->phases - op->padding;
        int begin = left < 0 ? divide_up(-left, stride) : 0;
        int end = in->width > left ? divide_up(in->width - left, stride) : 0;
        end = end < step->pitch ? end : step->pitch;
        begin = begin < end ? begin : end;
        uint32_t *row = phases + phase * step->phase_plane;
        for (int i = 0; i < step->phase_rows; i++, row += step->pitch) {
            const int y = i * stride + top;
            if (y < 0 || y >= in->height) {
                fill(row, step->pitch, value);
                continue;
            }
            const uint32_t *from = plane + in->origin + (ptrdiff_t)y * in->pitch + left;
            fill(row, begin, value);
            /* Subsampling moves 32 bits, whatever they are. */
            context->plan->network->kernels->subsample(
                (const float *)(from + (ptrdiff_t)begin * stride), stride, (float *)(row + begin), end - begin);
            fill(row + end, step->pitch - end, value);
        }
    }
}

/* Maxima of quads: beyond the map, 0 is never larger. */
void run_int8_pool(context_t *context, const op_t *op, const step_t *step) {
    const shape_t *in = &step->in, *out = &step->out;
    uint32_t *phases = (uint32_t *)context->own->scratch, *line = (uint32_t *)context->own->line;
    range_t quads = part(context, num_quads(in->channels));
    for (ptrdiff_t quad = quads.begin; quad < quads.end; quad++) {
        uint32_t *to = (uint32_t *)context->sample->buffers[op->out] + quad * out->plane;
        split_phases(context, op, step, (uint32_t *)context->sample->buffers[op->in] + quad * in->plane, 0, phases);
        fill_margins(out, to);
        for (int y = 0; y < out->height; y++) {
            const uint32_t *from = phases + (ptrdiff_t)y * step->pitch;
            memcpy(line, from + step->tap_offsets[0], (size_t)out->width * sizeof *line);
            for (int t = 1; t < op->kernel * op->kernel; t++)
                context->plan->network->int8->maximum(line, from + step->tap_offsets[t], out->width);
            write_row(out, to, y, line);
        }
    }
}

void run_int8_subsample(context_t *context, const op_t *op, const step_t *step) {
    const shape_t *in = &step->in, *out = &step->out;
    uint32_t *line = (uint32_t *)context->own->line;
    range_t quads = part(context, num_quads(out->channels));
    for (ptrdiff_t quad = quads.begin; quad < quads.end; quad++) {
        uint32_t *to = (uint32_t *)context->sample->buffers[op->out] + quad * out->plane;
        const ptrdiff_t from = quad - op->before / QUAD;
        fill_margins(out, to);
        if (from < 0 || from >= num_quads(in->channels))
            fill(line, out->width, out->zero);
        for (int y = 0; y < out->height; y++) {
            if (from >= 0 && from < num_quads(in->channels)) {
                const uint32_t *row = (uint32_t *)context->sample->buffers[op->in] + from * in->plane + in->origin
                    + (ptrdiff_t)y * op->stride * in->pitch;
                context->plan->network->kernels->subsample((const float *)row, op->stride, (float *)line, out->width);
            }
            write_row(out, to, y, line);
        }
    }
}

/* The ReLU of the shortcut, in the scale of the map that the skipped convolutions would have written: a product of
 * depth 0. The power of two keeps the bits that rounding to an integer would lose. A larger ratio than 256 has the
 * same results: all values above zero are the largest one. */
void run_int8_skip(context_t *context, const op_t *op, const step_t *step, const shape_t *out) {
    const shape_t *in = &step->in;
    const float power = 16384.f, scales = in->scale / out->scale;
    int32_t bias[QUAD];
    const int32_t *rows[QUAD] = {bias, bias, bias, bias};
    float multiplier[QUAD], ratio[QUAD];
    for (int i = 0; i < QUAD; i++) {
        multiplier[i] = 1.f / power;
        ratio[i] = (scales < 256.f ? scales : 256.f) * power;
        bias[i] = -(int32_t)lrintf(ratio[i] * (float)in->zero);
    }
    range_t quads = part(context, num_quads(in->channels));
    for (ptrdiff_t quad = quads.begin; quad < quads.end; quad++) {
        uint32_t *to = (uint32_t *)context->sample->buffers[op->out] + quad * out->plane;
        const product8_t product = {
            .rows = rows,
            .step = 1,
            .is_last = 1,
            .x = to + out->origin,
            .out = to + out->origin,
            .bias = bias,
            .multiplier = multiplier,
            .ratio = ratio,
            .residual = (const uint32_t *)context->sample->buffers[op->in] + quad * in->plane + in->origin,
            .zero = out->zero,
            .relu = 1,
            .mask = context->plan->steps[op + op->count - context->plan->network->ops].mask,
        };
        fill_margins(out, to);
        context->plan->network->int8->product(&product, 0, QUAD, num_groups(out));
    }
}

void run_quantize(context_t *context, const op_t *op, const step_t *step) {
    const shape_t *in = &step->in, *out = &step->out;
    const int pixels = num_pixels(in);
    uint32_t *line = (uint32_t *)context->own->line;
    range_t quads = part(context, num_quads(in->channels));
    for (ptrdiff_t quad = quads.begin; quad < quads.end; quad++) {
        const int left = in->channels - (int)quad * QUAD, count = left < QUAD ? left : QUAD;
        const planes_t planes = read_planes(context, op->in, in, quad * QUAD, count, 0, pixels);
        const float *x[QUAD] = {NULL};
        for (int i = 0; i < count; i++)
            x[i] = planes.first + i * planes.stride;
        context->plan->network->int8->quantise(x, pixels, 1.f / op->scale, op->zero, line);
        uint32_t *to = (uint32_t *)context->sample->buffers[op->out] + quad * out->plane;
        fill_margins(out, to);
        for (int y = 0; y < out->height; y++)
            write_row(out, to, y, line + (ptrdiff_t)y * out->width);
    }
}

/* A linear layer on a single pixel. In double, the product is exact: it makes no difference whether it is fused with
 * the sum. */
void run_int8_linear(context_t *context, const op_t *op) {
    const int8_kernels_t *kernels = context->plan->network->int8;
    const float *in = context->sample->buffers[op->in];
    float *out = context->sample->buffers[op->out];
    const int quads = num_quads(op->c_in);
    uint32_t *x = (uint32_t *)context->own->columns; /* unused otherwise, and large enough */
    for (int quad = 0; quad < quads; quad++) {
        const float *values[QUAD];
        for (int i = 0; i < QUAD; i++)
            values[i] = quad * QUAD + i < op->c_in ? in + (ptrdiff_t)(quad * QUAD + i) * PANEL : NULL;
        kernels->quantise(values, 1, 1.f / op->scale, op->zero, x + quad);
    }
    const uint32_t zeros = (uint32_t)op->zero * 0x01010101u;
    range_t filters = part(context, op->c_out);
    for (ptrdiff_t k = filters.begin; k < filters.end; k++) {
        const int32_t *w = (const int32_t *)(const void *)(op->weight8 + k * quads * QUAD);
        int32_t sum = kernels->dot(x, w, quads);
        for (int quad = 0; quad < quads && op->zero; quad++)
            sum -= kernels->dot(&zeros, w + quad, 1);
        out[k * PANEL] = (float)((double)(float)sum * (double)op->multiplier[k] + (double)op->bias[k]);
    }
}

/* Four channels of a map in float32, as planes without a border. */
static void read_quad(
    const context_t *context, int buffer, const shape_t *shape, ptrdiff_t quad, float *const out[QUAD]) {
    const uint32_t *from = (const uint32_t *)context->sample->buffers[buffer] + quad * shape->plane + shape->origin;
    for (int y = 0; y < shape->height; y++) {
        float *rows[QUAD];
        for (int i = 0; i < QUAD; i++)
            rows[i] = out[i] ? out[i] + (ptrdiff_t)y * shape->width : NULL;
        context->plan->network->int8->dequantise(
            from + (ptrdiff_t)y * shape->pitch, shape->width, shape->scale, shape->zero, rows);
    }
}

void run_dequantize(context_t *context, const op_t *op, const step_t *step) {
    const shape_t *in = &step->in;
    const ptrdiff_t plane = context->plan->plane;
    range_t quads = part(context, num_quads(in->channels));
    for (ptrdiff_t quad = quads.begin; quad < quads.end; quad++) {
        float *planes[QUAD];
        for (int i = 0; i < QUAD; i++)
            planes[i] = context->own->planes + i * plane;
        read_quad(context, op->in, in, quad, planes);
        for (int i = 0; i < QUAD && quad * QUAD + i < in->channels; i++)
            write_plane(context, op->out, &step->out, quad * QUAD + i, planes[i]);
    }
}

void int8_copy_out(context_t *context, int buffer, const shape_t *shape, float *out) {
    const int pixels = num_pixels(shape);
    range_t quads = part(context, num_quads(shape->channels));
    for (ptrdiff_t quad = quads.begin; quad < quads.end; quad++) {
        float *planes[QUAD];
        for (int i = 0; i < QUAD; i++)
            planes[i] = quad * QUAD + i < shape->channels ? out + (quad * QUAD + i) * pixels : NULL;
        read_quad(context, buffer, shape, quad, planes);
    }
}

/* Sums are exact: pixels and border are added up, and the border subtracted. */
void int8_averages(context_t *context, int buffer, const shape_t *shape, int begin, int end, float *out) {
    const int positions = num_groups(shape) * POSITIONS, pixels = num_pixels(shape);
    const int64_t border = (int64_t)(positions - pixels) * shape->zero, zeros = (int64_t)pixels * shape->zero;
    for (int quad = begin / QUAD; quad < num_quads(end); quad++) {
        int64_t totals[QUAD] = {0};
        const uint32_t *x = (const uint32_t *)context->sample->buffers[buffer] + quad * shape->plane + shape->origin;
        for (int at = 0; at < positions; at += 1 << 16) {
            uint32_t sums[QUAD] = {0};
            const int count = positions - at < 1 << 16 ? positions - at : 1 << 16;
            context->plan->network->int8->sum(x + at, count, sums);
            for (int i = 0; i < QUAD; i++)
                totals[i] += sums[i];
        }
        for (int i = 0; i < QUAD; i++)
            if (quad * QUAD + i >= begin && quad * QUAD + i < end) {
                const double mean = (double)(totals[i] - border - zeros) / (double)pixels;
                out[quad * QUAD + i] = (float)(mean * (double)shape->scale);
            }
    }
}
