/* Products with weights at fewer bits, for pass.c. Knows no pass.
 *
 * A row is first rounded to whole numbers: for int8 weights to 16 bits with one scale, for int4 weights to 8 bits with a
 * scale for every 32 numbers. Sums of products are then exact (int8: all of it; int4: a group of 32, and groups are
 * added in ascending order), so the bits of a row depend neither on how many rows there are nor on the threads.
 * A panel is read from end to end, one after the other: that is how memory is fastest.
 *
 * int8 panel: [inputs / 2][16 outputs][2] codes, beside it a scale an output; weight = code * scale.
 * int4 panel, group by group: [4][64] bytes, whose low halves are codes [16 outputs][4] and whose high halves the
 * codes of the next 4 inputs, then [16] pairs of bfloat16: scale and middle; weight = (code - 8) * scale + middle.
 */
#ifdef __AVX2__
#include <immintrin.h>
#endif
#define GROUP 32
#define ALONE 8 /* up to so many rows every thread rounds all rows for itself: cheaper than waiting for the others */
#define PANEL8(inputs) ((inputs) * L)
#define PANEL4(inputs) ((inputs) / GROUP * 320)
#ifndef AHEAD8
#define AHEAD8 2048
#endif
#ifndef AHEAD4
#define AHEAD4 2048
#endif

typedef int16_t vs __attribute__((vector_size(64)));
typedef uint8_t vb __attribute__((vector_size(64)));
typedef int8_t vc_u __attribute__((vector_size(32), aligned(1)));
typedef uint8_t vb_u __attribute__((vector_size(64), aligned(1)));
typedef int16_t vt_u __attribute__((vector_size(32), aligned(2)));
typedef int8_t vq_u __attribute__((vector_size(16), aligned(1)));

/* Rows as whole numbers of 16 bits and a scale each, or of 8 bits with a scale and scale * sum for each group. */
typedef struct {
    char *code;
    float *scale, *sum;
} Rounded;

static int64_t rounded_bytes(int64_t rows, int64_t n) {
    return padded(rows * n * 2) + 2 * padded(rows * (n / GROUP + 1) * 4);
}
static Rounded rounded_at(char *at, int64_t rows, int64_t n) {
    char *scale = at + padded(rows * n * 2);
    return (Rounded){at, (float *)scale, (float *)(scale + padded(rows * (n / GROUP + 1) * 4))};
}

#ifdef __AVX512F__
static inline vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#else
#define larger vmax
#endif
/* x with every number beside the one `gap` places on */
#define BESIDE(x, gap)                                                                                             \
    __builtin_shufflevector(x, x, gap, gap + 1, gap + 2, gap + 3, gap + 4, gap + 5, gap + 6, gap + 7, gap + 8,     \
                            gap + 9, gap + 10, gap + 11, gap + 12, gap + 13, gap + 14, gap + 15)
static inline float max16(vf x) {
    x = larger(x, BESIDE(x, 8));
    x = larger(x, BESIDE(x, 4));
    x = larger(x, BESIDE(x, 2));
    x = larger(x, BESIDE(x, 1));
    return x[0];
}
static inline int32_t total16(vi x) {
    x += BESIDE(x, 8);
    x += BESIDE(x, 4);
    x += BESIDE(x, 2);
    x += BESIDE(x, 1);
    return x[0];
}
static inline vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }
static inline vi nearest(vf x) { return __builtin_convertvector((x + 12582912.0f) - 12582912.0f, vi); }

/* The inverse of a scale of numbers up to `largest`; 0 where they are 0 or so small that there is none. */
static inline float inverse_of(float largest, float top) { return largest > 1e-33f ? top / largest : 0; }

/* top: the largest whole number allowed, so that no sum leaves 32 bits. A row that is not finite gets the scale nan. */
static void round16(const elem *x, int64_t n, float top, int16_t *code, float *scale) {
    vf most = splat(0), zero = splat(0);
    for (int64_t i = 0; i < n; i += L) {
        vf v = load(x + i);
        most = larger(magnitude(v), most);
        zero += v * 0.0f;
    }
    float largest = max16(most), inverse = inverse_of(largest, top);
    for (int64_t i = 0; i < n; i += L)
        *(vt_u *)(code + i) = __builtin_convertvector(nearest(load(x + i) * inverse), vt_u);
    *scale = sum16(zero) == 0 ? largest / top : NAN;
}
static void round8(const elem *x, int64_t n, int8_t *code, float *scale, float *sum) {
    vf zero = splat(0);
    for (int64_t g = 0; g < n / GROUP; g++) {
        vf a = load(x + g * GROUP), b = load(x + g * GROUP + L);
        float largest = max16(larger(magnitude(a), magnitude(b))), inverse = inverse_of(largest, 127);
        vi first = nearest(a * inverse), second = nearest(b * inverse);
        *(vq_u *)(code + g * GROUP) = __builtin_convertvector(first, vq_u);
        *(vq_u *)(code + g * GROUP + L) = __builtin_convertvector(second, vq_u);
        scale[g] = largest * (1.0f / 127);
        sum[g] = (float)total16(first + second) * scale[g];
        zero += a * 0.0f + b * 0.0f;
    }
    if (sum16(zero) != 0) scale[0] = NAN;
}

