/* Convolutions by Winograd's algorithm. */
#include <string.h>

#include "run.h"

/* Copy rows of whole vectors: what is too much is overwritten by the next row. Both sides have PANEL more floats. */
INLINE void copy_row(float *to, const float *from, int count) {
    for (int i = 0; i < count; i += PANEL)
        memcpy(to + i, from + i, PANEL * sizeof *to);
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

/* The output of one channel. */
typedef struct {
    const conv_t *conv;
    const kernels_t *kernels;
    float *line;
    float *out; /* channel of the map */
    const float *residual;
    float bias;
    int first, count; /* pixels in the line */
} channel_t;

static void flush(channel_t *channel) {
    const shape_t *map = &channel->conv->step->out;
    int count = channel->count; /* the last panel has room for complete vectors */
    if (channel->first + count == num_pixels(map))
        count = num_panels(map) * PANEL - channel->first;
    channel->kernels->finish(
        channel->line, channel->first, count, channel->out, channel->residual, map->panel, channel->bias,
        channel->conv->op->relu);
    channel->count = 0;
}

/* Store the outputs of pieces: rows that follow one another in the map together. */
static void store_rows(channel_t *channel, const piece_t *pieces, int count, const float *plane) {
    const int width = channel->conv->step->out.width, pitch = channel->conv->step->tiling.out_pitch;
    channel->count = 0;
    for (int i = 0, next; i < count && pieces[i].rows; i = next) {
        int columns = pieces[i].columns;
        for (next = i + 1; next < count && pieces[next].out == pieces[i].out + columns && pieces[next].rows; next++)
            columns += pieces[next].columns;
        for (int y = 0; y < pieces[i].rows; y++) {
            const int pixel = pieces[i].pixel + y * width;
            if (channel->count && pixel != channel->first + channel->count)
                flush(channel);
            if (!channel->count)
                channel->first = pixel;
            copy_row(channel->line + channel->count, plane + pieces[i].out + y * pitch, columns);
            channel->count += columns;
        }
    }
    flush(channel);
}

/* Store the outputs of dilated pieces: every dilation-th pixel of every dilation-th row. */
static void store_dilated(const channel_t *channel, const piece_t *pieces, int count, const float *plane) {
    const op_t *op = channel->conv->op;
    const shape_t *map = &channel->conv->step->out;
    for (int i = 0; i < count; i++)
        for (int y = 0; y < pieces[i].rows; y++) {
            const float *from = plane + pieces[i].out + (ptrdiff_t)y * channel->conv->step->tiling.out_pitch;
            int pixel = pieces[i].pixel + y * op->dilation * map->width;
            for (int x = 0; x < pieces[i].columns; x++, pixel += op->dilation) {
                const ptrdiff_t at = pixel / PANEL * map->panel + pixel % PANEL;
                float value = from[x] + channel->bias + (channel->residual ? channel->residual[at] : 0.f);
                channel->out[at] = op->relu && value < 0.f ? 0.f : value;
            }
        }
}

/* Number of panels that a thread works on at a time if threads run their own tiles, in their own parts of the scratch
 * memory: together, as many as a single thread does. 0 if they share all tiles, because there is one thread, the map is
 * small, or there are so many weights that each thread should read a part of them only. */
static int block_per_thread(const context_t *context, const conv_t *conv, int panels) {
    const step_t *step = conv->step;
    const int threads = context->threads;
    if (threads == 1 || panels < 2 * threads || step->block < threads)
        return 0;
    int block = divide_up(step->block, threads);
    while (block
           && threads * (point_floats(conv->op->c_in, block) + point_floats(conv->op->c_out, block))
               > 2 * (step->v_point + step->m_point))
        block--;
    return block;
}

/* Tiles of a convolution that are processed together, and their memory. */
typedef struct {
    const piece_t *pieces;
    int num_pieces;
    int begin, end; /* vectors */
    float *v, *m;   /* transformed inputs and outputs */
    ptrdiff_t v_panel, m_panel, v_point, m_point;
} tiles_t;

static void transform_inputs(context_t *context, const conv_t *conv, const tiles_t *tiles) {
    const kernels_t *kernels = context->plan->network->kernels;
    const step_t *step = conv->step;
    const tiling_t *tiling = &step->tiling;
    int last = tiles->num_pieces - 1;
    while (!tiles->pieces[last].rows)
        last--;
    /* Rows of the padded planes that these tiles read, and their pixels; all pixels if there are phases. */
    const int first_row = tiles->pieces[0].in / tiling->pitch;
    const int end_row = tiles->pieces[last].in / tiling->pitch + tiling->size + 2;
    ptrdiff_t begin = 0, end = num_pixels(&step->in);
    if (conv->op->dilation == 1) {
        begin = first_row ? (ptrdiff_t)(first_row - 1) * step->in.width : 0;
        end = (ptrdiff_t)end_row * step->in.width < end ? (ptrdiff_t)end_row * step->in.width : end;
    }
    range_t channels = part(context, conv->n_in);
    for (ptrdiff_t c = channels.begin; c < channels.end; c += GROUP) {
        const int count = in_group(c, &channels);
        planes_t planes = read_planes(context, conv->op->in, &step->in, c, count, begin, end);
        for (int i = 0; i < count; i++) {
            float *padded = context->own->scratch;
            pad(conv->op, &step->in, tiling, planes.first + i * planes.stride, first_row, end_row, padded);
            kernels->transform_input(
                tiling, padded, tiles->begin, tiles->end, tiles->v + (c + i) * PANEL, tiles->v_panel, tiles->v_point);
        }
    }
}

static void multiply_points(context_t *context, const conv_t *conv, const tiles_t *tiles) {
    const ptrdiff_t point = winograd_packing(conv->op, conv->step->tiling.points).point;
    product_t product = conv->product;
    product.bias = product.residual = NULL;
    product.relu = 0;
    product.x_panel = tiles->v_panel;
    product.out_panel = tiles->m_panel;
    range_t points = part(context, conv->step->tiling.points);
    for (ptrdiff_t p = points.begin; p < points.end; p++) {
        product.row_offset = p * point;
        product.then = (p + 1 < points.end ? p + 1 : points.begin) * point;
        product.x = tiles->v + p * tiles->v_point;
        product.out = tiles->m + p * tiles->m_point;
        context->plan->network->kernels->product(&product, 0, conv->n_out, tiles->end - tiles->begin);
    }
}

static void transform_outputs(context_t *context, const conv_t *conv, const tiles_t *tiles) {
    const kernels_t *kernels = context->plan->network->kernels;
    float *plane = context->own->scratch;
    range_t rows = part(context, conv->n_out);
    for (ptrdiff_t k = rows.begin; k < rows.end; k++) {
        channel_t channel = {
            .conv = conv,
            .kernels = kernels,
            .line = context->own->line,
            .out = conv->product.out + k * PANEL,
            .residual = conv->residual ? conv->residual + k * PANEL : NULL,
            .bias = conv->product.bias[k],
        };
        kernels->transform_output(
            &conv->step->tiling, tiles->m + k * PANEL, tiles->m_panel, tiles->m_point, tiles->begin, tiles->end, plane);
        if (conv->op->dilation == 1)
            store_rows(&channel, tiles->pieces, tiles->num_pieces, plane);
        else
            store_dilated(&channel, tiles->pieces, tiles->num_pieces, plane);
    }
}

/* Threads that share tiles split the channels, then the points, then the rows. */
void run_winograd(context_t *context, const conv_t *conv) {
    const step_t *step = conv->step;
    const tiling_t *tiling = &step->tiling;
    const int per_panel = PANEL / context->plan->network->kernels->lanes;
    const int panels = divide_up(tiling->vectors, per_panel);
    tiles_t tiles = {
        .v = context->sample->scratch,
        .v_panel = (ptrdiff_t)conv->n_in * PANEL,
        .m_panel = (ptrdiff_t)conv->n_out * PANEL,
        .v_point = step->v_point,
        .m_point = step->m_point,
    };
    context_t alone = *context;
    range_t own = {0, panels};
    int block = block_per_thread(context, conv, panels);
    if (block) {
        own = part(context, panels);
        tiles.v_point = point_floats(conv->op->c_in, block);
        tiles.m_point = point_floats(conv->op->c_out, block);
        tiles.v += context->thread * tiling->points * (tiles.v_point + tiles.m_point);
        alone.thread = 0;
        alone.threads = 1;
        context = &alone;
    } else
        block = step->block;
    tiles.m = tiles.v + tiling->points * tiles.v_point;
    for (int begin = (int)own.begin; begin < own.end; begin += block) {
        int end = (begin + block < own.end ? begin + block : (int)own.end) * per_panel;
        tiles.begin = begin * per_panel;
        tiles.end = end < tiling->vectors ? end : tiling->vectors;
        tiles.pieces = tiling->pieces + tiles.begin * tiling->pieces_per_vector;
        tiles.num_pieces = (tiles.end - tiles.begin) * tiling->pieces_per_vector;
        transform_inputs(context, conv, &tiles);
        meet(context);
        multiply_points(context, conv, &tiles);
        meet(context);
        transform_outputs(context, conv, &tiles);
    }
}
