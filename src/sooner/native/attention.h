/* Attention of rows over their lane's columns, by position: a tree sums in the order of its path. Knows no layer norm.
 */
/* block[unit][16 columns] <- keys[16 columns][units] */
static void transpose(const uint32_t *restrict keys, int64_t units, int64_t have, uint32_t *restrict block) {
    for (int64_t c = 0; c < L; c += W)
        for (int64_t u = 0; u < units; u += W) turn(keys + c * units + u, units, have - c, block + u * L + c);
}

/* scores[16] of up to 8 queries against one block of transposed keys */
#define SCORE(Q)                                                                                              \
    static void score_##Q(const uint32_t *restrict q, int64_t ldq, const uint32_t *restrict block, int64_t units, \
                          float *restrict out, int64_t ldo) {                                                 \
        vf acc[Q][PIECES];                                                                                    \
        EACH(i, Q) EACH(n, PIECES) acc[i][n] = (vf){0};                                                       \
        for (int64_t u = 0; u < units; u++)                                                                   \
            EACH(part, PARTS) {                                                                               \
                vu k[PIECES];                                                                                 \
                EACH(n, PIECES) k[n] = *(const vu_u *)(block + u * L + n * W);                                \
                EACH(i, Q) {                                                                                  \
                    vu one = unit_of(q[i * ldq + u], part);                                                   \
                    EACH(n, PIECES) acc[i][n] = DOT(acc[i][n], k[n], one, part);                              \
                }                                                                                             \
            }                                                                                                 \
        EACH(i, Q) EACH(n, PIECES) * (vf_u *)(out + i * ldo + n * W) = acc[i][n];                             \
    }
SCORE(1) SCORE(2) SCORE(3) SCORE(4) SCORE(5) SCORE(6) SCORE(7) SCORE(8)
typedef void (*Score)(const uint32_t *, int64_t, const uint32_t *, int64_t, float *, int64_t);
static const Score scorers[8] = {score_1, score_2, score_3, score_4, score_5, score_6, score_7, score_8};
#define SCORED (PIECES == 1 ? 8 : PIECES * 8 <= REGISTERS ? 6 : 3) /* queries at once */

/* What DOT takes of the unit of W dims of the values at one position, or at two that follow one another. */
static inline vu values_of(const elem *one, const elem *next, int part) {
    (void)next, (void)part;
#if PARTS == 2
    return (vu)load(part ? next : one);
#elif BF16
    vu low = __builtin_convertvector(*(const vh_u *)one, vu), high = __builtin_convertvector(*(const vh_u *)next, vu);
    return low | high << 16;
#else
    return *(const vu_u *)one;
#endif
}

/* acc[q][W N] += p[q][unit] . values of the unit's positions, for Q queries. p: [q][units], ldp apart. */
#define MIX(Q, N)                                                                                             \
    static void mix_##Q##_##N(const uint32_t *restrict p, int64_t ldp, const elem *restrict one,              \
                              const elem *restrict next, int64_t ldv, int64_t units, float *restrict acc0) {  \
        vf acc[Q][N];                                                                                         \
        EACH(q, Q) EACH(n, N) acc[q][n] = *(vf_u *)(acc0 + q * MIXED + n * W);                                \
        for (int64_t u = 0; u < units; u++) {                                                                 \
            int64_t at = u * PER_UNIT * ldv;                                                                  \
            EACH(part, PARTS) {                                                                               \
                vu chance[Q];                                                                                 \
                EACH(q, Q) chance[q] = unit_of(p[q * ldp + u], part);                                         \
                EACH(n, N) {                                                                                  \
                    vu x = values_of(one + at + n * W, next + at + n * W, part);                              \
                    EACH(q, Q) acc[q][n] = TIMES(acc[q][n], x, chance[q]);                                    \
                }                                                                                             \
            }                                                                                                 \
        }                                                                                                     \
        EACH(q, Q) EACH(n, N) *(vf_u *)(acc0 + q * MIXED + n * W) = acc[q][n];                                \
    }
