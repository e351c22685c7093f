"""The default controller: guesses as much as pays, by what passes cost and what guesses brought. No torch.

What is maximised is the text that the whole batch writes a second. Twice a step there is something to decide:
before drafting, whom to ask for a draft and how deep (a drafter costs time too); after it, which of the nodes that
were offered are worth a row of the pass. A node is worth its row if its chance to be accepted is more than what
would be written in the time the row takes. "Off" is the case where no node is; the drafter is still asked
now and then, and what it would have guessed is compared with the text that came.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from sooner.config import Budget
from sooner.control.belief import begin
from sooner.control.cost import Asked, Costs
from sooner.control.fixed import NOTHING, wished, wished_note
from sooner.control.passes import Load
from sooner.control.price import MARGIN, prices, worth_asking
from sooner.control.probes import Probes
from sooner.control.protocol import Guess, Note, StepRecord, Tried, View
from sooner.control.questions import Questions
from sooner.control.shapes import Shapes, levels
from sooner.control.state import Lesson, Now, State, Weighed, Worths

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_CHEAP = 0.15  # drafting for all below this share of a pass needs no choice of depth
_ROOMY, _SPARE = 1.25, 2  # nodes asked for: so many times what was kept lately, and some more
_FORGET = 0.93  # of what was kept lately, a step
_MEASURED = 3  # calls after which the cost of drafting is known
_DECIDE_EVERY, _FEW = 4, 4  # steps a choice of depth is kept for, unless there are but few to choose for
# Passes that are learnt from at once, and steps that a choice of whom to ask is kept for: a pass leaves nothing of
# this program in the processor's caches, so doing it four times in a row costs little more than once.
_TOGETHER = 4
_BREATH, _PAUSE = 3, 6  # steps: nobody is thought of while none is worth it; one is left alone after a question
_PROBE_DEPTH = 4
_WELL_KNOWN, _SELDOM = 100, 8  # measurements after which a cost is known well, and one call in eight will do
_KNOWN = 40  # measurements from which passes may be learnt from a few at once
_NEGLIGIBLE = 0.02  # chances that are not looked at
_FADE = 0.93  # of the speed-up seen, a step


class AdaptiveController:
    """Budgets up to `limit`, node by node only where it pays."""

    def __init__(self, limit: Budget, costs: Costs | None = None) -> None:
        self.limit = limit
        self.costs = costs or Costs()
        self.beliefs = begin()
        self.questions = Questions(self.costs)
        self._states: dict[str, State] = {}
        self._now: Now | None = None
        self._gain = 1.0  # speed-up over plain decoding, fading
        self.shapes = Shapes(limit.depth)
        self._probes = Probes(self.costs.passes)
        self._turn = self._due = 0
        self._curious = False  # whether somebody was asked who does not seem worth asking
        self._rest = 0  # the turn before which there is nothing to decide for those that are known
        self._plain_s = self._taken_s = 0.0  # all passes that brought tokens: without guesses, and as they were
        self._worths = Worths()
        self._cheap = True  # drafting for all takes so little that it needs no choice of depth
        self._decided: tuple[list[str], dict[str, int]] = ([], {})
        self._lessons: list[Lesson] = []
        self._weighed: Weighed | None = None
        # The pass and the requests that the last choice was made for, and the turn before which it holds for them.
        self._last: tuple[Now, list[str]] | None = None
        self._until = self._repeated = 0
        self._drafted = False  # whether the last pass carried guesses
        self._known_budgets: dict[tuple[int, int], Budget] = {}

    # Before drafting.

    def budgets(self, views: Sequence[View]) -> list[Budget]:
        if len(self._lessons) >= _TOGETHER:
            self._catch_up()
        self._turn += 1
        now = self._now = self._same(views)
        if now is not None:
            self._repeated += bool(now.asked)
            return self._given(views, now.asked)
        now = self._now = self._prepare(views)
        fresh = self._welcome(views)
        if self._turn < self._rest and not fresh:
            self._hold(views, now, self._rest)
            return self._given(views, {})
        free = [view for view in views if view.whole and view.speculation == "auto"]
        asked = now.asked = {} if self.limit.empty or not free else self._choose(free, now)
        now.depth = max(asked.values(), default=0)
        for name in asked:
            state = self._states[name]
            now.steady &= state.ever and self._turn - state.turn <= 4 * _PAUSE
            state.turn, state.ever = self._turn, True
        self._hold(views, now, self._turn + _TOGETHER if self._cheap and not self._curious else 0)
        return self._given(views, asked)

    def _hold(self, views: Sequence[View], now: Now, until: int) -> None:
        """What was chosen holds for some steps if nobody comes, goes or reads a prompt, once costs are known."""
        settled = now.load.rows == now.ready == now.load.requests and self.costs.passes.seen >= _KNOWN
        if settled and all(view.speculation == "auto" for view in views):
            self._last, self._until = (now, [view.request_id for view in views]), until
        else:
            self._until = 0

    def _same(self, views: Sequence[View]) -> Now | None:
        """The pass that was chosen for last, if its choice still holds."""
        if self._last is None or self._turn >= self._until or len(self._last[1]) != len(views):
            return None
        for view, name in zip(views, self._last[1], strict=True):
            if view.request_id != name or view.rows != 1 or not view.whole:
                return None
        return self._last[0]

    def _welcome(self, views: Sequence[View]) -> bool:
        """Whether some are here for the first time."""
        new = [view for view in views if view.request_id not in self._states and view.whole]
        for view in new:
            began = self._turn, self._plain_s, self._taken_s
            self._states[view.request_id] = self._worths.begin(State(view.speculation, *began))
        return bool(new)

    def _given(self, views: Sequence[View], asked: dict[str, int]) -> list[Budget]:
        return [
            NOTHING
            if not view.whole or (view.speculation == "auto" and view.request_id not in asked)
            else self._budget(view, asked)
            for view in views
        ]

    def _prepare(self, views: Sequence[View]) -> Now:
        passes = self.costs.passes
        context = sum(view.held + view.rows for view in views)
        load = Load(sum(view.rows for view in views), len(views), context)
        ready = sum(view.whole for view in views)
        load_s = passes.seconds(load)
        decode, decode_s = load, load_s
        if load.rows != ready or load.requests != ready:
            decode = Load(ready, ready, context)
            decode_s = passes.seconds(decode)
        rate = ready / decode_s
        plain_s = load_s if passes.known else 0.0
        return Now(load, ready, plain_s, decode, decode_s, rate, rate * max(self._gain, 1.0))

    def _budget(self, view: View, asked: dict[str, int]) -> Budget:
        if view.speculation != "auto":
            return wished(view, self.limit)
        nodes = self.limit.nodes
        if self._cheap:  # what has a price of its own has its depth chosen by it
            nodes = min(nodes, int(_ROOMY * self._states[view.request_id].wanted) + _SPARE)
        key = (asked[view.request_id], nodes)
        if key not in self._known_budgets:
            self._known_budgets[key] = Budget(key[0], self.limit.width, nodes)
        return self._known_budgets[key]

    def _choose(self, free: Sequence[View], now: Now) -> dict[str, int]:
        """Whom to ask, and how deep."""
        every = self.costs.drafts.seconds(Asked(len(free), self.shapes.usual))
        plain = now.decode_s
        seen = self.costs.drafts.seen
        self._cheap = every <= _CHEAP * plain or (seen < _MEASURED and not (seen and every > plain))
        depth = self.shapes.safe if self._cheap else min(_PROBE_DEPTH, self.shapes.safe)
        usual = min(self.shapes.usual, depth)
        one = self.questions.earn(plain, 1 + self._repeated, usual)
        self._repeated = 0
        if self._cheap:
            worths = [(self._states[view.request_id].worth, view.request_id) for view in free]
            toll = now.price * one, now.price * self.costs.asking(2, usual)
            chosen = dict.fromkeys(worth_asking(worths, *toll), depth)
        else:
            names = [view.request_id for view in free]
            others = bool(self._decided[1]) and self._decided[0] != names  # with nobody asked, who comes can wait
            if self._turn >= self._due or others or len(names) < _FEW:
                self._decided, self._due = (names, self._depth_that_pays(free, now)), self._turn + _DECIDE_EVERY
            chosen = dict(self._decided[1])
        sure = len(chosen)
        self._explore([view for view in free if view.request_id not in chosen], chosen, depth, usual)
        self._curious = len(chosen) > sure
        if not chosen:  # nothing changes until a question can be paid for, or the next decision
            wait, until = self.questions.wait(), self._due - self._turn - 1
            if self._cheap:  # nor before somebody has paused for long enough
                paused = min(self._states[view.request_id].turn for view in free) + _PAUSE - self._turn - 1
                wait = min(max(wait, paused, _BREATH), _PAUSE)
            else:
                wait = max(min(wait, until), 0)
            self._rest = self._turn + 1 + wait
            self.questions.skip(wait)
        return chosen

    def _explore(self, rest: Sequence[View], chosen: dict[str, int], depth: int, usual: float) -> None:
        """Ask some that seem not worth asking, the longest unasked first."""
        idle = [view for view in rest if self._turn - self._states[view.request_id].turn >= _PAUSE]
        count = self.questions.ask(len(idle), len(chosen), usual)
        if count < len(idle):
            idle.sort(key=lambda view: self._states[view.request_id].turn)
        for view in idle[:count]:
            chosen[view.request_id] = depth

    def _depth_that_pays(self, free: Sequence[View], now: Now) -> dict[str, int]:
        """For a drafter that costs: the depth and the share of the requests with the best rate, {} for none."""
        deepest, names = self.limit.depth, [view.request_id for view in free]
        levels = self.beliefs.levels(names, deepest)
        order = sorted(range(len(names)), key=lambda i: -sum(levels[i]))
        fill, nodes = self.shapes.fill(deepest), self.shapes.nodes(deepest)
        gains = [list(accumulate(map(mul, levels[i], fill))) or [0.0] for i in order]  # by depth
        counts = sorted({-(-len(order) // 4), -(-len(order) // 2), len(order)})
        best, chosen = now.rate * MARGIN, {}
        for depth in sorted({d for d in DEPTHS if d < deepest} | {deepest}):
            worth = list(accumulate(gain[min(depth, len(gain)) - 1] for gain in gains))
            rows, usual = sum(nodes[:depth]), sum(fill[:depth])
            for count in counts:
                load = Load(now.ready + round(count * rows), now.decode.requests, now.decode.context)
                drafting = self.costs.drafts.seconds(Asked(count, usual))
                rate = (now.ready + worth[count - 1]) / (self.costs.passes.seconds(load) + drafting)
                if rate > best:
                    best, chosen = rate, dict.fromkeys((names[i] for i in order[:count]), depth)
        return chosen

    # After drafting.

    def keep(self, views: Sequence[View], guesses: Sequence[Guess]) -> list[tuple[int, ...] | None]:
        if not any(guess.tokens for guess in guesses):
            return self._nothing(views)
        now = self._now or self._prepare(views)
        free = [i for i, view in enumerate(views) if view.speculation == "auto"]
        offered = [(views[i].request_id, guesses[i]) for i in free]
        most = sum(len(guess.tokens) for _, guess in offered)
        fixed = sum(len(guess.tokens) for guess in guesses) - most
        nodes, worth = self.beliefs.weigh(offered, _NEGLIGIBLE, prices(most, now, fixed, self.costs.passes))
        drawn = any(guess.drawn for guess in guesses)
        count = self._probes.count(worth, len(nodes.values), now.load.rows, self._gain, drawn)
        taken = nodes.first(count)
        kept: dict[int, list[int]] = {i: [] for i in free}
        for place, node in zip(taken.places, taken.nodes, strict=True):
            kept[free[place]].append(node)
        passes = self.costs.passes
        seconds = worth.seconds if count == worth.nodes else sum(passes.further(now.load, count)[:count])
        toll = worth.price * seconds / count if count else 0.0
        self._weighed = Weighed([views[i].request_id for i in free], taken, toll)
        self._remember(views, guesses, kept, now)
        return [tuple(sorted(kept[i])) if i in kept else None for i in range(len(views))]

    def _nothing(self, views: Sequence[View]) -> list[tuple[int, ...] | None]:
        """There was no answer, or no question."""
        self._probes.saw(guesses=False)
        asked = self._now.asked if self._now is not None else {}
        for name in asked:
            self._worths.add(self._states[name], 0.0)
        if asked and self._now is not None:
            self.shapes.add(Guess(), (), self._now.depth)
        return [() if view.speculation == "auto" else None for view in views]

    def _reckon(self, weighed: Weighed, now: Now) -> None:
        """What asking each request was worth."""
        worth = dict.fromkeys(now.asked, 0.0)
        for value, place in zip(weighed.taken.values, weighed.taken.places, strict=True):
            name = weighed.requests[place]
            if name in worth:
                worth[name] -= value + weighed.toll
        for name, new in worth.items():
            self._worths.add(self._states[name], new)

    def _remember(
        self, views: Sequence[View], guesses: Sequence[Guess], kept: dict[int, list[int]], now: Now
    ) -> None:
        """How many nodes of an answer are worth a row, and how answers are shaped."""
        answers = [i for i in kept if views[i].request_id in now.asked]
        for i in answers:
            if len(guesses[i]):
                state = self._states[views[i].request_id]
                state.offered += 1
                state.wanted = max(float(len(kept[i])), _FORGET * state.wanted)
        if answers and self._turn > _WELL_KNOWN:  # one at times is enough then
            answers = [] if self._turn % _SELDOM else [answers[self._turn // _SELDOM % len(answers)]]
        for i in answers:
            self.shapes.add(guesses[i], kept[i], now.depth)

    # After the pass.

    def observe(self, record: StepRecord) -> None:
        now, self._now = self._now, None
        weighed, self._weighed = self._weighed, None
        if now is None:
            return
        for tried in record.tried:
            state = self._states.get(tried.request_id)
            if state and tried.path and tried.path[-1] == tried.kept[-1]:  # right to its end: it might go on
                state.wanted = max(state.wanted, 2.0 * len(tried.kept))
        self._lessons.append(Lesson(record, now, self._turn, weighed))
        watched = now.asked or self.beliefs.waiting
        learning = self.costs.passes.seen < _KNOWN or self.costs.drafts.seen < _MEASURED
        # Dear drafts, questions, the first guesses after none, and what was far less than expected.
        usual = self._cheap and record.drafted and self._drafted
        hurry = watched and not (usual and not (weighed and weighed.disappointed(record.accepted)))
        self._drafted = bool(record.drafted)
        if hurry or learning or len(self._lessons) > _TOGETHER:
            self._catch_up()

    def _catch_up(self) -> None:
        """Learn from the passes since last time."""
        lessons, self._lessons = self._lessons, []
        for lesson in lessons:
            self._study(lesson)
        self._learn(lessons)

    def _study(self, lesson: Lesson) -> None:
        record, now, turn, weighed = lesson
        if weighed is not None:
            self._reckon(weighed, now)
        load = Load(record.rows, record.requests, record.context or now.load.context)
        # All but what drafting, deciding and each new token take is a matter of rows and requests.
        spent = record.step_s - record.draft_s - record.control_s - record.write_s - record.settle_s
        seldom, passes = turn % _SELDOM == 0, self.costs.passes
        # With guesses all are measured: with few that were, rows that had become cheap stayed unknown.
        guesses = record.rows != now.load.rows
        decoding = now.load.rows == now.ready or not passes.known  # rows of prompts are cheaper: no logits
        if decoding and (seldom or guesses or passes.seen < _WELL_KNOWN or passes.little(record.rows)):
            passes.observe(load, spent)
        if now.asked and (self.costs.drafts.seen < _WELL_KNOWN or seldom):
            self._measure(record, now)
        if now.asked and (self.costs.thinking.seen < _WELL_KNOWN or seldom):
            self.costs.thinking.observe(Asked(len(now.asked), 0.0), record.control_s)
        total = record.step_s
        if now.ready and now.load.rows == now.ready and now.plain_s > 0 and total > 0:
            gain = record.emitted * now.plain_s / (now.ready * total)
            self._gain += (1 - _FADE) * (min(gain, 64.0) - self._gain)
        if now.ready and now.plain_s > 0:
            self._plain_s += now.plain_s
            self._taken_s += total
        self._probes.saw(guesses=bool(record.drafted))

    def _measure(self, record: StepRecord, now: Now) -> None:
        """What drafting took. Who was not asked for long has to catch up: it counts only if it was quick."""
        drafts = self.costs.drafts
        reached = max((max(levels(tried.guess), default=0) for tried in record.tried), default=0)
        asked = Asked(len(now.asked), reached)
        if now.steady or record.draft_s < drafts.seconds(asked):
            drafts.observe(asked, record.draft_s)
            self.shapes.tried(now.depth, reached, record.draft_s <= _CHEAP * now.decode_s)

    def _learn(self, lessons: Sequence[Lesson]) -> None:
        """What became of guesses, taken or not."""
        heard, plain = list[Tried](), list[float]()  # plain: seconds of the same pass without guesses
        followed = set(self.beliefs.waiting)
        for lesson in lessons:
            for tried in lesson.record.tried:
                if tried.guess.tokens:
                    followed.add(tried.request_id)
                if tried.request_id in followed:
                    heard.append(tried)
                    plain.append(lesson.now.plain_s)
        rights = self.beliefs.learn(heard) if heard else []
        for tried, plain_s, right in zip(heard, plain, rights, strict=True):
            if right:
                self._rest = self._until = 0
            state = self._states.get(tried.request_id)
            if state and not tried.kept:
                if self._worths.is_news(state, right):
                    self.questions.reward(right)
                # A question that was answered rightly is followed up at once.
                state.turn = min(state.turn, self._turn - _PAUSE) if right else state.turn
            if state and tried.kept:
                state.kept += 1
                state.more_s += (len(tried.tokens) - 1) * plain_s

    def leave(self, request_id: str) -> Note:
        self._catch_up()
        self._until = 0  # no choice holds for one who comes by the same name
        state = self._states.pop(request_id, None) or State("auto", self._turn, self._plain_s, self._taken_s)
        self.beliefs.forget(request_id)
        plain_s, taken_s = self._plain_s - state.plain_s + state.more_s, self._taken_s - state.taken_s
        speedup = plain_s / taken_s if taken_s > 0 and self.costs.passes.seen > 3 else None
        if state.asked != "auto":
            note = wished_note(state.asked)
            return Note(note.used, note.why_off, speedup)
        why_off = "k is 0" if self.limit.empty else state.why_off(self._turn)
        return Note("auto", why_off, speedup)
