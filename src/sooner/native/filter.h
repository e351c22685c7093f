/* A Kalman filter that learns from one measurement at a time. Knows no Python and not what it estimates.
 * control/filter.py says what it does, and is its oracle.
 */

typedef struct {
    int64_t size, line;         /* estimates; those from the second on that are never negative */
    int64_t streak, enough;     /* surprises of one kind in a row, and how many of them are a change */
    double *mean, *cov, *drift; /* [size], [size, size], [size] */
    double *along;              /* [size], scratch */
    const double *jump;         /* [1 + line]: what the first may change by, and each of the line as a share of it */
    double surprise, clip;      /* deviations: of a surprise, beyond which it counts no more */
    double far;                 /* how far the first, the log of a pace, may be from 0 before it goes into the line */
} Filter;

static double seen_along(const Filter *f, const int64_t *at, const double *weight, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < f->size; i++) {
        const double *row = f->cov + i * f->size; /* symmetric */
        double sum = 0;
        for (int64_t k = 0; k < count; k++) sum += row[at[k]] * weight[k];
        f->along[i] = sum;
    }
    for (int64_t k = 0; k < count; k++) total += f->along[at[k]] * weight[k];
    return total;
}
static int changed(Filter *f, double off, double deviation) {
    int64_t way = fabs(off) <= f->surprise * deviation ? 0 : off > 0 ? 1 : -1;
    f->streak = way * f->streak > 0 ? f->streak + way : way;
    if (llabs(f->streak) < f->enough) return 0;
    f->streak = 0;
    return 1;
}
/* What one estimate below 0 gives up the others take over. */
static void not_negative(Filter *f) {
    double *part = f->mean + 1;
    for (int64_t round = 0; round < f->line; round++) {
        int64_t worst = 0;
        for (int64_t i = 1; i < f->line; i++)
            if (part[i] < part[worst]) worst = i;
        if (part[worst] >= 0) return;
        const double *along = f->cov + (1 + worst) * f->size;
        double step = part[worst] / along[1 + worst];
        for (int64_t i = 0; i < f->size; i++) f->mean[i] -= along[i] * step;
        part[worst] = 0;
    }
    for (int64_t i = 0; i < f->line; i++) part[i] = fmax(part[i], 0);
}
/* The pace goes into the line: nothing says how much is which, so they would go apart for ever. */
static void fold(Filter *f) {
    double pace = exp(f->mean[0]);
    f->mean[0] = 0;
    for (int64_t i = 1; i <= f->line; i++) {
        f->mean[i] *= pace;
        for (int64_t j = 0; j < f->size; j++) f->cov[i * f->size + j] *= pace;
        for (int64_t j = 0; j < f->size; j++) f->cov[j * f->size + i] *= pace;
    }
}
/* at, weight: [count]. What was measured is `off` from the sum of weight * mean[at]. */
void filter_learn(Filter *f, const int64_t *at, const double *weight, int64_t count, double off, double noise) {
    int64_t n = f->size;
    for (int64_t i = 0; i < n; i++) f->cov[i * n + i] += f->drift[i];
    double total = seen_along(f, at, weight, count) + noise;
    if (changed(f, off, sqrt(total))) {
        for (int64_t i = 0; i <= f->line; i++) {
            double room = f->jump[i] * (i ? f->mean[i] : 1);
            f->cov[i * n + i] += room * room;
        }
        total = seen_along(f, at, weight, count) + noise;
    }
    double most = f->clip * sqrt(total), gained = fmin(fmax(off, -most), most) / total;
    for (int64_t i = 0; i < n; i++) {
        double own = f->along[i] / total;
        for (int64_t j = 0; j < n; j++) f->cov[i * n + j] -= own * f->along[j];
        f->mean[i] += f->along[i] * gained;
    }
    not_negative(f);
    if (fabs(f->mean[0]) > f->far) fold(f);
}
