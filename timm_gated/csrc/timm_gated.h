/* Run networks saved by `accelerate(model).save('model.tgn')`, without Python.
 *
 *     tg_model *model = tg_load("model.tgn", NULL);
 *     float *outputs[] = {NULL, logits};
 *     if (!model || tg_run(model, images, 1, 224, 224, outputs, 1))
 *         fprintf(stderr, "%s\n", tg_error());
 *     tg_free(model);
 *
 * To build the library, compile the C files of this folder, without module.c, with GCC 12 or newer or Clang:
 * `cc -std=gnu11 -O3 -fno-math-errno -c`; link with -pthread -lm. The instruction set is chosen at run time. In a
 * shared library that is compiled with -fvisibility=hidden, only names that begin with tg_ are visible.
 *
 * Errors. Functions that return a pointer return NULL, and others a value other than 0, after an error. tg_error then
 * returns its text. It belongs to the library and is valid until the next error in the same thread.
 *
 * Memory. A model belongs to the caller, who frees it with tg_free. Images and outputs belong to the caller and are
 * used during tg_run only. A model owns memory for the maps of the last four image sizes, for each call that runs at
 * the same time: a first call of a size allocates it, later ones reuse it.
 *
 * Threads. All functions may be called from several threads at once, also with the same model, except that a model
 * must not be freed while it is used. A call of tg_run with several threads brings its own, which sleep between calls.
 * Results do not depend on the number of threads. After a fork, a model can be used in the child, provided that no
 * other thread was using it when the process forked.
 *
 * Arithmetic is in float32 or, for networks saved in int8, as int8.h defines it. Files are not trusted: a damaged or
 * hostile file is an error of tg_load or of tg_run. */
#ifndef TIMM_GATED_H
#define TIMM_GATED_H

#include <stdint.h>

#if defined(_WIN32)
#define TG_API __declspec(dllexport)
#else
#define TG_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this interface. Changes whenever a function does. */
#define TG_VERSION 10

/* The version that the library was built with: must equal TG_VERSION. */
TG_API int tg_version(void);

/* Text of the last error in this thread. */
TG_API const char *tg_error(void);

/* Name of the index-th instruction set that this machine has, fastest first: "avx512", "avx2", "portable". NULL after
 * the last. */
TG_API const char *tg_isa(int index);

typedef struct tg_model tg_model;

/* Load a network and prepare its weights for an instruction set, NULL for the fastest. */
TG_API tg_model *tg_load(const char *path, const char *isa);

/* Free a model; NULL is ignored. */
TG_API void tg_free(tg_model *model);

/* Number of image channels, and number of outputs. A classifier has two outputs: the last feature map, and the logits,
 * whose height and width are 1. A backbone has one output for each of its feature maps. */
TG_API int tg_channels(const tg_model *model);
TG_API int tg_num_outputs(const tg_model *model);

/* Get channels, height and width of an output, counted from 0, for images of a given height and width. */
TG_API int tg_output_size(tg_model *model, int index, int height, int width, int size[3]);

/* Run images.
 *
 * images   [count][channels][height][width], normalised like those the network was trained on.
 * outputs  One array for each output, [count][channels][height][width] of tg_output_size. NULL: not wanted.
 * threads  Number of threads, 1 to 1024, this one included. The images of a batch run in parallel; threads split a
 *          single one. */
TG_API int tg_run(
    tg_model *model, const float *images, int64_t count, int height, int width, float *const *outputs, int threads);

#ifdef __cplusplus
}
#endif

#endif
