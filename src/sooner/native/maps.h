/* Maps from 64-bit keys to whole numbers, and stores of rows that forget the older half. Know nothing of drafts. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint64_t *key;
    int32_t *at; /* -1 = no key here */
    int64_t room, held;
} Map;

static uint64_t mixed_bits(uint64_t x) {
    x ^= x >> 33, x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ x >> 33;
}
static int64_t map_place(const Map *m, uint64_t key) {
    int64_t i = (int64_t)(mixed_bits(key) & (uint64_t)(m->room - 1));
    while (m->at[i] >= 0 && m->key[i] != key) i = (i + 1) & (m->room - 1);
    return i;
}
static int32_t *map_find(const Map *m, uint64_t key) {
    if (!m->held) return NULL;
    int64_t i = map_place(m, key);
    return m->at[i] >= 0 ? m->at + i : NULL;
}
static void map_free(Map *m) {
    free(m->key), free(m->at);
    *m = (Map){0};
}
/* 0 where there is no memory for it. */
static int map_grow(Map *m) {
    Map more = {0};
    more.room = m->room ? 2 * m->room : 64;
    more.key = malloc((size_t)more.room * sizeof *more.key);
    more.at = malloc((size_t)more.room * sizeof *more.at);
    if (!more.key || !more.at) return map_free(&more), 0;
    memset(more.at, 0xff, (size_t)more.room * sizeof *more.at);
    for (int64_t i = 0; i < m->room; i++)
        if (m->at[i] >= 0) {
            int64_t to = map_place(&more, m->key[i]);
            more.key[to] = m->key[i], more.at[to] = m->at[i];
        }
    more.held = m->held;
    map_free(m);
    *m = more;
    return 1;
}
/* at >= 0. 0 where there is no memory for it. */
static int map_put(Map *m, uint64_t key, int32_t at) {
    if (2 * (m->held + 1) > m->room && !map_grow(m)) return 0;
    int64_t i = map_place(m, key);
    m->held += m->at[i] < 0;
    m->key[i] = key, m->at[i] = at;
    return 1;
}

#define TOPS 8 /* likeliest ids kept of a row */
typedef struct {
    int64_t request; /* whose row it is */
    int32_t ids[TOPS];
    int16_t codes[TOPS];
    int16_t count, quoted; /* quoted: from a prompt, where the target's own thoughts are not known */
} Row;

typedef struct {
    Map map;
    Row *rows;
    int64_t room;
} Half;

/* At most 2 * half rows: when the newer half is full it becomes the older one, which is dropped. */
typedef struct {
    Half newer, older;
    int64_t half;
} Store;

static const Row *half_find(const Half *h, uint64_t key) {
    const int32_t *at = map_find(&h->map, key);
    return at ? h->rows + *at : NULL;
}
static const Row *store_find(const Store *s, uint64_t key) {
    const Row *found = half_find(&s->newer, key);
    return found ? found : half_find(&s->older, key);
}
static void half_free(Half *h) {
    map_free(&h->map), free(h->rows);
    *h = (Half){0};
}
/* What there is no memory for is not kept. */
static void store_put(Store *s, uint64_t key, const Row *row) {
    Half *h = &s->newer;
    int32_t *known = map_find(&h->map, key);
    if (known) {
        h->rows[*known] = *row;
    } else {
        if (h->map.held == h->room) {
            int64_t room = h->room ? 2 * h->room : 64;
            Row *rows = realloc(h->rows, (size_t)room * sizeof *rows);
            if (!rows) return;
            h->rows = rows, h->room = room;
        }
        h->rows[h->map.held] = *row;
        if (!map_put(&h->map, key, (int32_t)h->map.held)) return;
    }
    if (h->map.held >= s->half) {
        half_free(&s->older);
        s->older = s->newer;
        s->newer = (Half){0};
    }
}
static int64_t store_keys(const Store *s) {
    int64_t keys = s->newer.map.held;
    for (int64_t i = 0; i < s->older.map.room; i++)
        keys += s->older.map.at[i] >= 0 && !map_find(&s->newer.map, s->older.map.key[i]);
    return keys;
}
