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

/* Tiles of a convolution that are processed together. */
typedef struct {
    blocking_t blocking;
    int input, num_inputs; /* that are transformed, as indices among the open ones */
    const piece_t *pieces;
    int num_pieces;
    int begin, end; /* vectors */
    float *v;       /* transformed inputs */
    ptrdiff_t v_panel;
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
    range_t channels = part(context, tiles->num_inputs);
    for (ptrdiff_t c = channels.begin; c < channels.end; c += GROUP) {
        const int count = in_group(c, &channels);
        planes_t planes = read_planes(context, conv->op->in, &step->in, tiles->input + c, count, begin, end);
        for (int i = 0; i < count; i++) {
            float *padded = context->own->scratch;
            pad(conv->op, &step->in, tiling, planes.first + i * planes.stride, first_row, end_row, padded);
            kernels->transform_input(
                tiling, padded, tiles->begin, tiles->end, tiles->v + (c + i) * PANEL, tiles->v_panel,
                tiles->blocking.v_point);
        }
    }
}

/* Filters and inputs that are processed together, as indices among the open ones. */
typedef struct {
    int row, num_rows;
    int input, num_inputs;
} cut_t;

static int channel_of(const conv_t *conv, int input) { return conv->open_in ? conv->open_in[input] : input; }

/* Channels from the first to the last input of a cut. Rows of weights have all of them, open or closed. */
static int num_channels(const conv_t *conv, const cut_t *cut) {
    return channel_of(conv, cut->input + cut->num_inputs - 1) + 1 - channel_of(conv, cut->input);
}

static void transform_weights(
    context_t *context, const conv_t *conv, const blocking_t *blocking, const cut_t *cut, float *u) {
    const kernels_t *kernels = context->plan->network->kernels;
    const packing_t packed = packing(conv->op);
    const int size = conv->step->tiling.size, end = cut->input + cut->num_inputs;
    for (int m = 0; m < cut->num_rows; m += packed.side_by_side, u += blocking->u_row) {
        const float *row = conv->product.rows[cut->row + m];
        if (packed.side_by_side == 1) {
            kernels->transform_weights(
                size, row + channel_of(conv, cut->input), packed.tap, num_channels(conv, cut), u, blocking->u_point);
            continue;
        }
        for (int j = cut->input, next; j < end; j = next) { /* successive channels together */
            const int channel = channel_of(conv, j);
            for (next = j + 1; next < end && channel_of(conv, next) == channel + next - j;)
                next++;
            kernels->transform_weights(
                size, row + channel * packed.column, packed.tap, (int)((next - j) * packed.column),
                u + (j - cut->input) * packed.column, blocking->u_point);
        }
    }
}

/* The weights of the next cut, which are fetched from memory while this one is computed. */
typedef struct {
    const conv_t *conv;
    cut_t cut;
    int m, tap, line; /* that come next */
} ahead_t;

static int lines_per_tap(const ahead_t *ahead) {
    return ahead->conv->product.interleaved == 1 ? divide_up(num_channels(ahead->conv, &ahead->cut), PANEL)
                                                 : ahead->cut.num_inputs;
}

static void prefetch(ahead_t *ahead, int lines) {
    const conv_t *conv = ahead->conv;
    const packing_t packed = packing(conv->op);
    const int per_tap = lines_per_tap(ahead), first = channel_of(conv, ahead->cut.input);
    for (; lines > 0 && ahead->m < ahead->cut.num_rows; lines--) {
        __builtin_prefetch(
            conv->product.rows[ahead->cut.row + ahead->m] + ahead->tap * packed.tap
                + (packed.side_by_side == 1 ? first + ahead->line * PANEL
                                            : channel_of(conv, ahead->cut.input + ahead->line) * packed.column),
            0, 2);
        if (++ahead->line < per_tap)
            continue;
        ahead->line = 0;
        if (++ahead->tap < 9)
            continue;
        ahead->tap = 0;
        ahead->m += packed.side_by_side;
    }
}

/* Add the products of some inputs to the sums of some filters. */
static void multiply_points(
    context_t *context, const conv_t *conv, const tiles_t *tiles, const cut_t *cut, ahead_t *ahead, const float *u,
    float *sums) {
    const blocking_t *blocking = &tiles->blocking;
    const int interleaved = conv->product.interleaved, points = conv->step->tiling.points;
    const float *rows[MAX_WINOGRAD_ROWS];
    for (int m = 0; m < cut->num_rows; m++)
        rows[m] = u + m / interleaved * blocking->u_row + m % interleaved;
    product_t product = {
        .rows = rows,
        .row_offset = interleaved == 1 ? -channel_of(conv, cut->input) : 0,
        .interleaved = interleaved,
        .row_floats = blocking->u_row,
        .columns = conv->product.columns + (interleaved == 1 ? cut->input : 0),
        .depth = cut->num_inputs,
        .x = tiles->v + (ptrdiff_t)(cut->input - tiles->input) * PANEL,
        .x_panel = tiles->v_panel,
        .out = sums,
        .out_panel = (ptrdiff_t)blocking->sum_rows * PANEL,
    };
    const int lines = divide_up(9 * divide_up(ahead->cut.num_rows, interleaved) * lines_per_tap(ahead), points);
    for (int p = 0; p < points; p++) {
        prefetch(ahead, lines);
        product.residual = cut->input ? product.out : NULL;
        context->plan->network->kernels->product(&product, 0, cut->num_rows, tiles->end - tiles->begin);
        product.row_offset += blocking->u_point;
        product.x += blocking->v_point;
        product.out += blocking->m_point;
    }
}

