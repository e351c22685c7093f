/* How likely the nodes of drafts are to be accepted, and what passes teach of that. Knows no Python, no costs, and of
 * a request its number alone. control/belief.py says what each part means and gives the constants; it is the oracle.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROOT (-1)
#define RANKS 4    /* places among siblings that are told apart */
#define BUCKETS 10 /* and depths */
#define SAID 4     /* scores are looked at as log odds, from minus this to this */
#define POINTS (2 * SAID + 2)

enum { PLAIN, SCORED, DRAWN };

typedef struct {
    double memory, prior, enough, first, later, doubt, drift, scored_doubt, scored_drift, pull, against, bound, sure;
} Terms;

typedef struct {
    double hits, visits;
} Rate;

typedef struct {
    int64_t count, kind;
    const int32_t *token, *parent;
    const double *score;
} Guess;

typedef struct {
    double shift, doubt;  /* doubt: variance of the shift, negative = nothing is known */
    int64_t waits;        /* whether a guess is still being compared with the text, from `node` on */
    int64_t node, depth;
    int64_t count, kind, room;
    int32_t *token, *parent;
    double *score;
} Own;

typedef struct {
    double value;
    int64_t place, node;
} Entry;

typedef struct {
    Terms terms;
    Rate place[BUCKETS * RANKS], level[BUCKETS];
    double hits[POINTS], visits[POINTS], said[POINTS], off[POINTS];
    int stale[POINTS];
    Own *own;
    int64_t owns, room;
    char *use, *hit;  /* [room] nodes of one guess */
    int32_t *depth, *born, *last; /* born, last: children so far, of the root and each node, and the last of them */
    double *chance;
    Entry *entry;
    int64_t entries;
} Beliefs;

Beliefs *beliefs_new(const Terms *terms) {
    Beliefs *b = calloc(1, sizeof *b);
    if (b) b->terms = *terms;
    return b;
}
void beliefs_forget(Beliefs *b, int64_t number) {
    if (number >= b->owns) return;
    Own *own = b->own + number;
    free(own->token), free(own->parent), free(own->score);
    *own = (Own){.doubt = -1};
}
void beliefs_free(Beliefs *b) {
    for (int64_t i = 0; i < b->owns; i++) beliefs_forget(b, i);
    free(b->own), free(b->use), free(b->hit), free(b->depth), free(b->born), free(b->last), free(b->chance), free(b->entry), free(b);
}
static void *grown(void *at, int64_t bytes, int *short_of) {
    void *more = realloc(at, (size_t)bytes);
    if (!more) *short_of = 1;
    return more ? more : at;
}
/* Room for guesses of so many nodes and requests up to this number; 0 where there is no memory. */
static int ready_for(Beliefs *b, int64_t nodes, int64_t number) {
    int bad = 0;
    if (nodes >= b->room) {
        int64_t room = nodes + 1; /* the root too */
        b->use = grown(b->use, room, &bad), b->hit = grown(b->hit, room, &bad);
        b->depth = grown(b->depth, room * 4, &bad), b->born = grown(b->born, room * 4, &bad);
        b->last = grown(b->last, room * 4, &bad), b->chance = grown(b->chance, room * 8, &bad);
        if (!bad) b->room = room;
    }
    if (!bad && number >= b->owns) {
        b->own = grown(b->own, (number + 1) * (int64_t)sizeof *b->own, &bad);
        while (!bad && b->owns <= number) b->own[b->owns++] = (Own){.doubt = -1};
    }
    return !bad;
}

