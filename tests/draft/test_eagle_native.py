"""An EAGLE head run in C drafts what the same head run in torch does, alone and together with others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sooner.config import Budget
from sooner.core.law import LawParams
from sooner.core.tree import EMPTY, Draft
from sooner.draft.eagle import EagleDrafter
from sooner.draft.eagle_native import NativeRunner
from sooner.draft.eagle_torch import TorchRunner
from sooner.draft.protocol import Context, Outcome
from sooner.heads.checkpoint import Checkpoint
from sooner.heads.eagle import EagleConfig, EagleHead, Rope
from sooner.model.protocol import Ends
from sooner.model.quantize import to_int8

VOCAB, HIDDEN, LAYERS = 90, 32, 8
THREE = EagleConfig(
    version=3, hidden=HIDDEN, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab=VOCAB, draft_vocab=37,
    target_hidden=HIDDEN, streams=3,
)  # fmt: skip
ONE = replace(THREE, version=1, draft_vocab=VOCAB, streams=1)
CONFIGS = {
    "eagle-3": THREE,
    "fc_norm": replace(THREE, fc_norm=True),
    "norm_before_fc": replace(THREE, norm_before_fc=True),
    "norm_before_residual": replace(THREE, norm_before_residual=True),
    "norm_output": replace(THREE, norm_output=True),
    "both norms kept": replace(THREE, norm_before_residual=True, norm_output=True),
    "biases": replace(THREE, bias=True, attention_bias=True),
    "linear rope": replace(THREE, rope=Rope(base=300.0, kind="linear", factor=3.0)),
    "llama3 rope": replace(THREE, rope=Rope(base=500.0, kind="llama3", factor=8.0, original=64)),
    "a head for each key": replace(THREE, kv_heads=4),
    "one key for all": replace(THREE, kv_heads=1, head_dim=32),
    "another target width": replace(THREE, target_hidden=48),
    "whole vocabulary": replace(THREE, draft_vocab=VOCAB),
    "gelu": replace(THREE, act="gelu_pytorch_tanh"),
    "eagle-1": ONE,
    "eagle-1 with biases": replace(ONE, bias=True, attention_bias=True),
}
TREES = {"chain": Budget.chain(5), "wide": Budget(3, 4, 14), "deep": Budget(6, 2, 9), "few": Budget(5, 3, 2)}


def some(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drafters(
    config: EagleConfig, kind: torch.dtype = torch.float32, least: float = 0.0, quantize: str | None = None
) -> list[EagleDrafter]:
    """The same random head, run in C and run in torch; if its weights are quantised, torch's were rounded so."""
    head = EagleHead(config)
    with torch.no_grad():
        for seed, (name, weight) in enumerate(sorted(head.named_parameters())):
            weight.copy_(
                1 + 0.2 * some(len(weight), seed=seed) if "norm" in name else 0.3 * some(*weight.shape, seed=seed)
            )
    ids = None
    if config.draft_vocab < VOCAB:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[: config.draft_vocab].sort().values
    embedding, lm_head = some(VOCAB, config.target_hidden, seed=90), some(VOCAB, HIDDEN, seed=91)
    own = None if config.target_hidden == HIDDEN else some(VOCAB, HIDDEN, seed=92)
    rounded = copy.deepcopy(head)
    last = lm_head if quantize is None else to_int8(lm_head).dense()
    if quantize is not None:
        for linear in (module for module in rounded.modules() if isinstance(module, torch.nn.Linear)):
            linear.weight.data = to_int8(linear.weight.data).dense()
    made = [
        EagleDrafter(
            Checkpoint(one, ids, own, None, {}),
            Ends(embedding.to(kind), None, lambda x: x @ last.to(x.dtype).T, lambda: lm_head.to(kind)),
            layers=LAYERS, vocab=VOCAB, beams=4, least=least, native=native, quantize=quantize,
        )
        for one, native in ((copy.deepcopy(head), True), (rounded, False))
    ]  # fmt: skip
    assert [type(drafter._runner) for drafter in made] == [NativeRunner, TorchRunner]
    return made


def text_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def features(config: EagleConfig, count: int, seed: int) -> Tensor:
    return some(count, config.streams, config.target_hidden, seed=1000 + seed)


