/* A layer of a Llama-shaped decoder over rows of lanes, and all that it is made of. Knows no pass, no Python, no request.
 *
 * Every row's arithmetic has one order, whatever shares the pass: a product sums over k in ascending order,
 * attention over positions in ascending order, wherever the columns of a tree lie. So the bits of a row do not
 * depend on how many rows there are, on their tree, or on the number of threads.
 *
 * Compiled once for each dtype: BF16=1 (weights, keys, values, activations bfloat16, sums float32) or 0 (float32).
 * A "unit" is 32 bits of a row: a pair of bfloat16 or one float32. Weights lie in panels of 16 outputs,
 * [out / 16][units][16], so that one register, or several, holds the same unit of 16 outputs.
 */
#include "vector.h"
#include "turn.h"
#include "product.h"

typedef struct {
    Linear qkv, o, gate_up, down; /* gate_up: panels of gate and up in turn */
    const float *before_attention, *after_attention, *before_mlp, *after_mlp, *q_norm, *k_norm; /* or NULL */
    int64_t norm_all;  /* q_norm and k_norm act on all heads at once, not on each */
    int64_t table;     /* which rotary table, -1 = none */
    int64_t window;    /* positions a row sees, itself included; 0 = all */
    float scale, softcap; /* softcap 0 = none */
} Layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, dim, inner, vocab, gelu, rotary; /* rotary: dims that turn */
    float eps, embed_scale;
    const elem *embed; /* [vocab, hidden], or NULL: read from the panels of head */
    const float *norm;
    Linear head;
    const Layer *layer;
} Model;

typedef struct {
    int64_t rows, segments, wanted, taps, angles, threads;
    const int64_t *token, *position, *column, *lane, *parent; /* [rows]; parent: row of the parent node, -1 = certain */
    const int64_t *offset;                                    /* [segments + 1] */
    const int64_t *row;                                       /* [wanted] */
    const int64_t *tap;                                       /* [taps] */
    const int64_t *angle;                                     /* [rows]: a row's place in a table */
    const float *cos, *sin;                                   /* [tables, angles, rotary] */
    elem *store;                                              /* [layers, 2, lanes, kv_heads, capacity, dim] */
    int64_t lanes, capacity;
    float *logits;  /* [wanted, vocab] */
    elem *features; /* [rows, taps, hidden] */
    char *scratch;  /* at least scratch_bytes() */
} Pass;

#include "attention.h"

/* ---- norms and rotation ---------------------------------------------------------------------------------- */

