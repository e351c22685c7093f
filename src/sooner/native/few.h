/* The few likeliest ids of a row of logits. Knows no law and no draft. */

/* The `count` likeliest ids of one row, best first, the lower id among equals; all NaN if any logit is. */
static void few_best(const float *x, int64_t n, int64_t count, int64_t *ids, float *values) {
    int64_t held = 0, i = 0;
    int odd = 0;
    float least = -INFINITY;
#define OFFER(at)                                                                      \
    do {                                                                               \
        float value = x[at];                                                           \
        odd |= value != value;                                                         \
        if (held < count || value > least) {                                           \
            int64_t j = held < count ? held++ : count - 1;                             \
            for (; j && values[j - 1] < value; j--) values[j] = values[j - 1], ids[j] = ids[j - 1]; \
            values[j] = value, ids[j] = (at);                                          \
            if (held == count) least = values[count - 1];                              \
        }                                                                              \
    } while (0)
    for (; i < n && held < count; i++) OFFER(i);
    for (; i + W <= n; i += W)
        for (uint32_t some = bits_of(~(*(const vf_u *)(x + i) <= splat(least))); some; some &= some - 1)
            OFFER(i + __builtin_ctz(some));
    for (; i < n; i++) OFFER(i);
    for (int64_t j = 0; odd && j < count; j++) ids[j] = j, values[j] = NAN;
#undef OFFER
}
