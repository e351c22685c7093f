/* How likely the nodes of drafts are to be accepted, and what passes teach of that. Knows no Python, no costs, and of
 * a request its number alone. control/belief_plain.py says what each part means and gives the constants; it is the oracle.
 */

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
    const int64_t *token, *parent;
    const double *score; /* of scored ones */
} Guess;

typedef struct {
    double shift, doubt;  /* doubt: variance of the shift, negative = nothing is known */
    int64_t waits;        /* whether a guess is still being compared with the text, from `node` on */
    int64_t node, depth;
    int64_t count, kind, room;
    int64_t *token, *parent;
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
    int64_t *depth, *born, *last; /* born, last: children so far, of the root and each node, and the last of them */
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
        b->depth = grown(b->depth, room * 8, &bad), b->born = grown(b->born, room * 8, &bad);
        b->last = grown(b->last, room * 8, &bad), b->chance = grown(b->chance, room * 8, &bad);
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
        b->last[parent + 1] = i;
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

/* What is told is a row of whole numbers: of each guess its request, kind and size; its tokens; its parents. Scores
 * of scored ones come in a row of their own. */
static Guess next_guess(const int64_t **at, const double **score, int64_t *request) {
    int64_t size = (*at)[2];
    Guess g = {size, (*at)[1], *at + 3, *at + 3 + size, *score};
    *request = (*at)[0], *at += 3 + 2 * size;
    if (g.kind == SCORED) *score += size;
    return g;
}
/* Nodes that have a chance: the chance, whose guess they are of, which they are. How many, or -1 without memory. */
static int64_t found_nodes(Beliefs *b, int64_t count, const int64_t *at, const double *score, double floor) {
    int64_t found = 0, request;
    for (int64_t i = 0; i < count; i++) {
        Guess g = next_guess(&at, &score, &request);
        int bad = !ready_for(b, g.count, request);
        if (!bad && found + g.count > b->entries) {
            b->entry = grown(b->entry, 2 * (found + g.count) * (int64_t)sizeof *b->entry, &bad);
            if (!bad) b->entries = 2 * (found + g.count);
        }
        if (bad) return -1;
        if (g.kind == SCORED) refresh(b);
        survive(b, &g, b->own[request].shift, floor);
        for (int64_t k = 0; k < g.count; k++)
            if (b->chance[k] > 0) b->entry[found++] = (Entry){b->chance[k], i, k};
    }
    return found;
}
/* The best first: minus the chances, and for each whose guess and which node. How many, or -1 without memory. */
int64_t beliefs_weigh(Beliefs *b, int64_t count, const int64_t *at, const double *score, double floor, double *value,
                      int64_t *where) {
    int64_t found = found_nodes(b, count, at, score, floor);
    if (found > 0) qsort(b->entry, (size_t)found, sizeof *b->entry, best_first);
    for (int64_t i = 0; i < found; i++)
        value[i] = -b->entry[i].value, where[2 * i] = b->entry[i].place, where[2 * i + 1] = b->entry[i].node;
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
        own->token = grown(own->token, g->count * 8, &bad), own->parent = grown(own->parent, g->count * 8, &bad);
        own->score = grown(own->score, g->count * 8, &bad);
        if (bad) return 0;
        own->room = g->count;
    }
    memcpy(own->token, g->token, (size_t)g->count * 8), memcpy(own->parent, g->parent, (size_t)g->count * 8);
    if (g->kind == SCORED) memcpy(own->score, g->score, (size_t)g->count * 8);
    own->waits = 1, own->node = node, own->depth = depth, own->count = g->count, own->kind = g->kind;
    return 1;
}
/* Learns from the nodes that were judged; what was left out below them can still be compared. */
static int verified(Beliefs *b, Own *own, const Guess *g, const int64_t *kept, int64_t keeps, const int64_t *path,
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
static int64_t compared(Beliefs *b, Own *own, const Guess *g, int64_t above, int64_t depth, int64_t token) {
    for (int64_t i = 0; i < g->count; i++) b->use[i] = 1, b->hit[i] = g->token[i] == token;
    return learn_level(b, own, g, above, depth);
}
/* Follows the waiting guess along the tokens that were written; how far it went. */
static int64_t follow(Beliefs *b, Own *own, const int64_t *token, int64_t count) {
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

/* Told of each request: a guess as it was offered; how many tokens came, how many nodes were verified and accepted,
 * and all of these. right: guesses that were not verified and right; waits: whether one is still being compared;
 * both next to each other for each request. 0 where there is no memory. */
int64_t beliefs_learn(Beliefs *b, int64_t count, const int64_t *at, const double *score, int64_t *learnt) {
    int64_t number;
    for (int64_t i = 0; i < count; i++) {
        Guess g = next_guess(&at, &score, &number);
        int64_t came = at[0], kept = at[1], length = at[2], done = 0;
        const int64_t *token = at + 3, *keep = token + came, *path = keep + kept;
        at = path + length;
        if (!ready_for(b, g.count, number)) return 0;
        Own *own = b->own + number;
        if (own->waits && !ready_for(b, own->count, number)) return 0;
        if (kept) {
            if (!verified(b, own, &g, keep, kept, path, length)) return 0;
            done = length < came ? length : came;
        } else if (g.count && g.kind != DRAWN) {
            if (!own->waits) {
                if (!wait_for(own, &g, ROOT, 1)) return 0;
            } else if (came) /* an earlier one is still being followed; of this one the first level will do */
                compared(b, own, &g, ROOT, 1, token[0]);
        }
        learnt[2 * i] = follow(b, own, token + done, came - done);
        learnt[2 * i + 1] = own->waits;
    }
    return 1;
}
