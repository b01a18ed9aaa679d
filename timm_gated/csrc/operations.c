/* Operations of a network, from the rows and tensors of a file.
 *
 * Python validates programs before it adds them; files are read without Python. The checks here and in plan.c guard
 * memory safety. */
#include <stdlib.h>
#include <string.h>

#include "network.h"

/* Smallest and largest value of each column; columns that an operation does not have are -1. */
typedef struct {
    column_t column;
    int low, high;
} range_of_t;

#define MAX_KERNEL 64
#define OPTIONAL (-1)
#define ANY MAX_SIZE

static const range_of_t ranges[NUM_KINDS][12] = {
    [CONV] =
        {{SOURCE, 0, ANY},
         {TARGET, 1, ANY},
         {RESIDUAL, OPTIONAL, ANY},
         {GATE_IN, OPTIONAL, ANY},
         {GATE_OUT, OPTIONAL, ANY},
         {STRIDE, 1, MAX_KERNEL},
         {DILATION, 1, ANY},
         {PADDING, 0, ANY},
         {RELU, 0, 1}},
    [GATE] = {{SOURCE, 0, ANY}, {GATE_DEFINED, 0, ANY}},
    [POOL] =
        {{SOURCE, 0, ANY},
         {TARGET, 1, ANY},
         {AVERAGE, 0, 1},
         {KERNEL, 1, MAX_KERNEL},
         {STRIDE, 1, MAX_KERNEL},
         {PADDING, 0, MAX_KERNEL},
         {CEIL_MODE, 0, 1}},
    [ADAPTIVE_POOL] = {{SOURCE, 0, ANY}, {TARGET, 1, ANY}, {BINS, 1, MAX_KERNEL}},
    [CONCAT] = {{TARGET, 1, ANY}, {ALIGN_CORNERS, 0, 1}},
    [SUBSAMPLE] = {{SOURCE, 0, ANY}, {TARGET, 1, ANY}, {STRIDE, 1, MAX_KERNEL}, {BEFORE, 0, ANY}, {AFTER, 0, ANY}},
    [SKIP] = {{SOURCE, 0, ANY}, {TARGET, 1, ANY}, {GATE_DEFINED, 0, ANY}, {COUNT, 1, ANY}},
    [OUTPUT] = {{SOURCE, 0, ANY}},
};

static const char *const column_names[NUM_COLUMNS] = {
    "kind",    "source", "target",  "residual",  "gate", "gate_in",       "gate_out", "kernel", "stride", "dilation",
    "padding", "relu",   "average", "ceil_mode", "bins", "align_corners", "before",   "after",  "count",  "macs"};

static int check_row(const int64_t row[NUM_COLUMNS]) {
    if (row[KIND] < 0 || row[KIND] >= NUM_KINDS)
        return fail("unknown kind of operation: %lld", (long long)row[KIND]);
    int expected[NUM_COLUMNS] = {[KIND] = 1, [MACS] = row[KIND] == GATE};
    for (const range_of_t *range = ranges[row[KIND]]; range->column; range++) {
        const int64_t value = row[range->column];
        expected[range->column] = 1;
        if (value < range->low || value > range->high)
            return fail("invalid %s: %lld", column_names[range->column], (long long)value);
    }
    for (int i = 0; i < NUM_COLUMNS; i++)
        if (!expected[i] && row[i] != -1)
            return fail("unexpected %s: %lld", column_names[i], (long long)row[i]);
    return 0;
}

/* Check that a tensor has this shape, where 0 stands for any size. */
static int has_shape(const tensor_t *tensor, type_t type, int num_dims, const int64_t *shape) {
    if (!tensor->data || tensor->type != type || tensor->num_dims != num_dims)
        return 0;
    for (int i = 0; i < num_dims; i++)
        if (tensor->shape[i] < 1 || tensor->shape[i] > MAX_SIZE || (shape[i] && tensor->shape[i] != shape[i]))
            return 0;
    return 1;
}

static float *copy(const tensor_t *tensor) {
    float *own = allocate((size_t)tensor->shape[0] * sizeof *own);
    if (own)
        memcpy(own, tensor->data, (size_t)tensor->shape[0] * sizeof *own);
    return own;
}

static int add_conv(network_t *network, op_t *op, const tensor_t *tensors) {
    const tensor_t *weight = &tensors[0], *bias = &tensors[1];
    if (!has_shape(weight, FLOAT32, 4, (int64_t[]){0, 0, 0, weight->shape[2]}) || weight->shape[2] > MAX_KERNEL
        || !has_shape(bias, FLOAT32, 1, (int64_t[]){weight->shape[0]})
        || weight->shape[1] * weight->shape[2] * weight->shape[2] > MAX_DEPTH)
        return fail("invalid shapes of a convolution's weight and bias");
    op->c_out = (int)weight->shape[0];
    op->c_in = (int)weight->shape[1];
    op->kernel = (int)weight->shape[2];
    const int gates[] = {op->gate_in, op->gate_out}, sizes[] = {op->c_in, op->c_out};
    for (int i = 0; i < 2; i++)
        if (gates[i] >= network->num_gates || (gates[i] >= 0 && network->gate_sizes[gates[i]] != sizes[i]))
            return fail(
                "a convolution of %d to %d channels does not fit its gates %d and %d", op->c_in, op->c_out, op->gate_in,
                op->gate_out);
    const packing_t to = packing(op);
    op->weight = allocate(times((size_t)to.floats, sizeof *op->weight));
    op->bias = copy(bias);
    if (!op->weight || !op->bias)
        return fail("out of memory");
    const float *from = weight->data;
    for (int k = 0; k < op->c_out; k++)
        for (int c = 0; c < op->c_in; c++)
            for (int t = 0; t < op->kernel * op->kernel; t++)
                op->weight[row_offset(&to, k) + c * to.column + t * to.tap] = *from++;
    return 0;
}

