/* Products with weights: out[m] = x[m] . w + bias, few rows, many outputs. Knows no model.
 *
 * Each sum runs over k in ascending order in one accumulator, however many rows and panels are in hand at once.
 */
typedef struct {
    const uint32_t *w;  /* panels; NULL: the parts */
    const float *bias;  /* or NULL */
    const float *scale; /* int8: of each output */
    int64_t units, out; /* units: 32 bits each, of a row of elems */
    int32_t bits;       /* 0: weights are elems; 8, 4: see quantized.h */
    float top;          /* int8: the largest whole number a row may be rounded to */
    const uint32_t *part[3]; /* weights as they are, see plain.h: up to three maps one below the other, the first */
    int64_t until[3];        /* ones of whole panels; until: outputs up to the end of each. Gated: gate and up */
} Linear;

#include "quantized.h"
#include "plain.h"

/* Where the rows of a panel begin, and how many there are. */
static const uint32_t *panel_rows(const Linear *lin, int64_t p, int gated, int *height) {
    int64_t first = p * L, part = 0, before = 0;
    *height = L;
    if (gated) return lin->part[p % 2] + p / 2 * L * lin->units;
    while (first >= lin->until[part]) before = lin->until[part++];
    if (lin->until[part] - first < L) *height = (int)(lin->until[part] - first);
    return lin->part[part] + (first - before) * lin->units;
}

typedef void (*Kernel)(const uint32_t *x, int64_t ldx, const uint32_t *w, int64_t units, float *out, int64_t ldo,
                       const uint32_t *next);
#define FETCH_FROM 5 /* rows from which the next panels are fetched while these are multiplied */
#define KERNEL(M, P)                                                                                          \
    static void kernel_##M##_##P(const uint32_t *restrict x, int64_t ldx, const uint32_t *restrict w,         \
                                 int64_t units, float *restrict out, int64_t ldo, const uint32_t *next) {       \
        vf acc[M][P];                                                                                         \
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)                                                  \
            _Pragma("GCC unroll 16") for (int p = 0; p < P; p++) acc[m][p] = splat(0);                        \
        for (int64_t u = 0; u < units; u++) {                                                                 \
            vu v[P];                                                                                          \
            _Pragma("GCC unroll 16") for (int p = 0; p < P; p++) {                                            \
                v[p] = *(const vu_u *)(w + (p * units + u) * L);                                              \
                if (M >= FETCH_FROM) __builtin_prefetch(next + (p * units + u) * L, 0, 2);                    \
            }                                                                                                 \
            _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) {                                            \
                uint32_t one = x[m * ldx + u];                                                                \
                _Pragma("GCC unroll 16") for (int p = 0; p < P; p++) acc[m][p] = DOT(acc[m][p], v[p], one);   \
            }                                                                                                 \
        }                                                                                                     \
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)                                                  \
            _Pragma("GCC unroll 16") for (int p = 0; p < P; p++) * (vf_u *)(out + m * ldo + p * L) = acc[m][p];\
    }
/* Sums of M rows in P panels must fit into 32 registers beside what they are made of. */
#define UP_TO_2(M) KERNEL(M, 1) KERNEL(M, 2)
#define UP_TO_3(M) UP_TO_2(M) KERNEL(M, 3)
#define UP_TO_4(M) UP_TO_3(M) KERNEL(M, 4)
UP_TO_4(1) UP_TO_4(2) UP_TO_4(3) UP_TO_4(4) UP_TO_4(5) UP_TO_4(6)
UP_TO_3(7) UP_TO_3(8) UP_TO_3(9)
UP_TO_2(10) UP_TO_2(11) UP_TO_2(12) UP_TO_2(13) UP_TO_2(14)
#define OF_2(M) {kernel_##M##_1, kernel_##M##_2}
#define OF_3(M) {kernel_##M##_1, kernel_##M##_2, kernel_##M##_3}
#define OF_4(M) {kernel_##M##_1, kernel_##M##_2, kernel_##M##_3, kernel_##M##_4}
#define TALLEST 14
static const Kernel kernels[TALLEST][4] = {OF_4(1), OF_4(2), OF_4(3),  OF_4(4),  OF_4(5),  OF_4(6),  OF_3(7),
                                           OF_3(8), OF_3(9), OF_2(10), OF_2(11), OF_2(12), OF_2(13), OF_2(14)};
