/* A network with its kernels, and the errors of all functions. operations.c adds the operations. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "model.h"

static _Thread_local char message[512];

int tg_version(void) { return TG_VERSION; }

const char *tg_error(void) { return message; }

int fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return -1;
}

/* Instruction sets, fastest first. The int8 kernels need extensions of their own: without them, those of AVX2 are
 * used. */
static const struct {
    const char *name;
    const kernels_t *kernels;
    const int8_kernels_t *int8;
} instruction_sets[] = {
#if defined(__x86_64__)
    {"avx512", &kernels_avx512, &int8_avx512},
    {"avxvnni", &kernels_avx2, &int8_avxvnni},
    {"avx2", &kernels_avx2, &int8_avx2},
#endif
    {"portable", &kernels_portable, &int8_portable},
};
enum { NUM_SETS = sizeof instruction_sets / sizeof *instruction_sets };

/* Whether the processor has the extensions of an instruction set: for all kernels, or for those of float32 only. */
static int runs_here(int index, int with_int8) {
#if defined(__x86_64__)
    const char *name = instruction_sets[index].name;
    __builtin_cpu_init();
    if (!strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")
            && __builtin_cpu_supports("avx512vl")
            && (!with_int8 || (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni")));
    if (!strcmp(name, "avxvnni") && !__builtin_cpu_supports("avxvnni"))
        return 0;
    if (!strcmp(name, "avxvnni") || !strcmp(name, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return (void)with_int8, instruction_sets[index].kernels == &kernels_portable;
}

static int find_set(const char *isa) {
    isa = isa ? isa : tg_isa(0);
    for (int i = 0; i < NUM_SETS; i++)
        if (!strcmp(instruction_sets[i].name, isa) && runs_here(i, 0))
            return i;
    return fail("no instruction set '%s' on this machine", isa);
}

const char *tg_isa(int index) {
    for (int i = 0; i < NUM_SETS; i++)
        if (runs_here(i, 0) && index-- == 0)
            return instruction_sets[i].name;
    return NULL;
}

/* Within reasonable bounds; of a small cache if the system does not tell. */
ptrdiff_t half_of_cache(void) {
#if defined(CACHE_BYTES) /* in tests: small blocks, so that most maps need several */
    return CACHE_BYTES / 2;
#else
    long bytes = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
    bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return (bytes < 1 << 18 ? 1 << 18 : bytes > 1 << 21 ? 1 << 21 : bytes) / 2;
#endif
}

int tg_fma_peak(const char *isa, double *gflops) {
    const int set = find_set(isa);
    if (set < 0)
        return -1;
    const kernels_t *kernels = instruction_sets[set].kernels;
    *gflops = 0.;
    for (int i = 0; i < 5; i++) {
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        double operations = kernels->fma_peak(1 << 21, 1e-3f);
        clock_gettime(CLOCK_MONOTONIC, &end);
        double rate = operations / ((double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec));
        *gflops = rate > *gflops ? rate : *gflops;
    }
    return 0;
}

void network_free(network_t *network) {
    if (!network)
        return;
    for (int i = 0; i < network->num_ops; i++) {
        op_t *op = &network->ops[i];
        void *owned[] = {op->weight,  op->bias,  op->weight2,    op->bias2,
                         op->weight8, op->bias8, op->multiplier, op->ratio};
        for (size_t k = 0; k < sizeof owned / sizeof *owned; k++)
            release(owned[k]);
        free(op->sources);
    }
    free(network->ops);
    free(network->gate_sizes);
    free(network);
}

network_t *network_new(const char *isa, int64_t in_channels, int64_t num_buffers, int64_t num_gates) {
    if (in_channels < 1 || in_channels > MAX_SIZE || num_buffers < 1 || num_buffers > MAX_SIZE || num_gates < 0
        || num_gates > MAX_SIZE) {
        fail(
            "invalid network: %lld channels, %lld maps, %lld gates", (long long)in_channels, (long long)num_buffers,
            (long long)num_gates);
        return NULL;
    }
    const int set = find_set(isa);
    if (set < 0)
        return NULL;
    network_t *network = calloc(1, sizeof *network);
    if (network)
        network->gate_sizes = calloc((size_t)num_gates + 1, sizeof *network->gate_sizes);
    if (!network || !network->gate_sizes) {
        free(network);
        fail("out of memory");
        return NULL;
    }
    network->kernels = instruction_sets[set].kernels;
    network->int8 = runs_here(set, 1) ? instruction_sets[set].int8 : instruction_sets[find_set("avx2")].int8;
    network->block_floats = half_of_cache() / (ptrdiff_t)sizeof(float);
    network->in_channels = (int)in_channels;
    network->num_buffers = (int)num_buffers;
    network->num_gates = (int)num_gates;
    return network;
}

int network_outputs(const network_t *network) {
    int count = 0;
    for (int i = 0; i < network->num_ops; i++)
        count += network->ops[i].kind == OUTPUT;
    return count;
}

int network_weights(const network_t *network, int index, float *weight, float *bias, float *weight2, float *bias2) {
    const op_t *op = index >= 0 && index < network->num_ops ? &network->ops[index] : NULL;
    if (!op || (op->kind != CONV && op->kind != GATE) || op->weight8)
        return fail("operation %d of %d has no float32 weights", index, network->num_ops);
    if (op->kind == CONV && op->groups > 1) {
        const size_t count = (size_t)op->c_out * (op->c_in / op->groups) * op->kernel * op->kernel;
        memcpy(weight, op->weight, count * sizeof *weight);
        memcpy(bias, op->bias, (size_t)op->c_out * sizeof *bias);
        return 0;
    }
    if (op->kind == CONV) {
        const packing_t from = packing(op);
        for (int k = 0; k < op->c_out; k++)
            for (int c = 0; c < op->c_in; c++)
                for (int t = 0; t < op->kernel * op->kernel; t++)
                    *weight++ = op->weight[row_offset(&from, k) + c * from.column + t * from.tap];
        memcpy(bias, op->bias, (size_t)op->c_out * sizeof *bias);
        return 0;
    }
    for (int h = 0; h < op->hidden; h++)
        for (int c = 0; c < op->c_in; c++)
            *weight++ = op->weight[(ptrdiff_t)c * op->hidden + h];
    for (int k = 0; k < op->c_out; k++)
        for (int h = 0; h < op->hidden; h++)
            *weight2++ = op->weight2[(ptrdiff_t)h * op->c_out + k];
    memcpy(bias, op->bias, (size_t)op->hidden * sizeof *bias);
    memcpy(bias2, op->bias2, (size_t)op->c_out * sizeof *bias2);
    return 0;
}
