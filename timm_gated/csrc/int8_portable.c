/* The int8 kernels for any machine: SSE2 on x86-64, NEON on ARM. */
#include <math.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#define ISA "portable"
#define LANES 4
#define ROW_BLOCK 4
#if defined(__aarch64__)
#define VECTORS 3
#else
#define VECTORS 2
#endif
#define NAME(x) x##_portable
#if defined(__x86_64__)
#define ROUND(x) ((ints)_mm_cvtps_epi32((__m128)(x)))
#elif defined(__aarch64__)
#define ROUND(x) ((ints)vcvtnq_s32_f32((float32x4_t)(x)))
#else
#define ROUND(x) \
    ((ints){(int32_t)lrintf((x)[0]), (int32_t)lrintf((x)[1]), (int32_t)lrintf((x)[2]), (int32_t)lrintf((x)[3])})
#endif
#if defined(__x86_64__)
/* Bytes become 16 bits, those with odd indices by shifts. */
#define DOT(sums, x, w) \
    ((sums) \
     + (ints)_mm_madd_epi16( \
         _mm_and_si128((__m128i)(x), _mm_set1_epi16(255)), _mm_srai_epi16(_mm_slli_epi16((__m128i)(w), 8), 8)) \
     + (ints)_mm_madd_epi16(_mm_srli_epi16((__m128i)(x), 8), _mm_srai_epi16((__m128i)(w), 8)))
#elif defined(__aarch64__)
/* Weights of 7 bits: sums of two products fit into 16 bits. */
static inline int32x4_t dot(int32x4_t sums, int32x4_t x, int32x4_t w) {
    const uint16x8_t bytes = vreinterpretq_u16_s32(x);
    const int16x8_t weights = vreinterpretq_s16_s32(w);
    const int16x8_t even = vreinterpretq_s16_u16(vandq_u16(bytes, vdupq_n_u16(255)));
    const int16x8_t odd = vreinterpretq_s16_u16(vshrq_n_u16(bytes, 8));
    const int16x8_t products =
        vmlaq_s16(vmulq_s16(even, vshrq_n_s16(vshlq_n_s16(weights, 8), 8)), odd, vshrq_n_s16(weights, 8));
    return vpadalq_s16(sums, products);
}
#define DOT(sums, x, w) ((ints)dot((int32x4_t)(sums), (int32x4_t)(x), (int32x4_t)(w)))
#else
#define BYTE(v, i, type) ((int32_t)(type)((uint32_t)(v) >> (8 * (i))))
#define DOT_LANE(x, w) \
    (BYTE(x, 0, uint8_t) * BYTE(w, 0, int8_t) + BYTE(x, 1, uint8_t) * BYTE(w, 1, int8_t) \
     + BYTE(x, 2, uint8_t) * BYTE(w, 2, int8_t) + BYTE(x, 3, uint8_t) * BYTE(w, 3, int8_t))
#define DOT(sums, x, w) \
    ((sums) \
     + (ints){DOT_LANE((x)[0], (w)[0]), DOT_LANE((x)[1], (w)[1]), DOT_LANE((x)[2], (w)[2]), DOT_LANE((x)[3], (w)[3])})
#endif
#include "int8.inc"
