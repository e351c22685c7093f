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

/* Where a thread prepares rows, by itself or together with the others, and where it lays out plain weights. */
typedef struct {
    char *own, *shared;
    uint32_t *panels;
} Room;
#define ALONE 8 /* up to so many rows every thread prepares all rows for itself: cheaper than waiting for the others */

#include "quantized.h"
#include "plain.h"

/* Bytes of rows of n numbers as the kernels read them, beside what they were; 0 where they are read as they are. */
static int64_t prepared_bytes(const Linear *lin, int64_t rows, int64_t n) {
    return lin->bits ? rounded_bytes(rows, n) : PARTS > 1 ? padded(rows * n * 4) : 0;
}

/* The rows as kernels read them. Where a product takes PARTS steps each number is widened, once and not in each panel. */
static const uint32_t *widened(const Linear *lin, const elem *x, int64_t rows, const Room *room) {
    if (PARTS == 1) return (const uint32_t *)x;
    int64_t n = lin->units * PER_UNIT, from = 0, to = rows;
    float *wide = (float *)(rows > ALONE ? room->shared : room->own);
    if (rows > ALONE) share(rows, &from, &to);
    for (int64_t i = from * n; i < to * n; i += W) *(vf_u *)(wide + i) = load(x + i);
    if (rows > ALONE) {
#pragma omp barrier
    }
    return (const uint32_t *)wide;
}

/* Where the rows of a panel begin, and how many there are. */
static const uint32_t *panel_rows(const Linear *lin, int64_t p, int gated, int *height) {
    int64_t first = p * L, part = 0, before = 0;
    *height = L;
    if (gated) return lin->part[p % 2] + p / 2 * L * lin->units;
    while (first >= lin->until[part]) before = lin->until[part++];
    if (lin->until[part] - first < L) *height = (int)(lin->until[part] - first);
    return lin->part[part] + (first - before) * lin->units;
}

/* next: what is fetched meanwhile, `pace` bytes with each unit of each panel. */
typedef void (*Kernel)(const uint32_t *x, int64_t ldx, const uint32_t *w, int64_t units, float *out, int64_t ldo,
                       const char *next, int64_t pace);
#define FETCH_FROM (PIECES == 1 ? 5 : 2) /* rows from which the next panels are fetched while these are multiplied */
#define KERNEL(M, P)                                                                                          \
    static void kernel_##M##_##P(const uint32_t *restrict x, int64_t ldx, const uint32_t *restrict w,         \
                                 int64_t units, float *restrict out, int64_t ldo, const char *next,             \
                                 int64_t pace) {                                                              \
        vf acc[M][(P) * PIECES];                                                                              \
        EACH(m, M) EACH(p, (P) * PIECES) acc[m][p] = (vf){0};                                                 \
        for (int64_t u = 0; u < units; u++) {                                                                 \
            if (M >= FETCH_FROM) EACH(p, P) __builtin_prefetch(next + p * units * L * 4 + u * pace, 0, 2);    \
            EACH(part, PARTS) {                                                                               \
                vu v[(P) * PIECES];                                                                           \
                EACH(p, (P) * PIECES)                                                                         \
                    v[p] = *(const vu_u *)(w + (p / PIECES * units + u) * L + p % PIECES * W);                \
                EACH(m, M) {                                                                                  \
                    vu one = everywhere(x[m * ldx + PARTS * u + part]);                                       \
                    EACH(p, (P) * PIECES) acc[m][p] = DOT(acc[m][p], v[p], one, part);                        \
                }                                                                                             \
            }                                                                                                 \
        }                                                                                                     \
        EACH(m, M) EACH(p, (P) * PIECES) * (vf_u *)(out + m * ldo + p * W) = acc[m][p];                       \
    }
/* Sums of M rows in P panels must fit into the registers beside what they are made of. */
#define UP_TO_2(M) KERNEL(M, 1) KERNEL(M, 2)
#define UP_TO_3(M) UP_TO_2(M) KERNEL(M, 3)
#define UP_TO_4(M) UP_TO_3(M) KERNEL(M, 4)
#define OF_1(M) {kernel_##M##_1}
#define OF_2(M) {kernel_##M##_1, kernel_##M##_2}
#define OF_3(M) {kernel_##M##_1, kernel_##M##_2, kernel_##M##_3}
#define OF_4(M) {kernel_##M##_1, kernel_##M##_2, kernel_##M##_3, kernel_##M##_4}
#if PIECES == 1
UP_TO_4(1) UP_TO_4(2) UP_TO_4(3) UP_TO_4(4) UP_TO_4(5) UP_TO_4(6)
UP_TO_3(7) UP_TO_3(8) UP_TO_3(9)
UP_TO_2(10) UP_TO_2(11) UP_TO_2(12) UP_TO_2(13) UP_TO_2(14)
#define TALLEST 14
static const Kernel kernels[TALLEST][4] = {OF_4(1), OF_4(2), OF_4(3),  OF_4(4),  OF_4(5),  OF_4(6),  OF_3(7),
                                           OF_3(8), OF_3(9), OF_2(10), OF_2(11), OF_2(12), OF_2(13), OF_2(14)};
