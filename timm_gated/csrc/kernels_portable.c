/* The kernels for any machine: SSE2 on x86-64, which has 16 registers, NEON on ARM, which has 32. */
#define ISA "portable"
#define LANES 4
#if defined(__aarch64__)
#define ROW_BLOCK 6
#define VECTORS 4
#if !defined(__clang__)
#pragma GCC optimize("no-schedule-insns") /* which loads so much ahead that sums are spilled in the loop */
#endif
#else
#define ROW_BLOCK 4
#define VECTORS 2
#endif
#define NAME(x) x##_portable
#include "kernels.inc"
