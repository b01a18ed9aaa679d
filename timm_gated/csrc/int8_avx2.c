/* The int8 kernels for AVX2. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#include <immintrin.h>
#define ISA "avx2"
#define LANES 8
#define ROW_BLOCK 4
#define VECTORS 2
#define NAME(x) x##_avx2
#define ROUND(x) ((ints)_mm256_cvtps_epi32((__m256)(x)))
/* Sums of two products have 16 bits: weights of 7 bits cannot saturate them. */
#define DOT(sums, x, w) \
    ((sums) + (ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)(x), (__m256i)(w)), _mm256_set1_epi16(1)))
/* Packing interleaves within 16 bytes: channel by channel, then sorted by position. */
#define PACK(y, zero) \
    ((ints)_mm256_shuffle_epi8( \
        _mm256_packus_epi16( \
            _mm256_adds_epi16(_mm256_packs_epi32((__m256i)(y)[0], (__m256i)(y)[1]), _mm256_set1_epi16((short)(zero))), \
            _mm256_adds_epi16( \
                _mm256_packs_epi32((__m256i)(y)[2], (__m256i)(y)[3]), _mm256_set1_epi16((short)(zero)))), \
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15))))
#include "int8.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
