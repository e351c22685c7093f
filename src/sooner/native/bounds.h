/* What a pass cannot be faster than: its products alone, and the reading of memory. For benchmarks. Knows no caller. */

/* The products of a pass on whatever its scratch memory holds. */
void run_products(const Model *m, const Pass *p) {
    int64_t n = p->rows, nq = m->heads * m->dim;
    char *at = p->scratch;
    float *y = TAKE(float, n * widest_row(m) * 4);
    elem *h = TAKE(elem, n * m->hidden * sizeof(elem));
    elem *mixed = TAKE(elem, n * nq * sizeof(elem));
    elem *inner = TAKE(elem, n * m->inner * sizeof(elem));
    char *together = TAKE(char, room_bytes(m, n));
#pragma omp parallel num_threads((int)p->threads)
    {
        Room room = own_room(m, p, at, together);
        for (int64_t l = 0; l < m->layers; l++) {
            const Layer *layer = m->layer + l;
            product(&layer->qkv, h, n, y, NULL, 0, &room);
            BARRIER
            product(&layer->o, mixed, n, y, NULL, 0, &room);
            BARRIER
            product(&layer->gate_up, h, n, NULL, inner, m->gelu, &room);
            BARRIER
            product(&layer->down, inner, n, y, NULL, 0, &room);
            BARRIER
        }
        product(&m->head, h, n < p->wanted ? n : p->wanted, p->logits, NULL, 0, &room);
    }
}

/* Reads `bytes` bytes, a multiple of 128, once; the sum keeps the compiler from leaving it out. */
float read_all(const char *data, int64_t bytes, int64_t threads) {
    float total = 0;
#pragma omp parallel num_threads((int)threads) reduction(+ : total)
    {
        int64_t from, to;
        share(bytes / 128, &from, &to);
        vu a = {0}, b = {0};
        for (int64_t i = from; i < to; i++) {
            a ^= *(const vu_u *)(data + i * 128);
            b ^= *(const vu_u *)(data + i * 128 + 64);
        }
        total += (float)(a ^ b)[0];
    }
    return total;
}
