/* Vectors of 16 and what one can do with them: load, store, dot, exp. Knows no model.
 *
 * Written with the vector extensions of gcc and clang, which make what the processor has of them; the product of
 * bfloat16 pairs alone asks for an instruction by name where there is one.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif
#if BF16 && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define L 16 /* lanes of a vector */
typedef float vf __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef float vf_u __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu_u __attribute__((vector_size(64), aligned(4)));
typedef uint16_t vh_u __attribute__((vector_size(32), aligned(2)));

#if BF16
typedef uint16_t elem;
#define PER_UNIT 2
#else
typedef float elem;
#define PER_UNIT 1
#endif

static inline vf splat(float x) { return (vf){0} + x; }
static inline vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
static inline vf vmax(vf a, vf b) { return pick(a > b, a, b); }

#if BF16
static inline vf load(const elem *p) { return (vf)(__builtin_convertvector(*(const vh_u *)p, vu) << 16); }
static inline void store(elem *p, vf x) {
    vu bits = (vu)x;
    *(vh_u *)p = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, vh);
}
static inline float widen(elem e) {
    union { uint32_t u; float f; } bits = {(uint32_t)e << 16};
    return bits.f;
}
#ifdef __AVX512BF16__
#define DOT(acc, w, x) ((vf)_mm512_dpbf16_ps((__m512)(acc), (__m512bh)(w), (__m512bh)((vu){0} + (x))))
#else
static inline vf dot_pair(vf acc, vu w, uint32_t x) {
    union { uint32_t u; float f; } low = {x << 16}, high = {x & 0xffff0000u};
    acc += (vf)(w << 16) * low.f;
    return acc + (vf)(w & 0xffff0000u) * high.f;
}
#define DOT dot_pair
#endif
#else
static inline vf load(const elem *p) { return *(const vf_u *)p; }
static inline void store(elem *p, vf x) { *(vf_u *)p = x; }
static inline float widen(elem e) { return e; }
static inline vf dot_one(vf acc, vu w, uint32_t x) {
    union { uint32_t u; float f; } one = {x};
    return acc + (vf)w * one.f;
}
#define DOT dot_one
#endif

static inline float sum16(vf x) {
    float a[L];
    memcpy(a, &x, sizeof a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}

static inline vf vexp(vf x) { /* relative error about 2e-7; 0 below -87 */
    vi alive = ~(x < splat(-87.0f));
    vf top = splat(88.0f);
    vf y = pick(x > top, top, x);
    y = pick(alive, y, splat(0.0f));
    vf t = y * 1.44269504f;
    vf r = (t + 12582912.0f) - 12582912.0f; /* nearest integer */
    vf f = (y - r * 0.693359375f) - r * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    vi n = __builtin_convertvector(r, vi);
    return (vf)(((vi)(p * (vf)((n + 127) << 23))) & alive);
}
static inline vf vtanh(vf x) {
    vf big = splat(40.0f);
    x = pick(x > big, big, x);
    return 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f);
}
static inline vf activate(vf x, int64_t gelu) {
    if (gelu) return 0.5f * x * (1.0f + vtanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    return x / (1.0f + vexp(-x));
}

static int64_t padded(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }

/* What of n pieces this thread does. */
static void share(int64_t n, int64_t *from, int64_t *to) {
    int64_t t = omp_get_thread_num(), all = omp_get_num_threads();
    *from = n * t / all;
    *to = n * (t + 1) / all;
}

