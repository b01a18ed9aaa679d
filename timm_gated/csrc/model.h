/* What Python uses of a model, besides timm_gated.h. The signatures are also in inference/native.py. TG_VERSION changes
 * with them, with kind_t and with column_t. */
#ifndef TIMM_GATED_MODEL_H
#define TIMM_GATED_MODEL_H

#include "network.h"

#define MAX_THREADS 1024

/* Create a model without operations, for an instruction set, or NULL for the fastest. */
TG_API tg_model *tg_model_new(const char *isa, int64_t in_channels, int64_t num_buffers, int64_t num_gates);

/* Add an operation: the row that describes it, and its tensors, which are copied. */
TG_API int tg_model_add(tg_model *model, const int64_t row[NUM_COLUMNS], const tensor_t tensors[MAX_TENSORS]);

/* Copy the weights of a convolution or a gate. */
TG_API int tg_model_weights(const tg_model *model, int op, float *weight, float *bias, float *weight2, float *bias2);

/* Like tg_run, with numbers of open channels and times. */
TG_API int tg_model_run(tg_model *model, const batch_t *batch, int height, int width, int threads);

/* Name of the algorithm of an operation, empty if it is not a convolution; NULL after an error. */
TG_API const char *tg_model_algorithm(tg_model *model, int height, int width, int op);

/* Measure the floating-point operations per second of one core, in GFLOP/s. */
TG_API int tg_fma_peak(const char *isa, double *gflops);

#endif
