/* Pooling, resizing and subsampling of maps. */
#include <math.h>
#include <string.h>

#include "run.h"

/* Compute row i of a max-pooled plane: reduce the columns of the window, then the row. */
static void max_pool_row(
    const kernels_t *kernels, const op_t *op, const shape_t *in, int i, const float *plane, float *columns, int width,
    float *out) {
    int top = i * op->stride - op->padding, bottom = top + op->kernel;
    top = top > 0 ? top : 0;
    bottom = bottom < in->height ? bottom : in->height;
    float *inner = columns + op->padding;
    memcpy(inner, plane + (ptrdiff_t)top * in->width, (size_t)in->width * sizeof *columns);
    for (int y = top + 1; y < bottom; y++)
        kernels->maximum(inner, plane + (ptrdiff_t)y * in->width, in->width);
    for (int x = 0; x < op->padding; x++)
        columns[x] = -INFINITY;
    for (int x = op->padding + in->width; x < pooled_columns(op, width); x++)
        columns[x] = -INFINITY;
    kernels->max_windows(columns, op->kernel, op->stride, out, width);
}

/* Compute row i of an average-pooled plane. Padding does not count. */
static void average_row(
    const op_t *op, const shape_t *in, int i, const float *plane, float *columns, int width, float *out) {
    int top = i * op->stride - op->padding, bottom = top + op->kernel;
    top = top > 0 ? top : 0;
    bottom = bottom < in->height ? bottom : in->height;
    memcpy(columns, plane + (ptrdiff_t)top * in->width, (size_t)in->width * sizeof *columns);
    for (int y = top + 1; y < bottom; y++) {
        const float *row = plane + (ptrdiff_t)y * in->width;
        for (int x = 0; x < in->width; x++)
            columns[x] += row[x];
    }
    for (int j = 0; j < width; j++) {
        int left = j * op->stride - op->padding, right = left + op->kernel;
        left = left > 0 ? left : 0;
        right = right < in->width ? right : in->width;
        float value = columns[left];
        for (int x = left + 1; x < right; x++)
            value += columns[x];
        out[j] = value / (float)((bottom - top) * (right - left));
    }
}

/* Channels of a map that is pooled: open ones, which are the first. */
static int num_pooled(const context_t *context, const step_t *step) {
    return step->gate >= 0 ? context->sample->num_open[step->gate] : step->in.channels;
}

void run_pool(context_t *context, const op_t *op, const step_t *step) {
    const kernels_t *kernels = context->plan->network->kernels;
    const shape_t *in = &step->in, *out = &step->out;
    float *columns = context->own->scratch, *line = context->own->line;
    range_t channels = part(context, num_pooled(context, step));
    for (ptrdiff_t c = channels.begin; c < channels.end; c += GROUP) {
        const int count = in_group(c, &channels);
        planes_t planes = read_planes(context, op->in, in, c, count, 0, num_pixels(in));
        for (int j = 0; j < count; j++) {
            const float *x = planes.first + j * planes.stride;
            float *y = line;
            for (int i = 0; i < out->height; i++, y += out->width)
                if (op->average)
                    average_row(op, in, i, x, columns, out->width, y);
                else
                    max_pool_row(kernels, op, in, i, x, columns, out->width, y);
            write_plane(context, op->out, out, c + j, line);
        }
    }
}

/* Position of row or column i of a map of `size` with reflected borders. */
static int reflected(int i, int size) {
    i = i < 0 ? -i : i;
    return i < size ? i : 2 * size - 2 - i;
}

/* Compute row i of a blurred plane: the columns of the window, then the row. `sums` holds the padded row. */
static void blur_row(
    const kernels_t *kernels, const op_t *op, const shape_t *in, int i, const float *weights, const float *plane,
    float *sums, float *row, int width, float *out) {
    float *inner = sums + op->padding;
    for (int k = 0; k < op->kernel; k++) {
        const float *x = plane + (ptrdiff_t)reflected(i * op->stride - op->padding + k, in->height) * in->width;
        const float weight = weights[k];
        for (int j = 0; j < in->width; j++)
            inner[j] = k ? inner[j] + weight * x[j] : weight * x[j];
    }
    for (int j = 1; j <= op->padding; j++) {
        inner[-j] = inner[reflected(-j, in->width)];
        inner[in->width - 1 + j] = inner[reflected(in->width - 1 + j, in->width)];
    }
    const int columns = (width - 1) * op->stride + 1;
    for (int k = 0; k < op->kernel; k++) {
        const float weight = weights[k];
        for (int j = 0; j < columns; j++)
            row[j] = k ? row[j] + weight * sums[j + k] : weight * sums[j + k];
    }
    kernels->subsample(row, op->stride, out, width);
}