static const int widest[TALLEST] = {4, 4, 4, 4, 4, 4, 3, 3, 3, 2, 2, 2, 2, 2}; /* panels at once */

/* Rows of one tile: eights where they fit, which multiply fastest; else as few and even as can be, since a low last
 * tile costs nearly what a high one does, and panels that go from memory to one tile are fetched while it works. */
static int tile_of(int64_t rows) {
    int64_t tiles = (rows + TALLEST - 1) / TALLEST;
    return rows % 8 ? (int)((rows + tiles - 1) / tiles) : 8;
}

/* out[m, n] = x[m] . w[n] + bias[n]. With `gated`, panels are gate and up in turn and out2 gets act(gate) * up. */
static void product(const Linear *lin, const elem *x, int64_t rows, float *out, elem *gated, int64_t gelu,
                    const Room *room) {
    Rounded rounded = lin->bits ? whole(lin, x, rows, room) : (Rounded){0};
    const uint32_t *units = (const uint32_t *)x;
    int64_t panels = (lin->out + L - 1) / L, from, to;
    if (gated) {
        share(panels / 2, &from, &to);
        from *= 2, to *= 2;
    } else
        share(panels, &from, &to);
    int tall = lin->bits ? 16 : tile_of(rows);
    float tile[32 * L]; /* 14 rows of 2 panels, 9 of 3, 16 of 2 of whole numbers */
    for (int64_t p = from, step; p < to; p += step) {
        int most = lin->bits ? 2 : 4;
        for (int64_t m = 0; m < rows && !lin->bits; m += tall) {
            int height = rows - m < tall ? (int)(rows - m) : tall;
            if (widest[height - 1] < most) most = widest[height - 1];
        }
        if (gated) most &= ~1; /* gate and up stay together */
        if (lin->part[0] && laid_panels(lin->units) < most) most = (int)laid_panels(lin->units);
        step = to - p < most ? to - p : most;
        const uint32_t *w = lin->part[0] ? room->panels : lin->w + p * lin->units * L;
        for (int64_t i = 0; lin->part[0] && i < step; i++) {
            int high;
            const uint32_t *lines = panel_rows(lin, p + i, gated != NULL, &high);
            lay_out(lines, high, lin->units, room->panels + i * lin->units * L,
                    (gated ? step / 2 : step) * L * lin->units);
        }
        int ragged = (p + step) * L > lin->out;
        for (int64_t m = 0; m < rows; m += tall) {
            int height = rows - m < tall ? (int)(rows - m) : tall;
            int aside = gated || ragged;
            float *to_ = aside ? tile : out + m * lin->out + p * L;
            int64_t ld = aside ? step * L : lin->out;
            if (lin->bits)
                multiply_whole(lin, &rounded, m, height, p, step, to_, ld);
            else
                kernels[height - 1][step - 1](units + m * lin->units, lin->units, w, lin->units, to_, ld,
                                               m + tall < rows || lin->part[0] ? w : w + step * lin->units * L);
            if (lin->bias)
                for (int i = 0; i < height; i++)
                    for (int64_t n = 0; n < step * L && p * L + n < lin->out; n++)
                        to_[i * ld + n] += lin->bias[p * L + n];
            if (gated)
                for (int i = 0; i < height; i++)
                    for (int64_t q = 0; q < step; q += 2) {
                        vf gate = *(vf_u *)(tile + i * ld + q * L), up = *(vf_u *)(tile + i * ld + (q + 1) * L);
                        store(gated + (m + i) * (lin->out / 2) + (p + q) / 2 * L, activate(gate, gelu) * up);
                    }
            else if (ragged)
                for (int i = 0; i < height; i++)
                    for (int64_t n = 0; n < step * L && p * L + n < lin->out; n++)
                        out[(m + i) * lin->out + p * L + n] = tile[i * ld + n];
        }
    }
}