static double logistic(double odds) { return 1 / (1 + exp(-odds)); }
static double odds_of(const Beliefs *b, double share) {
    double sure = b->terms.sure, odds = share >= 1 ? sure : share <= 0 ? -sure : log(share / (1 - share));
    return fmin(fmax(odds, -sure), sure);
}
static int64_t bucket(int64_t depth) {
    if (depth <= 4) return depth;
    return depth <= 8 ? 5 + (depth - 5) / 2 : 7 + ((depth < 13 ? depth : 13) - 9) / 4;
}
static double share_of(const Beliefs *b, const Rate *rates, int64_t at, int64_t rank, int64_t ranks) {
    const Rate *rate = rates + at * ranks + rank;
    if (rate->visits >= b->terms.enough) return rate->hits / rate->visits;
    double first = at > 1 ? share_of(b, rates, at - 1, rank, ranks) : rank ? b->terms.later : b->terms.first;
    return (rate->hits + b->terms.prior * first) / (rate->visits + b->terms.prior);
}
static double place_odds(const Beliefs *b, int64_t depth, int64_t rank) {
    return odds_of(b, share_of(b, b->place, bucket(depth), rank < RANKS ? rank : RANKS - 1, RANKS));
}
static void add_to(const Beliefs *b, Rate *rate, int hit) {
    rate->hits = rate->hits * b->terms.memory + hit;
    rate->visits = rate->visits * b->terms.memory + 1;
}
/* A node's score, given its parent's, as log odds. */
static double said_of(const Guess *g, int64_t node) {
    double above = g->parent[node] < 0 ? 1 : g->score[g->parent[node]];
    double share = above > 0 ? g->score[node] / above : 0, most = 1 / (1 + exp(-(double)SAID));
    if (!(share > 1 / (1 + exp((double)SAID)))) return -SAID; /* NaN too */
    return share >= most ? SAID : log(share / (1 - share));
}
static double scored_odds(const Beliefs *b, double said) {
    int64_t at = (int64_t)(said + SAID);
    return said + b->off[at] + (said + SAID - (double)at) * (b->off[at + 1] - b->off[at]);
}
/* Works out what scores are off by, where that lags behind. */
static void refresh(Beliefs *b) {
    for (int64_t at = 0; at < POINTS; at++) {
        if (!b->stale[at]) continue;
        double mean = b->said[at] / b->visits[at];
        double share = (b->hits[at] + b->terms.prior * logistic(mean)) / (b->visits[at] + b->terms.prior);
        b->off[at] = odds_of(b, share) - mean, b->stale[at] = 0;
    }
}
static void add_score(Beliefs *b, double said, int hit) {
    int64_t at = (int64_t)(said + SAID + 0.5);
    b->hits[at] = b->hits[at] * b->terms.memory + hit;
    b->visits[at] = b->visits[at] * b->terms.memory + 1;
    b->said[at] = b->said[at] * b->terms.memory + said;
    b->stale[at] = 1;
}

/* ---- chances of nodes ---- */

/* b->chance of each node that it and all above it are accepted; 0 below a chance of `floor`. Drawn siblings count in
 * the order of drawing. */
static void survive(Beliefs *b, const Guess *g, double shift, double floor) {
    double *chance = b->chance;
    for (int64_t i = 0; i <= g->count; i++) b->born[i] = 0, b->last[i] = -1;
    for (int64_t i = 0; i < g->count; i++) {
        int64_t parent = g->parent[i], rank = b->born[parent + 1]++, before = b->last[parent + 1];
        double above = parent < 0 ? 1 : chance[parent];
        b->depth[i] = parent < 0 ? 1 : b->depth[parent] + 1;
        b->last[parent + 1] = (int32_t)i;
        chance[i] = 0;
        if (g->kind != DRAWN && above == 0) continue;
        double odds = g->kind == SCORED ? scored_odds(b, said_of(g, i)) : place_odds(b, b->depth[i], rank);
        chance[i] = above * logistic(odds + shift);
        if (g->kind == DRAWN && before >= 0) chance[i] = fmin(chance[i], chance[before]);
        if (g->kind != DRAWN && chance[i] < floor) chance[i] = 0;
    }
}
static int best_first(const void *one, const void *other) {
    const Entry *a = one, *b = other;
    if (a->value != b->value) return a->value > b->value ? -1 : 1;
    if (a->place != b->place) return a->place < b->place ? -1 : 1;
    return a->node < b->node ? -1 : 1;
}

typedef struct {
    int64_t count;
    const int64_t *request, *size, *kind; /* [count] */
    const int32_t *token, *parent;        /* of all guesses, one after another */
    const double *score;
} Guesses;