static int add_gate(network_t *network, op_t *op, const tensor_t *tensors) {
    const tensor_t *first = &tensors[0], *second = &tensors[2];
    if (!has_shape(first, FLOAT32, 2, (int64_t[]){0, 0}) || !has_shape(&tensors[1], FLOAT32, 1, first->shape)
        || !has_shape(second, FLOAT32, 2, (int64_t[]){0, first->shape[0]})
        || !has_shape(&tensors[3], FLOAT32, 1, second->shape))
        return fail("invalid shapes of a gate's weights and biases");
    if (op->gate_out >= network->num_gates || network->gate_sizes[op->gate_out])
        return fail("gate %d of %d does not exist or is defined twice", op->gate_out, network->num_gates);
    op->hidden = (int)first->shape[0];
    op->c_in = (int)first->shape[1];
    op->c_out = (int)second->shape[0];
    op->weight = allocate(times((size_t)op->c_in * op->hidden, sizeof *op->weight));
    op->weight2 = allocate(times((size_t)op->hidden * op->c_out, sizeof *op->weight2));
    op->bias = copy(&tensors[1]);
    op->bias2 = copy(&tensors[3]);
    if (!op->weight || !op->weight2 || !op->bias || !op->bias2)
        return fail("out of memory");
    const float *from = first->data;
    for (int h = 0; h < op->hidden; h++)
        for (int c = 0; c < op->c_in; c++)
            op->weight[(ptrdiff_t)c * op->hidden + h] = *from++;
    from = second->data;
    for (int k = 0; k < op->c_out; k++)
        for (int h = 0; h < op->hidden; h++)
            op->weight2[(ptrdiff_t)h * op->c_out + k] = *from++;
    network->gate_sizes[op->gate_out] = op->c_out;
    return 0;
}

static int add_concat(network_t *network, op_t *op, const tensor_t *sources) {
    if (!has_shape(sources, INT64, 1, (int64_t[]){0}))
        return fail("invalid shape of the sources of a concatenation");
    op->num_sources = (int)sources->shape[0];
    op->sources = malloc((size_t)op->num_sources * sizeof *op->sources);
    if (!op->sources)
        return fail("out of memory");
    for (int i = 0; i < op->num_sources; i++) {
        const int64_t source = ((const int64_t *)sources->data)[i];
        if (source < 0 || source >= network->num_buffers || source == op->out)
            return fail("buffer %lld of %d cannot be concatenated", (long long)source, network->num_buffers);
        op->sources[i] = (int)source;
    }
    op->in = op->sources[0];
    return 0;
}

static int add_kind(network_t *network, op_t *op, const tensor_t *tensors) {
    switch (op->kind) {
        case CONV: return add_conv(network, op, tensors);
        case GATE: return add_gate(network, op, tensors);
        case CONCAT: return add_concat(network, op, tensors);
        case POOL:
            return op->padding > op->kernel / 2
                ? fail("a pooling of kernel %d with padding %d", op->kernel, op->padding)
                : 0;
        case SKIP:
            return op->gate_out >= network->num_gates || network->gate_sizes[op->gate_out] != 1
                ? fail("gate %d of a skip is not a gate of one channel", op->gate_out)
                : 0;
        default: return 0;
    }
}

int network_add(network_t *network, const int64_t row[NUM_COLUMNS], const tensor_t tensors[MAX_TENSORS]) {
    if (check_row(row))
        return -1;
    op_t op = {
        .kind = (kind_t)row[KIND],
        .in = (int)row[SOURCE],
        .out = (int)row[TARGET],
        .residual = (int)row[RESIDUAL],
        .gate_in = (int)row[GATE_IN],
        .gate_out = (int)(row[KIND] == CONV ? row[GATE_OUT] : row[GATE_DEFINED]),
        .count = (int)row[COUNT],
        .kernel = (int)(row[KIND] == ADAPTIVE_POOL   ? row[BINS]
                            : row[KIND] == SUBSAMPLE ? 1
                                                     : row[KERNEL]),
        .stride = (int)row[STRIDE],
        .dilation = row[KIND] == CONV ? (int)row[DILATION] : 1,
        .padding = row[PADDING] > 0 ? (int)row[PADDING] : 0,
        .relu = row[RELU] > 0,
        .average = row[AVERAGE] > 0,
        .ceil_mode = row[CEIL_MODE] > 0,
        .before = row[BEFORE] > 0 ? (int)row[BEFORE] : 0,
        .after = row[AFTER] > 0 ? (int)row[AFTER] : 0,
        .align_corners = row[ALIGN_CORNERS] > 0,
    };
    if (op.in >= network->num_buffers || op.out >= network->num_buffers || op.residual >= network->num_buffers
        || (op.out >= 0 && (op.out == op.in || op.out == op.residual)))
        return fail(
            "an operation from buffer %d, with shortcut %d, to buffer %d of %d", op.in, op.residual, op.out,
            network->num_buffers);
    if (network->num_ops == network->capacity) {
        const int capacity = 2 * network->capacity + 16;
        op_t *ops = realloc(network->ops, (size_t)capacity * sizeof *ops);
        if (!ops)
            return fail("out of memory");
        network->ops = ops;
        network->capacity = capacity;
    }
    op_t *added = &network->ops[network->num_ops++]; /* what it owns is freed with the network, also after an error */
    *added = op;
    return add_kind(network, added, tensors);
}
