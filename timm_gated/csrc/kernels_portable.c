/* The kernels for any machine: SSE2 on x86-64, NEON on ARM. */
#define ISA "portable"
#define LANES 4
#define ROW_BLOCK 4
#define VECTORS 2
#define NAME(x) x##_portable
#include "kernels.inc"
