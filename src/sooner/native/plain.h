/* Weights as their owner holds them, [outputs, k] row by row, laid out panel by panel while they are multiplied.
 *
 * A kernel reads the same panels as of packed weights, so a sum has the same order and the same bits; the price is
 * the turning (64 shuffles for 16 x 16 units), the gain that there is no second copy.
 */
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LAID_MOST (1 << 18) /* bytes of panels at once; they should stay in the second cache */

static int64_t laid_panels(int64_t units) { return units * L * 4 * 4 <= LAID_MOST ? 4 : 2; }
static int64_t laid_bytes(int64_t units) { return padded(laid_panels(units) * units * L * 4); }

/* to[u][i] = from[i][u], 16 x 16 */
static inline void turn(const uint32_t *from, int64_t ld, uint32_t *to) {
#ifdef __AVX512F__
    __m512i r[L], t[L];
    _Pragma("GCC unroll 16") for (int i = 0; i < L; i++) r[i] = _mm512_loadu_si512(from + i * ld);
    _Pragma("GCC unroll 8") for (int i = 0; i < L; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < L; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    } /* a quarter k of r[4i + j]: column 4k + j of rows 4i to 4i + 3 */
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    }
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
        _mm512_storeu_si512(to + j * L, _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88));
        _mm512_storeu_si512(to + (4 + j) * L, _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88));
        _mm512_storeu_si512(to + (8 + j) * L, _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd));
        _mm512_storeu_si512(to + (12 + j) * L, _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd));
    }
#else
    for (int u = 0; u < L; u++)
        for (int i = 0; i < L; i++) to[u * L + i] = from[i * ld + u];
#endif
}

/* One panel: `height` rows of `units` units, zeros below them. ahead: as far on is what will be read soon. */
static void lay_out(const uint32_t *rows, int height, int64_t units, uint32_t *to, int64_t ahead) {
    int64_t u = 0;
    for (; height == L && u + L <= units; u += L) {
        _Pragma("GCC unroll 16") for (int i = 0; i < L; i++) __builtin_prefetch(rows + i * units + u + ahead, 0, 2);
        turn(rows + u, units, to + u * L);
    }
    for (; u < units; u++)
        for (int i = 0; i < L; i++) to[u * L + i] = i < height ? rows[i * units + u] : 0;
}
