/* Each compute kernel alone, on every instruction set of this machine, against a scalar reference. Prints the first
 * difference and returns 1. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define TOLERANCE 1e-4
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static const kernels_t *kernels;

static float *random_floats(int count) {
    float *values = aligned_alloc(64, ((size_t)count * sizeof *values + 63) / 64 * 64);
    for (int i = 0; i < count; i++)
        values[i] = (float)rand() / (float)RAND_MAX - .5f;
    return values;
}

static void check(const char *name, double actual, double expected) {
    if (fabs(actual - expected) <= TOLERANCE * fmax(1., fabs(expected)) || (isnan(actual) && isnan(expected)))
        return;
    printf("%s of %s gives %g, expected %g\n", name, kernels->name, actual, expected);
    exit(1);
}

/* Pixel of a channel in a map in panels. */
static ptrdiff_t at(int channel, int pixel, ptrdiff_t panel) {
    return pixel / PANEL * panel + channel * PANEL + pixel % PANEL;
}

static void test_product(int num_rows, int depth, int pixels, int interleaved, int extras) {
    const int num_columns = 2 * depth, panels = divide_up(pixels, PANEL);
    const ptrdiff_t x_panel = (ptrdiff_t)depth * PANEL, out_panel = (ptrdiff_t)num_rows * PANEL;
    const int row_floats = num_columns * interleaved;
    float *weights = random_floats(divide_up(num_rows, interleaved) * row_floats);
    float *x = random_floats((int)x_panel * panels), *residual = random_floats((int)out_panel * panels);
    float *out = random_floats((int)out_panel * panels), *bias = random_floats(num_rows);
    const float **rows = malloc((size_t)num_rows * sizeof *rows);
    ptrdiff_t *columns = malloc((size_t)num_columns * sizeof *columns);
    for (int m = 0; m < num_rows; m++)
        rows[m] = weights + m / interleaved * row_floats + m % interleaved;
    for (int j = 0; j < depth; j++)
        columns[j] = (2 * j + j % 2) * interleaved; /* some of the columns */
    product_t product = {
        .rows = rows,
        .interleaved = interleaved,
        .row_floats = row_floats,
        .columns = columns,
        .depth = depth,
        .x = x,
        .x_panel = x_panel,
        .out = out,
        .out_panel = out_panel,
        .bias = extras ? bias : NULL,
        .residual = extras ? residual : NULL,
        .relu = extras,
    };
    kernels->product(&product, 0, num_rows, divide_up(pixels, kernels->lanes));
    for (int m = 0; m < num_rows; m++)
        for (int n = 0; n < pixels; n++) {
            double sum = extras ? bias[m] + residual[at(m, n, out_panel)] : 0.;
            for (int j = 0; j < depth; j++)
                sum += rows[m][columns[j]] * x[at(j, n, x_panel)];
            check("product", out[at(m, n, out_panel)], extras && sum < 0. ? 0. : sum);
        }
    if (extras) { /* one pixel */
        float *values = calloc((size_t)num_columns, sizeof *values);
        for (int j = 0; j < depth; j++)
            values[interleaved == 1 ? columns[j] : j] = x[at(j, 0, x_panel)];
        float *expected = malloc((size_t)num_rows * sizeof *expected);
        for (int m = 0; m < num_rows; m++)
            expected[m] = out[at(m, 0, out_panel)];
        kernels->product_pixel(&product, 0, num_rows, values, num_columns);
        for (int m = 0; m < num_rows; m++)
            check("product_pixel", out[at(m, 0, out_panel)], expected[m]);
        free(values);
        free(expected);
    }
    free(weights), free(x), free(residual), free(out), free(bias), free(rows), free(columns);
}

/* Matrices of Winograd's algorithm; G without its factors, A with them. */
static const double b4[6][6] = {{4, 0, -5, 0, 1, 0},  {0, -4, -4, 1, 1, 0}, {0, 4, -4, -1, 1, 0},
                                {0, -2, -1, 2, 1, 0}, {0, 2, -1, -2, 1, 0}, {0, 4, 0, -5, 0, 1}};
