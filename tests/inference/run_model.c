/* Load and run saved networks through timm_gated.h, for the tests of the C library.
 *
 *     run_model ISA THREADS COUNT HEIGHT WIDTH CALLERS MODEL...
 *
 * Value i of the images is (i * 2654435761 mod 2^32) / 2^31 - 1. Prints a line for each model: `ok`, or `error: ` and the
 * text of the error. Writes all outputs to MODEL.out. Several callers run images of several sizes at the same time and
 * compare them with the outputs of the first call. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "timm_gated.h"

#define MAX_OUTPUTS 64
#define MAX_CALLERS 16

typedef struct {
    int count, height, width, threads;
    int num_outputs;
    float *outputs[MAX_OUTPUTS];
    size_t floats[MAX_OUTPUTS];
} run_t;

static void free_outputs(run_t *run) {
    for (int i = 0; i < run->num_outputs; i++)
        free(run->outputs[i]);
    run->num_outputs = 0;
}

static int run_model(tg_model *model, run_t *run) {
    const size_t values = (size_t)run->count * (size_t)tg_channels(model) * (size_t)run->height * (size_t)run->width;
    const int num_outputs = tg_num_outputs(model) < MAX_OUTPUTS ? tg_num_outputs(model) : MAX_OUTPUTS;
    float *images = malloc(values * sizeof *images);
    for (size_t i = 0; i < values; i++)
        images[i] = (float)((double)(uint32_t)(i * 2654435761u) / 2147483648. - 1.);
    run->num_outputs = 0;
    int failed = 0;
    for (int i = 0, size[3]; i < num_outputs && !failed; i++) {
        failed = tg_output_size(model, i, run->height, run->width, size);
        if (failed)
            break;
        run->floats[i] = (size_t)run->count * (size_t)size[0] * (size_t)size[1] * (size_t)size[2];
        run->outputs[i] = malloc(run->floats[i] * sizeof(float));
        run->num_outputs++;
    }
    failed = failed || tg_run(model, images, run->count, run->height, run->width, run->outputs, run->threads);
    free(images);
    return failed;
}

typedef struct {
    tg_model *model;
    run_t run;
    int failures;
} caller_t;

static void *call(void *argument) {
    caller_t *caller = argument;
    run_t first = caller->run;
    caller->failures = run_model(caller->model, &first);
    for (int i = 0; i < 6 && !caller->failures; i++) {
        run_t again = caller->run;
        again.threads = i % 3 + 1;
        caller->failures = run_model(caller->model, &again);
        for (int k = 0; k < first.num_outputs && !caller->failures; k++)
            caller->failures = memcmp(first.outputs[k], again.outputs[k], first.floats[k] * sizeof(float)) != 0;
        free_outputs(&again);
    }
    free_outputs(&first);
    return NULL;
}

static int call_at_once(tg_model *model, const run_t *run, int callers) {
    pthread_t threads[MAX_CALLERS];
    caller_t arguments[MAX_CALLERS];
    int failures = 0;
    for (int i = 0; i < callers; i++) {
        arguments[i] = (caller_t){.model = model, .run = *run};
        arguments[i].run.width += i % 6; /* more sizes than are kept */
        pthread_create(&threads[i], NULL, call, &arguments[i]);
    }
    for (int i = 0; i < callers; i++) {
        pthread_join(threads[i], NULL);
        failures += arguments[i].failures;
    }
    return failures;
}

static void write_outputs(const char *path, const run_t *run) {
    char name[1000];
    snprintf(name, sizeof name, "%s.out", path);
    FILE *file = fopen(name, "wb");
    for (int i = 0; i < run->num_outputs; i++)
        fwrite(run->outputs[i], sizeof(float), run->floats[i], file);
    fclose(file);
}

int main(int count, char **arguments) {
    if (count < 8)
        return 2;
    const char *isa = *arguments[1] ? arguments[1] : NULL;
    const int callers = atoi(arguments[6]);
    for (int i = 7; i < count; i++) {
        run_t run = {
            .threads = atoi(arguments[2]),
            .count = atoi(arguments[3]),
            .height = atoi(arguments[4]),
            .width = atoi(arguments[5]),
        };
        tg_model *model = tg_load(arguments[i], isa);
        int failed = !model || run_model(model, &run);
        if (failed)
            printf("error: %s\n", tg_error());
        else {
            write_outputs(arguments[i], &run);
            const int failures = callers > 1 && callers <= MAX_CALLERS ? call_at_once(model, &run, callers) : 0;
            printf(failures ? "error: %d callers got other outputs\n" : "ok\n", failures);
        }
        free_outputs(&run);
        tg_free(model);
    }
    return 0;
}
