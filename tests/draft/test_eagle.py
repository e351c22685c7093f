"""The EAGLE drafter: every published layout drafts what the slow reference does, and follows any text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.law import LawParams
from sooner.core.step import Segment, pack
from sooner.core.tree import EMPTY, Draft, chain
from sooner.draft.eagle import EagleDrafter
from sooner.draft.protocol import Context, Outcome
from sooner.errors import ConfigError, DraftError
from sooner.heads import checkpoint
from sooner.llm import LLM
from sooner.model.load import load
from sooner.model.protocol import Ends, Model
from sooner.params import SamplingParams
from sooner.testing import check_drafter
from tests.heads import eagle_files as files
from tests.heads.eagle_files import VOCAB, H
from tests.heads.eagle_slow import Slow
from tests.tiny import make_tiny

LAYERS = 8
EMBEDDING = files.some(VOCAB, H, seed=40)
TARGET_HEAD = files.some(VOCAB, H, seed=41) * 3
TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]


def ends(hidden: int = H) -> Ends:
    embedding = EMBEDDING if hidden == H else files.some(VOCAB, hidden, seed=42)
    return Ends(embedding, None, lambda x: x @ TARGET_HEAD.to(x.dtype).T, lambda: TARGET_HEAD)


def drafter(folder: Path, hidden: int = H, least: float = 0.0, beams: int = 4) -> EagleDrafter:
    made = checkpoint.load(folder)
    return EagleDrafter(made, ends(hidden), layers=LAYERS, vocab=VOCAB, least=least, beams=beams)


def context(tokens: Sequence[int], name: str = "r") -> Context:
    return Context(name, list(tokens), LawParams(), 0, "match")


def streams(count: int, taps: int, hidden: int = H, seed: int = 50) -> Tensor:
    """Features of so many rows; those of a longer text begin alike."""
    return torch.stack([files.some(taps, hidden, seed=seed * 1000 + i) for i in range(count)])


def after(made: EagleDrafter, tokens: Sequence[int], budget: Budget, features: Tensor, name: str = "r") -> Draft:
    """The draft after `tokens`, all of whose rows but the last came in one pass."""
    made.observe([Outcome(name, (tokens[-1],), 0, 0, features[: len(tokens) - 1])])
    [draft] = made.propose([context(tokens, name)], [budget])
    return draft


def paths(draft: Draft) -> dict[tuple[int, ...], float]:
    """Each node's path from the root, with the score the draft gives it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, draft.scores or (), strict=True))


def alike(draft: Draft, other: Draft) -> bool:
    """The same tree, with scores equal up to rounding."""
    same = (draft.tokens, draft.parents) == (other.tokens, other.parents)
    return same and draft.scores == pytest.approx(other.scores, rel=1e-4)


def heads() -> dict[str, tuple[files.Settings, files.Tensors, int]]:
    """(settings, tensors, width of the target) of every layout and switch."""
    one, bare = files.eagle1(), files.eagle1(bias=False)
    three, wide, library = files.eagle3(), files.eagle3(target_hidden=24, own_embedding=True), files.speculators()
    same = files.some(VOCAB, H, seed=14) * 4
    everything = {n: t for n, t in three[1].items() if n not in ("d2t", "t2d")} | {"lm_head.weight": same}
    return {
        "eagle-1 with bias": (*one, H),
        "eagle-1 without bias": (*bare, H),
        "eagle-1 rope base": (one[0] | {"rope_theta": 300.0}, one[1], H),
        "eagle-3": (*three, H),
        "eagle-3 whole vocabulary": (three[0] | {"draft_vocab_size": VOCAB}, everything, H),
        "eagle-3 rope base": (three[0] | {"rope_theta": 300.0}, three[1], H),
        "eagle-3 fc_norm": (three[0] | {"fc_norm": True}, files.with_fc_norm(three[1]), H),
        "eagle-3 norm_before_fc": (
            three[0] | {"norm_before_fc": True},
            three[1] | {"input_norm.weight": files.near_one(3 * H, seed=60)},
            H,
        ),
        "eagle-3 attention bias": (
            three[0] | {"attention_bias": True},
            files.with_attention_bias(three[1], "midlayer"),
            H,
        ),
        "eagle-3 other target width": (*wide, 24),
        "speculators": (*library, H),
        "speculators norm_before_residual": (*files.speculators(norm_before_residual=True), H),
        "speculators norm_output": (library[0] | {"norm_output": True}, library[1], H),
    }


CASES = heads()


