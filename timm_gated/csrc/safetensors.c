#include "safetensors.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_NUMBER ((int64_t)1 << 53)

/* The header is JSON, of which it uses objects, arrays of integers, and strings. */
typedef struct {
    const char *at, *end;
} cursor_t;

typedef struct {
    const char *first;
    size_t length;
    int escaped; /* contains escapes, which are not decoded */
} text_t;

static int malformed(void) { return fail("its header is malformed"); }

static char next(cursor_t *json) {
    while (json->at < json->end && memchr(" \t\r\n", *json->at, 4))
        json->at++;
    return json->at < json->end ? *json->at : 0;
}

static int accept(cursor_t *json, char expected) {
    if (next(json) != expected)
        return 0;
    json->at++;
    return 1;
}

static int read_text(cursor_t *json, text_t *text) {
    if (!accept(json, '"'))
        return malformed();
    *text = (text_t){.first = json->at};
    for (; json->at < json->end && *json->at != '"'; json->at++) {
        if (*json->at == '\\' && json->at + 1 < json->end) {
            text->escaped = 1;
            json->at++;
        }
        if ((unsigned char)*json->at < ' ') /* error messages quote names */
            return malformed();
    }
    if (json->at >= json->end)
        return malformed();
    text->length = (size_t)(json->at++ - text->first);
    return 0;
}

static int equals(const text_t *text, const char *expected) {
    return !text->escaped && text->length == strlen(expected) && !memcmp(text->first, expected, text->length);
}

static int read_number(cursor_t *json, int64_t *number) {
    char digit = next(json);
    if (digit < '0' || digit > '9')
        return malformed();
    for (*number = 0; digit >= '0' && digit <= '9'; digit = ++json->at < json->end ? *json->at : 0) {
        *number = 10 * *number + (digit - '0');
        if (*number > MAX_NUMBER)
            return malformed();
    }
    return 0;
}

/* Read an array of at most `most` numbers; returns how many, or -1. */
static int read_numbers(cursor_t *json, int64_t *numbers, int most) {
    if (!accept(json, '['))
        return malformed();
    if (accept(json, ']'))
        return 0;
    for (int count = 0; count < most;) {
        if (read_number(json, &numbers[count++]))
            return -1;
        if (accept(json, ']'))
            return count;
        if (!accept(json, ','))
            return malformed();
    }
    return fail("a tensor has more than %d dimensions", most);
}

/* Begin or continue an object: read a key and its colon. Returns 1, 0 after the last key, or -1. */
static int next_key(cursor_t *json, int is_first, text_t *key) {
    if (is_first && !accept(json, '{'))
        return malformed();
    if (accept(json, '}'))
        return 0;
    if (!is_first && !accept(json, ','))
        return malformed();
    return read_text(json, key) || !accept(json, ':') ? malformed() : 1;
}

static int read_metadata(cursor_t *json, const char *expected, text_t *found) {
    text_t key, value;
    int more;
    for (int is_first = 1; (more = next_key(json, is_first, &key)) == 1; is_first = 0) {
        if (read_text(json, &value))
            return -1;
        if (equals(&key, expected))
            *found = value;
    }
    return more;
}

static const struct {
    const char *name;
    size_t bytes;
} types[] = {
    [INT64] = {"I64", 8}, [FLOAT32] = {"F32", 4}, [UINT8] = {"U8", 1}, [INT8] = {"I8", 1}, [INT32] = {"I32", 4}};

static int read_tensor(cursor_t *json, tensor_t *tensor, int64_t offsets[2]) {
    text_t key, type = {NULL, 0, 0};
    int more, num_offsets = 0;
    tensor->num_dims = -1;
    for (int is_first = 1; (more = next_key(json, is_first, &key)) == 1; is_first = 0) {
        int failed;
        if (equals(&key, "dtype"))
            failed = read_text(json, &type);
        else if (equals(&key, "shape"))
            failed = (tensor->num_dims = read_numbers(json, tensor->shape, 4)) < 0;
        else if (equals(&key, "data_offsets"))
            failed = (num_offsets = read_numbers(json, offsets, 2)) < 0;
        else
            failed = malformed();
        if (failed)
            return -1;
    }
    if (more || tensor->num_dims < 0 || num_offsets != 2 || !type.first)
        return malformed();
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (equals(&type, types[i].name)) {
            tensor->type = (type_t)i;
            return 0;
        }
    return fail("a tensor is of type %.*s", type.length < 20 ? (int)type.length : 20, type.first);
}

/* Check the place of a tensor in the data, and point to it. */
static int locate(tensor_t *tensor, const int64_t offsets[2], const char *data, size_t data_bytes) {
    const size_t item = types[tensor->type].bytes;
    size_t bytes = item;
    for (int i = 0; i < tensor->num_dims; i++)
        bytes = times(bytes, (size_t)tensor->shape[i]);
    const size_t begin = (size_t)offsets[0], end = (size_t)offsets[1];
    if (begin > end || end > data_bytes || end - begin != bytes || begin % item)
        return fail("a tensor of %zu bytes is at [%zu, %zu) of %zu bytes", bytes, begin, end, data_bytes);
    tensor->data = data + begin;
    return 0;
}

static int by_name(const void *first, const void *second) {
    const named_tensor_t *a = first, *b = second;
    const int order = memcmp(a->name, b->name, a->length < b->length ? a->length : b->length);
    return order ? order : (a->length > b->length) - (a->length < b->length);
}

/* CRC-32, eight bytes at a time: table k has the effect of a byte that is followed by k zeros. */
typedef struct {
    uint32_t tables[8][256];
} crc_t;

