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

#define OPTIONAL (-1)
#define ANY MAX_SIZE

static const range_of_t ranges[NUM_KINDS][13] = {
    [CONV] =
        {{SOURCE, 0, ANY},
         {TARGET, 1, ANY},
         {RESIDUAL, OPTIONAL, ANY},
         {GATE_IN, OPTIONAL, ANY},
         {GATE_OUT, OPTIONAL, ANY},
         {STRIDE, 1, MAX_KERNEL},
         {DILATION, 1, ANY},
         {PADDING, 0, ANY},
         {RELU, 0, 1},
         {GROUPS, 1, ANY}},
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
    [QUANTIZE] = {{SOURCE, 0, ANY}, {TARGET, 1, ANY}, {ZERO, 0, 255}},
    [DEQUANTIZE] = {{SOURCE, 0, ANY}, {TARGET, 1, ANY}},
    [INT8_CONV] =
        {{SOURCE, 1, ANY},
         {TARGET, 1, ANY},
         {RESIDUAL, OPTIONAL, ANY},
         {GATE_IN, OPTIONAL, ANY},
         {GATE_OUT, OPTIONAL, ANY},
         {STRIDE, 1, MAX_KERNEL},
         {DILATION, 1, ANY},
         {PADDING, 0, ANY},
         {RELU, 0, 1},
         {GROUPS, 1, 1},
         {ZERO, 0, 255}},
    [INT8_LINEAR] =
        {{SOURCE, 1, ANY},
         {TARGET, 1, ANY},
         {STRIDE, 1, 1},
         {DILATION, 1, 1},
         {PADDING, 0, 0},
         {RELU, 0, 0},
         {GROUPS, 1, 1},
         {ZERO, 0, 255}},
    [BLUR] =
        {{SOURCE, 0, ANY},
         {TARGET, 1, ANY},
         {KERNEL, 1, MAX_KERNEL},
         {STRIDE, 1, MAX_KERNEL},
         {PADDING, 0, MAX_KERNEL}},
    [CHANNEL_CONV] = {{SOURCE, 0, ANY}, {TARGET, 1, ANY}},
    [SCALE] = {{SOURCE, 0, ANY}, {TARGET, 1, ANY}, {RESIDUAL, OPTIONAL, ANY}, {RELU, 0, 1}, {FACTORS, 0, ANY}},
};

static const char *const column_names[NUM_COLUMNS] = {
    "kind",   "source",   "target",  "residual", "gate",    "gate_in",   "gate_out", "kernel",
    "stride", "dilation", "padding", "relu",     "average", "ceil_mode", "bins",     "align_corners",
    "before", "after",    "count",   "macs",     "zero",    "groups",    "factors"};

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

static int check_gates(const network_t *network, const op_t *op) {
    const int gates[] = {op->gate_in, op->gate_out}, sizes[] = {op->c_in, op->c_out};
    for (int i = 0; i < 2; i++)
        if (gates[i] >= network->num_gates || (gates[i] >= 0 && network->gate_sizes[gates[i]] != sizes[i]))
            return fail(
                "a convolution of %d to %d channels does not fit its gates %d and %d", op->c_in, op->c_out, op->gate_in,
                op->gate_out);
    return 0;
}

/* A grouped convolution, whose weights are not packed. */
static int add_grouped(network_t *network, op_t *op, const tensor_t *tensors) {
    const int64_t *shape = tensors[0].shape;
    const size_t bytes = times((size_t)(shape[1] * shape[2] * shape[2]), (size_t)shape[0] * sizeof *op->weight);
    op->weight = allocate(bytes);
    op->bias = copy(&tensors[1]);
    if (!op->weight || !op->bias)
        return fail("out of memory");
    memcpy(op->weight, tensors[0].data, bytes);
    if (op->gate_in >= 0 && op->gate_out >= 0)
        op->pairs = network->num_gates + network->num_pairs++;
    return 0;
}

