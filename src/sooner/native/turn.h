/* Turns squares of units, as wide and high as a register: to[u][i] = from[i][u]. Knows not what they are.
 */
#define STAGE(a, b, gap, ...)                                                             \
    EACH(i, W)                                                                            \
        if (!(i & gap)) {                                                                 \
            b[i] = __builtin_shufflevector(a[i], a[i + gap], __VA_ARGS__##_LOW);          \
            b[i + gap] = __builtin_shufflevector(a[i], a[i + gap], __VA_ARGS__##_HIGH);   \
        }
#if W == 16
#define S1_LOW 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define S1_HIGH 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define S2_LOW 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define S2_HIGH 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define S4_LOW 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define S4_HIGH 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define S8_LOW 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define S8_HIGH 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#elif W == 8
#define S1_LOW 0, 8, 2, 10, 4, 12, 6, 14
#define S1_HIGH 1, 9, 3, 11, 5, 13, 7, 15
#define S2_LOW 0, 1, 8, 9, 4, 5, 12, 13
#define S2_HIGH 2, 3, 10, 11, 6, 7, 14, 15
#define S4_LOW 0, 1, 2, 3, 8, 9, 10, 11
#define S4_HIGH 4, 5, 6, 7, 12, 13, 14, 15
#else
#define S1_LOW 0, 4, 2, 6
#define S1_HIGH 1, 5, 3, 7
#define S2_LOW 0, 1, 4, 5
#define S2_HIGH 2, 3, 6, 7
#endif

/* from: rows `ld` apart, of which there are `have`, more than W or none at all too; where there are none, 0. to: rows L apart. */
static inline void turn(const uint32_t *restrict from, int64_t ld, int64_t have, uint32_t *restrict to) {
    vu r[W], t[W];
    EACH(i, W) r[i] = i < have ? *(const vu_u *)(from + i * ld) : (vu){0};
    STAGE(r, t, 1, S1)
    STAGE(t, r, 2, S2)
#if W >= 8
    STAGE(r, t, 4, S4)
#endif
#if W == 16
    STAGE(t, r, 8, S8)
#endif
#if W == 8
    EACH(i, W) *(vu_u *)(to + i * L) = t[i];
#else
    EACH(i, W) *(vu_u *)(to + i * L) = r[i];
#endif
}
