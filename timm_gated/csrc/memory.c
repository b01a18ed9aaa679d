/* Aligned memory. On Linux, large blocks are mapped: in large pages if available, since weights are read once per
 * image, in order; and given back to the system when released, whereas malloc would keep them in a heap with gaps. */
#if defined(__linux__)
#define _GNU_SOURCE
#include <sys/mman.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "network.h"

#define LARGE_PAGE ((size_t)2 << 20)
#define ALIGNMENT 64

/* Precedes a block, in ALIGNMENT bytes. */
typedef struct {
    void *mapped; /* NULL if the block is not mapped */
    size_t bytes;
} header_t;
_Static_assert(sizeof(header_t) <= ALIGNMENT, "the header must not disturb the alignment");

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define MAP_FROM (LARGE_PAGE / 2)

static char *map(size_t bytes) {
    const size_t alignment = bytes >= 2 * LARGE_PAGE ? LARGE_PAGE : ALIGNMENT;
    const size_t total = bytes + alignment;
    char *mapped = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        return NULL;
    char *memory = mapped + (alignment - (size_t)mapped % alignment) % alignment;
#if defined(MADV_HUGEPAGE)
    if (alignment == LARGE_PAGE)
        madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    *(header_t *)memory = (header_t){mapped, total};
    return memory;
}

static void unmap(const header_t *header) { munmap(header->mapped, header->bytes); }
#else
#define MAP_FROM MAX_MEMORY

static char *map(size_t bytes) { return (void)bytes, NULL; }

static void unmap(const header_t *header) { (void)header; }
#endif

static char *allocate_zeros(size_t bytes) {
    void *memory;
#if defined(_WIN32)
    memory = _aligned_malloc(bytes, ALIGNMENT);
#else
    if (posix_memalign(&memory, ALIGNMENT, bytes))
        memory = NULL;
#endif
    return memory ? memset(memory, 0, bytes) : NULL;
}

void *allocate(size_t bytes) {
    if (bytes >= MAX_MEMORY - ALIGNMENT)
        return NULL;
    bytes += ALIGNMENT;
    char *memory = bytes >= MAP_FROM ? map(bytes) : allocate_zeros(bytes);
    return memory ? memory + ALIGNMENT : NULL;
}

void release(void *memory) {
    if (!memory)
        return;
    header_t *header = (header_t *)((char *)memory - ALIGNMENT);
    if (header->mapped) {
        unmap(header);
        return;
    }
#if defined(_WIN32)
    _aligned_free(header);
#else
    free(header);
#endif
}
