/* What a controller counts with, twice a step, in one library: between two passes nothing of it is in the processor's
 * caches, and each library has pages of its own to fetch. Knows no Python and no policy.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "filter.h"
#include "price.h"
#include "belief.h"

typedef struct {
    double floor;                 /* below such a chance a node is not looked at */
    const double *costs, *alone;  /* see price_worth */
    Plain plain;
} Against;

typedef struct {
    Choice choice;
    int64_t nodes; /* that have a chance */
    double *value;
    int64_t *where;
} Weighed;

/* See beliefs_weigh and price_worth. 0 where there is no memory. */
int64_t control_weigh(Beliefs *b, int64_t count, const int64_t *at, const double *score, const Against *a, Weighed *w) {
    w->nodes = beliefs_weigh(b, count, at, score, a->floor, w->value, w->where);
    if (w->nodes < 0) return 0;
    w->choice = price_worth(w->value, w->nodes, a->costs, a->alone, &a->plain);
    return 1;
}
