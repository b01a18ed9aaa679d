/* Tensors of a safetensors file, of up to 4 dimensions.
 *
 * Format: https://huggingface.co/docs/safetensors. The file is not trusted. */
#ifndef TIMM_GATED_SAFETENSORS_H
#define TIMM_GATED_SAFETENSORS_H

#include "network.h"

typedef struct {
    const char *name; /* not terminated */
    size_t length;
    tensor_t tensor;
    int used;
} named_tensor_t;

typedef struct {
    named_tensor_t *tensors; /* sorted by name */
    size_t count;
    char *content;
    size_t bytes;
} safetensors_t;

/* Read a file and check the sizes of all tensors, and their checksum, the entry `key` of the metadata. */
int safetensors_open(safetensors_t *file, const char *path, const char *key);
void safetensors_close(safetensors_t *file);

/* Find a tensor and mark it as used; NULL if there is none. */
const tensor_t *safetensors_find(safetensors_t *file, const char *name);

/* A tensor that is not used; NULL if all are. */
const named_tensor_t *safetensors_unused(const safetensors_t *file);

#endif
