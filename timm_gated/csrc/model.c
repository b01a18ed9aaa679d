/* A network with its plans for the last image sizes, and workspaces for the calls that run at the same time. */
#include <pthread.h>
#include <stdlib.h>

#include "model.h"

#define MAX_SIZES 4 /* for which plans and workspaces are kept */

typedef struct idle {
    workspace_t *workspace;
    struct idle *next;
} idle_t;

/* An image size. */
typedef struct entry {
    plan_t *plan;
    idle_t *idle; /* workspaces that no call uses */
    int users;    /* calls that use the plan */
    int forgotten;
    struct entry *next;
} entry_t;

struct tg_model {
    network_t *network;
    pthread_mutex_t mutex; /* of the entries */
    entry_t *recent;       /* most recently used first */
};

static void free_idle(idle_t *idle) {
    workspace_free(idle->workspace);
    free(idle);
}

static void free_entry(entry_t *entry) {
    while (entry->idle) {
        idle_t *next = entry->idle->next;
        free_idle(entry->idle);
        entry->idle = next;
    }
    plan_free(entry->plan);
    free(entry);
}

tg_model *tg_model_new(const char *isa, int64_t in_channels, int64_t num_buffers, int64_t num_gates) {
    network_t *network = network_new(isa, in_channels, num_buffers, num_gates);
    if (!network)
        return NULL;
    tg_model *model = calloc(1, sizeof *model);
    if (!model || pthread_mutex_init(&model->mutex, NULL)) {
        network_free(network);
        free(model);
        fail("out of memory");
        return NULL;
    }
    model->network = network;
    return model;
}

void tg_free(tg_model *model) {
    if (!model)
        return;
    while (model->recent) {
        entry_t *next = model->recent->next;
        free_entry(model->recent);
        model->recent = next;
    }
    pthread_mutex_destroy(&model->mutex);
    network_free(model->network);
    free(model);
}

int tg_model_add(tg_model *model, const int64_t row[NUM_COLUMNS], const tensor_t tensors[MAX_TENSORS]) {
    return network_add(model->network, row, tensors);
}

int tg_model_weights(const tg_model *model, int op, float *weight, float *bias, float *weight2, float *bias2) {
    return network_weights(model->network, op, weight, bias, weight2, bias2);
}

int tg_channels(const tg_model *model) { return model->network->in_channels; }

int tg_num_outputs(const tg_model *model) { return network_outputs(model->network); }

static entry_t *new_entry(network_t *network, int height, int width) {
    entry_t *entry = calloc(1, sizeof *entry);
    if (!entry) {
        fail("out of memory");
        return NULL;
    }
    entry->plan = plan_new(network, height, width);
    if (!entry->plan) {
        free(entry);
        return NULL;
    }
    return entry;
}

static void forget_oldest(tg_model *model) {
    entry_t **at = &model->recent;
    for (int i = 0; i < MAX_SIZES; i++, at = &(*at)->next)
        if (!*at)
            return;
    entry_t *oldest = *at;
    if (!oldest)
        return;
    *at = NULL;
    oldest->forgotten = 1;
    if (!oldest->users)
        free_entry(oldest);
}

/* Find or make the entry of an image size, for a user. */
static entry_t *acquire(tg_model *model, int height, int width) {
    pthread_mutex_lock(&model->mutex);
    entry_t **at = &model->recent;
    while (*at && ((*at)->plan->height != height || (*at)->plan->width != width))
        at = &(*at)->next;
    entry_t *entry = *at;
    if (entry)
        *at = entry->next;
    else
        entry = new_entry(model->network, height, width);
    if (entry) {
        entry->next = model->recent;
        entry->users++;
        model->recent = entry;
        forget_oldest(model);
    }
    pthread_mutex_unlock(&model->mutex);
    return entry;
}

/* Give an entry back, with the workspace that was used, if any. */
static void release_entry(tg_model *model, entry_t *entry, idle_t *used) {
    pthread_mutex_lock(&model->mutex);
    if (used) {
        used->next = entry->idle;
        entry->idle = used;
    }
    if (--entry->users == 0 && entry->forgotten)
        free_entry(entry);
    pthread_mutex_unlock(&model->mutex);
}

/* Take an idle workspace for so many threads, or NULL. */
static idle_t *take_idle(tg_model *model, entry_t *entry, int threads) {
    pthread_mutex_lock(&model->mutex);
    idle_t **at = &entry->idle;
    while (*at && (*at)->workspace->num_threads != threads)
        at = &(*at)->next;
    idle_t *idle = *at;
    if (idle)
        *at = idle->next;
    pthread_mutex_unlock(&model->mutex);
    return idle;
}

/* Take a workspace that runs so many samples at a time on so many threads. */
static idle_t *take_workspace(tg_model *model, entry_t *entry, int samples, int threads) {
    idle_t *idle = take_idle(model, entry, threads);
    if (idle && idle->workspace->num_samples >= samples)
        return idle;
    if (idle)
        workspace_free(idle->workspace);
    else
        idle = malloc(sizeof *idle);
    if (!idle) {
        fail("out of memory");
        return NULL;
    }
    idle->workspace = workspace_new(entry->plan, samples, threads);
    if (idle->workspace)
        return idle;
    free(idle);
    return NULL;
}

int tg_output_size(tg_model *model, int index, int height, int width, int size[3]) {
    entry_t *entry = acquire(model, height, width);
    if (!entry)
        return -1;
    const int found = index >= 0 && plan_output(entry->plan, index, size);
    release_entry(model, entry, NULL);
    return found ? 0 : fail("there is no output %d, but %d outputs", index, tg_num_outputs(model));
}

const char *tg_model_algorithm(tg_model *model, int height, int width, int op) {
    entry_t *entry = acquire(model, height, width);
    if (!entry)
        return NULL;
    const char *algorithm = plan_algorithm(entry->plan, op);
    release_entry(model, entry, NULL);
    return algorithm ? algorithm : "";
}

int tg_model_run(tg_model *model, const batch_t *batch, int height, int width, int threads) {
    if (batch->count < 0 || threads < 1 || threads > MAX_THREADS
        || (batch->count && (!batch->images || !batch->outputs)))
        return fail(
            "invalid run: %lld images at %p, outputs at %p, %d threads", (long long)batch->count,
            (const void *)batch->images, (const void *)batch->outputs, threads);
    entry_t *entry = acquire(model, height, width);
    if (!entry)
        return -1;
    idle_t *used = NULL;
    if (batch->count) {
        used = take_workspace(model, entry, batch->count < threads ? (int)batch->count : threads, threads);
        if (used)
            run_batch(used->workspace, batch);
    }
    release_entry(model, entry, used);
    return batch->count && !used ? -1 : 0;
}

int tg_run(
    tg_model *model, const float *images, int64_t count, int height, int width, float *const *outputs, int threads) {
    const batch_t batch = {.images = images, .count = count, .outputs = outputs};
    return tg_model_run(model, &batch, height, width, threads);
}
