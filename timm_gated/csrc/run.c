/* Execution of a plan. A batch is split by samples; threads that share a sample split each operation. */
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "run.h"

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

static void run_gate(context_t *context, const op_t *op, const step_t *step) {
    sample_t *sample = context->sample;
    /* The gates of a block read the same map, one after the other. */
    const int is_pooled = op > context->plan->network->ops && op[-1].kind == GATE && op[-1].in == op->in;
    range_t channels = part(context, is_pooled ? 0 : op->c_in);
    if (step->in.scale > 0.f)
        int8_averages(context, op->in, &step->in, (int)channels.begin, (int)channels.end, sample->pooled);
    else
        context->plan->network->kernels->average(
            sample->buffers[op->in] + channels.begin * PANEL, step->in.panel, (int)(channels.end - channels.begin),
            num_pixels(&step->in), sample->pooled + channels.begin);
    meet(context);
    if (context->thread != 0)
        return;
    float *logits = context->own->logits, *hidden = logits + op->c_out;
    context->plan->network->int8->gate(
        sample->pooled, op->c_in, op->weight, op->bias, op->hidden, op->weight2, op->bias2, op->c_out, hidden, logits);
    int count = 0;
    for (int k = 0; k < op->c_out; k++)
        if (logits[k] > 0.f)
            sample->open[op->gate_out][count++] = k;
    sample->num_open[op->gate_out] = count;
}

static void run_skip(context_t *context, const op_t *op, const step_t *step) {
    range_t floats = part(context, num_panels(&step->in) * step->in.panel);
    const float *x = context->sample->buffers[op->in];
    float *y = context->sample->buffers[op->out];
    for (int64_t i = floats.begin; i < floats.end; i++)
        y[i] = x[i] < 0.f ? 0.f : x[i];
}

static void copy_out(context_t *context, const op_t *op, const step_t *step, float *out) {
    const shape_t *shape = &step->in;
    const int pixels = num_pixels(shape);
    range_t channels = part(context, shape->channels);
    if (shape->scale > 0.f) {
        int8_copy_out(context, op->in, shape, out);
        return;
    }
    for (ptrdiff_t c = channels.begin; c < channels.end; c += GROUP) {
        const int count = in_group(c, &channels);
        planes_t planes = read_planes(context, op->in, shape, c, count, 0, pixels);
        for (int i = 0; i < count; i++)
            memcpy(out + (c + i) * pixels, planes.first + i * planes.stride, (size_t)pixels * sizeof *out);
    }
}

/* Copy the image into panels. */
static void pack_image(context_t *context, int channels) {
    const plan_t *plan = context->plan;
    const int pixels = plan->height * plan->width;
    const ptrdiff_t panel = spread((ptrdiff_t)channels * PANEL);
    range_t panels = part(context, divide_up(pixels, PANEL));
    for (ptrdiff_t i = panels.begin; i < panels.end; i++)
        for (int c = 0; c < channels; c++) {
            const ptrdiff_t pixel = i * PANEL, count = pixels - pixel < PANEL ? pixels - pixel : PANEL;
            memcpy(
                context->sample->buffers[0] + i * panel + c * PANEL, context->image + (ptrdiff_t)c * pixels + pixel,
                (size_t)count * sizeof *context->image);
        }
}

static void report_gates(const context_t *context, const batch_t *batch, int64_t index) {
    const network_t *network = context->plan->network;
    const sample_t *sample = context->sample;
    const int counts = network->num_gates + network->num_pairs;
    if (batch->num_open)
        memcpy(batch->num_open + index * counts, sample->num_open, (size_t)counts * sizeof *sample->num_open);
    if (!batch->is_open)
        return;
    int64_t channels = 0;
    for (int g = 0; g < network->num_gates; g++)
        channels += network->gate_sizes[g];
    uint8_t *is_open = batch->is_open + index * channels;
    memset(is_open, 0, (size_t)channels);
    for (int g = 0; g < network->num_gates; is_open += network->gate_sizes[g++])
        for (int i = 0; i < sample->num_open[g]; i++)
            is_open[sample->open[g][i]] = 1;
}