def context(tokens: Sequence[int], name: str = "r") -> Context:
    return Context(name, list(tokens), LawParams(), 0, "match")


def told(drafter: EagleDrafter, text: Sequence[int], rows: Tensor, name: str = "r") -> None:
    """The target has run all of a text but its last token."""
    drafter.observe([Outcome(name, (text[-1],), 0, 0, rows)])


def drafted(drafter: EagleDrafter, text: Sequence[int], budget: Budget) -> Draft:
    [draft] = drafter.propose([context(text)], [budget])
    return draft


def paths(draft: Draft) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, draft.scores or (), strict=True))


def check_alike(draft: Draft, other: Draft, rel: float = 1e-3) -> None:
    assert len(draft) > 0
    assert paths(draft) == pytest.approx(paths(other), rel=rel)


def check_near(draft: Draft, other: Draft) -> None:
    """Rows rounded to 16 bits: log-probabilities that reach -17 here are a little off, and near ties may turn."""
    found, expected = paths(draft), paths(other)
    both = found.keys() & expected.keys()
    assert len(found) == len(expected) > 0
    assert len(both) > 0.6 * len(found)
    assert [found[path] for path in both] == pytest.approx([expected[path] for path in both], rel=0.1)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_switch_drafts_what_torch_does(name: str, tree: str, quantize: str | None) -> None:
    """With weights at int8: what torch does with weights that were rounded so."""
    config, text = CONFIGS[name], text_of(23, seed=2)
    native, torch_ = drafters(config, quantize=quantize)
    rows = features(config, len(text) - 1, seed=3)
    for drafter in (native, torch_):
        told(drafter, text, rows)
    check = check_alike if quantize is None else check_near
    check(drafted(native, text, TREES[tree]), drafted(torch_, text, TREES[tree]))


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("config", [THREE, ONE], ids=["eagle-3", "eagle-1"])
def test_requests_drafted_for_together_get_what_torch_gives_each_alone(
    config: EagleConfig, quantize: str | None
) -> None:
    native, torch_ = drafters(config, least=0.05, quantize=quantize)
    texts = {f"r{i}": text_of(length, seed=i) for i, length in enumerate((2, 9, 40, 17, 5))}
    budgets = [Budget.chain(4), Budget(3, 4, 12), Budget(0, 1, 0), Budget(5, 2, 7), Budget.chain(1)]
    for drafter in (native, torch_):
        for seed, (name, text) in enumerate(texts.items()):
            told(drafter, text, features(config, len(text) - 1, seed), name)
    together = native.propose([context(text, name) for name, text in texts.items()], budgets)
    for (name, text), budget, draft in zip(texts.items(), budgets, together, strict=True):
        [alone] = torch_.propose([context(text, name)], [budget])
        if budget.empty:
            assert draft == alone == EMPTY
        else:
            check = check_alike if quantize is None else check_near
            check(draft, alone)


def test_a_long_prompt_is_made_in_pieces_with_its_neighbours_waiting() -> None:
    native, torch_ = drafters(THREE)
    long, short = text_of(1300, seed=5), text_of(6, seed=6)
    for drafter in (native, torch_):
        told(drafter, long, features(THREE, 1299, seed=7), "long")
        told(drafter, short, features(THREE, 5, seed=8), "short")
    budgets = [Budget(4, 3, 10), Budget.chain(3)]
    asked = [context(long, "long"), context(short, "short")]
    for draft, other in zip(native.propose(asked, budgets), torch_.propose(asked, budgets), strict=True):
        check_alike(draft, other, rel=3e-3)


