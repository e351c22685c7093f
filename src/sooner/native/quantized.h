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
#define GROUP 32
#define PANEL8(inputs) ((inputs) * L)
#define PANEL4(inputs) ((inputs) / GROUP * 320)
#ifndef AHEAD8
#define AHEAD8 2048
#endif
#ifndef AHEAD4
#define AHEAD4 2048
#endif

typedef int16_t vs __attribute__((vector_size(4 * W)));
typedef int8_t vc_u __attribute__((vector_size(2 * W), aligned(1)));
typedef int16_t vt_u __attribute__((vector_size(2 * W), aligned(2)));
typedef int8_t vq_u __attribute__((vector_size(W), aligned(1)));

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

#if defined(__AVX512F__) && W == 16
static inline vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__) && W == 8
static inline vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
#else
#define larger vmax
#endif
static inline vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }
static inline vi nearest(vf x) { return __builtin_convertvector((x + 12582912.0f) - 12582912.0f, vi); }

/* The inverse of a scale of numbers up to `largest`; 0 where they are 0 or so small that there is none. */
static inline float inverse_of(float largest, float top) { return largest > 1e-33f ? top / largest : 0; }

/* top: the largest whole number allowed, so that no sum leaves 32 bits. A row that is not finite gets the scale nan. */
static void round16(const elem *x, int64_t n, float top, int16_t *code, float *scale) {
    vf most = splat(0), zero = splat(0);
    for (int64_t i = 0; i < n; i += W) {
        vf v = load(x + i);
        most = larger(magnitude(v), most);
        zero += v * 0.0f;
    }
    float largest = largest_of(most), inverse = inverse_of(largest, top);
    for (int64_t i = 0; i < n; i += W)
        *(vt_u *)(code + i) = __builtin_convertvector(nearest(load(x + i) * inverse), vt_u);
    *scale = sum_of(zero) == 0 ? largest / top : NAN;
}
static void round8(const elem *x, int64_t n, int8_t *code, float *scale, float *sum) {
    vf zero = splat(0);
    for (int64_t g = 0; g < n / GROUP; g++, x += GROUP, code += GROUP) {
        vf most = splat(0);
        vi total = {0};
        EACH(i, GROUP / W) most = larger(magnitude(load(x + i * W)), most);
        float largest = largest_of(most), inverse = inverse_of(largest, 127);
        EACH(i, GROUP / W) {
            vi whole = nearest(load(x + i * W) * inverse);
            *(vq_u *)(code + i * W) = __builtin_convertvector(whole, vq_u);
            total += whole;
            zero += load(x + i * W) * 0.0f;
        }
        scale[g] = largest * (1.0f / 127);
        sum[g] = (float)total_of(total) * scale[g];
    }
    if (sum_of(zero) != 0) scale[0] = NAN;
}

/* acc + the products of two numbers of 16 bits in each of W places */
static inline vi dot2(vi acc, vi w, vu x) {
#if defined(__AVX512VNNI__) && W == 16
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__) && W == 16
    return acc + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__) && W == 8
    return acc + (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
    return acc + ((w << 16) >> 16) * ((vi)(x << 16) >> 16) + (w >> 16) * ((vi)x >> 16);
#endif
}

/* acc + the products of four codes from 0 to 15 and four numbers of 8 bits in each of W places */
static inline vi dot4(vi acc, vu w, vu x) {
#if defined(__AVX512VNNI__) && W == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__) && W == 16 /* pairs stay below 16 bits: 2 * 15 * 127 */
    return acc + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)w, (__m512i)x), _mm512_set1_epi16(1));
#elif defined(__AVX2__) && W == 8
    return acc + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, (__m256i)x), _mm256_set1_epi16(1));
#else
    for (int i = 0; i < 4; i++) acc += (vi)(w >> (8 * i) & 15) * ((vi)(x << (24 - 8 * i)) >> 24);
    return acc;
#endif
}

/* 2 W codes of 8 bits as numbers of 16 (GCC 12 makes five instructions of the conversion) */
static inline vi widen8(const char *at) {
#if defined(__AVX512BW__) && W == 16
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__AVX2__) && W == 8
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at));
#else
    return (vi)__builtin_convertvector(*(const vc_u *)at, vs);
#endif
}

/* out[m][16] = M rows . one panel. n: inputs. */
typedef void (*Quantized)(Rounded rows, const char *w, const float *scale, int64_t n, float *out, int64_t ldo);

