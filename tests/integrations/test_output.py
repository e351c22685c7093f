"""What comes back is what transformers gives: sequences, scores, logits, streams, and our record beside them."""

from __future__ import annotations

import logging
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation import GenerateDecoderOnlyOutput

import sooner
from tests.integrations.prompts import batch, both
from tests.model.test_hf import tiny
from tests.tiny import tiny_tokenizer

KEEP = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.given.append(value.clone())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("shape", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}])
def test_scores_and_logits_have_the_shapes_types_and_values_of_transformers(shape: dict[str, Any]) -> None:
    model, inputs = tiny("qwen2", "sdpa").to(torch.float64), batch([2, 6, 4, 20])
    keywords = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, **KEEP, **shape}
    plain, ours = both(model, inputs, {}, **keywords)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert torch.equal(plain.sequences, ours.sequences)
    for theirs, mine in ((plain.scores, ours.scores), (plain.logits, ours.logits)):
        assert type(mine) is tuple
        assert len(mine) == len(theirs)
        for left, right in zip(theirs, mine, strict=True):
            assert left.dtype == right.dtype
            torch.testing.assert_close(right, left, atol=1e-5, rtol=1e-5)
    assert ours.attentions is None
    assert ours.hidden_states is None


def test_scores_of_rows_that_have_ended_are_zeros_and_the_others_stay_in_place() -> None:
    model, inputs = tiny("llama", "sdpa"), batch([2, 6])
    seen = model.generate(**inputs, max_new_tokens=20, do_sample=False)[:, 6:]
    keywords = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": int(seen[1, 4]), **KEEP}
    plain, ours = both(model, inputs, {}, **keywords)
    assert torch.equal(plain.sequences, ours.sequences)
    written = (ours.sequences[1, 6:] == int(seen[1, 4])).nonzero()[0].item() + 1
    assert written < len(ours.scores)
    for step, (left, right) in enumerate(zip(plain.scores, ours.scores, strict=True)):
        torch.testing.assert_close(right[0], left[0], atol=1e-5, rtol=1e-5)
        assert step < written or not right[1].any()


def test_scores_of_sampled_rows_show_what_temperature_and_filters_left() -> None:
    model, inputs = tiny("llama", "sdpa"), batch([2, 6])
    wishes = {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 5,
        "max_new_tokens": 10,
        "eos_token_id": None,
        "seed": 1,
    }
    ours = sooner.generate(model, **inputs, **wishes, **KEEP)
    for step, (scores, logits) in enumerate(zip(ours.scores, ours.logits, strict=True)):
        kept = scores > -torch.inf
        assert kept.sum(-1).tolist() == [5, 5]
        torch.testing.assert_close(scores[kept], logits[kept] / 0.5)
        assert bool(kept.gather(1, ours.sequences[:, 6 + step, None]).all())
    transition = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    assert transition.shape == (2, 10)
    assert bool((transition <= 0).all())


def test_a_streamer_of_a_batch_is_given_one_token_of_every_row_at_a_time() -> None:
    model, inputs = tiny("llama", "sdpa"), batch([2, 6, 9])
    seen = model.generate(**inputs, max_new_tokens=20, do_sample=False)[:, 9:]
    plain, ours = Recorder(), Recorder()
    keywords = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": int(seen[1, 4])}
    model.generate(**inputs, **keywords, streamer=plain)
    model.generate(**inputs, **keywords, streamer=ours, custom_generate=sooner.generate, assistant_model=model)
    assert len(plain.given) == len(ours.given)
    assert all(torch.equal(left, right) for left, right in zip(plain.given, ours.given, strict=True))
    assert plain.ends == ours.ends == 1


def test_a_stream_without_an_end_of_text_id_is_as_long_as_the_output() -> None:
    model, inputs, ours = tiny("llama", "sdpa"), batch([2, 6, 9]), Recorder()
    met = [lambda ids, scores: ids[:, -1] % 7 == 3]
    out = sooner.generate(
        model, **inputs, max_new_tokens=50, do_sample=False, eos_token_id=None, streamer=ours,
        stopping_criteria=met, assistant_model=model,
    )  # fmt: skip
    assert torch.equal(torch.stack(ours.given[1:], dim=1), out[:, 9:])


@pytest.mark.parametrize("skip", [True, False])
def test_a_text_streamer_prints_what_it_prints_in_transformers(capsys: Any, skip: bool) -> None:
    model, tokenizer = tiny("llama", "sdpa", vocab_size=320), tiny_tokenizer()
    inputs = tokenizer("the same text, é", return_tensors="pt")
    model.generate(
        **inputs, max_new_tokens=30, do_sample=False, streamer=TextStreamer(tokenizer, skip_prompt=skip)
    )
    plain = capsys.readouterr().out
    streamer = TextStreamer(tokenizer, skip_prompt=skip)
    model.generate(
        **inputs, max_new_tokens=30, do_sample=False, streamer=streamer, custom_generate=sooner.generate
    )
    assert capsys.readouterr().out == plain


def test_an_iterator_streamer_ends_also_when_generate_fails() -> None:
    model, tokenizer = tiny("llama", "sdpa", vocab_size=320), tiny_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    inputs = tokenizer("the same text", return_tensors="pt")

    def fail(ids: Tensor, scores: Any) -> bool:
        if ids.shape[1] > 12:
            raise RuntimeError("their own")
        return False

    def write() -> None:
        with pytest.raises(RuntimeError, match="their own"):
            sooner.generate(model, **inputs, max_new_tokens=30, streamer=streamer, stopping_criteria=[fail])

    thread = Thread(target=write)
    thread.start()
    list(streamer)
    thread.join()


def test_the_record_is_on_the_output_and_in_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = tiny("llama", "sdpa"), batch([2, 6])
    with caplog.at_level(logging.INFO, logger="sooner"):
        ours = sooner.generate(model, **inputs, max_new_tokens=20, do_sample=False, eos_token_id=None)
    stats = ours.sooner_stats
    assert stats.total.emitted == 40
    assert [row.emitted for row in stats.rows] == [20, 20]
    assert stats.passes == max(row.steps for row in stats.rows)
    lines = [record.getMessage() for record in caplog.records if record.name == "sooner"]
    assert len(lines) == 1
    assert "2 rows, 40 tokens" in lines[0]
    assert "draft auto" in lines[0]


def test_hidden_states_that_nobody_is_given_are_not_refused() -> None:
    """Without a dictionary transformers returns none either; many configurations have the flag set."""
    asked = {"output_hidden_states": True, "output_attentions": True, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(*both(tiny("llama", "eager"), batch([2, 6]), {}, **asked))


def test_a_function_of_the_callers_around_ours_loses_neither_streamer_nor_assistant() -> None:
    """transformers forgets both where custom_generate is a function; the stream never ended."""
    model, streamer = tiny("llama", "sdpa"), Recorder()
    keywords: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}

    def around(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
        return sooner.generate(model, input_ids, **prepared)

    out = model.generate(**batch([5]), **keywords, streamer=streamer, custom_generate=around)
    assert streamer.ends == 1
    assert torch.cat([value.reshape(-1) for value in streamer.given]).tolist() == out[0].tolist()
    guessed = model.generate(**batch([5]), **keywords, assistant_model=model, custom_generate=around)
    assert guessed.sooner_stats.draft == "model"
    assert torch.equal(out, guessed)