static void transform_outputs(
    context_t *context, const conv_t *conv, const tiles_t *tiles, const cut_t *cut, const float *sums) {
    const kernels_t *kernels = context->plan->network->kernels;
    const step_t *step = conv->step;
    float *plane = context->own->scratch;
    for (ptrdiff_t m = 0; m < cut->num_rows; m++) {
        const ptrdiff_t k = cut->row + m;
        channel_t channel = {
            .conv = conv,
            .kernels = kernels,
            .line = context->own->line,
            .out = conv->product.out + k * PANEL,
            .residual = conv->residual ? conv->residual + k * PANEL : NULL,
            .bias = conv->product.bias[k],
        };
        kernels->transform_output(
            &step->tiling, sums + m * PANEL, (ptrdiff_t)tiles->blocking.sum_rows * PANEL, tiles->blocking.m_point,
            tiles->begin, tiles->end, plane);
        if (conv->op->dilation == 1)
            store_rows(&channel, tiles->pieces, tiles->num_pieces, plane);
        else
            store_dilated(&channel, tiles->pieces, tiles->num_pieces, plane);
    }
}

/* The cut after this one; without rows after the last. */
static cut_t next_cut(const tiles_t *tiles, cut_t cut, int end) {
    const blocking_t *blocking = &tiles->blocking;
    const int end_input = tiles->input + tiles->num_inputs;
    cut.input += cut.num_inputs;
    if (cut.input == end_input) {
        cut.input = tiles->input;
        cut.row += cut.num_rows;
        cut.num_rows = end - cut.row < blocking->rows ? end - cut.row : blocking->rows;
    }
    cut.num_inputs =
        end_input - cut.input < blocking->weights_per_row ? end_input - cut.input : blocking->weights_per_row;
    return cut;
}

/* Add the products of the transformed inputs: transform some weights at a time, and use them for all tiles while they
 * are in the cache. After the last inputs, compute the outputs. */
static void run_filters(context_t *context, const conv_t *conv, const tiles_t *tiles) {
    const step_t *step = conv->step;
    const blocking_t *blocking = &tiles->blocking;
    const int interleaved = conv->product.interleaved;
    const int unit = interleaved == 1 ? context->plan->network->kernels->row_block : interleaved;
    float *u = context->own->scratch + step->plane_floats, *sums = u + step->u_floats;
    const range_t units = part(context, divide_up(conv->n_out, unit));
    const int first = (int)units.begin * unit,
              end = units.end * unit < conv->n_out ? (int)units.end * unit : conv->n_out;
    cut_t cut = {.row = first, .input = tiles->input + tiles->num_inputs};
    for (cut = next_cut(tiles, cut, end); cut.num_rows > 0;) {
        ahead_t ahead = {.conv = conv, .cut = next_cut(tiles, cut, end)};
        float *own = blocking->sum_rows > blocking->rows ? sums + (ptrdiff_t)(cut.row - first) * PANEL : sums;
        transform_weights(context, conv, blocking, &cut, u);
        multiply_points(context, conv, tiles, &cut, &ahead, u, own);
        if (cut.input + cut.num_inputs == conv->n_in)
            transform_outputs(context, conv, tiles, &cut, own);
        cut = ahead.cut;
    }
}

/* Threads run their own tiles, in their own parts of the memory. On small maps, and if there are so many inputs that
 * each thread should read a part of the weights only, they share tiles and split the channels, then the filters. */
void run_winograd(context_t *context, const conv_t *conv) {
    const step_t *step = conv->step;
    const network_t *network = context->plan->network;
    const tiling_t *tiling = &step->tiling;
    const int per_panel = PANEL / network->kernels->lanes, panels = divide_up(tiling->vectors, per_panel);
    tiles_t tiles = {
        .blocking = winograd_blocking(network, conv->op, tiling, conv->n_in, 1),
        .v = context->sample->scratch,
    };
    context_t alone = *context;
    range_t own = {0, panels};
    const int threads = context->threads;
    if (threads > 1 && panels >= 2 * threads && tiles.blocking.panels >= threads
        && tiles.blocking.inputs == conv->n_in) {
        const blocking_t smaller = winograd_blocking(network, conv->op, tiling, conv->n_in, threads);
        if (threads * smaller.v_point <= 2 * tiles.blocking.v_point) {
            own = part(context, panels);
            tiles.blocking = smaller;
            tiles.v += context->thread * tiling->points * smaller.v_point;
            alone.thread = 0;
            alone.threads = 1;
            context = &alone;
        }
    }
    const int block = tiles.blocking.panels;
    for (int begin = (int)own.begin; begin < own.end; begin += block) {
        int end = (begin + block < own.end ? begin + block : (int)own.end) * per_panel;
        tiles.begin = begin * per_panel;
        tiles.end = end < tiling->vectors ? end : tiling->vectors;
        tiles.pieces = tiling->pieces + tiles.begin * tiling->pieces_per_vector;
        tiles.num_pieces = (tiles.end - tiles.begin) * tiling->pieces_per_vector;
        for (int input = 0; input < conv->n_in; input += tiles.num_inputs) {
            tiles.input = input;
            tiles.num_inputs = conv->n_in - input < tiles.blocking.inputs ? conv->n_in - input : tiles.blocking.inputs;
            tiles.v_panel = (ptrdiff_t)tiles.num_inputs * PANEL;
            if (begin > own.begin || input)
                meet(context); /* the former inputs are no longer needed */
            transform_inputs(context, conv, &tiles);
            meet(context);
            run_filters(context, conv, &tiles);
        }
    }
}
