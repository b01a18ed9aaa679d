/* The int8 kernels for AVX-512 with VNNI. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#include <immintrin.h>
#define ISA "avx512"
#define LANES 16
#define ROW_BLOCK 8
#define VECTORS 3
#define NAME(x) x##_avx512
#define ROUND(x) ((ints)_mm512_cvtps_epi32((__m512)(x)))
#define DOT(sums, x, w) ((ints)_mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(x), (__m512i)(w)))
/* Packing interleaves within 16 bytes: channel by channel, then sorted by position. */
#define PACK(y, zero) \
    ((ints)_mm512_shuffle_epi8( \
        _mm512_packus_epi16( \
            _mm512_adds_epi16(_mm512_packs_epi32((__m512i)(y)[0], (__m512i)(y)[1]), _mm512_set1_epi16((short)(zero))), \
            _mm512_adds_epi16( \
                _mm512_packs_epi32((__m512i)(y)[2], (__m512i)(y)[3]), _mm512_set1_epi16((short)(zero)))), \
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15))))
#include "int8.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
