/* One tree of the guesses of several sources, the likeliest first: a text's own past, recycled rows, a warm table.
 * Knows no Python and no model. What each part means is said where it is written in Python, which is its oracle:
 * draft/grow.py (the tree and what it learns), draft/sources.py, recycle.py, table.py, source.py (chances, grades).
 */
#include <math.h>
#include "maps.h"
#include "warm.h"

#define REACH 4    /* tokens of text and path that a source is shown */
#define GRADES 10  /* of a probability */
#define RANKS 4    /* told apart */
#define ROOT (-1)
#define LEVEL (GRADES * RANKS) /* codes of recycled rows by key: pairs, then single tokens */
#define QUOTED (2 * LEVEL)
#define ANOTHERS (QUOTED + 1) /* the same codes once more for rows that another request left */
#define LONG 1000.0           /* times a code is seen before its counts are halved */

typedef struct {
    int32_t token, code;
} Guess;

typedef struct {
    int64_t serial, length; /* length: tokens of the text that are in `next` */
    int32_t tail[REACH];    /* the last ones, oldest first */
    int quoted, asked;      /* asked: a tree was made and nothing is known of it yet */
    Map next;               /* what came last after each run of up to REACH tokens */
    int64_t nodes, node_room, guesses, guess_room;
    int32_t *token, *parent, *depth;
    double *score;
    int64_t *from, *to; /* [1 + nodes]: guesses of what follows root and nodes; from -1 = not asked */
    Guess *guess;
} Request;

typedef struct {
    double score;
    int64_t place;
    int32_t token, node;
} Entry;

typedef struct {
    int64_t lookup, recycle, table; /* first code of each source, -1 = not there */
    int64_t codes, half; /* half: keys of the newer half of a store */
    double floor;
    Table warm;
} Setup;

typedef struct {
    Setup setup;
    double *value, *survived, *seen; /* [codes] */
    Store pairs, singles;
    Request **request;
    int64_t requests, serials, heap_room;
    Entry *heap;
    double falls[GRADES - 1]; /* of -log, where a grade begins */
} Joined;

/* ---- memory ---------------------------------------------------------------------------------------------- */

void joined_free(Joined *);
void joined_forget(Joined *, int64_t);

/* priors, strength: see Chances. NULL where there is no memory. */
Joined *joined_new(const Setup *setup, const double *priors, double strength) {
    Joined *j = calloc(1, sizeof *j);
    if (!j) return NULL;
    j->setup = *setup;
    j->pairs.half = j->singles.half = setup->half;
    j->value = malloc((size_t)setup->codes * sizeof(double));
    j->survived = malloc((size_t)setup->codes * sizeof(double));
    j->seen = malloc((size_t)setup->codes * sizeof(double));
    if (!j->value || !j->survived || !j->seen) return joined_free(j), NULL;
    for (int64_t i = 0; i < setup->codes; i++)
        j->value[i] = priors[i], j->survived[i] = strength * priors[i], j->seen[i] = strength;
    for (int g = 1; g < GRADES; g++) j->falls[g - 1] = g * log(2) / 1.5;
    return j;
}
void joined_free(Joined *j) {
    for (int64_t i = 0; i < j->requests; i++) joined_forget(j, i);
    half_free(&j->pairs.newer), half_free(&j->pairs.older), half_free(&j->singles.newer), half_free(&j->singles.older);
    free(j->request), free(j->heap), free(j->value), free(j->survived), free(j->seen), free(j);
}
static void *grown(void *at, int64_t bytes, int *short_of) {
    void *more = realloc(at, (size_t)bytes);
    if (!more) *short_of = 1;
    return more ? more : at;
}
/* The request of a number, made if need be; NULL where there is no memory. */
static Request *request_of(Joined *j, int64_t number) {
    int bad = 0;
    if (number >= j->requests) {
        j->request = grown(j->request, (number + 1) * (int64_t)sizeof *j->request, &bad);
        if (bad) return NULL;
        while (j->requests <= number) j->request[j->requests++] = NULL;
    }
    if (!j->request[number] && (j->request[number] = calloc(1, sizeof(Request))))
        j->request[number]->serial = ++j->serials;
    return j->request[number];
}
void joined_forget(Joined *j, int64_t number) {
    if (number >= j->requests || !j->request[number]) return;
    Request *r = j->request[number];
    map_free(&r->next);
    free(r->token), free(r->parent), free(r->depth), free(r->score), free(r->from), free(r->to), free(r->guess);
    free(r);
    j->request[number] = NULL;
}
/* The text of a request begins anew; what its prompt taught stays. */
void joined_restart(Joined *j, int64_t number) {
    if (number >= j->requests || !j->request[number]) return;
    map_free(&j->request[number]->next);
    j->request[number]->length = 0;
}
int64_t joined_keys(const Joined *j) { return store_keys(&j->pairs) + store_keys(&j->singles); }
void joined_values(const Joined *j, double *to) { memcpy(to, j->value, (size_t)j->setup.codes * sizeof(double)); }

