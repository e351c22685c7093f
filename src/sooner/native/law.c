/* Laws of rows of logits, and draws from them. Knows no model, no draft, no request.
 *
 * A row's arithmetic does not depend on what other rows there are, nor on the number of threads. The order of
 * candidates is: higher logit first, among equals the higher id; see core/law.py for what the filters mean.
 */
#define BF16 0
#include "vector.h"
#include "few.h"

typedef struct {
    float value;
    int32_t id;
} Candidate;

typedef struct {
    double temperature, top_p, min_p;
    int64_t top_k; /* 0 = no limit */
    int64_t wanted; /* 0: the likeliest id alone; 1: candidates as well; 2: sums as well */
} Filter;

typedef struct {
    int64_t rows, vocab, room, threads; /* room: candidates that fit into a row of ids and mass */
    const float *logits;                /* [rows, vocab] */
    const Filter *filter;               /* [rows] */
    int64_t *ids;          /* [rows, room] */
    float *mass;           /* [rows, room] */
    int64_t *told;         /* [3 rows + 1]: of every row the likeliest id, lowest among equals; whether it is broken;
                              survivors, more than `room` if they did not fit. Then the highest of these counts: rows
                              are filled with 0 up to it */
    double *sums;          /* [rows, 2], where wanted: highest logit, sum of exp((x - highest) / temperature) */
} Laws;

/* Highest logit; NaN if any is. */
static float highest(const float *x, int64_t n) {
    vf top[4], odd = splat(0);
    for (int i = 0; i < 4; i++) top[i] = splat(-INFINITY);
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) {
            vf v = *(const vf_u *)(x + i + j * W);
            top[j] = vmax(v, top[j]);
            odd = (vf)((vi)odd | (v != v));
        }
    float lanes[W], best = -INFINITY;
    int32_t strange[W], any = 0;
    vf all = vmax(vmax(top[0], top[1]), vmax(top[2], top[3]));
    memcpy(lanes, &all, sizeof lanes);
    memcpy(strange, &odd, sizeof strange);
    for (int j = 0; j < W; j++) best = lanes[j] > best ? lanes[j] : best, any |= strange[j];
    for (; i < n; i++) best = x[i] > best ? x[i] : best, any |= x[i] != x[i];
    return any ? NAN : best;
}

static int64_t first_equal(const float *x, int64_t n, float wanted) {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        uint32_t same = bits_of(*(const vf_u *)(x + i) == splat(wanted));
        if (same) return i + __builtin_ctz(same);
    }
    while (i < n && x[i] != wanted) i++;
    return i;
}

/* Sum of exp((x - top) / t) over all ids. */
static double total_mass(const float *x, int64_t n, float top, float scale) {
    vf sum = splat(0), more = splat(0);
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        sum += vexp((*(const vf_u *)(x + i) - top) * scale);
        more += vexp((*(const vf_u *)(x + i + W) - top) * scale);
    }
    double rest = sum_of(sum + more);
    for (; i < n; i++) rest += exp((double)((x[i] - top) * scale));
    return rest;
}

/* Ids with a logit of at least `least`, in order of ids. */
static int64_t collect(const float *x, int64_t n, float least, Candidate *found) {
    int64_t count = 0, i = 0;
    for (; i + W <= n; i += W)
        for (uint32_t some = bits_of(*(const vf_u *)(x + i) >= splat(least)); some; some &= some - 1) {
            int64_t at = i + __builtin_ctz(some);
            found[count++] = (Candidate){x[at], (int32_t)at};
        }
    for (; i < n; i++)
        if (x[i] >= least) found[count++] = (Candidate){x[i], (int32_t)i};
    return count;
}

static int likelier(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->value != y->value) return x->value > y->value ? -1 : 1;
    return x->id > y->id ? -1 : 1;
}

static const double depths[] = {4, 6, 8, 10, 13, 17, 25, 40, INFINITY}; /* how far below the best candidates are looked for */

