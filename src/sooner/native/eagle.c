/* Drafts of an EAGLE head, of many requests in one call: slots of true features, then the levels of their trees. Knows no
 * acceptance and no text; draft/eagle_torch.py says the same in torch.
 *
 * Rows of the call: first those of the true slots, request after request, then level after level the beams of every
 * request. The last true slot of a request is the root of its tree; a row's stream is what the next slot takes as features.
 */
#include "decoder.h"
#include "few.h"

typedef struct {
    Model body; /* one layer; its embedding, its LM head (vocab: ids that it knows); norm NULL: EAGLE-1 has none */
    Linear fc;
    const float *stream_norm, *input_norm, *token_norm, *feature_norm; /* or NULL; EAGLE-1 has none of them */
    const int64_t *ids;                                                /* [vocab]: the target's, or NULL: the same */
    int64_t streams, width;                                            /* what the target gives for each token */
    int64_t normed_residual, norm_output;
} Head;

typedef struct {
    int64_t requests, fresh, beams, threads, angles, lanes, capacity, most; /* most: nodes of a draft there is room for */
    double least;
    /* [requests]: lane, slots it holds, true slots to make, place in the text of the first slot, limits; depth 0: no draft */
    const int64_t *lane, *held, *made, *first, *depth, *width, *nodes;
    const int64_t *token;   /* [fresh] */
    const elem *features;   /* [fresh, streams, width] */
    const float *cos, *sin; /* [angles, dim] */
    elem *store;            /* [2, lanes, kv_heads, capacity, dim] */
    int64_t *size, *tokens, *parents; /* the drafts: [requests], [requests, most], [requests, most] */
    float *scores;                    /* [requests, most]: log-probabilities of the paths */
    char *scratch;                    /* at least draft_bytes() */
} Job;

/* A node that was scored. */
typedef struct {
    int64_t token, parent;
    float score;
    int64_t place; /* in the draft, -1 = not in it */
} Node;

/* A request's tree while it grows: nodes scored so far, reads of this level (see Reading), columns in use, its level. */
typedef struct {
    Node *node;
    int64_t size, read, reads, columns, level;
} Tree;

/* A row whose likeliest tokens are asked for: the node it stands for (-1 = the root), its path's log-probability. */
typedef struct {
    int64_t row, node, tree;
    float above;
} Reading;

typedef struct {
    Pass pass;
    Work work;
    int64_t *token, *position, *column, *lane, *parent, *angle, *offset; /* of every row; offset: of this level */
    int64_t first, end, reads; /* rows of this level */
    Tree *tree;
    Reading *read;
    float *logits, *values; /* [reads, vocab], [reads, beams] */
    int64_t *ids;           /* [reads, beams] */
    int64_t inputs;         /* of the widest map */
    char *prepared;         /* where each thread prepares rows by itself */
} State;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t children(const Head *e, const Job *j, int64_t i) {
    return smaller(smaller(larger_of(j->width[i], 1), j->beams), e->body.vocab);
}
static int64_t beams(const Job *j, int64_t i) { return j->width[i] == 1 ? 1 : j->beams; }
static int64_t scored(const Head *e, const Job *j, int64_t i) {
    return j->depth[i] ? children(e, j, i) * (1 + (j->depth[i] - 1) * beams(j, i)) : 0;
}

static int by_score(const void *left, const void *right) {
    const Node *a = *(const Node *const *)left, *b = *(const Node *const *)right;
    return a->score != b->score ? (a->score < b->score ? 1 : -1) : a < b ? -1 : 1;
}

/* ---- memory ---------------------------------------------------------------------------------------------- */

