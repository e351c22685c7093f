/* Weights as their owner holds them, [outputs, k] row by row, laid out panel by panel while they are multiplied.
 *
 * A kernel reads the same panels as of packed weights, so a sum has the same order and the same bits; the price is
 * the turning (64 shuffles for 16 x 16 units), the gain that there is no second copy.
 */
#define LAID_MOST (1 << 18) /* bytes of panels at once; they should stay in the second cache */

static int64_t laid_panels(int64_t units) { return units * L * 4 * 4 <= LAID_MOST ? 4 : 2; }

/* One panel: `height` rows of `units` units, zeros below them. ahead: as far on is what will be read soon. */
static void lay_out(const uint32_t *rows, int height, int64_t units, uint32_t *to, int64_t ahead) {
    int64_t u = 0;
    for (; height == L && u + L <= units; u += L) {
        _Pragma("GCC unroll 16") for (int i = 0; i < L; i++) __builtin_prefetch(rows + i * units + u + ahead, 0, 2);
        for (int64_t i = 0; i < L; i += W)
            for (int64_t v = 0; v < L; v += W) turn(rows + i * units + u + v, units, W, to + (u + v) * L + i);
    }
    for (; u < units; u++)
        for (int i = 0; i < L; i++) to[u * L + i] = i < height ? rows[i * units + u] : 0;
}