/* exp((value - top) / t) of candidates, as total_mass counts them; returns their sum. */
static double weigh(const Candidate *found, int64_t n, float top, float scale, double *weight) {
    double sum = 0;
    for (int64_t i = 0; i < n; i += W) {
        float some[W];
        for (int64_t j = 0; j < W; j++) some[j] = i + j < n ? found[i + j].value : top;
        vf e = vexp((*(const vf_u *)some - top) * scale);
        memcpy(some, &e, sizeof some);
        for (int64_t j = 0; j < W && i + j < n; j++) sum += weight[i + j] = some[j];
    }
    return sum;
}

#define BUCKETS 192
/* Candidates best first. They are dealt by how far they lie below the best, a quarter of the temperature a bucket,
 * and those after the bucket in which `enough` of them, or `mass` of their weights, are reached are dropped; then
 * buckets are sorted one by one. Returns how many are left. `weight` follows in order. */
static int64_t order(Candidate *found, int64_t n, float top, double t, int64_t enough, double mass, double *weight,
                     Candidate *dealt) {
    int64_t start[BUCKETS + 1] = {0}, left = 0;
    double held[BUCKETS] = {0}, sum = 0;
    float scale = (float)(4 / t);
    uint8_t *bucket = (uint8_t *)(dealt + n);
    for (int64_t i = 0; i < n; i++) {
        float depth = (top - found[i].value) * scale;
        int b = bucket[i] = depth < BUCKETS - 1 ? (int)depth : BUCKETS - 1;
        start[b + 1]++;
        held[b] += weight[i];
    }
    int last = 0;
    for (; last < BUCKETS; last++) {
        left += start[last + 1];
        sum += held[last];
        start[last + 1] += start[last];
        if (left >= enough || sum >= mass) break;
    }
    int64_t at[BUCKETS];
    memcpy(at, start, sizeof at);
    for (int64_t i = 0; i < n; i++)
        if (bucket[i] <= last) dealt[at[bucket[i]]++] = found[i];
    for (int b = 0; b <= last && b < BUCKETS; b++) {
        Candidate *x = dealt + start[b];
        int64_t here = start[b + 1] - start[b];
        if (here > 48) qsort(x, here, sizeof *x, likelier);
        else
            for (int64_t i = 1; i < here; i++) {
                Candidate one = x[i];
                int64_t j = i;
                for (; j && likelier(&one, &x[j - 1]) < 0; j--) x[j] = x[j - 1];
                x[j] = one;
            }
    }
    memcpy(found, dealt, left * sizeof *found);
    return left;
}

/* The survivors of one row's filters: a beginning of the sorted candidates. Returns how many. */
static int64_t survivors(const Laws *p, int64_t r, const float *x, float top, Candidate *found, double *weight,
                         Candidate *dealt) {
    Filter f = p->filter[r];
    double t = fmin(fmax(f.temperature, 1e-30), 1e30), top_p = f.top_p, min_p = f.min_p;
    float scale = (float)(1.0 / t);
    int64_t k = f.top_k < p->vocab ? f.top_k : 0, n = 0, kept = 0;
    double total = k || top_p >= 1 ? 0 : total_mass(x, p->vocab, top, scale), inside = 0;
    double wanted = !k && top_p < 1 ? top_p * total * (1 + 1e-6) : INFINITY;
    for (int d = 0;; d++) {
        double least = top - depths[d] * t;
        n = collect(x, p->vocab, least > -3e38 ? (float)least : -INFINITY, found);
        inside = weigh(found, n, top, scale, weight);
        if (n == p->vocab || depths[d] == INFINITY) break;
        if (k ? n >= k : min_p > 0 && depths[d] > -log(min_p) + 1e-3) break;
        if (inside >= wanted) break;
    }
    n = order(found, n, top, t, k ? k : p->vocab + 1, wanted, weight, dealt);
    int64_t equals = 0;
    while (equals < n && found[equals].value == top) equals++;
    p->told[r] = found[equals - 1].id;
    if (k && k < n) {
        int64_t last = k;
        while (last < n && found[last].value == found[k - 1].value) last++;
        n = last;
    }
    inside = weigh(found, n, top, scale, weight);
    double all = k || top_p >= 1 ? inside : fmax(total, inside), before = 0, sum = 0;
    for (; kept < n; kept++) {
        if (weight[kept] < min_p * weight[0] || found[kept].value == -INFINITY) break;
        if (kept && top_p < 1 && !(before < top_p * all)) break;
        before += weight[kept];
        sum += weight[kept];
    }
    for (int64_t i = 0; i < kept; i++) weight[i] /= sum;
    return kept;
}

