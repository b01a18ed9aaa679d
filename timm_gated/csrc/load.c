/* Networks from files. inference/serialize.py documents the format. */
#include <stdio.h>
#include <string.h>

#include "model.h"
#include "safetensors.h"

#define FORMAT 2
#define OLD_COLUMNS 20 /* of version 1 */
#define NUM_FORMS 4

/* Names of the tensors of each kind of operation, without its number. */
static const char *const names[NUM_KINDS][MAX_TENSORS] = {
    [CONV] = {"weight", "bias"},
    [GATE] = {"weight1", "bias1", "weight2", "bias2"},
    [CONCAT] = {"sources"},
    [QUANTIZE] = {"scale"},
    [INT8_CONV] = {"weight", "bias", "multiplier", "ratio", "scale"},
    [INT8_LINEAR] = {"weight", "bias", "multiplier", "scale"},
    [CHANNEL_CONV] = {"weight"},
};

static const int64_t *integers(safetensors_t *file, const char *name, int num_dims) {
    const tensor_t *tensor = safetensors_find(file, name);
    if (!tensor || tensor->type != INT64 || tensor->num_dims != num_dims) {
        fail("%s is missing or not int64 with %d dimensions", name, num_dims);
        return NULL;
    }
    return tensor->data;
}

static int add_operation(tg_model *model, safetensors_t *file, int index, const int64_t row[NUM_COLUMNS]) {
    tensor_t tensors[MAX_TENSORS] = {0};
    if (row[KIND] >= 0 && row[KIND] < NUM_KINDS)
        for (int i = 0; i < MAX_TENSORS && names[row[KIND]][i]; i++) {
            char name[40];
            snprintf(name, sizeof name, "%d.%s", index, names[row[KIND]][i]);
            const tensor_t *tensor = safetensors_find(file, name);
            if (tensor)
                tensors[i] = *tensor;
            else if (strcmp(names[row[KIND]][i], "ratio")) /* only with a shortcut */
                return fail("%s is missing", name);
        }
    return tg_model_add(model, row, tensors);
}

static tg_model *read_model(safetensors_t *file, const char *isa) {
    safetensors_find(file, "text"); /* for Python */
    const int64_t *network = integers(file, "network", 1), *rows = integers(file, "operations", 2);
    if (!network || !rows)
        return NULL;
    const tensor_t *header = safetensors_find(file, "network"), *table = safetensors_find(file, "operations");
    const int columns = header->shape[0] && network[0] == 1 ? OLD_COLUMNS : NUM_COLUMNS;
    if (header->shape[0] != 6 || table->shape[1] != columns || (network[0] != 1 && network[0] != FORMAT)) {
        fail(
            "the format must be 1 or %d, with 6 values and rows of %d, got %lld, %lld and %lld", FORMAT, columns,
            header->shape[0] ? (long long)network[0] : -1LL, (long long)header->shape[0], (long long)table->shape[1]);
        return NULL;
    }
    const int64_t count = table->shape[0], classifier = network[4], form = network[5];
    if (classifier < 0 || classifier > count || form < 0 || form >= NUM_FORMS || count > MAX_SIZE) {
        fail(
            "a classifier of %lld of %lld operations, form %lld", (long long)classifier, (long long)count,
            (long long)form);
        return NULL;
    }
    tg_model *model = tg_model_new(isa, network[1], network[2], network[3]);
    for (int i = 0; model && i < count; i++) {
        int64_t row[NUM_COLUMNS];
        for (int column = 0; column < NUM_COLUMNS; column++)
            row[column] = column < columns ? rows[(size_t)i * columns + column] : -1;
        if (columns == OLD_COLUMNS && row[KIND] == CONV)
            row[GROUPS] = 1;
        if (add_operation(model, file, i, row)) {
            char problem[160];
            snprintf(problem, sizeof problem, "%s", tg_error());
            fail("operation %d: %s", i, problem);
            tg_free(model);
            return NULL;
        }
    }
    const named_tensor_t *unused = safetensors_unused(file);
    if (model && unused) {
        fail("'%.*s' is not part of the network", unused->length < 80 ? (int)unused->length : 80, unused->name);
        tg_free(model);
        return NULL;
    }
    return model;
}

tg_model *tg_load(const char *path, const char *isa) {
    safetensors_t file;
    tg_model *model = safetensors_open(&file, path, "timm_gated") ? NULL : read_model(&file, isa);
    safetensors_close(&file);
    if (!model) {
        char problem[200];
        snprintf(problem, sizeof problem, "%s", tg_error());
        fail("%.280s cannot be loaded: %s", path, problem);
    }
    return model;
}