static const double g4[6][6] = {{1, 0, 0}, {1, 1, 1}, {1, -1, 1}, {1, 2, 4}, {1, -2, 4}, {0, 0, 1}};
static const double a4[6][6] = {
    {1. / 4, -1. / 6, -1. / 6, 1. / 24, 1. / 24, 0},
    {0, -1. / 6, 1. / 6, 1. / 12, -1. / 12, 0},
    {0, -1. / 6, -1. / 6, 1. / 6, 1. / 6, 0},
    {0, -1. / 6, 1. / 6, 1. / 3, -1. / 3, 1}};
static const double b2[6][6] = {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}};
static const double g2[6][6] = {{1, 0, 0}, {1, 1, 1}, {1, -1, 1}, {0, 0, 1}};
static const double a2[6][6] = {{1, .5, .5, 0}, {0, .5, -.5, -1}};

/* Row i, column j of matrix * x * matrix^T, where x is size x size. */
static double transformed(const double matrix[6][6], const double x[6][6], int size, int i, int j) {
    double sum = 0.;
    for (int r = 0; r < size; r++)
        for (int c = 0; c < size; c++)
            sum += matrix[i][r] * x[r][c] * matrix[j][c];
    return sum;
}

static void test_transform_weights(int size, int count) {
    const int side = size + 2, padded = divide_up(count, PANEL) * PANEL;
    float *weights = random_floats(9 * padded), *u = random_floats(side * side * padded);
    kernels->transform_weights(size, weights, padded, count, u, padded);
    for (int i = 0; i < count; i++) {
        double w[6][6];
        for (int t = 0; t < 9; t++)
            w[t / 3][t % 3] = weights[t * padded + i];
        for (int p = 0; p < side * side; p++)
            check("transform_weights", u[p * padded + i], transformed(size == 4 ? g4 : g2, w, 3, p / side, p % side));
    }
    free(weights), free(u);
}

/* Piece of the tile in a lane, and its column within the piece. */
static int piece_of(int size, int lane, int *column) {
    const int vector = size == 4 ? lane % 4 : lane % 4 / 2, pixel = lane / 4 * 4 + (size == 4 ? 0 : lane % 2 * 2);
    *column = pixel % kernels->piece_pixels;
    return vector * (kernels->lanes / kernels->piece_pixels) + pixel / kernels->piece_pixels;
}

static void test_transforms_of_tiles(int size) {
    const int lanes = kernels->lanes, side = size + 2, points = side * side, vectors = 3;
    const int per_vector = size * lanes / kernels->piece_pixels, num_pieces = vectors * per_vector;
    const int pitch = kernels->piece_pixels + 4, out_pitch = kernels->piece_pixels;
    piece_t *pieces = calloc((size_t)num_pieces, sizeof *pieces);
    for (int i = 0; i < num_pieces; i++)
        pieces[i] = (piece_t){.in = i * size * pitch, .out = i * size * out_pitch};
    const tiling_t tiling = {
        .size = size,
        .points = points,
        .pitch = pitch,
        .out_pitch = out_pitch,
        .vectors = vectors,
        .pieces_per_vector = per_vector,
        .pieces = pieces,
    };
    const int panels = divide_up(vectors * lanes, PANEL), point = panels * PANEL;
    float *plane = random_floats((num_pieces * size + 2) * pitch + PANEL), *v = random_floats(points * point);
    float *out = random_floats(num_pieces * size * out_pitch + PANEL);
    kernels->transform_input(&tiling, plane, 0, vectors, v, PANEL, point);
    float *sums = random_floats(points * point);
    kernels->transform_output(&tiling, sums, PANEL, point, 0, vectors, out);
    for (int tile = 0; tile < vectors * lanes; tile++) {
        int column;
        const piece_t *piece = pieces + tile / lanes * per_vector + piece_of(size, tile % lanes, &column);
        double x[6][6], m[6][6];
        for (int p = 0; p < points; p++) {
            x[p / side][p % side] = plane[piece->in + p / side * pitch + column + p % side];
            m[p / side][p % side] = sums[p * point + tile];
        }
        for (int p = 0; p < points; p++)
            check(
                "transform_input", v[p * point + tile], transformed(size == 4 ? b4 : b2, x, side, p / side, p % side));
        for (int i = 0; i < size * size; i++)
            check(
                "transform_output", out[piece->out + i / size * out_pitch + column + i % size],
                transformed(size == 4 ? a4 : a2, m, side, i / size, i % size));
    }
    free(pieces), free(plane), free(v), free(out), free(sums);
}