static void one_row(const Laws *p, int64_t r, Candidate *found, double *weight, Candidate *dealt) {
    const float *x = p->logits + r * p->vocab;
    float top = highest(x, p->vocab);
    int64_t *best = p->told + r, *broken = best + p->rows, *count = broken + p->rows;
    *broken = !isfinite(top);
    *best = *count = 0;
    if (p->filter[r].wanted != 1) {
        if (!*broken) *best = first_equal(x, p->vocab, top);
        double t = fmin(fmax(p->filter[r].temperature, 1e-30), 1e30);
        p->sums[2 * r] = top;
        if (p->filter[r].wanted == 2) p->sums[2 * r + 1] = total_mass(x, p->vocab, top, (float)(1.0 / t));
        return;
    }
    if (*broken) { /* nothing to draw from: one id, so that shapes hold */
        p->ids[r * p->room] = 0, p->mass[r * p->room] = NAN, *count = 1;
        return;
    }
    *count = survivors(p, r, x, top, found, weight, dealt);
    int64_t fit = *count < p->room ? *count : p->room;
    for (int64_t i = 0; i < fit; i++) {
        p->ids[r * p->room + i] = found[i].id;
        p->mass[r * p->room + i] = (float)weight[i];
    }
}

void shape_rows(const Laws *p) {
    int64_t room = 0; /* candidates of a row; asking the system for memory is dear where none are wanted */
    for (int64_t r = 0; r < p->rows; r++) room = p->filter[r].wanted == 1 ? p->vocab : room;
#pragma omp parallel num_threads((int)(p->rows < p->threads ? p->rows : p->threads))
    {
        Candidate *found = malloc(room * sizeof *found);
        double *weight = malloc(room * sizeof *weight);
        Candidate *dealt = malloc(room * (sizeof *dealt + 1));
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < p->rows; r++) one_row(p, r, found, weight, dealt);
        free(dealt);
        free(found);
        free(weight);
    }
    int64_t most = 0, *count = p->told + 2 * p->rows;
    for (int64_t r = 0; r < p->rows; r++) most = count[r] > most ? count[r] : most;
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t i = count[r]; i < most && i < p->room; i++) p->ids[r * p->room + i] = 0, p->mass[r * p->room + i] = 0;
    count[p->rows] = most;
}

/* ids, values [rows, count] of logits [rows, vocab]; count <= vocab. */
void likeliest_rows(const float *logits, int64_t rows, int64_t vocab, int64_t count, int64_t threads, int64_t *ids,
                    float *values) {
#pragma omp parallel for schedule(static) num_threads((int)(rows < threads ? rows : threads))
    for (int64_t r = 0; r < rows; r++) few_best(logits + r * vocab, vocab, count, ids + r * count, values + r * count);
}

