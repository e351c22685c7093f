"""A batch of drafts judged with noise: rows, rules and ids in their places, and the frequencies that follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sooner.core import noise
from sooner.core.edit import LawParams
from sooner.core.law import law
from sooner.core.rules import Verdict, block, match, reject, traversal
from sooner.core.tree import EMPTY, ROOT, Draft, chain, children, depths, is_chain
from sooner.core.verify import NoiseChance, Rule, Trial, verify
from tests.core.enumeration import CHAIN_JUDGES, Drawn, Guessed, Text, World, grow, node_texts, written
from tests.core.goodness import LIMIT, chi_square, off_by

RULES: tuple[Rule, ...] = ("match", "reject", "block", "traversal")
COIN_RULES: tuple[Rule, ...] = ("reject", "block", "traversal")
TREE = (ROOT, ROOT, 0, 0, 1)
VOCAB = 40
PARAMS = (
    LawParams(1.0),
    LawParams(0.7, top_k=5),
    LawParams(1.3, top_p=0.8),
    LawParams(0.9, min_p=0.1),
    LawParams(1.0, typical_p=0.7),
)


def _logits(rows: int, seed: int, vocab: int = VOCAB) -> Tensor:
    return 2.5 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))


def _drawn(parents: Sequence[int], seed: int, vocab: int = VOCAB) -> Draft:
    """A draft drawn from random laws with DRAFT noise, siblings without replacement."""
    counter = iter(range(1_000))

    def q(text: Text) -> Tensor:
        return _logits(1, 7_919 * seed + sum(text) + len(text), vocab)[0].softmax(-1)

    def choose(left: Tensor, rank: int) -> int:
        return int(noise.race(left[None], [noise.key(seed, next(counter), noise.DRAFT)]))

    return grow(parents, q, choose, drawn=True)


def _copies(draft: Draft) -> Draft:
    return Draft(draft.tokens, draft.parents)


def _judge(logits: Tensor, params: LawParams, trial: Trial) -> Verdict:
    return verify(law(logits, [params] * len(logits)), [trial])[0]


# --- rows and ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drawn", [True, False])
def test_a_verdict_does_not_depend_on_the_batch(drawn: bool) -> None:
    """Chains, trees and empty drafts, greedy and sampled, by every rule, in one pass and alone."""
    trials: list[Trial] = []
    params: list[LawParams] = []
    every = [(rule, p) for rule in RULES for p in (LawParams(), *PARAMS)]
    for i, (rule, own) in enumerate(every):
        draft = (EMPTY, _drawn((ROOT, 0, 1), i), _drawn(TREE, i))[i % 3]
        trials.append(Trial(len(params), draft if drawn else _copies(draft), 5 + i, i % 4, rule))
        params += [own] * (1 + len(draft))
    logits = _logits(len(params), seed=1)
    together = verify(law(logits, params), trials)
    for trial, verdict in zip(trials, together, strict=True):
        rows = slice(trial.first, trial.first + 1 + len(trial.draft))
        alone = Trial(0, trial.draft, trial.root, trial.seed, trial.rule)
        assert _judge(logits[rows], params[trial.first], alone) == verdict
        assert 0 <= verdict.token < VOCAB


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("rule", COIN_RULES)
@pytest.mark.parametrize("drawn", [True, False])
def test_a_truncated_law_is_judged_as_the_whole_law_is(rule: Rule, params: LawParams, drawn: bool) -> None:
    """Few candidates or V columns: the same coins, the same ids, the same verdict."""
    bare = {"reject": reject, "block": block, "traversal": traversal}[rule]
    accepted = 0
    for seed in range(60):
        draft = _drawn((ROOT, 0, 1) if rule == "block" else TREE, seed)
        draft = draft if drawn else _copies(draft)
        logits = _logits(1 + len(draft), seed)
        laws = law(logits, [params] * len(logits))
        rows = torch.stack([row for r in range(len(logits)) if (row := laws.row(r)) is not None])
        verdict = verify(laws, [Trial(0, draft, 9, seed, rule)])[0]
        assert verdict == bare(rows, draft, NoiseChance(seed, 9))
        assert rows[(verdict.path or (ROOT,))[-1] + 1, verdict.token] > 0
        accepted += len(verdict.path)
    assert accepted > 0


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_match_writes_what_plain_sampling_writes(params: LawParams) -> None:
    """Along the path every token is the draw that its position's TARGET noise makes from its own row."""
    for seed in range(40):
        draft = _drawn(TREE, seed)
        logits = _logits(1 + len(draft), seed + 500)
        laws = law(logits, [params] * len(logits))
        verdict = verify(laws, [Trial(0, draft, 11, seed, "match")])[0]
        tokens = [*(draft.tokens[node] for node in verdict.path), verdict.token]
        for depth, (node, token) in enumerate(zip((ROOT, *verdict.path), tokens, strict=True)):
            row = laws.row(node + 1)
            assert row is not None
            assert int(noise.race(row[None], [noise.key(seed, 12 + depth, noise.TARGET)])) == token
        last = verdict.path[-1] if verdict.path else ROOT
        assert verdict.token not in [draft.tokens[c] for c in children(draft.parents).get(last, ())]


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_row_is_judged_by_its_likeliest_ids_whatever_the_rule(rule: Rule) -> None:
    logits = _logits(4, seed=2)
    best = logits.argmax(-1).tolist()
    right = chain(best[:3])
    assert _judge(logits, LawParams(), Trial(0, right, 3, 0, rule)) == Verdict((0, 1, 2), best[3])
    wrong = chain([best[0], (best[1] + 1) % VOCAB, best[2]])
    assert _judge(logits, LawParams(), Trial(0, wrong, 3, 0, rule)) == Verdict((0,), best[1])