static int add_conv(network_t *network, op_t *op, const tensor_t *tensors) {
    const tensor_t *weight = &tensors[0], *bias = &tensors[1];
    if (!has_shape(weight, FLOAT32, 4, (int64_t[]){0, 0, 0, weight->shape[2]}) || weight->shape[2] > MAX_KERNEL
        || !has_shape(bias, FLOAT32, 1, (int64_t[]){weight->shape[0]})
        || weight->shape[1] * weight->shape[2] * weight->shape[2] > MAX_DEPTH)
        return fail("invalid shapes of a convolution's weight and bias");
    if (weight->shape[1] * op->groups > MAX_SIZE || weight->shape[0] % op->groups)
        return fail(
            "%d groups of %lld inputs, for %lld outputs", op->groups, (long long)weight->shape[1],
            (long long)weight->shape[0]);
    op->c_out = (int)weight->shape[0];
    op->c_in = (int)weight->shape[1] * op->groups;
    op->kernel = (int)weight->shape[2];
    if (check_gates(network, op))
        return -1;
    if (op->groups > 1)
        return add_grouped(network, op, tensors);
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

/* Sums of int8 convolutions fit into 32 bits: at most MAX_INT8_DEPTH products, and these limits. */
#define MAX_INT8_DEPTH (3 << 14)
#define MAX_INT8_WEIGHT 63
#define MAX_INT8_BIAS (1 << 30)
#define MAX_INT8_RATIO (1 << 20)

static int in_range(const tensor_t *tensor, double low, double high) {
    for (int64_t i = 0; i < tensor->shape[0]; i++) {
        const double value =
            tensor->type == INT32 ? ((const int32_t *)tensor->data)[i] : (double)((const float *)tensor->data)[i];
        if (!(value >= low && value <= high)) /* also NaN */
            return 0;
    }
    return 1;
}

static int add_scale(op_t *op, const tensor_t *scale) {
    if (!has_shape(scale, FLOAT32, 1, (int64_t[]){1}) || !in_range(scale, 1e-30, 1e30))
        return fail("a quantised map needs a positive scale");
    op->scale = *(const float *)scale->data;
    return 0;
}

/* Weights under a gate of inputs, by groups of filters, in the order that regrouping sorts. */
static void pack_groups(const network_t *network, const op_t *op, const int8_t *from) {
    const int taps = op->kernel * op->kernel;
    for (int k = 0; k < op->c_out; k++) {
        const int place = regrouped_place(network->int8, k % ROW_GROUP);
        for (int c = 0; c < op->c_in; c++)
            for (int t = 0; t < taps; t++)
                op->weight8[(((size_t)(k / ROW_GROUP) * op->c_in + c) * taps + t) * ROW_GROUP + place] = *from++;
    }
}

static void pack_rows(const op_t *op, const int8_t *from) {
    const int taps = op->kernel * op->kernel;
    for (size_t k = 0; k < (size_t)op->c_out; k++)
        for (int c = 0; c < op->c_in; c++)
            for (int t = 0; t < taps; t++)
                op->weight8[((k * num_quads(op->c_in) + c / QUAD) * taps + t) * QUAD + c % QUAD] = *from++;
}

static int check_weights(const tensor_t *weight) {
    size_t count = 1;
    for (int i = 0; i < weight->num_dims; i++)
        count *= (size_t)weight->shape[i];
    const int8_t *values = weight->data;
    for (size_t i = 0; i < count; i++)
        if (values[i] < -MAX_INT8_WEIGHT || values[i] > MAX_INT8_WEIGHT)
            return fail("an int8 weight of %d, at most %d are supported", values[i], MAX_INT8_WEIGHT);
    return 0;
}

static int add_int8_conv(network_t *network, op_t *op, const tensor_t *tensors) {
    const tensor_t *weight = &tensors[0], *bias = &tensors[1], *multiplier = &tensors[2], *ratio = &tensors[3];
    const int64_t *sizes = weight->shape;
    if (!has_shape(weight, INT8, 4, (int64_t[]){0, 0, 0, sizes[2]}) || sizes[2] > MAX_KERNEL
        || sizes[1] * sizes[2] * sizes[2] > MAX_INT8_DEPTH || !has_shape(bias, INT32, 1, sizes)
        || !has_shape(multiplier, FLOAT32, 1, sizes) || (op->residual >= 0) != has_shape(ratio, FLOAT32, 1, sizes)
        || (op->residual < 0 && ratio->data))
        return fail("invalid shapes of the tensors of an int8 convolution");
    op->c_out = (int)sizes[0];
    op->c_in = (int)sizes[1];
    op->kernel = (int)sizes[2];
    const size_t taps = (size_t)op->kernel * op->kernel;
    const int8_t *values = weight->data;
    if (check_weights(weight))
        return -1;
    if (!in_range(bias, -MAX_INT8_BIAS, MAX_INT8_BIAS) || !in_range(multiplier, 0., 1.)
        || (op->residual >= 0 && !in_range(ratio, 0., MAX_INT8_RATIO)))
        return fail("bias, multiplier or ratio of an int8 convolution is out of range");
    if (add_scale(op, &tensors[4]) || check_gates(network, op))
        return -1;
    const size_t count = op->gate_in >= 0 ? (size_t)divide_up(op->c_out, ROW_GROUP) * ROW_GROUP * op->c_in * taps
                                          : (size_t)op->c_out * num_quads(op->c_in) * QUAD * taps;
    op->weight8 = allocate(times(count, 1));
    op->bias8 = allocate((size_t)op->c_out * sizeof *op->bias8);
    op->multiplier = copy(multiplier);
    op->ratio = op->residual >= 0 ? copy(ratio) : NULL;
    if (!op->weight8 || !op->bias8 || !op->multiplier || (op->residual >= 0 && !op->ratio))
        return fail("out of memory");
    memcpy(op->bias8, bias->data, (size_t)op->c_out * sizeof *op->bias8);
    if (op->gate_in >= 0)
        pack_groups(network, op, values);
    else
        pack_rows(op, values);
    /* With a shortcut, the phases of the input have the pitch of the maps. */
    const int reach = (op->kernel - 1) * op->dilation / op->stride;
    const int border = op->stride == 1 ? op->padding : op->residual >= 0 ? reach : 0;
    network->border = border > network->border ? border : network->border;
    return 0;
}

/* A linear layer on a float32 map of one pixel, which is quantised for it. */
static int add_int8_linear(op_t *op, const tensor_t *tensors) {
    const tensor_t *weight = &tensors[0], *bias = &tensors[1], *multiplier = &tensors[2];
    const int64_t *sizes = weight->shape;
    if (!has_shape(weight, INT8, 4, (int64_t[]){0, 0, 1, 1}) || !has_shape(bias, FLOAT32, 1, sizes)
        || !has_shape(multiplier, FLOAT32, 1, sizes) || sizes[1] > MAX_INT8_DEPTH)
        return fail("invalid shapes of the tensors of an int8 linear layer");
    op->c_out = (int)sizes[0];
    op->c_in = (int)sizes[1];
    if (check_weights(weight) || add_scale(op, &tensors[3]))
        return -1;
    op->weight8 = allocate(times((size_t)op->c_out * num_quads(op->c_in), QUAD));
    op->bias = copy(bias);
    op->multiplier = copy(multiplier);
    if (!op->weight8 || !op->bias || !op->multiplier)
        return fail("out of memory");
    pack_rows(op, weight->data);
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

static int add_channel_conv(op_t *op, const tensor_t *weight) {
    if (!has_shape(weight, FLOAT32, 1, (int64_t[]){0}) || weight->shape[0] > MAX_KERNEL || weight->shape[0] % 2 == 0)
        return fail("invalid shape of the weight of a convolution over channels");
    op->taps = (int)weight->shape[0];
    op->weight = copy(weight);
    return op->weight ? 0 : fail("out of memory");
}

static int add_kind(network_t *network, kind_t kind, op_t *op, const tensor_t *tensors) {
    switch (kind) {
        case CONV: return add_conv(network, op, tensors);
        case GATE: return add_gate(network, op, tensors);
        case CONCAT: return add_concat(network, op, tensors);
        case INT8_CONV: return add_int8_conv(network, op, tensors);
        case INT8_LINEAR: return add_int8_linear(op, tensors);
        case CHANNEL_CONV: return add_channel_conv(op, &tensors[0]);
        case BLUR:
            return op->padding > op->kernel ? fail("a blur of kernel %d with padding %d", op->kernel, op->padding) : 0;
        case QUANTIZE: return add_scale(op, &tensors[0]);
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
    const int is_conv = row[KIND] == CONV || row[KIND] == INT8_CONV;
    op_t op = {
        .kind = is_conv ? CONV : (kind_t)row[KIND],
        .in = (int)row[SOURCE],
        .out = (int)row[TARGET],
        .residual = is_conv || row[KIND] == SCALE ? (int)row[RESIDUAL] : -1,
        .factors = (int)row[FACTORS],
        .groups = is_conv ? (int)row[GROUPS] : 1,
        .pairs = -1,
        .gate_in = (int)row[GATE_IN],
        .gate_out = (int)(is_conv ? row[GATE_OUT] : row[GATE_DEFINED]),
        .count = (int)row[COUNT],
        .kernel = row[KIND] == ADAPTIVE_POOL ? (int)row[BINS]
            : row[KERNEL] > 0                ? (int)row[KERNEL]
                                             : 1,
        .stride = row[STRIDE] > 0 ? (int)row[STRIDE] : 1,
        .dilation = is_conv ? (int)row[DILATION] : 1,
        .padding = row[PADDING] > 0 ? (int)row[PADDING] : 0,
        .relu = row[RELU] > 0,
        .average = row[AVERAGE] > 0,
        .ceil_mode = row[CEIL_MODE] > 0,
        .before = row[BEFORE] > 0 ? (int)row[BEFORE] : 0,
        .after = row[AFTER] > 0 ? (int)row[AFTER] : 0,
        .align_corners = row[ALIGN_CORNERS] > 0,
        .zero = row[ZERO] > 0 ? (int)row[ZERO] : 0,
    };
    if (op.in >= network->num_buffers || op.out >= network->num_buffers || op.residual >= network->num_buffers
        || op.factors >= network->num_buffers
        || (op.out >= 0 && (op.out == op.in || op.out == op.residual || op.out == op.factors)))
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
    return add_kind(network, (kind_t)row[KIND], added, tensors);
}