void run_blur(context_t *context, const op_t *op, const step_t *step) {
    const shape_t *in = &step->in, *out = &step->out;
    float *sums = context->own->scratch, *row = sums + in->width + 2 * op->padding + PANEL;
    float weights[MAX_KERNEL];
    double weight = ldexp(1., 1 - op->kernel);
    for (int k = 0; k < op->kernel; k++) { /* binomial coefficients */
        weights[k] = (float)weight;
        weight = weight * (op->kernel - 1 - k) / (k + 1);
    }
    range_t channels = part(context, num_pooled(context, step));
    for (ptrdiff_t c = channels.begin; c < channels.end; c += GROUP) {
        const int count = in_group(c, &channels);
        planes_t planes = read_planes(context, op->in, in, c, count, 0, num_pixels(in));
        for (int j = 0; j < count; j++) {
            for (int i = 0; i < out->height; i++)
                blur_row(
                    context->plan->network->kernels, op, in, i, weights, planes.first + j * planes.stride, sums, row,
                    out->width, context->own->line + (ptrdiff_t)i * out->width);
            write_plane(context, op->out, out, c + j, context->own->line);
        }
    }
}

/* The value of a map of one pixel is the first of a channel. */
void run_channel_conv(context_t *context, const op_t *op, const step_t *step) {
    const float *x = context->sample->buffers[op->in];
    const int size = step->in.channels, before = op->taps / 2;
    range_t channels = part(context, size);
    for (int c = (int)channels.begin; c < channels.end; c++) {
        float sum = 0.f;
        for (int t = c < before ? before - c : 0; t < op->taps && c + t - before < size; t++)
            sum += op->weight[t] * x[(ptrdiff_t)(c + t - before) * PANEL];
        context->sample->buffers[op->out][(ptrdiff_t)c * PANEL] = sum;
    }
}

void run_scale(context_t *context, const op_t *op, const step_t *step) {
    sample_t *sample = context->sample;
    const float *logits = sample->buffers[op->factors];
    range_t channels = part(context, step->in.channels);
    for (ptrdiff_t c = channels.begin; c < channels.end; c++)
        sample->pooled[c] = 1.f / (1.f + expf(-logits[c * PANEL]));
    meet(context);
    range_t panels = part(context, num_panels(&step->in));
    for (ptrdiff_t i = panels.begin; i < panels.end; i++) {
        const ptrdiff_t at = i * step->in.panel;
        context->plan->network->kernels->scale(
            sample->buffers[op->in] + at, sample->pooled, step->in.channels,
            op->residual >= 0 ? sample->buffers[op->residual] + at : NULL, op->relu, sample->buffers[op->out] + at);
    }
}

/* Pool a plane to bins * bins pixels. */
static void pool_plane(
    const kernels_t *kernels, const shape_t *in, int bins, const float *x, float *columns, float *y) {
    for (int i = 0; i < bins; i++) {
        int top = (int)((int64_t)i * in->height / bins);
        int bottom = (int)(((int64_t)(i + 1) * in->height + bins - 1) / bins);
        memcpy(columns, x + (ptrdiff_t)top * in->width, (size_t)in->width * sizeof *columns);
        for (int row = top + 1; row < bottom; row++)
            for (int j = 0; j < in->width; j++)
                columns[j] += x[(ptrdiff_t)row * in->width + j];
        for (int j = 0; j < bins; j++) {
            int left = (int)((int64_t)j * in->width / bins);
            int right = (int)(((int64_t)(j + 1) * in->width + bins - 1) / bins);
            double sum = kernels->sum(columns + left, right - left);
            *y++ = (float)(sum / ((double)(bottom - top) * (right - left)));
        }
    }
}

