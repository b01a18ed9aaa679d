/* The kernels for AVX2 with FMA. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define ISA "avx2"
#define LANES 8
#define ROW_BLOCK 6
#define VECTORS 2
#define NAME(x) x##_avx2
#include "kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
