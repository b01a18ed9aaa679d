/* Memory that a plan runs in. */
#include <stdlib.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "network.h"

/* Take the next part of a block of memory, or only add up the size if `memory` is NULL. With AddressSanitizer, each
 * part is followed by a poisoned gap. */
static void *take(char *memory, size_t *used, size_t count, size_t size) {
    char *part = memory ? memory + *used : NULL;
    size_t bytes = times(count, size), rounded = (bytes + 63) / 64 * 64;
#if defined(__SANITIZE_ADDRESS__)
    if (part)
        ASAN_POISON_MEMORY_REGION(part + bytes, rounded + 256 - bytes);
    rounded += 256;
#endif
    *used = times(*used + rounded, 1);
    return part;
}

static size_t lay_out(workspace_t *workspace, char *memory) {
    const plan_t *plan = workspace->plan;
    const network_t *network = plan->network;
    size_t used = 0, channels = (size_t)plan->max_channels;
    sample_t *samples = take(memory, &used, workspace->num_samples, sizeof *samples);
    thread_t *threads = take(memory, &used, workspace->num_threads, sizeof *threads);
    for (int s = 0; s < workspace->num_samples; s++) {
        sample_t sample;
        sample.buffers = take(memory, &used, network->num_buffers, sizeof *sample.buffers);
        sample.open = take(memory, &used, network->num_gates + 1, sizeof *sample.open);
        sample.num_open = take(memory, &used, network->num_gates + network->num_pairs + 1, sizeof *sample.num_open);
        sample.pooled = take(memory, &used, channels, sizeof *sample.pooled);
        sample.scratch = take(memory, &used, plan->scratch_floats, sizeof *sample.scratch);
        for (int i = 0; i < network->num_buffers; i++) {
            float *buffer = take(memory, &used, plan->buffer_floats[i], sizeof *buffer);
            if (memory)
                sample.buffers[i] = buffer;
        }
        for (int i = 0; i < network->num_gates; i++) {
            int32_t *open = take(memory, &used, (size_t)network->gate_sizes[i], sizeof *open);
            if (memory)
                sample.open[i] = open;
        }
        if (memory)
            samples[s] = sample;
    }
    for (int t = 0; t < workspace->num_threads; t++) {
        thread_t thread;
        thread.scratch = take(memory, &used, plan->thread_floats, sizeof *thread.scratch);
        thread.planes = take(memory, &used, times(GROUP, (size_t)plan->plane), sizeof *thread.planes);
        thread.line = take(memory, &used, (size_t)plan->plane, sizeof *thread.line);
        thread.bias = take(memory, &used, channels, sizeof *thread.bias);
        thread.logits = take(memory, &used, channels + (size_t)plan->max_hidden, sizeof *thread.logits);
        const size_t padded = channels + QUAD;
        thread.rows = take(memory, &used, padded, sizeof *thread.rows);
        thread.bias8 = take(memory, &used, padded, sizeof *thread.bias8);
        thread.lines = take(memory, &used, (size_t)plan->max_lines, sizeof *thread.lines);
        thread.multiplier = take(memory, &used, padded, sizeof *thread.multiplier);
        thread.ratio = take(memory, &used, padded, sizeof *thread.ratio);
        thread.columns = take(memory, &used, (size_t)plan->max_depth, sizeof *thread.columns);
        if (memory)
            threads[t] = thread;
    }
    workspace->samples = samples;
    workspace->threads = threads;
    return used;
}

void workspace_free(workspace_t *workspace) {
    if (!workspace)
        return;
#if defined(__SANITIZE_ADDRESS__)
    if (workspace->memory)
        ASAN_UNPOISON_MEMORY_REGION(workspace->memory, workspace->bytes);
#endif
    team_free(workspace->team);
    release(workspace->memory);
    free(workspace);
}

workspace_t *workspace_new(const plan_t *plan, int num_samples, int num_threads) {
    workspace_t *workspace = num_samples > 0 && num_threads > 0 ? calloc(1, sizeof *workspace) : NULL;
    size_t bytes = 0;
    if (workspace) {
        workspace->plan = plan;
        workspace->num_samples = num_samples;
        workspace->num_threads = num_threads;
        workspace->bytes = bytes = lay_out(workspace, NULL);
        workspace->memory = allocate(bytes);
        if (workspace->memory) {
            lay_out(workspace, workspace->memory);
            workspace->team = team_new(num_threads);
            if (workspace->team)
                return workspace;
        }
    }
    workspace_free(workspace);
    fail(
        "out of memory: %zu bytes%s for %d samples on %d threads", bytes, bytes == MAX_MEMORY ? " or more" : "",
        num_samples, num_threads);
    return NULL;
}