/* ---- sources --------------------------------------------------------------------------------------------- */

static uint64_t pair_key(int32_t before, int32_t last) { return (uint64_t)(uint32_t)before << 32 | (uint32_t)last; }
static uint64_t run_key(const int32_t *tokens, int size) {
    uint64_t key = (uint64_t)size;
    for (int i = 0; i < size; i++) key = mixed_bits(key * 0x9e3779b97f4a7c15ULL + (uint32_t)tokens[i] + 1);
    return key;
}
static int tail_size(const Request *r) { return r->length < REACH ? (int)r->length : REACH; }
static void read_on(Request *r, const int32_t *tokens, int64_t count, int lookup) {
    for (int64_t i = 0; i < count; i++) {
        int held = tail_size(r);
        for (int size = 1; lookup && size <= held; size++)
            map_put(&r->next, run_key(r->tail + held - size, size), tokens[i]);
        if (held == REACH) memmove(r->tail, r->tail + 1, (REACH - 1) * sizeof *r->tail);
        r->tail[held == REACH ? REACH - 1 : held] = tokens[i];
        r->length++;
    }
}
static void quote(Joined *j, const Request *r, const int32_t *tokens, int64_t count) {
    for (int64_t at = 2; at < count; at++) {
        uint64_t key = pair_key(tokens[at - 2], tokens[at - 1]);
        const Row *known = store_find(&j->pairs, key);
        Row row = {.request = r->serial, .ids = {tokens[at]}, .codes = {QUOTED}, .count = 1, .quoted = 1};
        if (!known || known->quoted) store_put(&j->pairs, key, &row);
    }
}
static int grade(const Joined *j, double log) {
    int g = 0;
    while (g < GRADES - 1 && j->falls[g] <= -log) g++;
    return g;
}
static void keep_row(Joined *j, int64_t serial, int32_t before, int32_t last, const int64_t *ids,
                     const float *logits, int64_t count) {
    if (!count || !isfinite(logits[0])) return;
    Row row = {.request = serial, .count = (int16_t)(count < TOPS ? count : TOPS)};
    double whole = 0;
    for (int i = 0; i < row.count; i++) whole += exp((double)logits[i] - logits[0]);
    whole = log(whole) + logits[0];
    for (int i = 0; i < row.count; i++) {
        row.ids[i] = (int32_t)ids[i];
        row.codes[i] = (int16_t)(LEVEL + grade(j, logits[i] - whole) * RANKS + (i < RANKS ? i : RANKS - 1));
    }
    store_put(&j->singles, (uint64_t)(uint32_t)last, &row);
    if (before < 0) return;
    for (int i = 0; i < row.count; i++) row.codes[i] -= LEVEL;
    store_put(&j->pairs, pair_key(before, last), &row);
}
/* ---- the tree -------------------------------------------------------------------------------------------- */