void run_adaptive_pool(context_t *context, const op_t *op, const step_t *step) {
    const shape_t *in = &step->in;
    range_t channels = part(context, in->channels);
    if (op->kernel == 1 && op->in != 0) { /* to one pixel per channel, in float32 */
        float *averages = context->own->logits;
        if (in->scale > 0.f)
            int8_averages(context, op->in, in, (int)channels.begin, (int)channels.end, averages);
        else
            context->plan->network->kernels->average(
                context->sample->buffers[op->in] + channels.begin * PANEL, in->panel,
                (int)(channels.end - channels.begin), num_pixels(in), averages + channels.begin);
        for (ptrdiff_t c = channels.begin; c < channels.end; c++)
            context->sample->buffers[op->out][c * PANEL] = averages[c];
        return;
    }
    for (ptrdiff_t c = channels.begin; c < channels.end; c += GROUP) {
        const int count = in_group(c, &channels);
        planes_t planes = read_planes(context, op->in, in, c, count, 0, num_pixels(in));
        for (int j = 0; j < count; j++) {
            pool_plane(
                context->plan->network->kernels, in, op->kernel, planes.first + j * planes.stride,
                context->own->scratch, context->own->line);
            write_plane(context, op->out, &step->out, c + j, context->own->line);
        }
    }
}

/* Position in a row of `in` pixels that pixel `i` of a row of `out` pixels is interpolated at, like torch. */
static float source_position(int i, int in, int out, int align_corners) {
    if (align_corners)
        return out > 1 ? (float)i * ((float)(in - 1) / (float)(out - 1)) : 0.f;
    float position = ((float)i + 0.5f) * ((float)in / (float)out) - 0.5f;
    return position > 0.f ? position : 0.f;
}

/* Resize a plane bilinearly; `rows` is memory for the input, resized to the width of the output. */
static void resize(const op_t *op, const shape_t *in, const shape_t *out, const float *x, float *rows, float *y) {
    for (int j = 0; j < out->width; j++) {
        float position = source_position(j, in->width, out->width, op->align_corners);
        int left = (int)position < in->width - 1 ? (int)position : in->width - 1;
        int right = left + (left < in->width - 1);
        float weight = position - (float)left;
        for (int i = 0; i < in->height; i++) {
            const float *row = x + (ptrdiff_t)i * in->width;
            rows[(ptrdiff_t)i * out->width + j] = (1.f - weight) * row[left] + weight * row[right];
        }
    }
    for (int i = 0; i < out->height; i++, y += out->width) {
        float position = source_position(i, in->height, out->height, op->align_corners);
        int top = (int)position < in->height - 1 ? (int)position : in->height - 1;
        int bottom = top + (top < in->height - 1);
        float weight = position - (float)top;
        const float *above = rows + (ptrdiff_t)top * out->width, *below = rows + (ptrdiff_t)bottom * out->width;
        for (int j = 0; j < out->width; j++)
            y[j] = (1.f - weight) * above[j] + weight * below[j];
    }
}

/* Copy or resize a map into the channels of `out` from `before` on. */
static void place(context_t *context, const op_t *op, int buffer, const shape_t *in, const shape_t *out, int before) {
    if (in->height == out->height && in->width == out->width) {
        range_t panels = part(context, num_panels(in));
        for (ptrdiff_t i = panels.begin; i < panels.end; i++)
            memcpy(
                context->sample->buffers[op->out] + i * out->panel + before * PANEL,
                context->sample->buffers[buffer] + i * in->panel, (size_t)in->channels * PANEL * sizeof(float));
        return;
    }
    range_t channels = part(context, in->channels);
    for (ptrdiff_t c = channels.begin; c < channels.end; c++) {
        planes_t planes = read_planes(context, buffer, in, c, 1, 0, num_pixels(in));
        resize(op, in, out, planes.first, context->own->scratch, context->own->line);
        write_plane(context, op->out, out, c + before, context->own->line);
    }
}

void run_concat(context_t *context, const op_t *op, const step_t *step) {
    for (int i = 0, before = 0; i < op->num_sources; before += step->sources[i].channels, i++)
        place(context, op, op->sources[i], &step->sources[i], &step->out, before);
}

void run_subsample(context_t *context, const op_t *op, const step_t *step) {
    const shape_t *in = &step->in, *out = &step->out;
    float *line = context->own->line;
    range_t channels = part(context, out->channels);
    for (ptrdiff_t c = channels.begin; c < channels.end; c++) {
        ptrdiff_t from = c - op->before;
        if (from < 0 || from >= in->channels)
            memset(line, 0, (size_t)num_pixels(out) * sizeof *line);
        else {
            planes_t planes = read_planes(context, op->in, in, from, 1, 0, num_pixels(in));
            for (int i = 0; i < out->height; i++)
                context->plan->network->kernels->subsample(
                    planes.first + (ptrdiff_t)i * op->stride * in->width, op->stride, line + i * out->width,
                    out->width);
        }
        write_plane(context, op->out, out, c, line);
    }
}
