/* Plans of convolutions by Winograd's algorithm: tiles, and blocks that fit into the cache. */
#include <stdlib.h>

#include "plan.h"

#define MAX_DILATION 64      /* limits the number of phases */
#define MAX_OFFSET (1 << 30) /* in the padded planes of the phases, so that offsets fit into 31 bits */

static ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
static ptrdiff_t larger(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

/* A convolution of dilation d is d * d plain ones on the phases of a map: every d-th row and column from (y, x) on. The
 * tiles of the phases follow one another, and so do their padded planes. Returns 0 if these are too large. */
static int tile(const kernels_t *kernels, int size, int dilation, const shape_t *map, tiling_t *tiling) {
    const int per_row = divide_up(divide_up(map->width, dilation), kernels->piece_pixels);
    const int phase_rows = (int)round_up(divide_up(map->height, dilation), size) + 2;
    const int pitch = per_row * kernels->piece_pixels + 4; /* input tiles overlap */
    if ((ptrdiff_t)dilation * dilation * phase_rows > MAX_OFFSET / pitch)
        return 0;
    int pieces = 0;
    for (int y = 0; y < dilation && y < map->height; y++)
        for (int x = 0; x < dilation && x < map->width; x++)
            pieces += divide_up(divide_up(map->height - y, dilation), size)
                * divide_up(divide_up(map->width - x, dilation), kernels->piece_pixels);
    const int pieces_per_vector = size * kernels->lanes / kernels->piece_pixels;
    *tiling = (tiling_t){
        .size = size,
        .points = (size + 2) * (size + 2),
        .pitch = pitch,
        .phase_rows = phase_rows,
        .out_pitch = per_row * kernels->piece_pixels,
        .out_rows = dilation * dilation * (phase_rows - 2),
        .pieces_per_vector = pieces_per_vector,
        .vectors = divide_up(pieces, pieces_per_vector),
    };
    return 1;
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

/* Filters that Winograd's algorithm does not split. */
static int filter_unit(const network_t *network, const op_t *op) {
    return op->gate_out >= 0 ? network->kernels->row_block : INTERLEAVED;
}

static int tile_panels(const network_t *network, const tiling_t *tiling) {
    return divide_up(tiling->vectors * network->kernels->lanes, PANEL);
}

/* Floats of each point that Winograd's algorithm works on at a time: transformed inputs that fill the L2 cache, weights
 * and sums that fill a quarter of it. Half and twice as much of each was tried on Zen 4: slower or equal, up to noise.
 */
typedef struct {
    int inputs, weights, sums;
} budget_t;

/* More inputs are split, so that more panels share the transformed weights. 256 to 1024 inputs and 4 to 10 panels were
 * tried on a convolution of 4096 inputs and 36 x 72 pixels; without a split, it takes up to 1.8 times as long. */
#if defined(CACHE_BYTES)
#define MAX_WINOGRAD_INPUTS 20
#define SPLIT_INPUTS 8
#else
#define MAX_WINOGRAD_INPUTS 1024
#define SPLIT_INPUTS 256
#endif
#define SPLIT_PANELS 4

static budget_t winograd_budget(const network_t *network, const tiling_t *tiling) {
    const int cache = (int)(2 * network->block_floats / tiling->points);
    return (budget_t){cache, cache / 4, cache / 4};
}

blocking_t winograd_blocking(
    const network_t *network, const op_t *op, const tiling_t *tiling, int num_inputs, int threads) {
    const budget_t budget = winograd_budget(network, tiling);
    const packing_t packed = packing(op);
    const int by_rows = packed.side_by_side == 1, unit = filter_unit(network, op);
    const int panels = divide_up(tile_panels(network, tiling), threads);
    const int split = !by_rows && num_inputs > MAX_WINOGRAD_INPUTS; /* rows contain closed inputs, and are not split */
    blocking_t blocking = {.inputs = split ? even_part(num_inputs, SPLIT_INPUTS) : num_inputs};
    blocking.panels = even_part(panels, split ? SPLIT_PANELS : max(1, budget.inputs / (num_inputs * PANEL)));
    blocking.weights_per_row = by_rows ? num_inputs : even_part(blocking.inputs, max(1, budget.weights / unit));
    const int per_row = by_rows ? op->c_in : blocking.weights_per_row;
    const int units = min(budget.weights / (per_row * unit), budget.sums / (blocking.panels * PANEL * unit));
    blocking.rows = max(1, min(units, MAX_WINOGRAD_ROWS / unit)) * unit;
    blocking.sum_rows = split ? (int)round_up(op->c_out, unit) : blocking.rows;
    blocking.u_row = (ptrdiff_t)per_row * packed.side_by_side + PANEL;
    blocking.u_point = odd_lines(blocking.rows / packed.side_by_side * blocking.u_row);
    blocking.v_point = odd_lines((ptrdiff_t)blocking.inputs * blocking.panels * PANEL);
    blocking.m_point = odd_lines((ptrdiff_t)blocking.sum_rows * blocking.panels * PANEL);
    return blocking;
}

/* The most memory that winograd_blocking asks for, with any number of inputs and threads: one unit of each, or what the
 * budget allows, and the margins of the rows. */
static blocking_t largest_blocking(const network_t *network, const op_t *op, const tiling_t *tiling) {
    const budget_t budget = winograd_budget(network, tiling);
    const ptrdiff_t unit = filter_unit(network, op), margins = MAX_WINOGRAD_ROWS * PANEL;
    const ptrdiff_t weights = op->gate_out >= 0 ? unit * op->c_in : unit, all = tile_panels(network, tiling);
    const ptrdiff_t panels = smaller(all, larger(1, budget.inputs / PANEL)), per_panel = (ptrdiff_t)op->c_in * PANEL;
    return (blocking_t){
        .v_point = odd_lines(
            smaller(all * per_panel, larger(larger(budget.inputs, per_panel), SPLIT_INPUTS * SPLIT_PANELS * PANEL))),
        .u_point = odd_lines(larger(budget.weights, weights) + margins),
        .m_point = odd_lines(larger(
            larger(budget.sums, unit * PANEL * panels),
            op->c_in > MAX_WINOGRAD_INPUTS ? round_up(op->c_out, unit) * PANEL * SPLIT_PANELS : 0)),
    };
}

int plan_winograd(plan_t *plan, const op_t *op, step_t *step) {
    const network_t *network = plan->network;
    tiling_t *tiling = &step->tiling;
    step->pieces = cut(network->kernels, tiling, op->dilation, &step->out);
    if (!step->pieces)
        return fail("out of memory");
    tiling->pieces = step->pieces;
    const size_t points = (size_t)tiling->points;
    const blocking_t most = largest_blocking(network, op, tiling);
    at_least(&plan->scratch_floats, times(2 * points, (size_t)most.v_point)); /* for two threads */
    step->u_floats = tiling->points * most.u_point;
    /* padded input, or output, both of all phases */
    const size_t padded = times((size_t)op->dilation * op->dilation * tiling->phase_rows, (size_t)tiling->pitch);
    const size_t plane = times((size_t)tiling->out_rows + tiling->size, (size_t)tiling->out_pitch);
    step->plane_floats = round_up((padded > plane ? padded : plane) + PANEL, PANEL);
    at_least(&plan->thread_floats, (size_t)(step->plane_floats + step->u_floats) + times(points, (size_t)most.m_point));
    return 0;
}

/* Select the cheapest algorithm: multiplications per weight, padding included, plus the cost of loading and
 * transforming the weight. Returns whether it is Winograd's, with its tiling.
 *
 * The constants were fitted to the times of 3 x 3 convolutions of ResNet-20, 34 and 50, with and without gates, on maps
 * of 3 x 3 to 56 x 56, by all algorithms, on Zen 4 with AVX2 and AVX-512. */
int find_tiling(const kernels_t *kernels, const op_t *op, const shape_t *out, tiling_t *best) {
    if (op->kernel != 3 || op->stride != 1 || op->padding != op->dilation || op->dilation > MAX_DILATION)
        return 0;
    const double fetch = 40, transforms = 1.25, weights = 16;
    double least = 9 * (round_up((ptrdiff_t)out->height * out->width, kernels->lanes) + fetch);
    int found = 0;
    for (int size = 4; size >= 2; size -= 2) {
        tiling_t tiling;
        if (!tile(kernels, size, op->dilation, out, &tiling))
            continue;
        const double cost = tiling.points * (transforms * tiling.vectors * kernels->lanes + weights);
        if (cost < least) {
            least = cost;
            *best = tiling;
            found = 1;
        }
    }
    return found;
}