#define KERNEL8(M, SPLIT)                                                                                          \
    static void panel8_##M(Rounded rows, const char *restrict w, const float *restrict scale, int64_t n,           \
                           float *restrict out, int64_t ldo) {                                                     \
        const uint32_t *x = (const uint32_t *)rows.code;                                                           \
        vi acc[SPLIT][M][PIECES];                                                                                  \
        EACH(s, SPLIT) EACH(m, M) EACH(p, PIECES) acc[s][m][p] = (vi){0};                                          \
        for (int64_t u = 0; u < n / 2; u += 4) {                                                                   \
            __builtin_prefetch(w + u * 32 + AHEAD8);                                                               \
            __builtin_prefetch(w + u * 32 + AHEAD8 + 64);                                                          \
            EACH(i, 4) {                                                                                           \
                vi v[PIECES];                                                                                      \
                EACH(p, PIECES) v[p] = widen8(w + (u + i) * 32 + p * 2 * W);                                       \
                EACH(m, M) {                                                                                       \
                    vu one = everywhere(x[m * (n / 2) + u + i]);                                                   \
                    EACH(p, PIECES) acc[i % SPLIT][m][p] = dot2(acc[i % SPLIT][m][p], v[p], one);                  \
                }                                                                                                  \
            }                                                                                                      \
        }                                                                                                          \
        EACH(m, M) EACH(p, PIECES) {                                                                               \
            vi sum = acc[0][m][p];                                                                                 \
            _Pragma("GCC unroll 8") for (int s = 1; s < SPLIT; s++) sum += acc[s][m][p];                           \
            vf done = __builtin_convertvector(sum, vf) * *(const vf_u *)(scale + p * W);                           \
            *(vf_u *)(out + m * ldo + p * W) = done * rows.scale[m];                                               \
        }                                                                                                          \
    }
#define KERNEL4(M)                                                                                                 \
    static void panel4_##M(Rounded rows, const char *restrict w, const float *restrict scale, int64_t n,           \
                           float *restrict out, int64_t ldo) {                                                     \
        int64_t groups = n / GROUP;                                                                                \
        (void)scale;                                                                                               \
        vf total[M][PIECES];                                                                                       \
        EACH(m, M) EACH(p, PIECES) total[m][p] = (vf){0};                                                          \
        for (int64_t g = 0; g < groups; g++, w += 320) {                                                           \
            vi acc[M][PIECES];                                                                                     \
            EACH(m, M) EACH(p, PIECES) acc[m][p] = (vi){0};                                                        \
            EACH(j, 4) {                                                                                           \
                __builtin_prefetch(w + j * 64 + AHEAD4);                                                           \
                EACH(p, PIECES) {                                                                                  \
                    vu both = *(const vu_u *)(w + j * 64 + p * 4 * W);                                             \
                    vu low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;                                     \
                    EACH(m, M) {                                                                                   \
                        const uint32_t *x = (const uint32_t *)(rows.code + m * n + g * GROUP + j * 8);             \
                        acc[m][p] = dot4(dot4(acc[m][p], low, everywhere(x[0])), high, everywhere(x[1]));          \
                    }                                                                                              \
                }                                                                                                  \
            }                                                                                                      \
            __builtin_prefetch(w + 256 + AHEAD4);                                                                  \
            EACH(p, PIECES) {                                                                                      \
                vu two = *(const vu_u *)(w + 256 + p * 4 * W);                                                     \
                vf step = (vf)(two << 16), least = (vf)(two & 0xffff0000u) - 8 * step;                             \
                EACH(m, M) {                                                                                       \
                    total[m][p] += (step * rows.scale[m * groups + g]) * __builtin_convertvector(acc[m][p], vf);   \
                    total[m][p] += least * rows.sum[m * groups + g];                                               \
                }                                                                                                  \
            }                                                                                                      \
        }                                                                                                          \
        EACH(m, M) EACH(p, PIECES) *(vf_u *)(out + m * ldo + p * W) = total[m][p];                                 \
    }
/* As many rows at once as have their sums in registers. */
#if REGISTERS == 32 && PIECES == 1
#define TALLEST8 16
#define TALLEST4 16
KERNEL8(1, 4) KERNEL8(2, 4) KERNEL8(3, 2) KERNEL8(4, 2) KERNEL8(5, 2) KERNEL8(6, 2) KERNEL8(7, 1) KERNEL8(8, 1)
KERNEL8(9, 1) KERNEL8(10, 1) KERNEL8(11, 1) KERNEL8(12, 1) KERNEL8(13, 1) KERNEL8(14, 1) KERNEL8(15, 1) KERNEL8(16, 1)
KERNEL4(1) KERNEL4(2) KERNEL4(3) KERNEL4(4) KERNEL4(5) KERNEL4(6) KERNEL4(7) KERNEL4(8)
KERNEL4(9) KERNEL4(10) KERNEL4(11) KERNEL4(12) KERNEL4(13) KERNEL4(14) KERNEL4(15) KERNEL4(16)
#define UP_TO_16(N) {N##_1, N##_2, N##_3, N##_4, N##_5, N##_6, N##_7, N##_8, N##_9, N##_10, N##_11, N##_12, N##_13, \
                     N##_14, N##_15, N##_16}
static const Quantized panels8[TALLEST8] = UP_TO_16(panel8), panels4[TALLEST4] = UP_TO_16(panel4);
#else
#define TALLEST8 6
#define TALLEST4 4
KERNEL8(1, 4) KERNEL8(2, 2) KERNEL8(3, 2) KERNEL8(4, 1) KERNEL8(5, 1) KERNEL8(6, 1)
KERNEL4(1) KERNEL4(2) KERNEL4(3) KERNEL4(4)
static const Quantized panels8[TALLEST8] = {panel8_1, panel8_2, panel8_3, panel8_4, panel8_5, panel8_6};
static const Quantized panels4[TALLEST4] = {panel4_1, panel4_2, panel4_3, panel4_4};
#endif

static int64_t tiles_of_whole(const Linear *lin, int64_t rows) {
    int64_t most = lin->bits == 8 ? TALLEST8 : TALLEST4;
    return (rows + most - 1) / most;
}

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