def test_rounds_of_guesses_right_and_wrong_leave_the_slots_torch_leaves() -> None:
    """Guesses of one round lie where the next one's slots are written; text goes on by whole paths or by none."""
    native, torch_ = drafters(THREE)
    text = text_of(12, seed=9)
    for drafter in (native, torch_):
        told(drafter, text, features(THREE, len(text) - 1, seed=10))
    for turn in range(8):
        draft, other = (drafted(drafter, text, Budget(4, 3, 9)) for drafter in (native, torch_))
        check_alike(draft, other)
        path, node = [], len(draft) - 1
        while turn % 2 and node >= 0:
            path.insert(0, node)
            node = draft.parents[node]
        fresh = text_of(1, seed=20 + turn)[0]
        tokens = (*(draft.tokens[n] for n in path), fresh)
        rows = features(THREE, 1 + len(draft), seed=30 + turn)
        for drafter in (native, torch_):
            drafter.observe([Outcome("r", tokens, len(path), len(draft), rows, draft)])
        text += tokens
    assert len(text) > 12 + 8


def test_asked_again_without_news_it_drafts_the_same() -> None:
    [native, _] = drafters(THREE)
    text = text_of(10, seed=11)
    told(native, text, features(THREE, 9, seed=12))
    first = drafted(native, text, Budget(3, 3, 8))
    assert drafted(native, text, Budget(3, 3, 8)) == first
    assert drafted(native, text, Budget.chain(2)).tokens[0] == first.tokens[0]


def test_an_unlikely_future_is_left_out_and_the_best_nodes_are_not() -> None:
    text, rows = text_of(15, seed=13), features(THREE, 14, seed=14)
    patient, hasty = drafters(THREE)[0], drafters(THREE, least=1.0)[0]
    for drafter in (patient, hasty):
        told(drafter, text, rows)
    all_of_it, beginning = (paths(drafted(d, text, Budget(6, 4, 99))) for d in (patient, hasty))
    assert max(map(len, all_of_it)) == 6
    assert max(map(len, beginning)) == 1
    few = paths(drafted(patient, text, Budget(6, 4, 5)))
    assert sorted(few.values()) == sorted(all_of_it.values())[-5:]


def test_the_number_of_threads_changes_no_bit_of_a_draft() -> None:
    texts = {f"r{i}": text_of(length, seed=i) for i, length in enumerate((30, 9, 3))}
    threads, drafts = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            [native, _] = drafters(THREE)
            for seed, (name, text) in enumerate(texts.items()):
                told(native, text, features(THREE, len(text) - 1, seed), name)
            drafts.append(native.propose([context(t, n) for n, t in texts.items()], [Budget(4, 4, 14)] * 3))
    finally:
        torch.set_num_threads(threads)
    assert drafts[0] == drafts[1] == drafts[2]


def test_a_broken_feature_drafts_nothing_and_breaks_no_neighbour() -> None:
    native, torch_ = drafters(THREE)
    text, rows = text_of(8, seed=15), features(THREE, 7, seed=16)
    told(native, text, rows * torch.nan, "broken")
    for drafter in (native, torch_):
        told(drafter, text, rows, "whole")
    broken, whole = native.propose([context(text, "broken"), context(text, "whole")], [Budget(3, 3, 8)] * 2)
    assert broken == EMPTY
    check_alike(whole, torch_.propose([context(text, "whole")], [Budget(3, 3, 8)])[0])


def test_in_bfloat16_the_likeliest_tokens_are_those_of_torch_up_to_rounding() -> None:
    config = replace(THREE, head_dim=32)
    same = 0
    for seed in range(12):
        native, torch_ = drafters(config, torch.bfloat16)
        text, rows = text_of(20, seed=seed), features(config, 19, seed=seed).bfloat16()
        for drafter in (native, torch_):
            told(drafter, text, rows)
        draft, other = (paths(drafted(drafter, text, Budget(1, 4, 4))) for drafter in (native, torch_))
        for path in draft.keys() & other.keys():
            assert draft[path] == pytest.approx(other[path], rel=0.15, abs=0.005)
        same += len(draft.keys() & other.keys())
    assert same >= 44  # of 48: the fourth may be a near tie


def test_sizes_that_are_no_whole_vectors_are_run_by_torch() -> None:
    head = EagleHead(replace(THREE, head_dim=8))
    ends = Ends(some(VOCAB, HIDDEN, seed=1), None, lambda x: x, lambda: some(VOCAB, HIDDEN, seed=1))
    made = EagleDrafter(Checkpoint(head, torch.arange(37), None, None, {}), ends, layers=LAYERS, vocab=VOCAB)
    assert type(made._runner) is TorchRunner
