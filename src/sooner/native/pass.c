/* One pass of a Llama-shaped decoder over lanes, in one call. Knows no Python, no request, no acceptance.
 */
#include "decoder.h"

int64_t scratch_bytes(const Model *m, const Pass *p) {
    int64_t n = p->rows;
    return padded(n * m->hidden * 4) + padded(n * widest_row(m) * 4) + padded(n * m->hidden * sizeof(elem)) +
           padded(n * m->heads * m->dim * sizeof(elem)) * 2 + padded(n * m->inner * sizeof(elem)) +
           padded(n * sizeof(Seen)) + room_bytes(m, n) + p->threads * own_bytes(m, p);
}

int64_t struct_bytes(int64_t which) {
    return which == 0 ? sizeof(Linear) : which == 1 ? sizeof(Layer) : which == 2 ? sizeof(Model) : sizeof(Pass);
}

/* A thread's own room. at: where the memory of the threads begins. */
static Room own_room(const Model *m, const Pass *p, char *at, char *together) {
    char *own = at + omp_get_thread_num() * own_bytes(m, p) + scores_bytes(m, p) + padded(m->dim / PER_UNIT * L * 4);
    return (Room){own, together, (uint32_t *)(own + room_bytes(m, ALONE))};
}

static void keep(const Model *m, const Pass *p, int64_t layer, int64_t from, int64_t to, const float *x) {
    for (int64_t t = 0; t < p->taps; t++)
        if (p->tap[t] == layer)
            for (int64_t r = from; r < to; r++)
                narrow(x + r * m->hidden, m->hidden, p->features + (r * p->taps + t) * m->hidden);
}

void run_pass(const Model *m, const Pass *p) {
    int64_t n = p->rows, hidden = m->hidden, nq = m->heads * m->dim;
    char *at = p->scratch;
    Work w;
    w.x = TAKE(float, n * hidden * 4);
    w.y = TAKE(float, n * widest_row(m) * 4);
    w.h = TAKE(elem, n * hidden * sizeof(elem));
    w.q = TAKE(elem, n * nq * sizeof(elem));
    w.mixed = TAKE(elem, n * nq * sizeof(elem));
    w.inner = TAKE(elem, n * m->inner * sizeof(elem));
    w.seen = TAKE(Seen, n * sizeof(Seen));
    w.together = TAKE(char, room_bytes(m, n));
    w.own = at;
    see(p, 0, n, w.seen);
#pragma omp parallel num_threads((int)p->threads)
    {
        int64_t from, to;
        float *x = w.x, *y = w.y;
        Room room = own_room(m, p, w.own, w.together);
        share(n, &from, &to);
        for (int64_t r = from; r < to; r++) embed(m, p->token[r], x + r * hidden);
        for (int64_t l = 0; l < m->layers; l++) {
            keep(m, p, l, from, to, x);
            for (int64_t r = from; r < to; r++)
                ready(m, m->layer[l].before_attention, x + r * hidden, y + r * hidden, w.h + r * hidden);
            run_layer(m, p, l, &w, 0, n, &room);
        }
        BARRIER
        int last = 0; /* whether every row's final state is wanted as a feature */
        for (int64_t t = 0; t < p->taps; t++) last |= p->tap[t] == m->layers;
        if (last) {
            for (int64_t r = from; r < to; r++) norm(x + r * hidden, m->norm, m->eps, hidden, y + r * hidden);
            keep(m, p, m->layers, from, to, y);
            BARRIER
        }
        share(p->wanted, &from, &to);
        for (int64_t i = from; i < to; i++) ready(m, m->norm, x + p->row[i] * hidden, y + i * hidden, w.h + i * hidden);
        BARRIER
        if (p->wanted) product(&m->head, w.h, p->wanted, p->logits, NULL, 0, &room);
    }
}

#include "bounds.h"
