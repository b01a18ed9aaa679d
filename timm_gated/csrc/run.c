/* Execution of a plan. A batch is split by samples; threads that share a sample split each operation. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include "network.h"

typedef struct {
    const plan_t *plan;
    sample_t *sample;
    thread_t *own;
    int thread, threads;  /* index and number of the threads that share the sample */
    team_t *team;         /* of these threads, if there are several */
    double *milliseconds; /* per operation, to add to; NULL if they are not measured */
} context_t;

typedef struct {
    int64_t begin, end;
} range_t;

/* The range of this thread. */
static range_t part(const context_t *context, int64_t count) {
    return (range_t){count * context->thread / context->threads, count * (context->thread + 1) / context->threads};
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

static void meet(const context_t *context) {
    if (context->threads > 1)
        team_meet(context->team);
}

/* A convolution of one sample. */
typedef struct {
    const op_t *op;
    const step_t *step;
    int n_in, n_out, taps;
    float *in, *out;
    const float *residual;
    product_t product;
} conv_t;

/* Prepare the product over all open channels. The algorithms add the maps. */
static conv_t prepare(context_t *context, const op_t *op, const step_t *step, algorithm_t algorithm) {
    sample_t *sample = context->sample;
    thread_t *own = context->own;
    conv_t conv = {
        .op = op,
        .step = step,
        .n_in = op->gate_in >= 0 ? sample->num_open[op->gate_in] : op->c_in,
        .n_out = op->gate_out >= 0 ? sample->num_open[op->gate_out] : op->c_out,
        .in = sample->buffers[op->in],
        .out = sample->buffers[op->out],
        .residual = op->residual >= 0 ? sample->buffers[op->residual] : NULL,
    };
    const int32_t *open_in = op->gate_in >= 0 ? sample->open[op->gate_in] : NULL;
    const int32_t *open_out = op->gate_out >= 0 ? sample->open[op->gate_out] : NULL;
    int taps = algorithm == WINOGRAD ? 1 : op->kernel * op->kernel;
    const float *weight = algorithm == WINOGRAD ? op->transformed[step->tiling.size == 2] : op->weight;
    packing_t packed = packing(op, taps);
    for (int m = 0; m < conv.n_out; m++) {
        int k = open_out ? open_out[m] : m;
        own->rows[m] = weight + row_offset(&packed, k);
        own->bias[m] = op->bias[k];
    }
    ptrdiff_t *column = own->columns;
    for (int j = 0; j < conv.n_in; j++)
        for (int t = 0; t < taps; t++)
            *column++ = (open_in ? open_in[j] : j) * packed.column + t * packed.tap;
    conv.taps = taps;
    conv.product = (product_t){
        .rows = own->rows,
        .columns = own->columns,
        .depth = conv.n_in * taps,
        .bias = own->bias,
        .relu = op->relu,
    };
    return conv;
}

/* Run a convolution on packed parts of its input.
 *
 * Planes are on different pages of memory. Packed, they are read contiguously by every block of rows. x has the planes of
 * the input, or its phases, `x_channel` floats apart. */
static void run_packed(context_t *context, const conv_t *conv, const float *x, ptrdiff_t x_channel) {
    const kernels_t *kernels = context->plan->network->kernels;
    const step_t *step = conv->step;
    const int lanes = kernels->lanes, pixels = step->out.height * step->out.width, vectors = divide_up(pixels, lanes);
    product_t product = conv->product;
    product.x_row = lanes;
    product.out_row = step->out.plane;
    product.out_vector = lanes;
    /* Large maps are split by pixels. Small ones, where weights dominate, by rows. */
    int by_pixels = vectors >= 16 * context->threads;
    range_t own = by_pixels ? part(context, vectors) : (range_t){0, vectors};
    range_t rows = by_pixels ? (range_t){0, conv->n_out} : part(context, conv->n_out);
    if (own.begin == own.end || rows.begin == rows.end)
        return;
    int chunk = even_part((int)(own.end - own.begin), CHUNK_VECTORS);
    int most = PACKED_FLOATS / (chunk * lanes * conv->taps), block = conv->n_in;
    if (block > most)
        block = even_part(block, most > 1 ? most : 1);
    float *panels = context->own->plane;
    float *line = panels + (ptrdiff_t)chunk * lanes * conv->taps * (block > 1 ? block : 1);
    for (int v = (int)own.begin; v < own.end; v += chunk) {
        int count = v + chunk < own.end ? chunk : (int)own.end - v, first = v * lanes;
        int end = (v + count) * lanes < pixels ? (v + count) * lanes : pixels;
        product.out = conv->out + first;
        product.residual = conv->residual ? conv->residual + first : NULL;
        product.bias = conv->product.bias;
        for (int channel = 0, channels; channel == 0 || channel < conv->n_in; channel += channels) {
            channels = conv->n_in - channel < block ? conv->n_in - channel : block;
            product.depth = channels * conv->taps;
            product.columns = conv->product.columns + (ptrdiff_t)channel * conv->taps;
            product.x = panels;
            product.x_vector = (ptrdiff_t)product.depth * lanes;
            product.relu = channel + channels == conv->n_in && conv->product.relu;
            const float *from = x + channel * x_channel;
            if (conv->taps == 1)
                kernels->pack(from + first, x_channel, channels, count, panels);
            else
                for (int j = 0; j < channels; j++)
                    kernels->pack_taps(
                        from + j * x_channel, step->tap_offsets, conv->taps, step->pitch, step->out.width, first,
                        end - first, line, panels + (ptrdiff_t)j * conv->taps * lanes, product.x_vector);
            kernels->product(&product, (int)rows.begin, (int)rows.end, count);
            if (!conv->n_in)
                break;
            product.residual = product.out; /* add further channels to the sums so far */
            product.bias = NULL;
        }
    }
}

/* Copy one phase of a padded plane: every stride-th pixel, starting at (y, x). */
static void split_phase(
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

static void run_direct(context_t *context, conv_t *conv) {
    const op_t *op = conv->op;
    const step_t *step = conv->step;
    float *split = context->sample->scratch, *phase;
    ptrdiff_t channel = step->phases * step->phases * step->phase_plane;
    range_t channels = part(context, conv->n_in);
    for (ptrdiff_t j = channels.begin; j < channels.end; j++) {
        phase = split + j * channel;
        for (int y = 0; y < step->phases; y++)
            for (int x = 0; x < step->phases; x++, phase += step->phase_plane)
                split_phase(
                    context->plan->network->kernels, op, step, conv->in + j * step->in.plane,
                    y * op->dilation % op->stride, x * op->dilation % op->stride, phase);
    }
    meet(context);
    run_packed(context, conv, split, channel);
}

/* Copy rows [begin, end) of the phases of a plane, each with a border of one pixel. */
static void pad(
    const op_t *op, const shape_t *map, const tiling_t *tiling, const float *plane, int begin, int end, float *padded) {
    const int dilation = op->dilation;
    for (int i = begin; i < end; i++) {
        float *row = padded + (ptrdiff_t)i * tiling->pitch;
        int phase = i / tiling->phase_rows, y = (i % tiling->phase_rows - 1) * dilation + phase / dilation;
        int first = phase % dilation;
        if (y < 0 || y >= map->height || first >= map->width) {
            memset(row, 0, (size_t)tiling->pitch * sizeof *row);
            continue;
        }
        const float *from = plane + (ptrdiff_t)y * map->width + first;
        int width = divide_up(map->width - first, dilation);
        row[0] = 0.f;
        if (dilation == 1)
            memcpy(row + 1, from, (size_t)width * sizeof *row);
        else
            for (int x = 0; x < width; x++)
                row[1 + x] = from[x * dilation];
        memset(row + 1 + width, 0, (size_t)(tiling->pitch - 1 - width) * sizeof *row);
    }
}

/* Copy the pixels of phases to their places in a plane, with bias, residual and ReLU. */
static void interleave(
    const op_t *op, const shape_t *map, const tiling_t *tiling, const piece_t *pieces, int count, const float *phases,
    float *out, const float *residual, float bias) {
    const int dilation = op->dilation;
    for (int i = 0; i < count; i++)
        for (int y = 0; y < pieces[i].rows; y++) {
            const float *from = phases + pieces[i].out + (ptrdiff_t)y * tiling->width;
            ptrdiff_t at = pieces[i].pixel + (ptrdiff_t)y * dilation * map->width;
            for (int x = 0; x < pieces[i].columns; x++, at += dilation) {
                float value = from[x] + bias + (residual ? residual[at] : 0.f);
                out[at] = op->relu && value < 0.f ? 0.f : value;
            }
        }
}

static void run_winograd(context_t *context, conv_t *conv) {
    const kernels_t *kernels = context->plan->network->kernels;
    const step_t *step = conv->step;
    const tiling_t *tiling = &step->tiling;
    float *v = context->sample->scratch, *m = v + tiling->points * step->v_point;
    float *padded = context->own->plane;
    ptrdiff_t point = packing(conv->op, 1).point;
    product_t product = conv->product;
    product.bias = NULL;
    product.relu = 0;
    ptrdiff_t v_vector = (ptrdiff_t)conv->n_in * kernels->lanes, m_vector = (ptrdiff_t)conv->n_out * kernels->lanes;
    product.x_row = product.out_row = kernels->lanes;
    product.x_vector = v_vector;
    product.out_vector = m_vector;
    for (int begin = 0; begin < tiling->vectors; begin += step->block) {
        int end = begin + step->block < tiling->vectors ? begin + step->block : tiling->vectors;
        /* Rows of the padded planes that these tiles read. */
        const piece_t *pieces = tiling->pieces;
        int last = end * tiling->pieces_per_vector - 1;
        while (!pieces[last].rows)
            last--;
        int first_row = pieces[begin * tiling->pieces_per_vector].in / tiling->pitch;
        int end_row = pieces[last].in / tiling->pitch + tiling->size + 2;
        range_t channels = part(context, conv->n_in);
        for (ptrdiff_t j = channels.begin; j < channels.end; j++) {
            pad(conv->op, &step->in, tiling, conv->in + j * step->in.plane, first_row, end_row, padded);
            kernels->transform_input(tiling, padded, begin, end, v + j * kernels->lanes, v_vector, step->v_point);
        }
        meet(context);
        range_t points = part(context, tiling->points);
        for (ptrdiff_t p = points.begin; p < points.end; p++) {
            product.row_offset = p * point;
            product.then = (p + 1 < points.end ? p + 1 : points.begin) * point;
            product.x = v + p * step->v_point;
            product.out = m + p * step->m_point;
            kernels->product(&product, 0, conv->n_out, end - begin);
        }
        meet(context);
        range_t rows = part(context, conv->n_out);
        for (ptrdiff_t k = rows.begin; k < rows.end; k++) {
            ptrdiff_t at = k * step->out.plane;
            const float *residual = conv->residual ? conv->residual + at : NULL;
            const float *mk = m + k * kernels->lanes;
            float bias = context->own->bias[k];
            if (conv->op->dilation == 1) {
                kernels->transform_output(
                    tiling, mk, m_vector, step->m_point, begin, end, conv->out + at, residual, bias, conv->op->relu);
                continue;
            }
            float *phases = context->own->plane;
            kernels->transform_output(tiling, mk, m_vector, step->m_point, begin, end, phases, NULL, 0.f, 0);
            int per_vector = tiling->pieces_per_vector;
            interleave(
                conv->op, &step->out, tiling, pieces + begin * per_vector, (end - begin) * per_vector, phases,
                conv->out + at, residual, bias);
        }
    }
}

static void run_conv(context_t *context, const op_t *op, const step_t *step) {
    int no_input = op->gate_in >= 0 && context->sample->num_open[op->gate_in] == 0;
    algorithm_t algorithm = no_input ? POINTWISE : step->algorithm;
    conv_t conv = prepare(context, op, step, algorithm);
    if (conv.n_out == 0)
        return;
    if (algorithm == WINOGRAD)
        run_winograd(context, &conv);
    else if (algorithm == DIRECT)
        run_direct(context, &conv);
    else
        run_packed(context, &conv, conv.in, step->in.plane);
}

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

static void run_pool(context_t *context, const op_t *op, const step_t *step) {
    const kernels_t *kernels = context->plan->network->kernels;
    const shape_t *in = &step->in, *out = &step->out;
    range_t channels = part(context, in->channels);
    for (ptrdiff_t c = channels.begin; c < channels.end; c++) {
        const float *x = context->sample->buffers[op->in] + c * in->plane;
        float *y = context->sample->buffers[op->out] + c * out->plane;
        for (int i = 0; i < out->height; i++, y += out->width)
            if (op->kind == MAX_POOL)
                max_pool_row(kernels, op, in, i, x, context->own->plane, out->width, y);
            else
                average_row(op, in, i, x, context->own->plane, out->width, y);
    }
}

static void run_adaptive_pool(context_t *context, const op_t *op, const step_t *step) {
    const shape_t *in = &step->in;
    const int bins = op->kernel;
    float *columns = context->own->plane;
    range_t channels = part(context, in->channels);
    for (ptrdiff_t c = channels.begin; c < channels.end; c++) {
        const float *x = context->sample->buffers[op->in] + c * in->plane;
        float *y = context->sample->buffers[op->out] + c * step->out.plane;
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
                double sum = context->plan->network->kernels->sum(columns + left, right - left);
                *y++ = (float)(sum / ((double)(bottom - top) * (right - left)));
            }
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

static void run_place(context_t *context, const op_t *op, const step_t *step) {
    const shape_t *in = &step->in, *out = &step->out;
    float *rows = context->own->plane; /* of the input, resized to the width of the output */
    range_t channels = part(context, in->channels);
    for (ptrdiff_t c = channels.begin; c < channels.end; c++) {
        const float *x = context->sample->buffers[op->in] + c * in->plane;
        float *y = context->sample->buffers[op->out] + (c + op->before) * out->plane;
        if (in->height == out->height && in->width == out->width) {
            memcpy(y, x, (size_t)in->height * in->width * sizeof *y);
            continue;
        }
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
}

static void run_subsample(context_t *context, const op_t *op, const step_t *step) {
    const shape_t *in = &step->in, *out = &step->out;
    range_t channels = part(context, out->channels);
    for (ptrdiff_t c = channels.begin; c < channels.end; c++) {
        float *y = context->sample->buffers[op->out] + c * out->plane;
        ptrdiff_t from = c - op->before;
        if (from < 0 || from >= in->channels) {
            memset(y, 0, (size_t)out->plane * sizeof *y);
            continue;
        }
        const float *x = context->sample->buffers[op->in] + from * in->plane;
        for (int i = 0; i < out->height; i++, y += out->width)
            context->plan->network->kernels->subsample(
                x + (ptrdiff_t)i * op->stride * in->width, op->stride, y, out->width);
    }
}

static void run_gate(context_t *context, const op_t *op, const step_t *step) {
    sample_t *sample = context->sample;
    ptrdiff_t pixels = (ptrdiff_t)step->in.height * step->in.width;
    range_t channels = part(context, op->c_in);
    for (ptrdiff_t c = channels.begin; c < channels.end; c++)
        sample->pooled[c] =
            (float)(context->plan->network->kernels->sum(sample->buffers[op->in] + c * step->in.plane, pixels)
                    / (double)pixels);
    meet(context);
    if (context->thread != 0)
        return;
    float *logits = context->own->logits, *hidden = logits + op->c_out;
    memcpy(hidden, op->bias, (size_t)op->hidden * sizeof *hidden);
    for (int c = 0; c < op->c_in; c++)
        for (int h = 0; h < op->hidden; h++)
            hidden[h] += op->weight[(ptrdiff_t)c * op->hidden + h] * sample->pooled[c];
    memcpy(logits, op->bias2, (size_t)op->c_out * sizeof *logits);
    for (int h = 0; h < op->hidden; h++) {
        float value = hidden[h] < 0.f ? 0.f : hidden[h];
        for (int k = 0; k < op->c_out; k++)
            logits[k] += op->weight2[(ptrdiff_t)h * op->c_out + k] * value;
    }
    int count = 0;
    for (int k = 0; k < op->c_out; k++)
        if (logits[k] > 0.f)
            sample->open[op->gate_out][count++] = k;
    sample->num_open[op->gate_out] = count;
}

static void run_skip(context_t *context, const op_t *op, const step_t *step) {
    range_t floats = part(context, step->in.channels * step->in.plane);
    const float *x = context->sample->buffers[op->in];
    float *y = context->sample->buffers[op->out];
    for (int64_t i = floats.begin; i < floats.end; i++)
        y[i] = x[i] < 0.f ? 0.f : x[i];
}

static void copy_out(context_t *context, const op_t *op, const step_t *step, float *out) {
    ptrdiff_t pixels = (ptrdiff_t)step->in.height * step->in.width;
    range_t channels = part(context, step->in.channels);
    for (ptrdiff_t c = channels.begin; c < channels.end; c++)
        memcpy(out + c * pixels, context->sample->buffers[op->in] + c * step->in.plane, (size_t)pixels * sizeof *out);
}

static void run_sample(
    context_t *context, const float *image, float *const *outputs, int32_t *num_open, int64_t index) {
    const plan_t *plan = context->plan;
    const network_t *network = plan->network;
    ptrdiff_t pixels = (ptrdiff_t)plan->height * plan->width;
    ptrdiff_t plane = plan->buffer_floats[0] / network->in_channels;
    range_t channels = part(context, network->in_channels);
    for (ptrdiff_t c = channels.begin; c < channels.end; c++)
        memcpy(context->sample->buffers[0] + c * plane, image + c * pixels, (size_t)pixels * sizeof *image);
    meet(context);
    for (int i = 0; i < network->num_ops; i++) {
        const op_t *op = &network->ops[i];
        const step_t *step = &plan->steps[i];
        double *milliseconds = context->thread == 0 && context->milliseconds ? &context->milliseconds[i] : NULL;
        double begin = milliseconds ? now() : 0.;
        switch (op->kind) {
            case CONV: run_conv(context, op, step); break;
            case MAX_POOL:
            case AVG_POOL: run_pool(context, op, step); break;
            case ADAPTIVE_POOL: run_adaptive_pool(context, op, step); break;
            case SUBSAMPLE: run_subsample(context, op, step); break;
            case PLACE: run_place(context, op, step); break;
            case GATE: run_gate(context, op, step); break;
            case SKIP:
                if (!context->sample->num_open[op->gate_out]) {
                    run_skip(context, op, step);
                    i += op->count;
                }
                break;
            case OUTPUT:
                copy_out(context, op, step, *outputs + index * step->in.channels * step->in.height * step->in.width);
                outputs++;
                break;
        }
        meet(context);
        if (milliseconds)
            *milliseconds += now() - begin;
    }
    if (num_open && context->thread == 0)
        for (int g = 0; g < network->num_gates; g++)
            num_open[index * network->num_gates + g] = context->sample->num_open[g];
}

typedef struct {
    workspace_t *workspace;
    const float *images;
    int64_t count;
    float *const *outputs;
    int32_t *num_open;
    double *milliseconds;
    atomic_llong next; /* next sample to run */
} batch_t;

/* Each thread runs its own samples. All threads share the remaining ones. */
static void run_batch(void *argument, int thread, int threads) {
    batch_t *batch = argument;
    workspace_t *workspace = batch->workspace;
    const plan_t *plan = workspace->plan;
    ptrdiff_t image = (ptrdiff_t)plan->network->in_channels * plan->height * plan->width;
    int64_t alone = threads <= workspace->num_samples ? batch->count / threads * threads : 0;
    context_t own = {
        plan,
        &workspace->samples[threads <= workspace->num_samples ? thread : 0],
        &workspace->threads[thread],
        0,
        1,
        NULL,
        threads == 1 ? batch->milliseconds : NULL};
    for (int64_t n; (n = atomic_fetch_add(&batch->next, 1)) < alone;)
        run_sample(&own, batch->images + n * image, batch->outputs, batch->num_open, n);
    if (alone == batch->count)
        return;
    context_t shared = {plan,    &workspace->samples[0], &workspace->threads[thread], thread,
                        threads, workspace->team,        batch->milliseconds};
    meet(&shared);
    for (int64_t n = alone; n < batch->count; n++)
        run_sample(&shared, batch->images + n * image, batch->outputs, batch->num_open, n);
}

/* Run images [count][channels][height][width]. Outputs have the same layout. If num_open is not NULL, it is set to the
 * number of open channels, [count][gates]. If milliseconds is not NULL, the times of the operations are added to it; a
 * batch of one image has all of them. */
API int tg_run(
    workspace_t *workspace, const float *images, int64_t count, float *const *outputs, int num_outputs,
    int32_t *num_open, double *milliseconds) {
    const network_t *network = workspace->plan->network;
    int expected = 0;
    for (int i = 0; i < network->num_ops; i++)
        expected += network->ops[i].kind == OUTPUT;
    if (!images || !outputs || count < 0 || num_outputs != expected)
        return fail("invalid run: %lld images, %d outputs, expected %d", (long long)count, num_outputs, expected);
    batch_t batch = {workspace, images, count, outputs, num_open, milliseconds, 0};
    team_run(workspace->team, run_batch, &batch);
    return 0;
}