static void norm(const float *x, const float *weight, float eps, int64_t n, float *out) {
    vf squares = splat(0);
    for (int64_t i = 0; i < n; i += W) {
        vf v = *(const vf_u *)(x + i);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum_of(squares) / (float)n + eps);
    for (int64_t i = 0; i < n; i += W) *(vf_u *)(out + i) = *(const vf_u *)(x + i) * scale * *(const vf_u *)(weight + i);
}
static void rotate(float *x, const float *cos, const float *sin, int64_t width) {
    int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

static int64_t row_stride(const Pass *p) { return (p->capacity + 2 * L - 1) & ~(int64_t)(L - 1); }

static int64_t tile_height(const Model *m, const Pass *p) {
    int64_t heads = m->heads / m->kv_heads, fit = SCORES_BYTES / (heads * row_stride(p) * 4);
    return fit < 1 ? 1 : fit < TILE_ROWS ? fit : TILE_ROWS;
}
/* Rows of a segment that one task attends for, `tile` at most: so that few tasks go evenly into the threads. */
static int64_t piece_height(const Model *m, const Pass *p, int64_t rows, int64_t tile) {
    int64_t pieces = (rows + tile - 1) / tile, few = 4 * p->threads;
    while (pieces < rows && pieces * m->kv_heads * p->segments < few && pieces * m->kv_heads % p->threads) pieces++;
    return (rows + pieces - 1) / pieces;
}
static int64_t scores_bytes(const Model *m, const Pass *p) {
    return padded(tile_height(m, p) * (m->heads / m->kv_heads) * row_stride(p) * 4);
}
static int64_t widest_input(const Model *m) {
    int64_t mixed = m->heads * m->dim, most = m->hidden > m->inner ? m->hidden : m->inner;
    return mixed > most ? mixed : most;
}
static int64_t room_bytes(const Model *m, int64_t rows) {
    return prepared_bytes(&m->head, rows, widest_input(m));
}
static int64_t panel_bytes(const Model *m) {
    return m->head.part[0] ? LAID_MOST + 2 * L * 4 * widest_input(m) : 0;
}
static int64_t own_bytes(const Model *m, const Pass *p) {
    return scores_bytes(m, p) + padded(m->dim / PER_UNIT * L * 4) + room_bytes(m, ALONE) +
           panel_bytes(m);
}
static int64_t widest_row(const Model *m) {
    int64_t qkv = (m->heads + 2 * m->kv_heads) * m->dim;
    return qkv > m->hidden ? qkv : m->hidden;
}

/* ---- rows ------------------------------------------------------------------------------------------------ */

static void embed(const Model *m, int64_t token, float *x) {
    if (m->embed)
        for (int64_t i = 0; i < m->hidden; i++) x[i] = widen(m->embed[token * m->hidden + i]) * m->embed_scale;
    else if (m->head.bits) { /* int8 */
        const int8_t *panel = (const int8_t *)m->head.w + token / L * PANEL8(m->hidden) + token % L * 2;
        float scale = m->head.scale[token] * m->embed_scale;
        for (int64_t i = 0; i < m->hidden; i++) x[i] = (float)panel[i / 2 * L * 2 + i % 2] * scale;
    } else {
        const uint32_t *panel = m->head.w + token / L * m->head.units * L + token % L;
        for (int64_t u = 0; u < m->head.units; u++)
            for (int64_t j = 0; j < PER_UNIT; j++)
                x[u * PER_UNIT + j] = widen(((const elem *)(panel + u * L))[j]) * m->embed_scale;
    }
}

/* Head norms, rotation, keys and values into their columns, the query narrowed. */
static void place(const Model *m, const Pass *p, const Layer *layer, int64_t l, int64_t r, float *qkv, elem *q) {
    int64_t nq = m->heads * m->dim, nk = m->kv_heads * m->dim;
    float *k = qkv + nq, *v = k + nk;
    if (layer->q_norm && layer->norm_all) norm(qkv, layer->q_norm, m->eps, nq, qkv);
    if (layer->k_norm && layer->norm_all) norm(k, layer->k_norm, m->eps, nk, k);
    for (int64_t h = 0; h < m->heads + m->kv_heads; h++) {
        float *x = qkv + h * m->dim;
        const float *weight = h < m->heads ? layer->q_norm : layer->k_norm;
        if (weight && !layer->norm_all) norm(x, weight, m->eps, m->dim, x);
        if (layer->table >= 0) {
            int64_t at = (layer->table * p->angles + p->angle[r]) * m->rotary;
            rotate(x, p->cos + at, p->sin + at, m->rotary);
        }
    }
    int64_t shared = m->heads / m->kv_heads * m->dim;
    for (int64_t g = 0; g < m->kv_heads; g++) {
        narrow(qkv + g * shared, shared, q + (g * p->rows + r) * shared);
        int64_t at = ((p->lane[r] * m->kv_heads + g) * p->capacity + p->column[r]) * m->dim;
        int64_t half = p->lanes * m->kv_heads * p->capacity * m->dim;
        narrow(k + g * m->dim, m->dim, p->store + l * 2 * half + at);
        narrow(v + g * m->dim, m->dim, p->store + (l * 2 + 1) * half + at);
    }
}

/* stream += more, normed before where the family does that. */
static void add(const Model *m, const float *weight, float *more, float *stream) {
    if (weight) norm(more, weight, m->eps, m->hidden, more);
    for (int64_t i = 0; i < m->hidden; i++) stream[i] += more[i];
}

/* What the next product reads: the stream, normed where the family does that. */
static void ready(const Model *m, const float *weight, const float *stream, float *normed, elem *out) {
    if (weight) norm(stream, weight, m->eps, m->hidden, normed);
    narrow(weight ? normed : stream, m->hidden, out);
}

/* ---- a layer --------------------------------------------------------------------------------------------- */

#define BARRIER _Pragma("omp barrier")
#define TAKE(type, bytes) (type *)at; at += padded(bytes)

/* Rows on their way through the layers. */
typedef struct {
    float *x;     /* [rows, hidden]: the stream */
    float *y;     /* [rows, widest_row()]: what a product gave */
    elem *h;      /* what a product reads */
    elem *q, *mixed, *inner;
    Seen *seen;
    char *together, *own; /* memory to prepare rows in together; that of the threads */
} Work;

static void attend_all(const Model *m, const Pass *p, const Layer *layer, int64_t l, const Work *w) {
    int64_t tile = tile_height(m, p), lds = row_stride(p), task = 0;
    float *scores = (float *)(w->own + omp_get_thread_num() * own_bytes(m, p));
    uint32_t *block = (uint32_t *)((char *)scores + scores_bytes(m, p));
    for (int64_t s = 0; s < p->segments; s++) {
        int64_t high = piece_height(m, p, p->offset[s + 1] - p->offset[s], tile);
        for (int64_t r = p->offset[s]; r < p->offset[s + 1]; r += high)
            for (int64_t g = 0; g < m->kv_heads; g++, task++)
                if (task % omp_get_num_threads() == omp_get_thread_num()) {
                    int64_t end = r + high < p->offset[s + 1] ? r + high : p->offset[s + 1];
                    attend(m, p, layer, l, w->seen, g, r, end, w->q, w->mixed, scores, lds, block);
                }
    }
}

/* Rows first to end of the stream through a layer; h, from its beginning, holds what q, k and v read. Every thread ends
 * with the rows that `share` gives it, not waiting for the others. */
static void run_layer(const Model *m, const Pass *p, int64_t l, const Work *w, int64_t first, int64_t end,
                      const Room *room) {
    const Layer *layer = m->layer + l;
    int64_t n = end - first, hidden = m->hidden, nq = m->heads * m->dim, from, to;
    float *x = w->x + first * hidden, *y = w->y;
    share(n, &from, &to);
    BARRIER
    product(&layer->qkv, w->h, n, y, NULL, 0, room);
    BARRIER
    for (int64_t r = from; r < to; r++) place(m, p, layer, l, first + r, y + r * layer->qkv.out, w->q);
    BARRIER
    attend_all(m, p, layer, l, w);
    BARRIER
    product(&layer->o, w->mixed + first * nq, n, y, NULL, 0, room);
    BARRIER
    for (int64_t r = from; r < to; r++) {
        add(m, layer->after_attention, y + r * hidden, x + r * hidden);
        ready(m, layer->before_mlp, x + r * hidden, y + r * hidden, w->h + r * hidden);
    }
    BARRIER
    product(&layer->gate_up, w->h, n, NULL, w->inner, m->gelu, room);
    BARRIER
    product(&layer->down, w->inner, n, y, NULL, 0, room);
    BARRIER
    for (int64_t r = from; r < to; r++) add(m, layer->after_mlp, y + r * hidden, x + r * hidden);
}