static void crc_prepare(crc_t *crc) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++)
            value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0);
        crc->tables[0][i] = value;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++) {
            const uint32_t before = crc->tables[k - 1][i];
            crc->tables[k][i] = before >> 8 ^ crc->tables[0][before & 255];
        }
}

static uint32_t crc_update(const crc_t *crc, uint32_t value, const void *data, size_t count) {
    const unsigned char *bytes = data;
    value = ~value;
    for (; count >= 8; count -= 8, bytes += 8) {
        uint32_t low = 0, sum = 0;
        for (int i = 0; i < 4; i++)
            low |= (uint32_t)bytes[i] << 8 * i;
        low ^= value;
        for (int i = 0; i < 4; i++)
            sum ^= crc->tables[7 - i][low >> 8 * i & 255] ^ crc->tables[3 - i][bytes[4 + i]];
        value = sum;
    }
    for (; count; count--)
        value = value >> 8 ^ crc->tables[0][(value ^ *bytes++) & 255];
    return ~value;
}

/* Of names, shapes and values. */
static uint32_t checksum(const safetensors_t *file) {
    crc_t crc;
    uint32_t value = 0;
    crc_prepare(&crc);
    for (size_t i = 0; i < file->count; i++) {
        const named_tensor_t *named = &file->tensors[i];
        const tensor_t *tensor = &named->tensor;
        size_t bytes = types[tensor->type].bytes;
        for (int k = 0; k < tensor->num_dims; k++)
            bytes *= (size_t)tensor->shape[k];
        value = crc_update(&crc, value, named->name, named->length);
        value = crc_update(&crc, value, tensor->shape, (size_t)tensor->num_dims * sizeof *tensor->shape);
        value = crc_update(&crc, value, tensor->data, bytes);
    }
    return value;
}

static int append(safetensors_t *file, size_t *capacity, const named_tensor_t *tensor) {
    if (file->count == *capacity) {
        *capacity = 2 * *capacity + 64;
        named_tensor_t *tensors = realloc(file->tensors, *capacity * sizeof *tensors);
        if (!tensors)
            return fail("out of memory");
        file->tensors = tensors;
    }
    file->tensors[file->count++] = *tensor;
    return 0;
}

static int read_header(safetensors_t *file, cursor_t *json, const char *data, size_t data_bytes, const char *key) {
    text_t name, found = {NULL, 0, 0};
    size_t capacity = 0, total = 0;
    int more;
    for (int is_first = 1; (more = next_key(json, is_first, &name)) == 1; is_first = 0) {
        if (equals(&name, "__metadata__")) {
            if (read_metadata(json, key, &found))
                return -1;
            continue;
        }
        named_tensor_t tensor = {.name = name.first, .length = name.length};
        int64_t offsets[2];
        if (read_tensor(json, &tensor.tensor, offsets) || locate(&tensor.tensor, offsets, data, data_bytes)
            || append(file, &capacity, &tensor))
            return -1;
        total = times(total + (size_t)(offsets[1] - offsets[0]), 1);
    }
    if (more || next(json))
        return malformed();
    if (!found.first)
        return fail("it was not saved by `save` of an accelerated network");
    if (total != data_bytes)
        return fail("its tensors have %zu bytes, but it holds %zu", total, data_bytes);
    if (file->count)
        qsort(file->tensors, file->count, sizeof *file->tensors, by_name);
    char actual[9];
    snprintf(actual, sizeof actual, "%08x", checksum(file));
    return equals(&found, actual) ? 0 : fail("it is damaged: the checksum is %s", actual);
}

/* The file is copied, not mapped: nobody can change or truncate the copy. */
static int read_file(safetensors_t *file, const char *path) {
    FILE *stream = fopen(path, "rbe");
    struct stat status;
    if (!stream)
        return fail("%s", strerror(errno));
    int failed = 0;
    if (fstat(fileno(stream), &status) || !S_ISREG(status.st_mode))
        failed = fail("it is not a regular file");
    else if (!(file->content = allocate((size_t)status.st_size)))
        failed = fail("out of memory");
    else
        file->bytes = fread(file->content, 1, (size_t)status.st_size, stream);
    fclose(stream);
    return failed;
}

int safetensors_open(safetensors_t *file, const char *path, const char *key) {
    *file = (safetensors_t){.bytes = 0};
    if (read_file(file, path))
        return -1;
    uint64_t size = 0;
    for (int i = 7; file->bytes >= 8 && i >= 0; i--)
        size = size << 8 | (unsigned char)file->content[i];
    if (file->bytes < 8 || size > file->bytes - 8 || size % 8) /* writers align the data to 8 bytes */
        return fail("it is damaged: %zu bytes with a header of %llu", file->bytes, (unsigned long long)size);
    cursor_t json = {file->content + 8, file->content + 8 + size};
    return read_header(file, &json, json.end, file->bytes - 8 - size, key);
}

void safetensors_close(safetensors_t *file) {
    release(file->content);
    free(file->tensors);
}

const tensor_t *safetensors_find(safetensors_t *file, const char *name) {
    const named_tensor_t key = {.name = name, .length = strlen(name)};
    named_tensor_t *found =
        file->count ? bsearch(&key, file->tensors, file->count, sizeof *file->tensors, by_name) : NULL;
    if (!found)
        return NULL;
    found->used = 1;
    return &found->tensor;
}

const named_tensor_t *safetensors_unused(const safetensors_t *file) {
    for (size_t i = 0; i < file->count; i++)
        if (!file->tensors[i].used)
            return &file->tensors[i];
    return NULL;
}