@pytest.mark.parametrize(
    "budget", [Budget.chain(4), Budget(3, 3, 12), Budget(4, 2, 9)], ids=["chain", "wide", "deep"]
)
@pytest.mark.parametrize("case", CASES)
def test_every_layout_drafts_what_the_slow_reference_does(tmp_path: Path, case: str, budget: Budget) -> None:
    settings, tensors, hidden = CASES[case]
    made = drafter(files.write(tmp_path, settings, tensors), hidden)
    features = streams(len(TEXT), len(made.taps), hidden)
    draft = after(made, TEXT, budget, features)
    slow = Slow(settings, tensors, EMBEDDING, TARGET_HEAD)
    wanted = slow.tree(TEXT, features, depth=budget.depth, width=budget.width, beams=4, nodes=budget.nodes)
    found = paths(draft)
    assert set(found) == set(wanted)
    for path, score in wanted.items():
        assert found[path] == pytest.approx(torch.tensor(score).exp().item(), rel=1e-3), path


def test_pieces_rounds_and_trees_leave_the_slots_of_a_text_seen_at_once(tmp_path: Path) -> None:
    """Prompt in chunks, guesses right and wrong, rounds without a draft: always the draft of a fresh drafter."""
    folder = files.write(tmp_path, *files.eagle3())
    made, budget = drafter(folder), Budget(3, 3, 10)
    features = streams(80, 3)
    made.observe([Outcome("r", (), 0, 0, features[:4])])
    made.observe([Outcome("r", (TEXT[-1],), 0, 0, features[4 : len(TEXT) - 1])])
    text = list(TEXT)
    for turn in range(9):
        [draft] = made.propose([context(text)], [budget])
        assert alike(draft, after(drafter(folder), text, budget, features))
        if turn % 3 == 2:
            draft = EMPTY  # plain decoding in between
        node = len(draft) - 1 - turn if len(draft) else -1
        taken: list[int] = []
        while node >= 0:
            taken.insert(0, node)
            node = draft.parents[node]
        tokens = [*(draft.tokens[n] for n in taken), (turn * 7) % VOCAB]
        below = [draft.tokens[n] for n, p in enumerate(draft.parents) if p == (taken[-1] if taken else -1)]
        while tokens[-1] in below:
            tokens[-1] = (tokens[-1] + 1) % VOCAB
        rows = [features[len(text) - 1]] + [files.some(3, H, seed=9)] * len(draft)
        for place, n in enumerate(taken):
            rows[1 + n] = features[len(text) + place]
        made.observe([Outcome("r", tuple(tokens), len(taken), len(draft), torch.stack(rows), draft)])
        text += tokens
    assert len(text) > len(TEXT) + 12


def test_requests_drafted_for_together_get_what_they_would_alone(tmp_path: Path) -> None:
    folder = files.write(tmp_path, *files.eagle3())
    together = drafter(folder)
    texts = {f"r{i}": [*TEXT[i:], *range(i), 5] for i in range(5)} | {"long": TEXT * 3}
    budgets = [
        Budget(3, 3, 10),
        Budget(2, 3, 6),
        Budget.chain(3),
        Budget(0, 1, 0),
        Budget.chain(2),
        Budget(3, 3, 9),
    ]
    for seed, (name, text) in enumerate(texts.items()):
        together.observe([Outcome(name, (text[-1],), 0, 0, streams(len(text) - 1, 3, seed=seed))])
    drafts = together.propose([context(text, name) for name, text in texts.items()], budgets)
    for seed, (draft, text, budget) in enumerate(zip(drafts, texts.values(), budgets, strict=True)):
        if budget.empty:
            assert draft == EMPTY
            continue
        alone = after(drafter(folder), text, budget, streams(len(text) - 1, 3, seed=seed))
        assert alike(draft, alone)


def test_a_text_whose_beginning_was_run_before_is_drafted_from_what_was_seen(tmp_path: Path) -> None:
    """Slots keep their place in the text: the first are missing, as for a reference that masks them."""
    settings, tensors = files.eagle3()
    made = drafter(files.write(tmp_path, settings, tensors))
    features = streams(len(TEXT), 3)
    made.observe([Outcome("r", (TEXT[-1],), 0, 0, features[4 : len(TEXT) - 1])])
    [draft] = made.propose([context(TEXT)], [Budget.chain(2)])

    class Late(Slow):
        def slot(
            self, token: int, feature: Tensor, position: int, keys: list[Tensor], values: list[Tensor]
        ) -> Tensor:
            state = super().slot(token, feature, position, keys, values)
            if position < 4:
                keys.clear()
                values.clear()
            return state

    wanted = Late(settings, tensors, EMBEDDING, TARGET_HEAD).tree(
        TEXT, features, depth=2, width=1, beams=1, nodes=2
    )
    assert set(paths(draft)) == set(wanted)