static Guess guess_at(const Guesses *all, int64_t i, int64_t begin) {
    return (Guess){all->size[i], all->kind[i], all->token + begin, all->parent + begin, all->score + begin};
}
/* chance: [nodes]. -1 where there is no memory. */
int64_t beliefs_survive(Beliefs *b, const Guesses *all, double floor, double *chance) {
    int64_t begin = 0;
    for (int64_t i = 0; i < all->count; begin += all->size[i++]) {
        Guess g = guess_at(all, i, begin);
        if (g.kind == SCORED) refresh(b);
        if (!ready_for(b, g.count, all->request[i])) return -1;
        survive(b, &g, b->own[all->request[i]].shift, floor);
        memcpy(chance + begin, b->chance, (size_t)g.count * sizeof *chance);
    }
    return begin;
}
/* Nodes that have a chance, the best first: minus it, whose guess they are of, which they are. How many, or -1. */
int64_t beliefs_weigh(Beliefs *b, const Guesses *all, double floor, double *value, int64_t *place, int64_t *node) {
    int64_t total = beliefs_survive(b, all, floor, value), begin = 0, found = 0;
    int bad = total < 0;
    if (!bad && total > b->entries) {
        b->entry = grown(b->entry, total * (int64_t)sizeof *b->entry, &bad);
        if (!bad) b->entries = total;
    }
    if (bad) return -1;
    for (int64_t i = 0; i < all->count; begin += all->size[i++])
        for (int64_t k = 0; k < all->size[i]; k++)
            if (value[begin + k] > 0) b->entry[found++] = (Entry){value[begin + k], i, k};
    qsort(b->entry, (size_t)found, sizeof *b->entry, best_first);
    for (int64_t i = 0; i < found; i++)
        value[i] = -b->entry[i].value, place[i] = b->entry[i].place, node[i] = b->entry[i].node;
    return found;
}
/* Log odds that a draft is accepted so far at least, given that it was one level less; of depths 1 to `depth`. */
void beliefs_levels(const Beliefs *b, int64_t depth, double *odds) {
    for (int64_t d = 1; d <= depth; d++) odds[d - 1] = odds_of(b, share_of(b, b->level, bucket(d), 0, 1));
}
double beliefs_shift(const Beliefs *b, int64_t number) { return number < b->owns ? b->own[number].shift : 0; }

/* ---- learning ---- */

