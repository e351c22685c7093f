/* What more rows cost, and how many guesses are worth theirs. Knows no Python, no filter and no request.
 * control/passes.py and control/price.py say what each part means and give the constants; they are the oracles.
 */

typedef struct {
    const double *mean;              /* estimates: the log of the pace, the line, the log of each departure */
    const int64_t *apart;            /* [1 + counted]: where the departure of so many rows is, -1 = not seen */
    const int64_t *knot;             /* [knots]: rows where the slope may change; slopes begin at mean[slope] */
    int64_t knots, slope, counted, tile;
    double near, least;
} Costs;

static double share_now(const Costs *c, int64_t rows) {
    if (rows > c->counted) return exp(c->mean[0]);
    if (c->apart[rows] >= 0) return exp(c->mean[0] + c->mean[c->apart[rows]]);
    int64_t first = (rows - 1) / c->tile * c->tile + 1, nearest = -1;
    for (int64_t seen = first; seen < first + c->tile && seen <= c->counted; seen++)
        if (c->apart[seen] >= 0 && (nearest < 0 || llabs(seen - rows) < llabs(nearest - rows))) nearest = seen;
    if (nearest < 0) return exp(c->mean[0]);
    return exp(c->mean[0] + c->mean[c->apart[nearest]] * pow(c->near, (double)llabs(nearest - rows)));
}
/* Seconds of each row more than `rows`. line: what the line says of `rows`; keys: of what one row reads; to: [count],
 * with room for one more. */
void price_rise(const Costs *c, int64_t rows, double line, double keys, int64_t count, double *to) {
    double pace = exp(c->mean[0]), least = 0, last;
    int64_t segment = 0;
    while (segment + 1 < c->knots && rows >= c->knot[segment + 1]) segment++;
    for (int64_t i = 0; i <= count; i++) {
        to[i] = line * share_now(c, rows + i);
        if (segment + 1 < c->knots && rows + i >= c->knot[segment + 1]) segment++;
        line += c->mean[c->slope + segment] + keys;
    }
    last = to[count];
    for (int64_t i = count - 1; i >= 0; i--) { /* more rows never take less time */
        while (segment && rows + i < c->knot[segment]) segment--;
        least = c->least * pace * (c->mean[c->slope + segment] + keys);
        double here = fmin(to[i], last - least);
        to[i] = last - here, last = here;
    }
}

typedef struct {
    double ready, seconds, price, rate, doubt, near; /* tokens and seconds of the pass without guesses; see worth_their_rows */
} Plain;

/* What a node brings beside what its row takes. */
static double node_gain(double value, double cost, double price, double doubt) {
    return -value - (1 + doubt * (1 + value)) * price * cost;
}

typedef struct {
    double price, seconds;     /* of a second; of the rows of those that are worth it */
    int64_t worth, few, far;   /* nodes that are worth their rows; as few and as many as are nearly as good a choice */
} Choice;

/* How many of `count` nodes are worth their rows, the best first. value: minus the chances; costs, alone: of each row,
 * in this pass and in one without prompts. */
Choice price_worth(const double *value, int64_t count, const double *costs, const double *alone, const Plain *p) {
    double tokens = p->ready, seconds = p->seconds, ratio = tokens / seconds, best = 0, gain = 0, rows = 0;
    for (int64_t i = 0; i < count; i++) {
        tokens -= value[i], seconds += alone[i];
        if (tokens > ratio * seconds) ratio = tokens / seconds;
    }
    Choice found = {.price = fmax(fmin(p->price, ratio), p->rate)};
    for (int64_t i = 0; i < count; i++) {
        rows += costs[i], gain += node_gain(value[i], costs[i], found.price, p->doubt);
        if (gain > best) best = gain, found.worth = i + 1, found.seconds = rows;
    }
    found.few = -1;
    gain = rows = 0;
    for (int64_t n = 0; n <= count; n++) {
        if (n) rows += costs[n - 1], gain += node_gain(value[n - 1], costs[n - 1], found.price, p->doubt);
        if (n != found.worth && gain < best - p->near * found.price * (p->seconds + rows)) continue;
        found.few = found.few < 0 ? n : found.few, found.far = n;
    }
    return found;
}