def test_without_features_there_is_no_draft_and_a_new_life_begins_anew(tmp_path: Path) -> None:
    folder = files.write(tmp_path, *files.eagle3())
    made, features = drafter(folder), streams(40, 3)
    assert made.propose([context(TEXT)], [Budget.chain(3)]) == [EMPTY]
    wanted = after(drafter(folder), TEXT, Budget.chain(3), features)
    assert after(made, TEXT, Budget.chain(3), features) == wanted
    # The same id with a shorter, other text: what was kept does not fit, so nothing is drafted.
    other = [1, 2, 3, 4]
    assert made.propose([context(other)], [Budget.chain(3)]) == [EMPTY]
    assert made.lanes_in_use == 0
    assert after(made, TEXT, Budget.chain(3), features) == wanted
    made.forget("r")
    made.forget("r")
    assert made.lanes_in_use == 0


def test_a_missed_pass_drops_the_request_instead_of_shifting_its_features(tmp_path: Path) -> None:
    made, features = drafter(files.write(tmp_path, *files.eagle3())), streams(40, 3)
    after(made, TEXT, Budget.chain(3), features)
    assert made.propose([context([*TEXT, 4])], [Budget.chain(3)]) == [EMPTY]
    # Accepted guesses of a draft that is not told: whose rows they are is not known.
    after(made, TEXT, Budget.chain(3), features)
    made.observe([Outcome("r", (4, 5), 1, 1, features[:2])])
    assert made.propose([context([*TEXT, 4, 5])], [Budget.chain(3)]) == [EMPTY]


def test_drafting_ends_where_deeper_guesses_are_not_worth_a_pass(tmp_path: Path) -> None:
    folder = files.write(tmp_path, *files.eagle3())
    features = streams(len(TEXT), 3)
    patient = after(drafter(folder, least=0.0), TEXT, Budget(6, 3, 60), features)
    hasty = after(drafter(folder, least=1.0), TEXT, Budget(6, 3, 60), features)
    assert max(len(p) for p in paths(patient)) == 6
    assert max(len(p) for p in paths(hasty)) < 6
    assert set(paths(hasty)) <= set(paths(patient))


def test_stopping_early_never_changes_the_best_nodes(tmp_path: Path) -> None:
    """Deeper levels are left out only when none of their nodes could be among the best."""
    settings, tensors = files.eagle3()
    made = drafter(files.write(tmp_path, settings, tensors), least=0.0)
    features, slow = streams(len(TEXT), 3), Slow(settings, tensors, EMBEDDING, TARGET_HEAD)
    for nodes in (1, 3, 6):
        draft = after(made, TEXT, Budget(4, 3, nodes), features, f"r{nodes}")
        wanted = slow.tree(TEXT, features, depth=4, width=3, beams=4, nodes=nodes)
        assert set(paths(draft)) == set(wanted)


@pytest.mark.parametrize("taps", [3])
def test_it_keeps_the_protocol_with_and_without_features(tmp_path: Path, taps: int) -> None:
    folder = files.write(tmp_path, *files.eagle3())
    check_drafter(lambda: drafter(folder), VOCAB, steps=24)

    class Fed(EagleDrafter):
        """Gets features of every row, as from an engine, though the check hands over none."""

        def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
            for c in contexts:
                self.forget(c.request_id)
                if len(c.tokens) > 1:
                    super().observe([Outcome(c.request_id, (), 0, 0, streams(len(c.tokens) - 1, taps))])
            return super().propose(contexts, budgets)

        def observe(self, outcomes: Sequence[Outcome]) -> None:
            pass

    made = checkpoint.load(folder)
    check_drafter(lambda: Fed(made_again(made, folder), ends(), layers=LAYERS, vocab=VOCAB), VOCAB, steps=24)


def made_again(made: checkpoint.Checkpoint, folder: Path) -> checkpoint.Checkpoint:
    """A drafter packs the head it is given, so each takes its own."""
    return checkpoint.load(folder)