/* Queries and dims that are mixed at once: their sums and the values fit into the registers. */
#define TOGETHER (REGISTERS == 32 ? 6 : 3)
#define MIXED (4 * W)
#define MIXES(Q) MIX(Q, 1) MIX(Q, 2) MIX(Q, 3) MIX(Q, 4)
MIXES(1) MIXES(2) MIXES(3)
#define MIXERS(Q) {mix_##Q##_1, mix_##Q##_2, mix_##Q##_3, mix_##Q##_4}
typedef void (*Mix)(const uint32_t *, int64_t, const elem *, const elem *, int64_t, int64_t, float *);
#if REGISTERS == 32
MIXES(4) MIXES(5) MIXES(6)
static const Mix mixers[TOGETHER][4] = {MIXERS(1), MIXERS(2), MIXERS(3), MIXERS(4), MIXERS(5), MIXERS(6)};
#else
static const Mix mixers[TOGETHER][4] = {MIXERS(1), MIXERS(2), MIXERS(3)};
#endif

#define SCORES_BYTES (256 * 1024)
#define TILE_ROWS 8

/* What a row sees: columns 0 to prefix - 1, and after them `path`, the columns of its ancestors and itself. */
typedef struct {
    int64_t prefix;
} Seen;

static void see(const Pass *p, int64_t first, int64_t end, Seen *seen) {
    for (int64_t r = first; r < end; r++) {
        int64_t up = p->parent[r];
        int straight = up < 0 || (seen[up].prefix == p->position[up] + 1 && p->column[r] == p->column[up] + 1);
        seen[r].prefix = straight ? p->position[r] + 1 : seen[up].prefix;
    }
}

static void softmax(const Layer *layer, float *s, int64_t first, int64_t last) {
    int64_t low = first & ~(int64_t)(L - 1), high = (last + L) & ~(int64_t)(L - 1); /* last is inclusive */
    for (int64_t i = low; i < first; i++) s[i] = -INFINITY;
    for (int64_t i = last + 1; i < high; i++) s[i] = -INFINITY;
    vf best = splat(-INFINITY);
    for (int64_t i = low; i < high; i += W) {
        vf v = *(vf_u *)(s + i) * layer->scale;
        if (layer->softcap != 0) {
            vf capped = layer->softcap * vtanh(v / layer->softcap);
            v = pick(v == splat(-INFINITY), v, capped);
        }
        *(vf_u *)(s + i) = v;
        best = vmax(v, best);
    }
    float top = -INFINITY, lanes[W];
    memcpy(lanes, &best, sizeof lanes);
    for (int i = 0; i < W; i++) top = lanes[i] > top ? lanes[i] : top;
    vf sum = splat(0);
    for (int64_t i = low; i < high; i += W) {
        vf e = vexp(*(vf_u *)(s + i) - top);
        *(vf_u *)(s + i) = e;
        sum += e;
    }
    float scale = 1.0f / sum_of(sum);
    for (int64_t i = low; i < high; i += W) store((elem *)s + i, *(vf_u *)(s + i) * scale);
}

/* What a row sees of its lane: positions low to last; up to `prefix` a position is its column, from there on the
 * columns are those of `path`. */
typedef struct {
    int64_t low, last, prefix;
    const int64_t *path;
} View;

static int64_t column(const View *view, int64_t position) {
    if (position > view->last) position = view->last; /* its probability is 0 */
    return position < view->prefix ? position : view->path[position - view->prefix];
}

/* W n dims of the mixed values of up to TOGETHER queries: columns that all see at once, the others one by one. */
static void mix(const uint32_t *p, int64_t ldp, const View *const *views, int64_t queries, const elem *values,
                int64_t ldv, int64_t n, float *acc) {
    int64_t from = 0, to = INT64_MAX;
    for (int64_t q = 0; q < queries; q++) {
        if (views[q]->low / PER_UNIT > from) from = views[q]->low / PER_UNIT;
        if (views[q]->prefix / PER_UNIT < to) to = views[q]->prefix / PER_UNIT;
    }
    if (to < from) to = from;
    memset(acc, 0, queries * MIXED * sizeof *acc);
    Mix one = mixers[0][n - 1];
    for (int64_t half = 0; half < 2; half++) {
        for (int64_t q = 0; q < queries; q++) {
            int64_t u = half ? to : views[q]->low / PER_UNIT, end = half ? views[q]->last / PER_UNIT + 1 : from;
            for (; u < end; u++) {
                const elem *first = values + column(views[q], u * PER_UNIT) * ldv;
                const elem *next = values + column(views[q], u * PER_UNIT + PER_UNIT - 1) * ldv;
                one(p + q * ldp + u, ldp, first, next, ldv, 1, acc + q * MIXED);
            }
        }
        const elem *all = values + from * PER_UNIT * ldv;
        if (!half && from < to)
            mixers[queries - 1][n - 1](p + from, ldp, all, all + (PER_UNIT - 1) * ldv, ldv, to - from, acc);
    }
}

