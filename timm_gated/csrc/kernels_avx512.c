/* The kernels for AVX-512. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,avx2,fma")
#endif
#define ISA "avx512"
#define LANES 16
#define ROW_BLOCK 8
#define VECTORS 3
#define NAME(x) x##_avx512
#include "kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
