/* Convolutions: on packed parts of the input, or by Winograd's algorithm. */
#include <string.h>

#include "run.h"

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
    /* Sums do not depend on the number of threads: the blocks of channels are the same for every chunk. */
    int most = PACKED_FLOATS / (CHUNK_VECTORS * lanes * conv->taps), block = conv->n_in;
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

/* Number of vectors that a thread works on at a time if threads run their own tiles, in their own parts of the scratch
 * memory. 0 if they share all tiles because there is one thread or the map is small. */
static int block_per_thread(const context_t *context, const conv_t *conv) {
    const step_t *step = conv->step;
    const int threads = context->threads, lanes = context->plan->network->kernels->lanes;
    if (threads == 1 || step->tiling.vectors < 2 * threads)
        return 0;
    int block = step->block;
    while (block
           && threads * (point_floats(conv->op->c_in, block, lanes) + point_floats(conv->op->c_out, block, lanes))
               > 2 * (step->v_point + step->m_point))
        block--;
    return block;
}

/* Threads that share tiles split the channels, then the points, then the rows. */
static void run_winograd(context_t *shared, conv_t *conv) {
    const kernels_t *kernels = shared->plan->network->kernels;
    const step_t *step = conv->step;
    const tiling_t *tiling = &step->tiling;
    float *v = shared->sample->scratch;
    ptrdiff_t v_point = step->v_point, m_point = step->m_point;
    float *padded = shared->own->plane;
    ptrdiff_t point = packing(conv->op, 1).point;
    product_t product = conv->product;
    product.bias = NULL;
    product.relu = 0;
    ptrdiff_t v_vector = (ptrdiff_t)conv->n_in * kernels->lanes, m_vector = (ptrdiff_t)conv->n_out * kernels->lanes;
    product.x_row = product.out_row = kernels->lanes;
    product.x_vector = v_vector;
    product.out_vector = m_vector;
    context_t alone = *shared;
    const context_t *context = shared;
    range_t own = {0, tiling->vectors};
    int block = block_per_thread(shared, conv);
    if (block) {
        own = part(shared, tiling->vectors);
        v_point = point_floats(conv->op->c_in, block, kernels->lanes);
        m_point = point_floats(conv->op->c_out, block, kernels->lanes);
        v += shared->thread * tiling->points * (v_point + m_point);
        alone.thread = 0;
        alone.threads = 1;
        context = &alone;
    } else
        block = step->block;
    float *m = v + tiling->points * v_point;
    for (int begin = (int)own.begin; begin < own.end; begin += block) {
        int end = begin + block < own.end ? begin + block : (int)own.end;
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
            kernels->transform_input(tiling, padded, begin, end, v + j * kernels->lanes, v_vector, v_point);
        }
        meet(context);
        range_t points = part(context, tiling->points);
        for (ptrdiff_t p = points.begin; p < points.end; p++) {
            product.row_offset = p * point;
            product.then = (p + 1 < points.end ? p + 1 : points.begin) * point;
            product.x = v + p * v_point;
            product.out = m + p * m_point;
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
                    tiling, mk, m_vector, m_point, begin, end, conv->out + at, residual, bias, conv->op->relu);
                continue;
            }
            float *phases = context->own->plane;
            kernels->transform_output(tiling, mk, m_vector, m_point, begin, end, phases, NULL, 0.f, 0);
            int per_vector = tiling->pieces_per_vector;
            interleave(
                conv->op, &step->out, tiling, pieces + begin * per_vector, (end - begin) * per_vector, phases,
                conv->out + at, residual, bias);
        }
    }
}

void run_conv(context_t *context, const op_t *op, const step_t *step) {
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