/* acc + the products of two numbers of 16 bits in each of 16 places */
static inline vi dot2(vi acc, vs w, uint32_t x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, (__m512i)((vu){0} + x));
#elif defined(__AVX512BW__)
    return acc + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)((vu){0} + x));
#elif defined(__AVX2__)
    __m256i half[2], one = _mm256_set1_epi32((int)x);
    memcpy(half, &w, sizeof half);
    half[0] = _mm256_madd_epi16(half[0], one), half[1] = _mm256_madd_epi16(half[1], one);
    vi sum;
    memcpy(&sum, half, sizeof sum);
    return acc + sum;
#else
    vi both = (vi)w;
    return acc + ((both << 16) >> 16) * (int32_t)(int16_t)x + (both >> 16) * ((int32_t)x >> 16);
#endif
}

/* acc + the products of four codes from 0 to 15 and four numbers of 8 bits in each of 16 places */
static inline vi dot4(vi acc, vb w, uint32_t x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)((vu){0} + x));
#elif defined(__AVX2__) /* pairs stay below 16 bits: 2 * 15 * 127 */
    __m256i half[2], one = _mm256_set1_epi32((int)x), ones = _mm256_set1_epi16(1);
    memcpy(half, &w, sizeof half);
    for (int i = 0; i < 2; i++) half[i] = _mm256_madd_epi16(_mm256_maddubs_epi16(half[i], one), ones);
    vi sum;
    memcpy(&sum, half, sizeof sum);
    return acc + sum;
#else
    vu four = (vu)w;
    for (int i = 0; i < 4; i++) acc += (vi)(four >> (8 * i) & 15) * (int32_t)(int8_t)(x >> (8 * i));
    return acc;
#endif
}

#ifdef __AVX512BW__ /* GCC 12 makes five instructions of the conversion */
static inline vs widen8(const char *at) { return (vs)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)at)); }
#else
static inline vs widen8(const char *at) { return __builtin_convertvector(*(const vc_u *)at, vs); }
#endif

/* out[m][16] = M rows . one panel. n: inputs. */
typedef void (*Quantized)(Rounded rows, const char *w, const float *scale, int64_t n, float *out, int64_t ldo);

#define EACH(I, N) _Pragma("GCC unroll 16") for (int I = 0; I < N; I++)
#define KERNEL8(M, SPLIT)                                                                                          \
    static void panel8_##M(Rounded rows, const char *restrict w, const float *restrict scale, int64_t n,           \
                           float *restrict out, int64_t ldo) {                                                     \
        const uint32_t *x = (const uint32_t *)rows.code;                                                           \
        vi acc[SPLIT][M];                                                                                          \
        EACH(s, SPLIT) EACH(m, M) acc[s][m] = (vi){0};                                                             \
        for (int64_t u = 0; u < n / 2; u += 4) {                                                                   \
            __builtin_prefetch(w + u * 32 + AHEAD8);                                                               \
            __builtin_prefetch(w + u * 32 + AHEAD8 + 64);                                                          \
            EACH(i, 4) {                                                                                           \
                vs v = widen8(w + (u + i) * 32);                                                                   \
                EACH(m, M) acc[i % SPLIT][m] = dot2(acc[i % SPLIT][m], v, x[m * (n / 2) + u + i]);                 \
            }                                                                                                      \
        }                                                                                                          \
        EACH(m, M) {                                                                                               \
            vi sum = acc[0][m];                                                                                    \
            _Pragma("GCC unroll 8") for (int s = 1; s < SPLIT; s++) sum += acc[s][m];                              \
            *(vf_u *)(out + m * ldo) = __builtin_convertvector(sum, vf) * *(const vf_u *)scale * rows.scale[m];    \
        }                                                                                                          \
    }