/* Lays out all that a call needs from `at` on, and returns where it ends. */
static char *lay(const Head *e, const Job *j, State *s, char *at) {
    const Model *m = &e->body;
    int64_t rows = j->fresh, reads = 0, nodes = 0;
    for (int64_t i = 0; i < j->requests; i++)
        if (j->depth[i]) {
            rows += (j->depth[i] - 1) * beams(j, i);
            reads += beams(j, i);
            nodes += scored(e, j, i);
        }
    int64_t most = larger_of(rows, 1), wide = larger_of(2 * m->hidden, e->streams * e->width);
    s->pass = (Pass){.rows = rows, .angles = j->angles, .threads = j->threads, .cos = j->cos, .sin = j->sin,
                     .store = j->store, .lanes = j->lanes, .capacity = j->capacity};
    int64_t **each[] = {&s->token, &s->position, &s->column, &s->lane, &s->parent, &s->angle};
    for (int k = 0; k < 6; k++) { *each[k] = TAKE(int64_t, most * 8); }
    s->offset = TAKE(int64_t, (j->requests + 1) * 8);
    s->tree = TAKE(Tree, j->requests * sizeof(Tree));
    s->read = TAKE(Reading, (reads + 1) * sizeof(Reading));
    Node *node = TAKE(Node, nodes * sizeof(Node));
    s->logits = TAKE(float, reads * m->vocab * 4);
    s->values = TAKE(float, reads * j->beams * 4);
    s->ids = TAKE(int64_t, reads * j->beams * 8);
    s->work.x = TAKE(float, most * m->hidden * 4);
    s->work.y = TAKE(float, most * widest_row(m) * 4);
    s->work.h = TAKE(elem, most * wide * sizeof(elem));
    s->work.q = TAKE(elem, most * m->heads * m->dim * sizeof(elem));
    s->work.mixed = TAKE(elem, most * m->heads * m->dim * sizeof(elem));
    s->work.inner = TAKE(elem, most * m->inner * sizeof(elem));
    s->work.seen = TAKE(Seen, most * sizeof(Seen));
    s->inputs = larger_of(wide, widest_input(m));
    s->work.together = TAKE(char, prepared_bytes(&m->head, most, s->inputs));
    s->prepared = TAKE(char, j->threads * prepared_bytes(&m->head, ALONE, s->inputs));
    s->work.own = at;
    for (int64_t i = 0; j->scratch && i < j->requests; i++) { /* without it only the size is asked for */
        s->tree[i] = (Tree){.node = node};
        node += scored(e, j, i);
    }
    return at + j->threads * own_bytes(m, &s->pass);
}

int64_t draft_bytes(const Head *e, const Job *j) {
    Job asked = *j;
    State s;
    asked.scratch = NULL;
    return (int64_t)(intptr_t)lay(e, &asked, &s, NULL);
}

int64_t draft_struct_bytes(int64_t which) { return which == 0 ? sizeof(Head) : sizeof(Job); }

/* ---- planning -------------------------------------------------------------------------------------------- */

/* The rows of this level are known: whom each sees, and the pass that runs them. */
static void begin(State *s) {
    Pass *p = &s->pass;
    p->token = s->token, p->position = s->position, p->column = s->column, p->lane = s->lane;
    p->parent = s->parent, p->angle = s->angle, p->offset = s->offset;
    see(p, s->first, s->end, s->work.seen);
}

static void plan_true_slots(const Job *j, State *s) {
    int64_t r = 0;
    s->first = s->pass.segments = s->reads = 0;
    for (int64_t i = 0; i < j->requests; i++) {
        if (j->made[i]) s->offset[s->pass.segments++] = r;
        for (int64_t k = 0; k < j->made[i]; k++, r++) {
            s->token[r] = j->token[r], s->lane[r] = j->lane[i], s->parent[r] = -1;
            s->position[r] = s->column[r] = j->held[i] + k;
            s->angle[r] = j->first[i] + j->held[i] + k;
        }
        s->tree[i].columns = j->held[i] + j->made[i];
        s->tree[i].read = s->reads;
        s->tree[i].reads = j->depth[i] > 0;
        if (j->depth[i]) s->read[s->reads++] = (Reading){r - 1, -1, i, 0};
    }
    s->offset[s->pass.segments] = s->end = r;
    begin(s);
}

/* Whether nothing deeper can be among the best nodes, or it is too unlikely to be worth a pass. beam: best first. */
static int enough(const Job *j, const Tree *t, int64_t i, Node *const *beam, int64_t kept) {
    double together = 0;
    int64_t better = 0;
    for (int64_t k = 0; k < kept; k++) together += exp(beam[k]->score);
    for (int64_t n = 0; n < t->size; n++) better += t->node[n].score >= beam[0]->score;
    return !(together >= j->least) || better >= j->nodes[i];
}