static void test_finish(int first, int count, int relu) {
    const int channels = 3, panels = divide_up(first + count, PANEL);
    const ptrdiff_t panel = channels * PANEL;
    float *x = random_floats(count + PANEL), *out = random_floats((int)panel * panels);
    float *residual = random_floats((int)panel * panels);
    kernels->finish(x, first, count, out + PANEL, residual + PANEL, panel, .25f, relu);
    for (int i = 0; i < count; i++) {
        const double sum = x[i] + residual[at(1, first + i, panel)] + .25;
        check("finish", out[at(1, first + i, panel)], relu && sum < 0. ? 0. : sum);
    }
    free(x), free(out), free(residual);
}

static void test_average(int channels, int pixels) {
    const ptrdiff_t panel = channels * PANEL;
    float *map = random_floats((int)panel * divide_up(pixels, PANEL)), *out = random_floats(channels);
    kernels->average(map, panel, channels, pixels, out);
    for (int c = 0; c < channels; c++) {
        double sum = 0.;
        for (int i = 0; i < pixels; i++)
            sum += map[at(c, i, panel)];
        check("average", out[c], sum / pixels);
    }
    free(map), free(out);
}

static void test_lines(int count) {
    float *x = random_floats(4 * count + 4 * PANEL), *y = random_floats(count), *out = random_floats(count + PANEL);
    x[count / 2] = NAN;
    for (int stride = 1; stride <= 3; stride++) {
        kernels->subsample(x, stride, out, count);
        for (int i = 0; i < count; i++)
            check("subsample", out[i], x[i * stride]);
        kernels->max_windows(x, 3, stride, out, count);
        for (int i = 0; i < count; i++) {
            const float *w = x + i * stride;
            check("max_windows", out[i], isnan(w[0] + w[1] + w[2]) ? NAN : fmax(w[0], fmax(w[1], w[2])));
        }
    }
    memcpy(out, y, (size_t)count * sizeof *out);
    kernels->maximum(out, x, count);
    double sum = 0.;
    for (int i = 0; i < count; i++) {
        check("maximum", out[i], isnan(x[i]) ? NAN : fmax(x[i], y[i]));
        sum += y[i];
    }
    check("sum", kernels->sum(y, count), sum);
    free(x), free(y), free(out);
}

static void test_pack_taps(int width, int first, int count) {
    const int taps = 3, pitch = width + 2, height = divide_up(first + count, width);
    const ptrdiff_t offsets[] = {0, 1, pitch + 2}, panel = taps * PANEL;
    float *x = random_floats((height + 2) * pitch + 2 * PANEL), *line = random_floats(count + 2 * PANEL);
    float *panels = random_floats((int)panel * divide_up(count, PANEL));
    kernels->pack_taps(x, offsets, taps, pitch, width, first, count, line, panels, panel, PANEL);
    for (int t = 0; t < taps; t++)
        for (int i = 0; i < count; i++) {
            const int pixel = first + i;
            check("pack_taps", panels[at(t, i, panel)], x[offsets[t] + pixel / width * pitch + pixel % width]);
        }
    free(x), free(line), free(panels);
}

static void test_all(void) {
    const int sizes[] = {1, 3, 5, 6, 7, 8, 9, 15, 16, 17, 33, 50, 100};
    for (int i = 0; i < COUNT(sizes); i++) {
        const int size = sizes[i];
        for (int extras = 0; extras < 2; extras++)
            for (int interleaved = 1; interleaved <= PANEL; interleaved += PANEL - 1) {
                test_product(size, 13, 49, interleaved, extras);
                test_product(11, size, 33, interleaved, extras);
                test_product(20, 9, size, interleaved, extras);
            }
        test_transform_weights(4, size);
        test_transform_weights(2, size);
        test_finish(size % 5, size, 0);
        test_finish(16, size, 1);
        test_average(size, 20);
        test_average(5, 30 * size);
        test_lines(size);
        test_pack_taps(size, size / 2, 40);
    }
    test_transforms_of_tiles(4);
    test_transforms_of_tiles(2);
    printf("%s\n", kernels->name);
}

int main(void) {
    kernels = &kernels_portable;
    test_all();
#if defined(__x86_64__)
    __builtin_cpu_init();
    kernels = &kernels_avx2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        test_all();
    kernels = &kernels_avx512;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        test_all();
#endif
    return 0;
}
