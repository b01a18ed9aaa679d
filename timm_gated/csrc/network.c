/* Construction of a network, operation by operation.
 *
 * Python validates programs; the checks here and in plan.c guard memory safety. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "network.h"

static _Thread_local char message[256];

/* Must be increased with any change of the functions called from Python. */
API int tg_version(void) { return 7; }

API const char *tg_error(void) { return message; }

int fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return -1;
}

static const kernels_t *const all_kernels[] = {
#if defined(__x86_64__)
    &kernels_avx512,
    &kernels_avx2,
#endif
    &kernels_portable,
};
enum { NUM_KERNELS = sizeof all_kernels / sizeof *all_kernels };

static int runs_here(const kernels_t *kernels) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (kernels == &kernels_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")
            && __builtin_cpu_supports("avx512vl");
    if (kernels == &kernels_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return kernels == &kernels_portable;
}

static const kernels_t *find_kernels(const char *isa) {
    for (int i = 0; i < NUM_KERNELS; i++)
        if (!strcmp(all_kernels[i]->name, isa) && runs_here(all_kernels[i]))
            return all_kernels[i];
    fail("no instruction set '%s' on this machine", isa);
    return NULL;
}

/* Name of the index-th available instruction set, fastest first; NULL after the last. */
API const char *tg_isa(int index) {
    for (int i = 0; i < NUM_KERNELS; i++)
        if (runs_here(all_kernels[i]) && index-- == 0)
            return all_kernels[i]->name;
    return NULL;
}

/* Half of the L2 cache in bytes, within reasonable bounds; of a small one if the system does not tell. */
static ptrdiff_t half_of_cache(void) {
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

/* Measure the floating-point operations per second of one core, in GFLOP/s. */
API int tg_fma_peak(const char *isa, double *gflops) {
    const kernels_t *kernels = find_kernels(isa);
    if (!kernels)
        return -1;
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

API void tg_network_free(network_t *network) {
    if (!network)
        return;
    for (int i = 0; i < network->num_ops; i++) {
        op_t *op = &network->ops[i];
        float *owned[] = {op->weight, op->bias, op->weight2, op->bias2};
        for (size_t k = 0; k < sizeof owned / sizeof *owned; k++)
            release(owned[k]);
    }
    free(network->ops);
    free(network->gate_sizes);
    free(network);
}

API network_t *tg_network_new(const char *isa, int in_channels, int num_buffers, int num_gates) {
    if (in_channels < 1 || in_channels > MAX_SIZE || num_buffers < 1 || num_buffers > MAX_SIZE || num_gates < 0
        || num_gates > MAX_SIZE) {
        fail("invalid network: %d channels, %d buffers, %d gates", in_channels, num_buffers, num_gates);
        return NULL;
    }
    const kernels_t *kernels = find_kernels(isa);
    if (!kernels)
        return NULL;
    network_t *network = calloc(1, sizeof *network);
    if (network)
        network->gate_sizes = calloc((size_t)num_gates + 1, sizeof *network->gate_sizes);
    if (!network || !network->gate_sizes) {
        free(network);
        fail("out of memory");
        return NULL;
    }
    network->kernels = kernels;
    network->block_floats = half_of_cache() / (ptrdiff_t)sizeof(float);
    network->in_channels = in_channels;
    network->num_buffers = num_buffers;
    network->num_gates = num_gates;
    return network;
}

static op_t *add(network_t *network, kind_t kind, int in, int out) {
    if (in < 0 || in >= network->num_buffers
        || (kind != GATE && kind != OUTPUT && (out < 1 || out >= network->num_buffers || in == out))) {
        fail("invalid operation from buffer %d to buffer %d of %d", in, out, network->num_buffers);
        return NULL;
    }
    if (network->num_ops == network->capacity) {
        int capacity = 2 * network->capacity + 16;
        op_t *ops = realloc(network->ops, (size_t)capacity * sizeof *ops);
        if (!ops) {
            fail("out of memory");
            return NULL;
        }
        network->ops = ops;
        network->capacity = capacity;
    }
    op_t *op = &network->ops[network->num_ops];
    *op = (op_t){.kind = kind, .in = in, .out = out, .residual = -1, .gate_in = -1, .gate_out = -1};
    return op;
}

static float *copy(const float *values, ptrdiff_t count) {
    float *own = allocate((size_t)count * sizeof *own);
    if (own)
        memcpy(own, values, (size_t)count * sizeof *own);
    return own;
}

static int out_of_range(int value, int low) { return value < low || value > MAX_SIZE; }

/* Add a convolution with folded batch norm; weight is [c_out][c_in][kernel][kernel]. */
API int tg_add_conv(network_t *network, const conv_spec_t *spec, const float *weight, const float *bias) {
    if (out_of_range(spec->c_in, 1) || out_of_range(spec->c_out, 1) || out_of_range(spec->dilation, 1)
        || out_of_range(spec->padding, 0) || spec->kernel < 1 || spec->kernel > 64 || spec->stride < 1
        || spec->stride > 64 || (int64_t)spec->c_in * spec->kernel * spec->kernel > MAX_DEPTH || !weight || !bias)
        return fail(
            "invalid convolution: %d to %d channels, kernel %d, stride %d, dilation %d, padding %d", spec->c_in,
            spec->c_out, spec->kernel, spec->stride, spec->dilation, spec->padding);
    if (spec->residual < -1 || spec->residual >= network->num_buffers || spec->residual == spec->out)
        return fail("invalid convolution: buffer %d with residual %d", spec->out, spec->residual);
    int gates[] = {spec->gate_in, spec->gate_out}, sizes[] = {spec->c_in, spec->c_out};
    for (int i = 0; i < 2; i++)
        if (gates[i] < -1 || gates[i] >= network->num_gates
            || (gates[i] >= 0 && network->gate_sizes[gates[i]] != sizes[i]))
            return fail(
                "invalid convolution: %d to %d channels with gates %d and %d", spec->c_in, spec->c_out, spec->gate_in,
                spec->gate_out);
    op_t *op = add(network, CONV, spec->in, spec->out);
    if (!op)
        return -1;
    op->residual = spec->residual;
    op->gate_in = spec->gate_in;
    op->gate_out = spec->gate_out;
    op->c_in = spec->c_in;
    op->c_out = spec->c_out;
    op->kernel = spec->kernel;
    op->stride = spec->stride;
    op->dilation = spec->dilation;
    op->padding = spec->padding;
    op->relu = spec->relu;
    int taps = spec->kernel * spec->kernel;
    packing_t to = packing(op);
    op->weight = allocate((size_t)to.floats * sizeof *op->weight);
    op->bias = copy(bias, spec->c_out);
    network->num_ops++;
    if (!op->weight || !op->bias)
        return fail("out of memory");
    for (int k = 0; k < op->c_out; k++)
        for (int c = 0; c < op->c_in; c++)
            for (int t = 0; t < taps; t++)
                op->weight[row_offset(&to, k) + c * to.column + t * to.tap] = *weight++;
    return 0;
}

/* Add a gate: pooling and two layers with folded batch norm; weights are [hidden][c_in] and [size][hidden]. */
API int tg_add_gate(
    network_t *network, int in, int gate, int c_in, int hidden, int size, const float *weight, const float *bias,
    const float *weight2, const float *bias2) {
    if (gate < 0 || gate >= network->num_gates || network->gate_sizes[gate])
        return fail("invalid gate: %d of %d, or defined twice", gate, network->num_gates);
    if (out_of_range(c_in, 1) || out_of_range(hidden, 1) || out_of_range(size, 1) || !weight || !bias || !weight2
        || !bias2)
        return fail("invalid gate: %d, %d and %d channels", c_in, hidden, size);
    op_t *op = add(network, GATE, in, -1);
    if (!op)
        return -1;
    op->gate_out = gate;
    op->c_in = c_in;
    op->c_out = size;
    op->hidden = hidden;
    op->weight = allocate((size_t)c_in * hidden * sizeof *op->weight);
    op->weight2 = allocate((size_t)hidden * size * sizeof *op->weight2);
    op->bias = copy(bias, hidden);
    op->bias2 = copy(bias2, size);
    network->num_ops++;
    if (!op->weight || !op->weight2 || !op->bias || !op->bias2)
        return fail("out of memory");
    for (int h = 0; h < hidden; h++)
        for (int c = 0; c < c_in; c++)
            op->weight[(ptrdiff_t)c * hidden + h] = *weight++;
    for (int k = 0; k < size; k++)
        for (int h = 0; h < hidden; h++)
            op->weight2[(ptrdiff_t)h * size + k] = *weight2++;
    network->gate_sizes[gate] = size;
    return 0;
}

/* Copy the weights of a convolution, or of a gate, in the layout in which they were added; a convolution has only the
 * first two. */
API int tg_read_weights(const network_t *network, int index, float *weight, float *bias, float *weight2, float *bias2) {
    const op_t *op = index >= 0 && index < network->num_ops ? &network->ops[index] : NULL;
    if (!op || (op->kind != CONV && op->kind != GATE))
        return fail("operation %d of %d has no weights", index, network->num_ops);
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

/* Add max pooling, or average pooling that excludes the padding. */
API int tg_add_pool(
    network_t *network, int average, int in, int out, int kernel, int stride, int padding, int ceil_mode) {
    if (kernel < 1 || kernel > 64 || stride < 1 || stride > 64 || padding < 0 || padding > kernel / 2)
        return fail("invalid pooling: kernel %d, stride %d, padding %d", kernel, stride, padding);
    op_t *op = add(network, average ? AVG_POOL : MAX_POOL, in, out);
    if (!op)
        return -1;
    op->kernel = kernel;
    op->stride = stride;
    op->padding = padding;
    op->dilation = 1;
    op->ceil_mode = ceil_mode;
    network->num_ops++;
    return 0;
}

/* Add strided subsampling, with channels of zeros before and after. */
API int tg_add_subsample(network_t *network, int in, int out, int stride, int before, int after) {
    if (stride < 1 || stride > 64 || out_of_range(before, 0) || out_of_range(after, 0))
        return fail("invalid subsampling: stride %d, %d channels before and %d after", stride, before, after);
    op_t *op = add(network, SUBSAMPLE, in, out);
    if (!op)
        return -1;
    op->kernel = op->dilation = 1;
    op->stride = stride;
    op->before = before;
    op->after = after;
    network->num_ops++;
    return 0;
}

/* Average pooling to bins * bins pixels, like torch's adaptive pooling. */
API int tg_add_adaptive_pool(network_t *network, int in, int out, int bins) {
    if (bins < 1 || bins > 64)
        return fail("invalid adaptive pooling: %d bins", bins);
    op_t *op = add(network, ADAPTIVE_POOL, in, out);
    if (!op)
        return -1;
    op->kernel = bins;
    network->num_ops++;
    return 0;
}

/* Resize a map bilinearly to the size of `like`, into channels from `before` on of a map of so many channels. */
API int tg_add_place(network_t *network, int in, int out, int like, int before, int channels, int align_corners) {
    if (like < 0 || like >= network->num_buffers || like == out || out_of_range(before, 0) || out_of_range(channels, 1))
        return fail("invalid place: like buffer %d, channel %d of %d", like, before, channels);
    op_t *op = add(network, PLACE, in, out);
    if (!op)
        return -1;
    op->like = like;
    op->before = before;
    op->c_out = channels;
    op->align_corners = align_corners;
    network->num_ops++;
    return 0;
}

/* Add a skip: if the gate is closed, omit the next convolutions and output the ReLU of their shortcut. */
API int tg_add_skip(network_t *network, int in, int out, int gate, int count) {
    if (gate < 0 || gate >= network->num_gates || network->gate_sizes[gate] != 1 || out_of_range(count, 1))
        return fail("invalid skip of %d operations with gate %d", count, gate);
    op_t *op = add(network, SKIP, in, out);
    if (!op)
        return -1;
    op->gate_out = gate;
    op->count = count;
    network->num_ops++;
    return 0;
}

/* Add an output. */
API int tg_add_output(network_t *network, int in) {
    if (!add(network, OUTPUT, in, -1))
        return -1;
    network->num_ops++;
    return 0;
}