static int say(Request *r, int32_t token, int64_t code) {
    if (r->guesses == r->guess_room) {
        int bad = 0;
        int64_t room = r->guess_room ? 2 * r->guess_room : 64;
        r->guess = grown(r->guess, room * (int64_t)sizeof *r->guess, &bad);
        if (bad) return 0;
        r->guess_room = room;
    }
    r->guess[r->guesses++] = (Guess){token, (int32_t)code};
    return 1;
}
/* What the sources say may follow a text that ends in `tail`. */
static int ask(const Joined *j, Request *r, const int32_t *tail, int size) {
    const Setup *s = &j->setup;
    int good = 1;
    for (int n = size; s->lookup >= 0 && n; n--) {
        const int32_t *next = map_find(&r->next, run_key(tail + size - n, n));
        if (!next) continue;
        good &= say(r, *next, s->lookup + n);
        break;
    }
    int32_t last = tail[size - 1];
    if (s->recycle >= 0) {
        const Row *row = size > 1 ? store_find(&j->pairs, pair_key(tail[size - 2], last)) : NULL;
        if (!row) row = store_find(&j->singles, (uint64_t)(uint32_t)last);
        int64_t first = s->recycle + (row && row->request != r->serial ? ANOTHERS : 0);
        for (int i = 0; row && i < row->count; i++) good &= say(r, row->ids[i], first + row->codes[i]);
    }
    if (s->table >= 0) {
        const Table *t = &s->warm;
        int64_t kind, row = warm_row(t, tail, size, &kind);
        for (int64_t i = row > 0 ? t->ends[row - 1] : 0; row >= 0 && i < t->ends[row]; i++)
            good &= say(r, t->ids[i], s->table + kind * t->level + t->codes[i]);
    }
    return good;
}
static int before_in_heap(Entry a, Entry b) { return a.score > b.score || (a.score == b.score && a.place < b.place); }
static int push(Joined *j, int64_t *held, Entry e) {
    if (*held == j->heap_room) {
        int bad = 0;
        int64_t room = j->heap_room ? 2 * j->heap_room : 256;
        j->heap = grown(j->heap, room * (int64_t)sizeof *j->heap, &bad);
        if (bad) return 0;
        j->heap_room = room;
    }
    int64_t i = (*held)++;
    for (; i && before_in_heap(e, j->heap[(i - 1) / 2]); i = (i - 1) / 2) j->heap[i] = j->heap[(i - 1) / 2];
    j->heap[i] = e;
    return 1;
}
static Entry pop(Joined *j, int64_t *held) {
    Entry top = j->heap[0], last = j->heap[--*held];
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < *held; i = child) {
        if (child + 1 < *held && before_in_heap(j->heap[child + 1], j->heap[child])) child++;
        if (!before_in_heap(j->heap[child], last)) break;
        j->heap[i] = j->heap[child];
    }
    j->heap[i] = last;
    return top;
}
/* The last REACH tokens of the text and the path down to `node`; returns how many there are. */
static int tail_of(const Request *r, int64_t node, int32_t *tail) {
    int32_t back[REACH];
    int size = 0, held = tail_size(r);
    for (; node != ROOT && size < REACH; node = r->parent[node]) back[size++] = r->token[node];
    for (int i = held; i && size < REACH; i--) back[size++] = r->tail[i - 1];
    for (int i = 0; i < size; i++) tail[i] = back[size - 1 - i];
    return size;
}
/* Put the best guesses of what follows `node` on the heap, `width` at most. */
static int offer(Joined *j, Request *r, int64_t *held, int64_t node, double score, int64_t width) {
    int32_t tail[REACH];
    int size = tail_of(r, node, tail);
    double least = j->setup.floor / score;
    r->from[1 + node] = r->guesses;
    int good = size ? ask(j, r, tail, size) : 1;
    r->to[1 + node] = r->guesses;
    Entry best[32]; /* sources say one, TOPS, and the eight of a table's row at most */
    int64_t count = 0;
    for (int64_t i = r->from[1 + node]; i < r->guesses; i++) {
        double chance = j->value[r->guess[i].code];
        int64_t k = 0;
        if (!(chance >= least)) continue;
        while (k < count && best[k].token != r->guess[i].token) k++;
        if (k == count && count < (int64_t)(sizeof best / sizeof *best)) best[count++] = (Entry){-1, 0, r->guess[i].token, 0};
        if (k < count && chance > best[k].score) best[k].score = chance;
    }
    for (int64_t rank = 0; rank < width && rank < count; rank++) {
        int64_t top = rank;
        for (int64_t k = rank + 1; k < count; k++)
            if (best[k].score > best[top].score || (best[k].score == best[top].score && best[k].token > best[top].token))
                top = k;
        Entry e = best[top];
        best[top] = best[rank];
        good &= push(j, held, (Entry){score * e.score, node * width + rank, e.token, (int32_t)node});
    }
    return good;
}
static int room_for(Request *r, int64_t nodes) {
    int bad = 0;
    if (nodes <= r->node_room) return 1;
    r->token = grown(r->token, nodes * (int64_t)sizeof *r->token, &bad);
    r->parent = grown(r->parent, nodes * (int64_t)sizeof *r->parent, &bad);
    r->depth = grown(r->depth, nodes * (int64_t)sizeof *r->depth, &bad);
    r->score = grown(r->score, nodes * (int64_t)sizeof *r->score, &bad);
    r->from = grown(r->from, (1 + nodes) * (int64_t)sizeof *r->from, &bad);
    r->to = grown(r->to, (1 + nodes) * (int64_t)sizeof *r->to, &bad);
    if (!bad) r->node_room = nodes;
    return !bad;
}
static int tree(Joined *j, Request *r, int64_t depth, int64_t width, int64_t nodes) {
    int64_t held = 0;
    r->nodes = r->guesses = r->asked = 0;
    if (!room_for(r, nodes)) return 0;
    for (int64_t i = 0; i <= nodes; i++) r->from[i] = -1;
    r->asked = 1;
    int good = offer(j, r, &held, ROOT, 1.0, width);
    while (good && held && r->nodes < nodes) {
        Entry e = pop(j, &held);
        int64_t n = r->nodes++;
        r->token[n] = e.token, r->parent[n] = e.node, r->score[n] = e.score;
        r->depth[n] = e.node == ROOT ? 1 : r->depth[e.node] + 1;
        if (r->depth[n] < depth) good = offer(j, r, &held, n, e.score, width);
    }
    return good;
}