def test_a_head_of_another_target_is_refused_by_name(tmp_path: Path) -> None:
    made = checkpoint.load(files.write(tmp_path, *files.eagle3()))
    with pytest.raises(DraftError, match="streams 16 wide, the target's are 24 wide"):
        EagleDrafter(made, ends(24), layers=LAYERS, vocab=VOCAB)
    with pytest.raises(DraftError, match="for 40 token ids, the target has 41"):
        EagleDrafter(made, ends(), layers=LAYERS, vocab=VOCAB + 1)
    for bad in ({"beams": 0}, {"least": 1.5}, {"least": -0.1}):
        with pytest.raises(ConfigError, match="eagle needs"):
            EagleDrafter(made, ends(), layers=LAYERS, vocab=VOCAB, **bad)  # type: ignore[arg-type]


def test_a_chain_is_a_tree_of_width_one(tmp_path: Path) -> None:
    made, features = drafter(files.write(tmp_path, *files.eagle3())), streams(len(TEXT), 3)
    draft = after(made, TEXT, Budget.chain(4), features)
    assert draft.parents == chain(draft.tokens).parents
    assert len(draft) == 4


def test_texts_equal_plain_decoding_and_drafts_rest_on_the_targets_own_features(tmp_path: Path) -> None:
    """A random head on a real target, greedy and seeded, chains and trees, several at once. What it drafts in the
    engine is what the slow reference makes of a separate pass of the target over the same text."""
    loaded = load(str(make_tiny(tmp_path / "target", seed=3, layers=8)), dtype="float32", device="cpu")
    vocab, hidden = loaded.model.vocab_size, 32
    settings, tensors = _for_target(vocab, hidden)
    made = checkpoint.load(files.write(tmp_path / "head", settings, tensors))
    shared = loaded.model.ends()  # type: ignore[attr-defined]  # FusedModel has ends
    slow = Slow(settings, tensors, shared.embedding, shared.head())
    seen: list[tuple[list[int], Budget, Draft]] = []

    class Watched(EagleDrafter):
        def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
            drafts = super().propose(contexts, budgets)
            seen.extend((list(c.tokens), b, d) for c, b, d in zip(contexts, budgets, drafts, strict=True))
            return drafts

    eagle = Watched(made, shared, layers=8, vocab=vocab, beams=4, least=0.0)
    prompts = [[5, 9, 200, 31, 7], [8] * 40, [100, 101]]
    for asked in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.9, seed=4)):
        plain = LLM(loaded, draft="none").generate(prompts, asked)
        for controller in (FixedController(Budget.chain(3)), FixedController(Budget(3, 3, 9))):
            small = EngineConfig(max_requests=3, step_rows=48, chunk_rows=16)
            llm = LLM(loaded, draft=eagle, controller=controller, config=small)
            texts = llm.generate(prompts, asked)
            assert [t.token_ids for t in texts] == [t.token_ids for t in plain]
            assert llm.engine.guard.failures == {}
            assert sum(t.stats.drafted for t in texts) > 60
    assert eagle.lanes_in_use == 0
    drafted = [entry for entry in seen if len(entry[2])]
    for tokens, budget, draft in drafted[:: len(drafted) // 12]:
        features = _features(loaded.model, tokens[:-1], eagle.taps)
        wanted = slow.tree(tokens, features, depth=budget.depth, width=budget.width, beams=4, nodes=budget.nodes)
        assert set(paths(draft)) == set(wanted)


def _for_target(vocab: int, hidden: int) -> tuple[files.Settings, files.Tensors]:
    """An EAGLE-3 head over every second id of a target with this vocabulary and width."""
    settings, small = files.eagle3()
    tensors = {}
    for i, (name, tensor) in enumerate(sorted(small.items())):
        wide = [size * hidden // H if size in (H, 2 * H, 3 * H) else size for size in tensor.shape]
        wide = [hidden // 2 if name.endswith(("k_proj.weight", "v_proj.weight")) and d == 0 else size
                for d, size in enumerate(wide)]  # fmt: skip
        tensors[name] = files.near_one(wide[0], seed=i) if len(wide) == 1 else files.some(*wide, seed=i)
    ids = torch.arange(0, vocab, 2)
    tensors["lm_head.weight"] = files.some(len(ids), hidden, seed=99)
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return settings | {"hidden_size": hidden, "vocab_size": vocab, "draft_vocab_size": len(ids)}, tensors


def _features(model: Model, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    lane = model.lanes.open()
    out = model.forward(pack([Segment(lane, 0, tuple(tokens))]), rows=torch.tensor([0]), taps=taps)
    model.lanes.close(lane)
    assert out.features is not None
    return out.features