/* Scores what was read for a tree, and adds the rows of its next level; returns how many. */
static int64_t grow(const Head *e, const Job *j, State *s, int64_t i, Reading *next) {
    Tree *t = s->tree + i;
    int64_t few = children(e, j, i), before = t->size;
    for (int64_t b = t->read; b < t->read + t->reads; b++)
        for (int64_t c = 0; c < few; c++) {
            float score = s->read[b].above + s->values[b * j->beams + c];
            int64_t id = s->ids[b * j->beams + c];
            t->node[t->size++] = (Node){e->ids ? e->ids[id] : id, s->read[b].node, score > -INFINITY ? score : -INFINITY, -1};
        }
    int64_t fresh = t->size - before, kept = smaller(beams(j, i), fresh);
    if (++t->level >= j->depth[i]) return 0;
    Node *beam[fresh];
    for (int64_t k = 0; k < fresh; k++) beam[k] = t->node + before + k;
    qsort(beam, fresh, sizeof *beam, by_score);
    if (enough(j, t, i, beam, kept)) return 0;
    for (int64_t k = 0; k < kept; k++) {
        int64_t r = s->end++, up = s->read[t->read + (beam[k] - t->node - before) / few].row;
        s->token[r] = beam[k]->token, s->lane[r] = j->lane[i], s->parent[r] = up;
        s->position[r] = s->position[up] + 1, s->angle[r] = s->angle[up] + 1, s->column[r] = t->columns++;
        next[k] = (Reading){r, beam[k] - t->node, i, beam[k]->score};
    }
    return kept;
}

static void plan_level(const Head *e, const Job *j, State *s) {
    int64_t reads = 0;
    for (int64_t i = 0; i < j->requests; i++) reads += s->tree[i].reads ? beams(j, i) : 0;
    Reading next[reads + 1];
    reads = 0;
    s->first = s->end;
    s->pass.segments = 0;
    for (int64_t i = 0; i < j->requests; i++) {
        Tree *t = s->tree + i;
        if (!t->reads) continue;
        int64_t from = s->end, kept = grow(e, j, s, i, next + reads);
        if (kept) s->offset[s->pass.segments++] = from;
        t->read = reads, t->reads = kept;
        reads += kept;
    }
    memcpy(s->read, next, reads * sizeof *next);
    s->reads = reads;
    s->offset[s->pass.segments] = s->end;
    begin(s);
}

/* The best nodes of a tree. Scores never rise from a node to its child, and children come later, so ancestors are there. */
static void choose(const Job *j, Tree *t, int64_t i) {
    Node *best[t->size + 1];
    int64_t able = 0, n = 0;
    for (int64_t k = 0; k < t->size; k++)
        if (t->node[k].score > -INFINITY) best[able++] = t->node + k;
    qsort(best, able, sizeof *best, by_score);
    for (int64_t k = 0; k < smaller(able, smaller(j->nodes[i], j->most)); k++) best[k]->place = 0;
    for (int64_t k = 0; k < t->size; k++) {
        Node *one = t->node + k;
        if (one->place < 0) continue;
        one->place = n;
        j->tokens[i * j->most + n] = one->token;
        j->parents[i * j->most + n] = one->parent < 0 ? -1 : t->node[one->parent].place;
        j->scores[i * j->most + n++] = one->score;
    }
    j->size[i] = n;
}

/* ---- the head -------------------------------------------------------------------------------------------- */

