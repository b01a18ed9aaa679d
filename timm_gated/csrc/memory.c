/* Aligned memory, in large pages if available: transformed weights are read once per image, in order. */
#if defined(__linux__)
#define _GNU_SOURCE
#include <sys/mman.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "network.h"

#define LARGE_PAGE ((size_t)2 << 20)

void *allocate(size_t bytes) {
    size_t alignment = bytes >= 2 * LARGE_PAGE ? LARGE_PAGE : 64;
    void *memory = NULL;
    if (bytes >= MAX_MEMORY)
        return NULL;
#if defined(_WIN32)
    memory = _aligned_malloc(bytes, alignment);
#else
    if (posix_memalign(&memory, alignment, bytes))
        return NULL;
#endif
    if (!memory)
        return NULL;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (alignment == LARGE_PAGE)
        madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memset(memory, 0, bytes);
}

void release(void *memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    free(memory);
#endif
}