def test_match_takes_the_first_row_as_the_choice_after_the_root() -> None:
    draft = Draft((4, 5, 6), (ROOT, ROOT, 1))
    assert match([5, 0, 6, 9], draft) == Verdict((1, 2), 9)
    assert match([4, 7, 0, 0], draft) == Verdict((0,), 7)
    assert match([3, 0, 0, 0], draft) == Verdict((), 3)
    assert match([8], EMPTY) == Verdict((), 8)


def test_no_trials_give_no_verdicts() -> None:
    assert verify(law(_logits(2, 0), [LawParams(1.0)] * 2), []) == []


# --- frequencies: noise instead of forks -----------------------------------------------------------


def _by_noise(world: World, make: Drawn | Guessed, rule: Rule, seed: int, root: int) -> Text:
    """One round as the engine runs it: draft with DRAFT noise, judge with `verify`."""

    class Draws:
        count = 0

        def coin(self, probability: float, depth: int) -> bool:
            raise AssertionError("a drafter tosses no coins")

        def pick(self, weights: Tensor, depth: int) -> int:
            self.count += 1
            return int(noise.race(weights[None], [noise.key(seed, root + self.count, noise.DRAFT, root)]))

    draft = make(world, Draws())
    logits = torch.stack([world.p(text) for text in node_texts(draft)]).log()
    verdict = _judge(logits, LawParams(1.0), Trial(0, draft, root, seed, rule))
    return (*(draft.tokens[node] for node in verdict.path), verdict.token)


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        ("match", Drawn((ROOT, ROOT, 1))),
        ("reject", Drawn((ROOT, ROOT, 1))),
        ("reject", Guessed((ROOT, ROOT, 0))),
        ("block", Drawn((ROOT, 0))),
        ("traversal", Drawn((ROOT, ROOT, 1))),
        ("traversal", Guessed((ROOT, ROOT, 0))),
    ],
    ids=str,
)
def test_noise_gives_every_text_its_exact_probability(rule: Rule, make: Drawn | Guessed) -> None:
    """1,200 seeds at one place, then 1,200 places of one seed, against the enumeration."""
    world, count = World(2), 1_200
    exact = written(world, make, CHAIN_JUDGES[rule])
    texts = sorted(exact)
    law_of_texts = torch.tensor([exact[text] for text in texts])
    for rounds in ([(seed, 4) for seed in range(count)], [(77, root) for root in range(count)]):
        seen = Counter(_by_noise(world, make, rule, seed, root) for seed, root in rounds)
        assert set(seen) <= set(texts)
        assert chi_square(torch.tensor([seen[text] for text in texts]), law_of_texts) > LIMIT