/* The id with the highest mass / exponential noise: core/noise.py: race. ids NULL: the columns themselves. */
static uint64_t mixed(uint64_t key, uint64_t id) {
    uint64_t bits = key + (id + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
}

#define BLOCK 64
typedef struct {
    double best;
    int64_t won;
} Leader;

/* `here` more columns from column `from` on, of mass m. */
static void race_block(const float *m, const int64_t *ids, int64_t from, int64_t here, uint64_t key, Leader *leader) {
    double u[BLOCK], best = leader->best;
    for (int64_t i = 0; i < here; i++)
        u[i] = ((double)(mixed(key, ids ? (uint64_t)ids[from + i] : (uint64_t)(from + i)) >> 12) + 0.5) * 0x1p-52;
    /* -log(u) >= 1 - u, so what fails here cannot win; what passes is computed in full */
    int some = 0;
    for (int64_t i = 0; i < here; i++) some |= m[i] > (1 - u[i]) * best;
    for (int64_t i = 0; some && i < here; i++) {
        if (!(m[i] > (1 - u[i]) * best)) continue;
        double score = m[i] / -log(u[i]);
        if (score > best) best = score, leader->won = from + i;
    }
    leader->best = best;
}

int64_t race_row(const float *mass, const int64_t *ids, int64_t n, uint64_t key) {
    Leader leader = {0, 0};
    for (int64_t from = 0; from < n; from += BLOCK)
        race_block(mass + from, ids, from, n - from < BLOCK ? n - from : BLOCK, key, &leader);
    return ids ? ids[leader.won] : leader.won;
}

/* The same with mass exp((x - top) * scale) of logits x. */
int64_t race_logits(const float *x, int64_t n, float top, float scale, uint64_t key) {
    Leader leader = {0, 0};
    float m[BLOCK];
    for (int64_t from = 0; from < n; from += BLOCK) {
        int64_t here = n - from < BLOCK ? n - from : BLOCK;
        for (int64_t i = 0; i < BLOCK; i += W) {
            vf v = splat(-INFINITY);
            memcpy(&v, x + from + i, sizeof(float) * (size_t)(here - i < W ? (here > i ? here - i : 0) : W));
            v = vexp((v - top) * scale);
            memcpy(m + i, &v, sizeof v);
        }
        race_block(m, NULL, from, here, key, &leader);
    }
    return leader.won;
}

/* Of tables [., stride] of which k columns count: the sums of some rows of mass, and the masses of `guesses` tokens.
 * asked: the rows [rows], then the row of each guess, then its token. told: the sums, then the masses. */
void look_up(const int64_t *ids, const float *mass, int64_t stride, int64_t k, int64_t rows, int64_t guesses,
             const int64_t *asked, double *told) {
    for (int64_t r = 0; r < rows; r++) {
        told[r] = 0;
        for (int64_t i = 0; i < k; i++) told[r] += mass[asked[r] * stride + i];
    }
    for (int64_t g = 0; g < guesses; g++) {
        int64_t start = asked[rows + g] * stride, token = asked[rows + guesses + g];
        told[rows + g] = 0;
        for (int64_t i = 0; i < k; i++)
            if (ids[start + i] == token) told[rows + g] += mass[start + i];
    }
}

typedef struct {
    int64_t vocab, rows, biased, past, fresh, paired, banned;
    float *logits;                  /* [rows, vocab] */
    const int64_t *bias_ids;        /* [biased] */
    const double *bias;             /* [biased], added in turn */
    const int64_t *past_ids;        /* [past], every id of prompt and text once */
    const float *counts;            /* [past], how often the text holds it */
    const int64_t *fresh_ids;       /* [fresh], further ids that paths hold */
    const int64_t *pairs;           /* [paired, 2], ordered by row: (row, column of past and fresh ids), a sighting */
    const int64_t *ban;             /* [banned, 2], (row, id) that may not come */
    double repeat, presence, frequency;
} Edits;

/* Bias, penalties and bans, in this order; what they mean is in core/edit.py. */
void edit_rows(const Edits *e) {
    int64_t known = e->past + e->fresh;
    float *more = calloc(known + 1, sizeof *more);
    float repeat = (float)e->repeat, presence = (float)e->presence, frequency = (float)e->frequency;
    for (int64_t r = 0, at = 0; r < e->rows; r++) {
        float *row = e->logits + r * e->vocab;
        for (int64_t i = 0; i < e->biased; i++) row[e->bias_ids[i]] += (float)e->bias[i];
        int64_t from = at;
        for (; at < e->paired && e->pairs[2 * at] == r; at++) more[e->pairs[2 * at + 1]] += 1;
        for (int64_t i = 0; i < known; i++) {
            int old = i < e->past;
            if (!old && more[i] == 0) continue;
            float *x = row + (old ? e->past_ids[i] : e->fresh_ids[i - e->past]), count = (old ? e->counts[i] : 0) + more[i];
            *x = *x < 0 ? *x * repeat : *x / repeat;
            *x = *x - frequency * count - presence * (count > 0);
        }
        for (int64_t i = from; i < at; i++) more[e->pairs[2 * i + 1]] = 0;
    }
    for (int64_t i = 0; i < e->banned; i++) e->logits[e->ban[2 * i] * e->vocab + e->ban[2 * i + 1]] = -INFINITY;
    free(more);
}