#define KERNEL4(M)                                                                                                 \
    static void panel4_##M(Rounded rows, const char *restrict w, const float *restrict scale, int64_t n,           \
                           float *restrict out, int64_t ldo) {                                                     \
        int64_t groups = n / GROUP;                                                                                \
        (void)scale;                                                                                               \
        vf total[M];                                                                                               \
        EACH(m, M) total[m] = splat(0);                                                                            \
        for (int64_t g = 0; g < groups; g++, w += 320) {                                                           \
            vi acc[M];                                                                                             \
            EACH(m, M) acc[m] = (vi){0};                                                                           \
            EACH(j, 4) {                                                                                           \
                vb both = *(const vb_u *)(w + j * 64);                                                             \
                vb low = both & 15, high = (vb)((vs)both >> 4) & 15;                                               \
                __builtin_prefetch(w + j * 64 + AHEAD4);                                                           \
                EACH(m, M) {                                                                                       \
                    const uint32_t *x = (const uint32_t *)(rows.code + m * n + g * GROUP + j * 8);                 \
                    acc[m] = dot4(dot4(acc[m], low, x[0]), high, x[1]);                                            \
                }                                                                                                  \
            }                                                                                                      \
            vu two = *(const vu_u *)(w + 256);                                                                     \
            __builtin_prefetch(w + 256 + AHEAD4);                                                                  \
            vf step = (vf)(two << 16), least = (vf)(two & 0xffff0000u) - 8 * step;                                 \
            EACH(m, M) {                                                                                           \
                total[m] += (step * rows.scale[m * groups + g]) * __builtin_convertvector(acc[m], vf);             \
                total[m] += least * rows.sum[m * groups + g];                                                      \
            }                                                                                                      \
        }                                                                                                          \
        EACH(m, M) *(vf_u *)(out + m * ldo) = total[m];                                                            \
    }
KERNEL8(1, 4) KERNEL8(2, 4) KERNEL8(3, 2) KERNEL8(4, 2) KERNEL8(5, 2) KERNEL8(6, 2) KERNEL8(7, 1) KERNEL8(8, 1)
KERNEL8(9, 1) KERNEL8(10, 1) KERNEL8(11, 1) KERNEL8(12, 1) KERNEL8(13, 1) KERNEL8(14, 1) KERNEL8(15, 1) KERNEL8(16, 1)
KERNEL4(1) KERNEL4(2) KERNEL4(3) KERNEL4(4) KERNEL4(5) KERNEL4(6) KERNEL4(7) KERNEL4(8)
KERNEL4(9) KERNEL4(10) KERNEL4(11) KERNEL4(12) KERNEL4(13) KERNEL4(14) KERNEL4(15) KERNEL4(16)
#define UP_TO_16(N) {N##_1, N##_2, N##_3, N##_4, N##_5, N##_6, N##_7, N##_8, N##_9, N##_10, N##_11, N##_12, N##_13, \
                     N##_14, N##_15, N##_16}
static const Quantized panels8[16] = UP_TO_16(panel8), panels4[16] = UP_TO_16(panel4);

typedef struct {
    char *own, *shared; /* where rows are rounded: by each thread for itself, or together */
    uint32_t *panels;   /* where a thread lays out plain weights */
} Room;

/* The rows as whole numbers, as the weights want them. */
static Rounded whole(const Linear *lin, const elem *x, int64_t rows, const Room *room) {
    int64_t n = lin->units * PER_UNIT, from = 0, to = rows;
    Rounded made = rounded_at(rows > ALONE ? room->shared : room->own, rows, n);
    if (rows > ALONE) share(rows, &from, &to);
    for (int64_t r = from; r < to; r++)
        if (lin->bits == 8)
            round16(x + r * n, n, lin->top, (int16_t *)made.code + r * n, made.scale + r);
        else
            round8(x + r * n, n, (int8_t *)made.code + r * n, made.scale + r * (n / GROUP), made.sum + r * (n / GROUP));
    if (rows > ALONE) {
#pragma omp barrier
    }
    return made;
}

/* out[m, 16 p + j] = row m . output 16 (panel + p) + j, of `height` rows from m on and `step` panels. */
static void multiply_whole(const Linear *lin, const Rounded *rows, int64_t m, int height, int64_t panel, int64_t step,
                           float *out, int64_t ld) {
    int64_t n = lin->units * PER_UNIT, groups = lin->bits == 8 ? 1 : n / GROUP;
    int64_t bytes = lin->bits == 8 ? PANEL8(n) : PANEL4(n);
    Rounded from = {rows->code + m * n * (lin->bits == 8 ? 2 : 1), rows->scale + m * groups, rows->sum + m * groups};
    const char *w = (const char *)lin->w + panel * bytes;
    for (int64_t p = 0; p < step; p++)
        (lin->bits == 8 ? panels8 : panels4)[height - 1](from, w + p * bytes, lin->scale ? lin->scale + (panel + p) * L : NULL,
                                                         n, out + p * L, ld);
}