typedef struct {
    int64_t count;
    const int64_t *request, *until; /* until: where each request's new tokens end in `tokens` */
    const int32_t *tokens;
    const int64_t *depth, *width, *nodes; /* budgets; nodes 0 = nothing is asked */
    int64_t *size;                        /* nodes of each tree */
    int32_t *token, *parent;              /* one tree after the other */
    double *score;
} Asked;

/* Read on in every text, then make every tree. Returns 0 where there is no memory. */
int64_t joined_propose(Joined *j, const Asked *a) {
    int64_t from = 0, end = 0;
    for (int64_t i = 0; i < a->count; from = a->until[i++]) {
        Request *r = request_of(j, a->request[i]);
        if (!r) return 0;
        if (j->setup.recycle >= 0 && !r->quoted) quote(j, r, a->tokens + from, a->until[i] - from);
        r->quoted = 1;
        read_on(r, a->tokens + from, a->until[i] - from, j->setup.lookup >= 0);
    }
    for (int64_t i = 0; i < a->count; i++) {
        Request *r = j->request[a->request[i]];
        a->size[i] = 0;
        if (!a->nodes[i]) continue;
        if (!tree(j, r, a->depth[i], a->width[i], a->nodes[i])) return 0;
        memcpy(a->token + end, r->token, (size_t)r->nodes * sizeof *r->token);
        memcpy(a->parent + end, r->parent, (size_t)r->nodes * sizeof *r->parent);
        memcpy(a->score + end, r->score, (size_t)r->nodes * sizeof *r->score);
        end += a->size[i] = r->nodes;
    }
    return 1;
}

/* ---- what came ------------------------------------------------------------------------------------------- */

static void learn(Joined *j, int32_t code, int survived) {
    double seen = j->seen[code] + 1;
    if (survived) j->survived[code] += 1;
    if (seen > LONG) seen /= 2, j->survived[code] /= 2;
    j->seen[code] = seen;
    j->value[code] = j->survived[code] / seen;
}
/* Every guess along the text that came shows whether it was right, taken into the tree or not. */
static void judge(Joined *j, Request *r, const int32_t *tokens, int64_t count) {
    int64_t node = ROOT;
    for (int64_t i = 0; i < count && r->from[1 + node] >= 0; i++) {
        for (int64_t g = r->from[1 + node]; g < r->to[1 + node]; g++)
            learn(j, r->guess[g].code, r->guess[g].token == tokens[i]);
        int64_t n = node + 1;
        while (n < r->nodes && (r->parent[n] != node || r->token[n] != tokens[i])) n++;
        if (n >= r->nodes) break;
        node = n;
    }
}

typedef struct {
    int64_t count, width;          /* width: ids of a row */
    const int64_t *request, *came; /* came: where each request's new tokens end in `tokens` */
    const int32_t *tokens;
    const int32_t *before, *root; /* the last two tokens of the text before the pass; before -1 = there was one */
    const int64_t *nodes, *rows;  /* of each verified draft; rows: 0 = nothing of them is known, or 1 + nodes */
    const int32_t *token, *parent;
    const int64_t *ids;
    const float *logits;
} Came;

int64_t joined_observe(Joined *j, const Came *c) {
    int64_t from = 0;
    for (int64_t i = 0; i < c->count; from = c->came[i++]) {
        Request *r = request_of(j, c->request[i]);
        if (!r) return 0;
        if (r->asked) judge(j, r, c->tokens + from, c->came[i] - from);
        r->asked = 0;
    }
    const int32_t *token = c->token, *parent = c->parent;
    const int64_t *ids = c->ids;
    const float *logits = c->logits;
    for (int64_t i = 0; i < c->count; token += c->nodes[i], parent += c->nodes[i++]) {
        int64_t serial = j->request[c->request[i]]->serial;
        for (int64_t n = 0; n < c->rows[i]; n++, ids += c->width, logits += c->width) {
            int32_t above = n && parent[n - 1] != ROOT ? token[parent[n - 1]] : c->root[i];
            if (j->setup.recycle < 0) continue;
            if (n) keep_row(j, serial, above, token[n - 1], ids, logits, c->width);
            else keep_row(j, serial, c->before[i], c->root[i], ids, logits, c->width);
        }
    }
    return 1;
}
