/* Registers of numbers and what one can do with them: load, store, dot, exp. Knows no model.
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
#ifdef __AVX__
#include <immintrin.h>
#endif

#define L 16 /* outputs of a panel of weights, columns of a block of keys */
/* Lanes of a register of the machine, and how many registers there are: a longer vector would lie in memory. */
#ifndef W
#if defined(__AVX512F__)
#define W 16
#define REGISTERS 32
#elif defined(__AVX__)
#define W 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define W 4
#define REGISTERS 32
#else
#define W 4
#define REGISTERS 16
#endif
#endif
#define PIECES (L / W) /* registers that L numbers take */
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)
typedef float vf __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef float vf_u __attribute__((vector_size(4 * W), aligned(4)));
typedef uint32_t vu_u __attribute__((vector_size(4 * W), aligned(4)));
typedef uint16_t vh_u __attribute__((vector_size(2 * W), aligned(2)));

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
#else
static inline vf load(const elem *p) { return *(const vf_u *)p; }
static inline void store(elem *p, vf x) { *(vf_u *)p = x; }
static inline float widen(elem e) { return e; }
#endif

/* DOT: acc + products of a unit of weights, two of bfloat16 or one, with that of a row, the first before the second.
 * Without an instruction for both it takes PARTS steps, and rows are best widened before, when many panels are multiplied. */
#if BF16 && defined(__AVX512BF16__) && W == 16
#define PARTS 1
#define TIMES(acc, w, x) ((vf)_mm512_dpbf16_ps((__m512)(acc), (__m512bh)(w), (__m512bh)(x)))
#else
#define PARTS (1 + BF16)
#define TIMES(acc, w, x) ((acc) + (vf)(w) * (vf)(x))
#endif
#if PARTS == 2
#define PART_OF(unit, part) ((part) ? (unit) & 0xffff0000u : (unit) << 16)
#else
#define PART_OF(unit, part) (unit)
#endif
#define DOT(acc, w, x, part) TIMES(acc, PART_OF(w, part), x)
static inline vu everywhere(uint32_t x) { return (vu){0} + x; }
/* What DOT takes of a unit that was not widened. */
static inline vu unit_of(uint32_t x, int part) {
    (void)part;
    vu all = everywhere(x);
#if PARTS == 2 && defined(__AVX__) && W == 8 /* else gcc parts it before it spreads it: three instructions more */
    __asm__("" : "+x"(all));
#endif
    return PART_OF(all, part);
}

static void narrow(const float *x, int64_t n, elem *out) {
    for (int64_t i = 0; i < n; i += W) store(out + i, *(const vf_u *)(x + i));
}

/* What all lanes come to, half of them with the other half until one is left. */
#define FOLDED(name, vector, number, both)                                    \
    static inline number name(vector x) {                                     \
        number all[W];                                                        \
        memcpy(all, &x, sizeof all);                                          \
        for (int half = W / 2; half; half /= 2)                               \
            for (int i = 0; i < half; i++) {                                  \
                number a = all[i], b = all[i + half];                         \
                all[i] = both;                                                \
            }                                                                 \
        return all[0];                                                        \
    }
FOLDED(sum_of, vf, float, a + b)
FOLDED(total_of, vi, int32_t, a + b)
FOLDED(largest_of, vf, float, b > a ? b : a)
/* Bit i says whether lane i of a mask is set. */
static inline uint32_t bits_of(vi mask) {
#if defined(__AVX512F__) && W == 16
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX__) && W == 8
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
    uint32_t found = 0;
    for (int i = 0; i < W; i++) found |= (uint32_t)(mask[i] & 1) << i;
    return found;
#endif
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

