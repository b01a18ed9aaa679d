/* Classify images with a saved network, without Python.
 *
 *     classify model.tgn image.ppm [image.ppm ...]
 *     classify --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 --threads 2 model.tgn image.ppm
 *
 * Images are binary PPM files (P6, 8 bits), which most image programs write, of the size the network expects. Prints
 * the five classes with the largest logits: class number and logit. `make example` builds and runs this file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "timm_gated.h"

static float mean[3] = {0.485f, 0.456f, 0.406f}, deviation[3] = {0.229f, 0.224f, 0.225f}; /* ImageNet's */

typedef struct {
    int height, width;
    float *pixels; /* [3][height][width], normalised */
} image_t;

/* Read the next number of a PPM header, or return -1. */
static int read_number(FILE *file) {
    int number, c = fgetc(file);
    while (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '#') {
        if (c == '#') /* comment until the end of the line */
            while (c != '\n' && c != EOF)
                c = fgetc(file);
        else
            c = fgetc(file);
    }
    ungetc(c, file);
    return fscanf(file, "%d", &number) == 1 ? number : -1;
}

/* Convert [height][width][3] bytes to normalised planes. */
static void normalise(const unsigned char *bytes, size_t count, float *pixels) {
    for (size_t i = 0; i < count; i++)
        for (size_t c = 0; c < 3; c++)
            pixels[c * count + i] = ((float)bytes[3 * i + c] / 255.f - mean[c]) / deviation[c];
}

/* Read a PPM file. Without success, `pixels` is NULL. */
static image_t read_ppm(const char *path) {
    image_t image = {0, 0, NULL};
    FILE *file = fopen(path, "rb");
    if (!file)
        return image;
    const int is_ppm = fgetc(file) == 'P' && fgetc(file) == '6';
    image.width = read_number(file);
    image.height = read_number(file);
    if (is_ppm && image.width > 0 && image.height > 0 && image.width <= 1 << 13 && image.height <= 1 << 13
        && read_number(file) == 255) {
        const size_t count = (size_t)image.width * (size_t)image.height;
        unsigned char *bytes = malloc(3 * count);
        fgetc(file); /* one white space ends the header */
        if (bytes && fread(bytes, 3, count, file) == count && (image.pixels = malloc(3 * count * sizeof(float))))
            normalise(bytes, count, image.pixels);
        free(bytes);
    }
    fclose(file);
    return image;
}

static void print_top5(const float *logits, int classes) {
    int shown[5];
    for (int rank = 0; rank < 5 && rank < classes; rank++) {
        int best = -1;
        for (int k = 0; k < classes; k++) {
            int used = 0;
            for (int i = 0; i < rank; i++)
                used |= shown[i] == k;
            if (!used && (best < 0 || logits[k] > logits[best]))
                best = k;
        }
        shown[rank] = best;
        printf("  %d %.4f", best, (double)logits[best]);
    }
    printf("\n");
}

static int classify(tg_model *model, const char *path, int threads) {
    image_t image = read_ppm(path);
    if (!image.pixels) {
        fprintf(stderr, "%s is not a binary PPM file with 8 bits\n", path);
        return 1;
    }
    /* The last output of a classifier has the logits; the others are not wanted. */
    const int last = tg_num_outputs(model) - 1;
    int size[3];
    float **outputs = calloc((size_t)last + 1, sizeof *outputs);
    int failed = !outputs || tg_output_size(model, last, image.height, image.width, size);
    if (!failed) {
        outputs[last] = malloc((size_t)size[0] * (size_t)size[1] * (size_t)size[2] * sizeof **outputs);
        failed = !outputs[last] || tg_run(model, image.pixels, 1, image.height, image.width, outputs, threads);
    }
    if (failed)
        fprintf(stderr, "%s: %s\n", path, tg_error());
    else {
        printf("%s", path);
        print_top5(outputs[last], size[0]);
    }
    if (outputs)
        free(outputs[last]);
    free(outputs);
    free(image.pixels);
    return failed;
}

int main(int count, char **arguments) {
    int threads = 1, i = 1, ok = 1;
    for (; ok && i + 1 < count && !strncmp(arguments[i], "--", 2); i += 2) {
        const char *value = arguments[i + 1];
        float *triple = !strcmp(arguments[i], "--mean") ? mean : !strcmp(arguments[i], "--std") ? deviation : NULL;
        if (triple)
            ok = sscanf(value, "%f,%f,%f", &triple[0], &triple[1], &triple[2]) == 3;
        else
            ok = !strcmp(arguments[i], "--threads") && (threads = atoi(value)) > 0;
    }
    if (!ok || i + 2 > count) {
        fprintf(stderr, "usage: classify [--mean R,G,B] [--std R,G,B] [--threads N] MODEL IMAGE.ppm [IMAGE.ppm ...]\n");
        return 2;
    }
    if (tg_version() != TG_VERSION) {
        fprintf(stderr, "the library has version %d of its interface, not %d\n", tg_version(), TG_VERSION);
        return 1;
    }
    tg_model *model = tg_load(arguments[i], NULL);
    if (!model || tg_channels(model) != 3 || tg_num_outputs(model) < 1) {
        fprintf(stderr, "%s\n", model ? "the network does not classify RGB images" : tg_error());
        tg_free(model);
        return 1;
    }
    int failed = 0;
    while (++i < count)
        failed |= classify(model, arguments[i], threads);
    tg_free(model);
    return failed;
}
