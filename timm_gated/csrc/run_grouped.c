/* Grouped convolutions: the inputs of one group at a time as padded planes, for its outputs. */
#include <string.h>

#include "run.h"

/* The open channels of a group, [begin, end) among those of all groups. */
typedef struct {
    int begin, end;
} channels_t;

/* Open channels of the next group, which has the channels below `limit`. */
static channels_t next_group(channels_t last, const int32_t *open, int num_open, int limit) {
    channels_t next = {last.end, open ? last.end : limit};
    while (open && next.end < num_open && open[next.end] < limit)
        next.end++;
    return next;
}

/* Copy the open inputs of a group into padded planes, split into phases. */
static void pad_inputs(context_t *context, const op_t *op, const step_t *step, channels_t inputs) {
    float *phase = context->own->scratch;
    const range_t channels = {inputs.begin, inputs.end};
    for (ptrdiff_t c = channels.begin; c < channels.end; c += GROUP) {
        const int count = in_group(c, &channels);
        planes_t planes = read_planes(context, op->in, &step->in, c, count, 0, num_pixels(&step->in));
        for (int i = 0; i < count; i++)
            for (int y = 0; y < step->phases; y++)
                for (int x = 0; x < step->phases; x++, phase += step->phase_plane)
                    split_phase(
                        context->plan->network->kernels, op, step, planes.first + i * planes.stride,
                        y * op->dilation % op->stride, x * op->dilation % op->stride, phase);
    }
}

/* Copy rows that are `pitch` floats apart one after the other. Up to PANEL more floats are copied. */
static void join_rows(const float *from, int pitch, int width, int rows, float *to) {
    for (int y = 0; y < rows; y++, from += pitch, to += width)
        for (int x = 0; x < width; x += PANEL)
            memcpy(to + x, from + x, PANEL * sizeof *to);
}

/* Compute some outputs of a group from its padded inputs. */
static void convolve(context_t *context, const op_t *op, const step_t *step, channels_t inputs, channels_t outputs) {
    const kernels_t *kernels = context->plan->network->kernels;
    const shape_t *out = &step->out;
    thread_t *own = context->own;
    float *lines = own->scratch + step->plane_floats, *map = context->sample->buffers[op->out];
    const float *residual = op->residual >= 0 ? context->sample->buffers[op->residual] : NULL;
    const ptrdiff_t line = grouped_line(step);
    for (int y = 0; y < out->height; y += GROUPED_ROWS) {
        const int rows = out->height - y < GROUPED_ROWS ? out->height - y : GROUPED_ROWS;
        const int positions = (rows - 1) * step->pitch + out->width;
        for (int m = outputs.begin, count; m < outputs.end; m += count) {
            count = even_part(outputs.end - m, kernels->row_block);
            const planes_product_t product = {
                .rows = (const float *const *)own->rows + m,
                .columns = own->columns + inputs.begin,
                .inputs = inputs.end - inputs.begin,
                .taps = op->kernel * op->kernel,
                .offsets = step->tap_offsets,
                .x = own->scratch + (ptrdiff_t)y * step->pitch,
                .x_plane = (ptrdiff_t)step->phases * step->phases * step->phase_plane,
                .out = lines,
                .out_plane = line,
            };
            kernels->planes_product(&product, count, divide_up(positions, kernels->lanes));
            for (int i = 0; i < count; i++) {
                const ptrdiff_t channel = (ptrdiff_t)(m + i) * PANEL;
                join_rows(lines + i * line, step->pitch, out->width, rows, own->line);
                kernels->finish(
                    own->line, y * out->width, rows * out->width, map + channel, residual ? residual + channel : NULL,
                    out->panel, own->bias[m + i], op->relu);
            }
        }
    }
}

/* Threads split the outputs, so that a thread pads the inputs of its own groups. */
void run_grouped(context_t *context, const op_t *op, const step_t *step) {
    sample_t *sample = context->sample;
    thread_t *own = context->own;
    const int per_group_in = op->c_in / op->groups, per_group_out = op->c_out / op->groups;
    const int taps = op->kernel * op->kernel;
    const int n_in = op->gate_in >= 0 ? sample->num_open[op->gate_in] : op->c_in;
    const int n_out = op->gate_out >= 0 ? sample->num_open[op->gate_out] : op->c_out;
    const int32_t *open_in = op->gate_in >= 0 ? sample->open[op->gate_in] : NULL;
    const int32_t *open_out = op->gate_out >= 0 ? sample->open[op->gate_out] : NULL;
    for (int j = 0; j < n_in; j++)
        own->columns[j] = (ptrdiff_t)((open_in ? open_in[j] : j) % per_group_in) * taps;
    for (int m = 0; m < n_out; m++) {
        const int k = open_out ? open_out[m] : m;
        own->rows[m] = op->weight + (ptrdiff_t)k * per_group_in * taps;
        own->bias[m] = op->bias[k];
    }
    const range_t mine = part(context, n_out);
    channels_t inputs = {0, 0}, outputs = {0, 0};
    int64_t pairs = 0;
    for (int g = 1; g <= op->groups; g++) {
        inputs = next_group(inputs, open_in, n_in, g * per_group_in);
        outputs = next_group(outputs, open_out, n_out, g * per_group_out);
        pairs += (int64_t)(inputs.end - inputs.begin) * (outputs.end - outputs.begin);
        const channels_t some = {
            outputs.begin > mine.begin ? outputs.begin : (int)mine.begin,
            outputs.end < mine.end ? outputs.end : (int)mine.end};
        if (some.begin < some.end) {
            pad_inputs(context, op, step, inputs);
            convolve(context, op, step, inputs, some);
        }
    }
    if (op->pairs >= 0 && context->thread == 0)
        sample->num_open[op->pairs] = (int)pairs;
}
