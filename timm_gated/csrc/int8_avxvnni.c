/* The int8 kernels for AVX-VNNI. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avxvnni")
#endif
#include <immintrin.h>
#define ISA "avxvnni"
#define LANES 8
#define ROW_BLOCK 4
#define VECTORS 3
#define NAME(x) x##_avxvnni
#define ROUND(x) ((ints)_mm256_cvtps_epi32((__m256)(x)))
#define DOT(sums, x, w) ((ints)_mm256_dpbusd_avx_epi32((__m256i)(sums), (__m256i)(x), (__m256i)(w)))
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