def test_one_draft_survives_with_one_minus_total_variation_by_noise() -> None:
    p, q = _logits(2, seed=21, vocab=6).softmax(-1)
    overlap = float(torch.minimum(p, q).sum())
    assert 0.2 < overlap < 0.9
    count = 2_500
    laws = law(p.log().expand(2, -1), [LawParams(1.0)] * 2)
    tokens = noise.race(q.expand(count, -1), [noise.key(s, 3, noise.DRAFT, 2) for s in range(count)]).tolist()
    for rule in COIN_RULES:
        trials = [Trial(0, chain([token], q[None]), 2, s, rule) for s, token in enumerate(tokens)]
        survived = sum(len(verdict.path) for verdict in verify(laws, trials))
        assert off_by(survived / count, overlap, count) < 4, rule


@pytest.mark.parametrize("seed", range(2))
def test_draft_and_target_that_share_noise_agree_as_often_as_the_formula_says(seed: int) -> None:
    """Probability of agreeing: the sum over j of 1 / sum_i max(p_i / p_j, q_i / q_j) (2408.07978)."""
    p, q = _logits(2, seed=30 + seed, vocab=8).double().softmax(-1)
    agree = sum(1 / float(torch.maximum(p / p[j], q / q[j]).sum()) for j in range(8))
    apart = 1 - float(torch.minimum(p, q).sum())
    assert (1 - apart) / (1 + apart) <= agree <= 1 - apart
    count = 8_000
    keys = [noise.key(s, 3, noise.TARGET) for s in range(count)]
    same = noise.race(p.expand(count, -1), keys) == noise.race(q.expand(count, -1), keys)
    assert off_by(float(same.double().mean()), agree, count) < 4


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", COIN_RULES)
def test_laws_of_a_half_precision_drafter_are_normalised_in_full_precision(
    monkeypatch: pytest.MonkeyPatch, rule: Rule, narrow: torch.dtype
) -> None:
    """A token drawn from bfloat16 weights has probability weight / sum, not that rounded to bfloat16."""
    tossed: list[float] = []

    def coin(chance: NoiseChance, probability: float, depth: int) -> bool:
        tossed.append(probability)
        return True

    monkeypatch.setattr(NoiseChance, "coin", coin)
    logits = _logits(2, seed=8, vocab=9)
    p = logits[0].double().softmax(-1)
    weights = (_logits(1, seed=9, vocab=9)[0].softmax(-1) * 0.9995).to(narrow)
    q = weights.double() / weights.double().sum()
    for token in range(9):
        _judge(logits, LawParams(1.0), Trial(0, chain([token], weights[None]), 0, 0, rule))
        assert min(tossed.pop(), 1) == pytest.approx(min(float(p[token] / q[token]), 1), rel=1e-5)


# --- edges -----------------------------------------------------------------------------------------


def _with_uniform(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(noise, "uniform", lambda key: value)


@pytest.mark.parametrize("rule", COIN_RULES)
@pytest.mark.parametrize("drawn", [True, False])
def test_a_token_that_top_k_removed_is_not_accepted_when_the_coin_shows_zero(
    monkeypatch: pytest.MonkeyPatch, rule: Rule, drawn: bool
) -> None:
    """bugs.md case 20: with "u <= p/q" a token of probability 0 came through at u = 0."""
    _with_uniform(monkeypatch, 0.0)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 3)
    q = torch.full((2, 4), 0.25)
    for removed in (2, 3):
        draft = chain([removed, 0], q if drawn else None)
        for seed in range(50):
            verdict = _judge(logits, LawParams(1.0, top_k=2), Trial(0, draft, 0, seed, rule))
            assert verdict.path == ()
            assert verdict.token in (0, 1)