#define AHEAD (4 * L) /* columns that keys are fetched before they are read; the processor stops at each page */

/* L columns from `first` on, as far as there are `columns`, are on their way into the cache from now on. */
static inline void fetch(const elem *at, int64_t first, int64_t columns, int64_t dim) {
    const char *end = (const char *)(at + (first + L < columns ? first + L : columns) * dim);
    for (const char *line = (const char *)(at + first * dim); line < end; line += 64) __builtin_prefetch(line, 0, 2);
}

/* One kv head, rows r0 to r1 of one segment. q: [kv_heads, rows, heads of each, dim]; out: [rows, heads, dim]. */
static void attend(const Model *m, const Pass *p, const Layer *layer, int64_t l, const Seen *seen, int64_t g,
                   int64_t r0, int64_t r1, const elem *q, elem *out, float *scores, int64_t lds, uint32_t *block) {
    int64_t heads = m->heads / m->kv_heads, units = m->dim / PER_UNIT, columns = 0, first = INT64_MAX;
    int64_t per_lane = m->kv_heads * p->capacity * m->dim;
    const elem *keys = p->store + ((l * 2) * p->lanes + p->lane[r0]) * per_lane + g * p->capacity * m->dim;
    const elem *values = keys + p->lanes * per_lane;
    for (int64_t r = r0; r < r1; r++) {
        int64_t low = layer->window && p->position[r] >= layer->window ? p->position[r] - layer->window + 1 : 0;
        if (p->column[r] + 1 > columns) columns = p->column[r] + 1;
        if (low < first) first = low;
    }
    for (int64_t c = first & ~(int64_t)(L - 1); c < columns; c += L) {
        int64_t have = columns - c < L ? columns - c : L;
        fetch(keys, c + AHEAD, columns, m->dim);
        fetch(values, c, columns, m->dim);
        transpose((const uint32_t *)(keys + c * m->dim), units, have, block);
        int64_t queries = (r1 - r0) * heads;
        const uint32_t *mine = (const uint32_t *)(q + (g * p->rows + r0) * heads * m->dim);
        for (int64_t i = 0, n; i < queries; i += n) {
            n = queries - i < SCORED ? queries - i : SCORED;
            scorers[n - 1](mine + i * units, units, block, units, scores + i * lds + c, lds);
        }
    }
    int64_t depth = 0;
    for (int64_t r = r0; r < r1; r++) depth += p->position[r] + 1 - seen[r].prefix;
    int64_t paths[depth + 1], *path = paths;
    View views[r1 - r0];
    for (int64_t r = r0; r < r1; r++) {
        int64_t last = p->position[r], low = layer->window && last >= layer->window ? last - layer->window + 1 : 0;
        int64_t prefix = seen[r].prefix, tail = last + 1 - prefix;
        for (int64_t i = tail - 1, up = r; i >= 0; i--, up = p->parent[up]) path[i] = p->column[up];
        views[r - r0] = (View){low, last, prefix, path};
        float *s = scores + (r - r0) * heads * lds;
        for (int64_t h = 0; h < heads; h++) {
            float *one = s + h * lds;
            for (int64_t i = 0; i < tail; i++) one[prefix + i] = one[path[i]];
            softmax(layer, one, low, last);
        }
        path += tail;
    }
    int64_t queries = (r1 - r0) * heads;
    for (int64_t i = 0, some; i < queries; i += some) {
        some = queries - i < TOGETHER ? queries - i : TOGETHER;
        const View *mine[TOGETHER];
        for (int64_t j = 0; j < some; j++) mine[j] = &views[(i + j) / heads];
        for (int64_t d = 0; d < m->dim; d += MIXED) {
            int64_t n = m->dim - d < MIXED ? (m->dim - d) / W : 4;
            float acc[TOGETHER * MIXED];
            mix((const uint32_t *)scores + i * lds, lds, mine, some, values + d, m->dim, n, acc);
            for (int64_t j = 0; j < some; j++) {
                int64_t r = r0 + (i + j) / heads, h = g * heads + (i + j) % heads;
                narrow(acc + j * MIXED, n * W, out + (r * m->heads + h) * m->dim + d);
            }
        }
    }
}
