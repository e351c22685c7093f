"""What is not supported is refused by name, before anything runs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

import sooner
from sooner.errors import ConfigError, ModelError, RequestError
from tests.integrations.prompts import batch
from tests.model.test_hf import SMALL, tiny


class Unused:
    """A processor that must not be reached."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise AssertionError("something ran")


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"num_beams": 3}, "beam search"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"draft": "self:int8"}, "second copy of the weights"),
        ({"assistant_early_exit": 3}, "from 1 to 2"),
        ({"draft": "lokup"}, "Did you mean 'lookup'"),
        ({"draft": 3}, "a name or a Drafter"),
        ({"k": -1}, "k must be"),
        ({"rule": "best", "do_sample": True}, "rule"),
        ({"seed": -4}, "seed"),
    ],
)
def test_a_keyword_that_is_not_supported_is_named(keywords: dict[str, Any], named: str) -> None:
    model = tiny("llama", "sdpa")
    with pytest.raises(ConfigError, match=named):
        sooner.generate(model, **batch([4, 2]), max_new_tokens=5, logits_processor=[Unused()], **keywords)


def test_right_padding_is_refused() -> None:
    inputs = batch([4, 2])
    inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    with pytest.raises(ConfigError, match="row 1: the attention mask"):
        sooner.generate(tiny("llama", "sdpa"), **inputs, max_new_tokens=5)


def test_a_mask_of_another_shape_is_refused_as_such() -> None:
    """It was said to be about position_ids alone, which nobody gave."""
    inputs = batch([4]) | {"attention_mask": torch.ones((1, 6), dtype=torch.int64)}
    with pytest.raises(ConfigError, match="attention_mask or position_ids are for 6 tokens, input_ids has 4"):
        sooner.generate(tiny("llama", "sdpa"), **inputs, max_new_tokens=5)


def test_prompts_without_a_token_are_refused() -> None:
    model = tiny("llama", "sdpa")
    with pytest.raises(ConfigError, match="a token at least"):
        sooner.generate(model, torch.zeros((1, 0), dtype=torch.int64), max_new_tokens=5)
    with pytest.raises(ConfigError, match="a prompt is empty"):
        sooner.generate_batch(model, [[5], []], max_new_tokens=5)


def test_many_prompts_and_a_streamer_are_refused() -> None:
    with pytest.raises(ConfigError, match="streamer"):
        sooner.generate_batch(tiny("llama", "sdpa"), [[5]], streamer=Unused(), max_new_tokens=5)


def test_positions_of_their_own_are_refused() -> None:
    inputs = batch([5])
    with pytest.raises(ConfigError, match="position_ids"):
        sooner.generate(
            tiny("llama", "sdpa"), **inputs, max_new_tokens=5, position_ids=torch.tensor([[3, 4, 5, 6, 7]])
        )


def test_embeddings_instead_of_ids_are_refused() -> None:
    model = tiny("llama", "sdpa")
    inputs = batch([5])
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    with pytest.raises(ConfigError, match="inputs_embeds"):
        sooner.generate(model, **inputs, inputs_embeds=embeddings, max_new_tokens=5)


def test_a_filled_cache_is_refused() -> None:
    model, inputs = tiny("llama", "sdpa"), batch([5])
    name = next(n for n in ("cache", "past_key_values") if n in inspect.signature(model.forward).parameters)
    filled = {name: DynamicCache()}  # the keyword has changed its name
    model(inputs["input_ids"], use_cache=True, **filled)
    with pytest.raises(ConfigError, match="filled cache"):
        sooner.generate(model, **inputs, max_new_tokens=5, **filled)


def test_an_encoder_decoder_is_refused() -> None:
    config = AutoConfig.for_model(
        "t5", vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration is an encoder-decoder"):
        sooner.generate(model, **batch([5]), max_new_tokens=5)


def test_a_model_with_a_state_that_cannot_be_cut_is_refused() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match="mamba"):
        sooner.generate(model, torch.tensor([[5, 6]]), max_new_tokens=5)


def test_an_assistant_with_another_vocabulary_is_refused() -> None:
    model, other = tiny("llama", "sdpa"), tiny("llama", "sdpa", vocab_size=120)
    with pytest.raises(ConfigError, match=r"vocabulary \(120\) is not the target's \(97\)"):
        sooner.generate(model, **batch([5]), max_new_tokens=5, assistant_model=other)


def test_an_assistant_of_an_unknown_family_is_named_as_the_assistant() -> None:
    other = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", vocab_size=97, hidden_size=16, n_head=2)
    )
    with pytest.raises(ModelError, match=r"assistant_model: .*bloom"):
        sooner.generate(tiny("llama", "sdpa"), **batch([5]), max_new_tokens=5, assistant_model=other.eval())


def test_an_assistant_and_a_draft_are_one_too_many() -> None:
    model = tiny("llama", "sdpa")
    with pytest.raises(ConfigError, match="either assistant_model or draft"):
        sooner.generate(model, **batch([5]), max_new_tokens=5, assistant_model=model, draft="lookup")


def test_learned_positions_are_not_run_past() -> None:
    model = tiny("gpt2", "eager")
    with pytest.raises(RequestError, match="context is 128"):
        sooner.generate(model, **batch([SMALL["max_position_embeddings"]]), max_new_tokens=5)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32, "factor": 4.0,
}  # fmt: skip


def test_a_text_that_reaches_the_context_is_not_cut_in_silence() -> None:
    """transformers turns to other rotations there, or fails (learned positions); the text looked like a whole."""
    model, inputs = tiny("llama", "eager", rope_parameters=LONGROPE), batch([26])
    model.generation_config.eos_token_id = None
    whole = sooner.generate(model, **inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(whole, model.generate(**inputs, max_new_tokens=6, do_sample=False))
    with pytest.raises(RequestError, match=r"context of 32 tokens .* at most 6 new tokens"):
        sooner.generate(model, **inputs, max_new_tokens=9, do_sample=False)