static void run_sample(context_t *context, const batch_t *batch, int64_t index) {
    const plan_t *plan = context->plan;
    const network_t *network = plan->network;
    float *const *output = batch->outputs;
    context->image = batch->images + index * network->in_channels * plan->height * plan->width;
    if (plan->packs_image) {
        pack_image(context, network->in_channels);
        meet(context);
    }
    for (int i = 0; i < network->num_ops; i++) {
        const op_t *op = &network->ops[i];
        const step_t *step = &plan->steps[i];
        const int is_int8 = step->in.scale > 0.f;
        double *milliseconds = context->thread == 0 && context->milliseconds ? &context->milliseconds[i] : NULL;
        double begin = milliseconds ? now() : 0.;
        switch (op->kind) {
            case CONV: (op->weight8 ? run_int8_conv : run_conv)(context, op, step); break;
            case POOL: (is_int8 ? run_int8_pool : run_pool)(context, op, step); break;
            case ADAPTIVE_POOL: run_adaptive_pool(context, op, step); break;
            case SUBSAMPLE: (is_int8 ? run_int8_subsample : run_subsample)(context, op, step); break;
            case INT8_LINEAR: run_int8_linear(context, op); break;
            case QUANTIZE: run_quantize(context, op, step); break;
            case DEQUANTIZE: run_dequantize(context, op, step); break;
            case BLUR: run_blur(context, op, step); break;
            case CHANNEL_CONV: run_channel_conv(context, op, step); break;
            case SCALE: run_scale(context, op, step); break;
            case CONCAT: run_concat(context, op, step); break;
            case GATE: run_gate(context, op, step); break;
            case SKIP:
                if (!context->sample->num_open[op->gate_out]) {
                    if (is_int8)
                        run_int8_skip(context, op, step, &plan->steps[i + op->count].out);
                    else
                        run_skip(context, op, step);
                    i += op->count;
                }
                break;
            case OUTPUT:
                if (*output)
                    copy_out(context, op, step, *output + index * step->in.channels * num_pixels(&step->in));
                output++;
                break;
            case INT8_CONV:
            case NUM_KINDS: break;
        }
        meet(context);
        if (milliseconds)
            *milliseconds += now() - begin;
    }
    if (context->thread == 0)
        report_gates(context, batch, index);
}

typedef struct {
    workspace_t *workspace;
    const batch_t *batch;
    atomic_llong next; /* sample to run */
} job_argument_t;

/* Each thread runs its own samples. All threads share the remaining ones. */
static void run_part(void *argument, int thread, int threads) {
    job_argument_t *job = argument;
    workspace_t *workspace = job->workspace;
    const batch_t *batch = job->batch;
    int64_t alone = threads <= workspace->num_samples ? batch->count / threads * threads : 0;
    context_t own = {
        .plan = workspace->plan,
        .sample = &workspace->samples[threads <= workspace->num_samples ? thread : 0],
        .own = &workspace->threads[thread],
        .threads = 1,
        .milliseconds = threads == 1 ? batch->milliseconds : NULL,
    };
    for (int64_t n; (n = atomic_fetch_add(&job->next, 1)) < alone;)
        run_sample(&own, batch, n);
    if (alone == batch->count)
        return;
    context_t shared = {
        .plan = workspace->plan,
        .sample = &workspace->samples[0],
        .own = &workspace->threads[thread],
        .thread = thread,
        .threads = threads,
        .team = workspace->team,
        .milliseconds = batch->milliseconds,
    };
    meet(&shared);
    for (int64_t n = alone; n < batch->count; n++)
        run_sample(&shared, batch, n);
}

void run_batch(workspace_t *workspace, const batch_t *batch) {
    job_argument_t job = {workspace, batch, 0};
    team_run(workspace->team, run_part, &job);
}