/* The children of `above` that are in b->use were judged, those in b->hit were right. The first that was, or ROOT. */
static int64_t learn_level(Beliefs *b, Own *own, const Guess *g, int64_t above, int64_t depth) {
    const Terms *t = &b->terms;
    int64_t rank = 0, right = ROOT, judged = 0;
    double first = g->kind == SCORED ? t->scored_doubt : t->doubt;
    double drift = g->kind == SCORED ? t->scored_drift : t->drift;
    double shift = own->shift, doubt = own->doubt < 0 ? first : fmin(own->doubt, first);
    for (int64_t node = 0; node < g->count; node++) {
        if (g->parent[node] != above) continue;
        int64_t place = rank++;
        if (!b->use[node]) continue;
        int hit = b->hit[node];
        double said = g->kind == SCORED ? said_of(g, node) : 0;
        double chance = logistic((g->kind == SCORED ? scored_odds(b, said) : place_odds(b, depth, place)) + shift);
        double weight = chance * (1 - chance); /* what was sure to come says little */
        judged++;
        if (hit && right == ROOT) right = node;
        if (hit - chance > t->against) doubt = first; /* the text is another one */
        doubt /= 1 + weight * doubt;
        shift += doubt * (hit - chance) - t->pull * weight * shift;
        doubt += drift;
        shift = fmin(fmax(shift, -t->bound), t->bound);
        if (g->kind == SCORED) add_score(b, said, hit);
        else add_to(b, b->place + bucket(depth) * RANKS + (place < RANKS ? place : RANKS - 1), hit);
    }
    if (!judged) return ROOT;
    own->shift = shift, own->doubt = doubt;
    add_to(b, b->level + bucket(depth), right != ROOT);
    return right;
}
static int has_children(const Guess *g, int64_t node) {
    for (int64_t i = 0; i < g->count; i++)
        if (g->parent[i] == node) return 1;
    return 0;
}
/* Goes on comparing this guess with the text later. 0 where there is no memory. */
static int wait_for(Own *own, const Guess *g, int64_t node, int64_t depth) {
    int bad = 0;
    if (g->count > own->room) {
        own->token = grown(own->token, g->count * 4, &bad), own->parent = grown(own->parent, g->count * 4, &bad);
        own->score = grown(own->score, g->count * 8, &bad);
        if (bad) return 0;
        own->room = g->count;
    }
    memcpy(own->token, g->token, (size_t)g->count * 4), memcpy(own->parent, g->parent, (size_t)g->count * 4);
    memcpy(own->score, g->score, (size_t)g->count * 8);
    own->waits = 1, own->node = node, own->depth = depth, own->count = g->count, own->kind = g->kind;
    return 1;
}
/* Learns from the nodes that were judged; what was left out below them can still be compared. */
static int verified(Beliefs *b, Own *own, const Guess *g, const int32_t *kept, int64_t keeps, const int32_t *path,
                    int64_t length) {
    memset(b->use, 0, (size_t)g->count), memset(b->hit, 0, (size_t)g->count);
    for (int64_t i = 0; i < keeps; i++) b->use[kept[i]] = 1;
    for (int64_t i = 0; i < length; i++) b->hit[path[i]] = 1;
    for (int64_t i = 0; i <= length; i++) learn_level(b, own, g, i ? path[i - 1] : ROOT, i + 1);
    int64_t end = length ? path[length - 1] : ROOT, rest = 0;
    own->waits = 0;
    for (int64_t i = 0; i < g->count; i++) {
        if (g->parent[i] != end) continue;
        if (b->use[i]) return 1;
        rest++;
    }
    return g->kind == DRAWN || !rest || wait_for(own, g, end, length + 1);
}
/* One level of a guess against the token that came: the node that was right, or ROOT. */
static int64_t compared(Beliefs *b, Own *own, const Guess *g, int64_t above, int64_t depth, int32_t token) {
    for (int64_t i = 0; i < g->count; i++) b->use[i] = 1, b->hit[i] = g->token[i] == token;
    return learn_level(b, own, g, above, depth);
}
/* Follows the waiting guess along the tokens that were written; how far it went. */
static int64_t follow(Beliefs *b, Own *own, const int32_t *token, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (!own->waits) return i;
        Guess g = {own->count, own->kind, own->token, own->parent, own->score};
        int64_t right = compared(b, own, &g, own->node, own->depth, token[i]);
        own->waits = right != ROOT && has_children(&g, right);
        if (right == ROOT) return i;
        own->node = right, own->depth++;
    }
    return count;
}

typedef struct {
    Guesses guesses;
    const int64_t *tokens, *kept, *path; /* [count]: how many of each */
    const int32_t *token, *keep, *accepted;
} Came;

/* right: guesses that were not verified and right; waits: whether one is still being compared. 0 without memory. */
int64_t beliefs_learn(Beliefs *b, const Came *came, int64_t *right, int64_t *waits) {
    const int32_t *token = came->token, *keep = came->keep, *path = came->accepted;
    int64_t begin = 0;
    for (int64_t i = 0; i < came->guesses.count; begin += came->guesses.size[i++]) {
        Guess g = guess_at(&came->guesses, i, begin);
        int64_t number = came->guesses.request[i], count = came->tokens[i], done = 0;
        if (!ready_for(b, g.count, number)) return 0;
        Own *own = b->own + number;
        if (own->waits && !ready_for(b, own->count, number)) return 0;
        if (came->kept[i]) {
            if (!verified(b, own, &g, keep, came->kept[i], path, came->path[i])) return 0;
            done = came->path[i] < count ? came->path[i] : count;
        } else if (g.count && g.kind != DRAWN) {
            if (!own->waits) {
                if (!wait_for(own, &g, ROOT, 1)) return 0;
            } else if (count) /* an earlier one is still being followed; of this one the first level will do */
                compared(b, own, &g, ROOT, 1, token[0]);
        }
        right[i] = follow(b, own, token + done, count - done);
        waits[i] = own->waits;
        token += count, keep += came->kept[i], path += came->path[i];
    }
    return 1;
}