/* True rows: the target's streams as the head takes them in, in x. */
static void fuse(const Head *e, const Job *j, const Work *w, int64_t n, const Room *room) {
    int64_t from, to, all = e->streams * e->width, hidden = e->body.hidden;
    float eps = e->body.eps, wide[all];
    share(n, &from, &to);
    for (int64_t r = from; r < to; r++) {
        const elem *given = j->features + r * all;
        float *x = e->body.norm ? wide : w->x + r * hidden; /* EAGLE-1 takes them as they are */
        for (int64_t k = 0; k < all; k += W) *(vf_u *)(x + k) = load(given + k);
        if (!e->body.norm) continue;
        for (int64_t k = 0; e->stream_norm && k < all; k += e->width)
            norm(x + k, e->stream_norm + k, eps, e->width, x + k);
        ready(&(Model){.hidden = all, .eps = eps}, e->input_norm, x, x, w->h + r * all);
    }
    if (!e->body.norm) return;
    BARRIER
    product(&e->fc, w->h, n, w->x, NULL, 0, room);
    BARRIER
}

/* Joins tokens and features (x) of the rows of this level: x becomes the stream, h what the layer reads. */
static void enter(const Head *e, const State *s, const Room *room) {
    const Model *m = &e->body;
    const Work *w = &s->work;
    int64_t from, to, hidden = m->hidden;
    float *y = w->y;
    share(s->end - s->first, &from, &to);
    for (int64_t i = from; i < to; i++) {
        int64_t r = s->first + i, up = s->parent[r];
        float *x = w->x + r * hidden, *own = y + i * hidden;
        elem *h = w->h + i * 2 * hidden;
        if (up >= 0) memcpy(x, w->x + up * hidden, hidden * sizeof *x);
        embed(m, s->token[r], own);
        ready(m, e->token_norm, own, own, h);
        ready(m, e->feature_norm, x, own, h + hidden);
        if (e->normed_residual) memcpy(x, own, hidden * sizeof *x);
    }
    if (m->norm) return;
    BARRIER
    product(&e->fc, w->h, s->end - s->first, w->x + s->first * hidden, NULL, 0, room);
    BARRIER
    for (int64_t i = from; i < to; i++) narrow(w->x + (s->first + i) * hidden, hidden, w->h + i * hidden);
}

/* The likeliest tokens of every reading and their log-probabilities. */
static void likeliest(const Head *e, const Job *j, const State *s, const Room *room) {
    const Model *m = &e->body;
    int64_t from, to, hidden = m->hidden;
    share(s->reads, &from, &to);
    for (int64_t i = from; i < to; i++) {
        float *x = s->work.x + s->read[i].row * hidden, *y = s->work.y + i * hidden;
        ready(m, m->norm, x, y, s->work.h + i * hidden);
        if (e->norm_output) memcpy(x, y, hidden * sizeof *x);
    }
    BARRIER
    product(&m->head, s->work.h, s->reads, s->logits, NULL, 0, room);
    BARRIER
    for (int64_t i = from; i < to; i++) {
        float *logits = s->logits + i * m->vocab, *values = s->values + i * j->beams, sum = 0;
        int64_t few = children(e, j, s->read[i].tree), k = 0;
        few_best(logits, m->vocab, few, s->ids + i * j->beams, values);
        vf sums = splat(0);
        for (; k + W <= m->vocab; k += W) sums += vexp(*(vf_u *)(logits + k) - values[0]);
        for (; k < m->vocab; k++) sum += expf(logits[k] - values[0]);
        float norm = values[0] + logf(sum_of(sums) + sum);
        for (int64_t c = 0; c < few; c++) values[c] -= norm; /* at most 0, since the sum holds exp(0) */
    }
}

void draft(const Head *e, const Job *j) {
    State s;
    lay(e, j, &s, j->scratch);
    plan_true_slots(j, &s);
#pragma omp parallel num_threads((int)j->threads)
    {
        Room room = {s.prepared + omp_get_thread_num() * prepared_bytes(&e->body.head, ALONE, s.inputs), s.work.together, NULL};
        fuse(e, j, &s.work, s.end, &room);
        while (s.first < s.end) {
            enter(e, &s, &room);
            run_layer(&e->body, &s.pass, 0, &s.work, s.first, s.end, &room);
            BARRIER
            if (!s.reads) break;
            likeliest(e, j, &s, &room);
            BARRIER
            if (omp_get_thread_num() == 0) plan_level(e, j, &s);
            BARRIER
        }
    }
    for (int64_t i = 0; i < j->requests; i++) choose(j, s.tree + i, i);
}