@pytest.mark.parametrize("rule", COIN_RULES)
def test_a_token_the_target_likes_at_least_as_much_is_accepted_at_the_top_of_the_coin(
    monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    """bugs.md case 20, the other edge: p >= q is accepted also at the largest number below 1."""
    _with_uniform(monkeypatch, 1 - 2.0**-53)
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    p = logits.double().softmax(-1)
    equal = chain([0, 0], p[:2].float())
    assert _judge(logits, LawParams(1.0), Trial(0, equal, 0, 1, rule)).path == (0, 1)
    modest = chain([0, 0], torch.tensor([[0.3, 0.3, 0.4]] * 2))
    assert _judge(logits, LawParams(1.0), Trial(0, modest, 0, 1, rule)).path == (0, 1)


@pytest.mark.parametrize("rule", COIN_RULES)
@pytest.mark.parametrize("temperature", [0.01, 0.5, 1.0])
def test_equal_laws_up_to_rounding_accept_nearly_everything(rule: Rule, temperature: float) -> None:
    """bugs.md case 15: the residual of equal laws has no mass, and dividing by it gave NaN."""
    generator = torch.Generator().manual_seed(5)
    params, count, k = LawParams(temperature), 250, 4
    accepted = 0
    for seed in range(count):
        logits = _logits(k + 1, seed)
        nearly = logits + 1e-7 * torch.randn(logits.shape, generator=generator) * (seed % 2)
        laws = law(nearly, [params] * (k + 1))
        q = torch.stack([row for r in range(k) if (row := laws.row(r)) is not None])
        tokens = noise.race(q, [noise.key(seed, d, noise.DRAFT, 0) for d in range(k)]).tolist()
        verdict = _judge(logits, params, Trial(0, chain(tokens, q), 0, seed, rule))
        assert 0 <= verdict.token < VOCAB
        accepted += len(verdict.path)
    assert accepted >= count * k - 2  # 1e-7 apart at temperature 0.01 is 1e-5 in the law


BAD = {"nan": math.nan, "inf": math.inf, "nothing": -math.inf}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("params", [LawParams(), LawParams(1.0), LawParams(1.0, top_k=5)], ids=str)
def test_a_broken_row_ends_its_own_path_and_nothing_else(params: LawParams, rule: Rule, bad: str) -> None:
    """bugs.md case 21: rows of NaN gave ids outside the vocabulary, or spoilt the neighbours."""
    logits = _logits(12, seed=3)
    draft = _copies(_drawn(TREE, 4))
    trials = [Trial(0, draft, 2, 1, rule), Trial(6, draft, 2, 2, rule)]
    whole = verify(law(logits, [params] * 12), trials)
    logits[0] = BAD[bad]
    found = verify(law(logits, [params] * 12), trials)
    assert found[0] == Verdict((), -1, broken=True)
    assert found[1] == whole[1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("params", [LawParams(), LawParams(1.0), LawParams(1.0, top_k=5)], ids=str)
@pytest.mark.parametrize("drawn", [True, False])
def test_a_broken_node_breaks_only_the_texts_that_reach_it(drawn: bool, params: LawParams, rule: Rule) -> None:
    """The tokens before a broken node are right, and a branch not taken may be broken for all we care."""
    reached = 0
    for seed in range(40):
        logits = _logits(3, seed=seed)
        best = int(logits[0].argmax())
        q = torch.full((2, VOCAB), 0.5 / (VOCAB - 1))
        q[0, best] = 0.5
        q[1, best] = 0
        q[1] /= q[1].sum()
        draft = Draft((best, (best + 1) % VOCAB), (ROOT, ROOT), q if drawn else None)
        logits[1] = math.nan
        verdict = _judge(logits, params, Trial(0, draft, 7, seed, rule))
        if verdict.path == (0,):
            assert verdict == Verdict((0,), -1, broken=True)
            reached += 1
        else:
            assert not verdict.broken
            assert 0 <= verdict.token < VOCAB
    assert reached > 0


def test_a_chain_is_a_chain_and_a_tree_is_not() -> None:
    """What decides between block and traversal."""
    assert is_chain(())
    assert is_chain((ROOT, 0, 1))
    assert not is_chain(TREE)
    assert not is_chain((ROOT, ROOT))
    assert max(depths(TREE)) == 2