static const int widest[TALLEST] = {4, 4, 4, 4, 4, 4, 3, 3, 3, 2, 2, 2, 2, 2}; /* panels at once */
#elif PIECES * 8 <= REGISTERS /* two registers of 16 or four of 32 a panel */
UP_TO_4(1) UP_TO_3(2) UP_TO_2(3) KERNEL(4, 1) KERNEL(5, 1) KERNEL(6, 1)
#define TALLEST 6
static const Kernel kernels[TALLEST][4] = {OF_4(1), OF_3(2), OF_2(3), OF_1(4), OF_1(5), OF_1(6)};
static const int widest[TALLEST] = {4, 3, 2, 1, 1, 1};
#else
UP_TO_2(1) KERNEL(2, 1) KERNEL(3, 1)
#define TALLEST 3
static const Kernel kernels[TALLEST][4] = {OF_2(1), OF_1(2), OF_1(3)};
static const int widest[TALLEST] = {2, 1, 1};
#endif

/* How many tiles rows go into: eights where they fit, which AVX-512 multiplies fastest; else as few and even as can be,
 * since a low tile costs nearly what a high one does. */
static int64_t tiles_of(int64_t rows) {
    return rows % 8 || TALLEST < 8 ? (rows + TALLEST - 1) / TALLEST : rows / 8;
}

/* out[m, n] = x[m] . w[n] + bias[n]. With `gated`, panels are gate and up in turn and out2 gets act(gate) * up. */
static void product(const Linear *lin, const elem *x, int64_t rows, float *out, elem *gated, int64_t gelu,
                    const Room *room) {
    Rounded rounded = lin->bits ? whole(lin, x, rows, room) : (Rounded){0};
    const uint32_t *units = lin->bits ? NULL : widened(lin, x, rows, room);
    int64_t ldx = PARTS * lin->units;
    int64_t panels = (lin->out + L - 1) / L, from, to;
    if (gated) {
        share(panels / 2, &from, &to);
        from *= 2, to *= 2;
    } else
        share(panels, &from, &to);
    int64_t tiles = lin->bits ? tiles_of_whole(lin, rows) : tiles_of(rows), tall = (rows + tiles - 1) / tiles;
    float tile[32 * L]; /* 14 rows of 2 panels, 9 of 3, 16 of 2 of whole numbers */
    for (int64_t p = from, step; p < to; p += step) {
        int most = lin->bits || widest[tall - 1] < 2 ? 2 : widest[tall - 1];
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
        int64_t pace = (4 * L + tiles - 1) / tiles; /* of what is fetched meanwhile each tile fetches a part */
        for (int64_t t = 0; t < tiles; t++) {
            int64_t m = rows * t / tiles;
            int height = (int)(rows * (t + 1) / tiles - m);
            int aside = gated || ragged;
            float *to_ = aside ? tile : out + m * lin->out + p * L;
            int64_t ld = aside ? step * L : lin->out;
            if (lin->bits)
                multiply_whole(lin, &rounded, m, height, p, step, to_, ld);
            else
                for (int64_t q = 0, wide; q < step; q += wide) {
                    wide = step - q < widest[height - 1] ? step - q : widest[height - 1];
                    const uint32_t *here = w + q * lin->units * L;
                    const char *next = (const char *)(here + (lin->part[0] ? 0 : step) * lin->units * L);
                    kernels[height - 1][wide - 1](units + m * ldx, ldx, here, lin->units, to_ + q * L, ld,
                                                  next + t * lin->units * pace, pace);
                }
            if (lin->bias)
                for (int i = 0; i < height; i++)
                    for (int64_t n = 0; n < step * L && p * L + n < lin->out; n++)
                        to_[i * ld + n] += lin->bias[p * L + n];
            if (gated)
                for (int i = 0; i < height; i++)
                    for (int64_t q = 0; q < step; q += 2) {
                        elem *both = gated + (m + i) * (lin->out / 2) + (p + q) / 2 * L;
                        for (int64_t n = 0; n < L; n += W) {
                            vf gate = *(vf_u *)(tile + i * ld + q * L + n);
                            vf up = *(vf_u *)(tile + i * ld + (q + 1) * L + n);
                            store(both + n, activate(gate, gelu) * up);
                        }
                    }
            else if (ragged)
                for (int i = 0; i < height; i++)
                    for (int64_t n = 0; n < step * L && p * L + n < lin->out; n++)
                        out[(m + i) * lin->out + p * L + n] = tile[i * ld + n];
        }
    }
}
