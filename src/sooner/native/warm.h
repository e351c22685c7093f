/* A warm table as draft/table.py keeps it: what may follow the longest end of a text that it knows. */
#include <stdint.h>

#define RUN 3      /* tokens of the longest key */
#define ID_BITS 21 /* of each in a key */

typedef struct { /* as table.py keeps one */
    int64_t vocab, level, keys[RUN]; /* keys: of runs of three tokens, two, one */
    const int64_t *key[RUN];         /* sorted */
    const int32_t *at[RUN], *ends, *ids;
    const uint8_t *codes;
} Table;

static int64_t bisect(const int64_t *keys, int64_t count, int64_t key) {
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (keys[middle] < key) low = middle + 1;
        else high = middle;
    }
    return low < count && keys[low] == key ? low : -1;
}
/* The row of the longest end of `tail` that is a key, and which kind of key it is; -1 where none is. */
static int64_t warm_row(const Table *t, const int32_t *tail, int size, int64_t *kind) {
    int64_t first = 0;
    for (*kind = 0; *kind < RUN; first += t->keys[(*kind)++]) {
        int64_t key = 0, length = RUN - *kind, known = size >= length;
        for (int64_t i = size - length; known && i < size; i++)
            known = tail[i] < t->vocab, key = key << ID_BITS | tail[i];
        int64_t at = known ? bisect(t->key[*kind], t->keys[*kind], key) : -1;
        if (at >= 0) return first + t->at[*kind][at];
    }
    return -1;
}
