"""The caller's model is only read: bit-identical logits, configuration, hooks and memory, also after failures."""

from __future__ import annotations

import gc
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessorList, StoppingCriteriaList

import sooner
from sooner.errors import ModelError
from sooner.model.borrowed import borrow, mirror
from sooner.model.hf import HFModel
from sooner.model.load import _model
from sooner.model.native import NativeModel
from tests.integrations.prompts import batch
from tests.model.test_hf import tiny


def portrait(model: Any) -> dict[str, Any]:
    """Everything about a model that a call might leave changed."""
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation": model.generation_config.to_dict(),
        "training": [part.training for part in model.modules()],
        "hooks": [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()],
        "attributes": [sorted(part.__dict__) for part in model.modules()],
        "parameters": [(name, p.data_ptr()) for name, p in model.named_parameters()],
        "buffers": [(name, b.data_ptr()) for name, b in model.named_buffers()],
    }


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_that_was_used_gives_the_same_bits_as_before(attention: str) -> None:
    model, inputs = tiny("llama", attention), batch([5, 12, 3])
    before, seen = portrait(model), model(**inputs).logits
    model.generate(**inputs, max_new_tokens=12, custom_generate=sooner.generate, assistant_model=model)
    assert portrait(model) == before
    assert torch.equal(model(**inputs).logits, seen)
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=12, do_sample=False),
        sooner.generate(model, **inputs, max_new_tokens=12, do_sample=False),
    )


@pytest.mark.parametrize("failure", [RuntimeError("their own"), KeyboardInterrupt()])
def test_a_call_that_fails_half_way_leaves_the_model_as_it_was(failure: BaseException) -> None:
    model, inputs = tiny("gemma2", "eager"), batch([5, 12])
    before, seen, calls = portrait(model), model(**inputs).logits, []

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape)
        if len(calls) > 5:
            raise failure
        return scores

    with pytest.raises(type(failure)):
        sooner.generate(model, **inputs, max_new_tokens=12, logits_processor=LogitsProcessorList([fail]))
    assert portrait(model) == before
    assert torch.equal(model(**inputs).logits, seen)


def test_a_callback_may_use_the_model_while_a_text_is_written() -> None:
    model, inputs = tiny("llama", "eager"), batch([5, 12])
    seen, found = model(**inputs).logits, []

    def look(ids: torch.Tensor, scores: Any) -> bool:
        found.append(torch.equal(model(**inputs).logits, seen))
        return False

    sooner.generate(model, **inputs, max_new_tokens=4, stopping_criteria=StoppingCriteriaList([look]))
    assert len(found) > 4
    assert all(found)


def test_the_weights_are_shared_and_not_copied() -> None:
    model = tiny("llama", "sdpa")
    twin = mirror(model)
    assert [p.data_ptr() for p in twin.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert all(mine is not theirs for mine, theirs in zip(twin.modules(), model.modules(), strict=True))


def test_weights_that_were_trained_between_two_calls_are_seen() -> None:
    model, inputs = tiny("llama", "sdpa"), batch([5, 12])
    first = sooner.generate(model, **inputs, max_new_tokens=12, do_sample=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    second = sooner.generate(model, **inputs, max_new_tokens=12, do_sample=False)
    assert not torch.equal(first, second)
    assert torch.equal(second, model.generate(**inputs, max_new_tokens=12, do_sample=False))


class Adapted(nn.Module):
    """A linear map with a low-rank addition, as peft puts in."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.scale = base, 0.5
        self.a = nn.Parameter(torch.randn(4, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


def test_adapters_and_hooks_act_as_they_do_in_transformers() -> None:
    model, inputs = tiny("llama", "sdpa"), batch([5, 12, 30])
    base = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 1.5)
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert torch.equal(plain, sooner.generate(model, **inputs, max_new_tokens=16, do_sample=False))
    assert not torch.equal(plain, base)


def test_a_forward_put_on_a_module_runs_with_our_attention() -> None:
    """Such a forward is bound to the caller's module: followed blindly it would attend without our lanes."""
    model, inputs = tiny("llama", "eager"), batch([5, 12, 30])
    attention = model.model.layers[0].self_attn
    kind = type(attention)
    attention.forward = MethodType(lambda self, *args, **kw: kind.forward(self, *args, **kw), attention)
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert torch.equal(plain, sooner.generate(model, **inputs, max_new_tokens=16, do_sample=False))
    attention.forward = lambda *args, **kw: kind.forward(attention, *args, **kw)
    with pytest.raises(ModelError, match="forward of a LlamaAttention was replaced"):
        borrow(model)


def test_a_model_in_training_mode_with_dropout_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.eval"):
        borrow(tiny("gpt2", "eager").train())


def test_weights_that_are_not_all_there_are_refused() -> None:
    model = tiny("llama", "eager")
    model.lm_head.to("meta")
    with pytest.raises(ModelError, match="cpu, meta"):
        borrow(model)


def test_a_thousand_calls_keep_nothing() -> None:
    """Objects that the garbage collector knows: none more after 1,000 calls than after 20."""
    model, inputs = tiny("llama", "sdpa", num_hidden_layers=1), batch([3, 5])

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor | nn.Module) for thing in gc.get_objects())

    def call(times: int) -> int:
        for _ in range(times):
            sooner.generate(model, **inputs, max_new_tokens=2, do_sample=False)
        return tensors()

    assert call(20) == call(980)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("runtime", ["fused", "packed", "native"])
def test_our_own_decoders_leave_the_model_alone(runtime: str, tied: bool) -> None:
    """Those of a packed copy empty the modules they are made from: the mirror's, never the caller's."""
    sizes = {"hidden_size": 64, "head_dim": 16, "tie_word_embeddings": tied}
    model, inputs = tiny("qwen3", "sdpa", **sizes), batch([5, 12, 30])
    before, seen = portrait(model), model(**inputs).logits
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert torch.equal(
        plain, sooner.generate(model, **inputs, max_new_tokens=16, do_sample=False, runtime=runtime)
    )
    assert portrait(model) == before
    assert torch.equal(model(**inputs).logits, seen)


@pytest.mark.parametrize("runtime", ["fused", "packed", "native"])
def test_our_own_decoders_refuse_what_they_would_not_see(runtime: str) -> None:
    """They read weights: an adapter, a hook or a quantised layer would silently be left out."""
    hooked, adapted = tiny("llama", "sdpa"), tiny("llama", "sdpa")
    hooked.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 1.5)
    adapted.model.layers[0].self_attn.q_proj = Adapted(adapted.model.layers[0].self_attn.q_proj)
    for model, named in ((hooked, "hooked LlamaMLP"), (adapted, "Adapted"), (tiny("gpt2", "eager"), "gpt2")):
        with pytest.raises(ModelError, match=named):
            borrow(model, runtime)
        assert isinstance(borrow(model), HFModel), "left to themselves they step back"


def raised_epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def identity(model: Any) -> None:
    model.model.layers[1].mlp = nn.Identity()


@pytest.mark.parametrize(("change", "named"), [(raised_epsilon, "epsilon"), (identity, "Identity")])
def test_a_module_changed_by_hand_acts_as_it_does_in_transformers(change: Any, named: str) -> None:
    """Our decoder has one epsilon and an MLP everywhere: it wrote another text, or fell over."""
    model, inputs = tiny("llama", "sdpa", hidden_size=64, head_dim=16), batch([5, 12, 30])
    change(model)
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert torch.equal(plain, sooner.generate(model, **inputs, max_new_tokens=16, do_sample=False))
    with pytest.raises(ModelError, match=named):
        borrow(model, "native")


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_a_family_whose_embeddings_are_scaled_elsewhere_runs_in_its_modules(family: str) -> None:
    """Before transformers 5.4 the body of a Gemma scaled them; our decoder left that out: another text."""
    model = tiny(family, "eager", hidden_size=64, head_dim=16)
    scaled = model.model.embed_tokens
    model.model.embed_tokens = nn.Embedding.from_pretrained(scaled.weight.detach())
    with pytest.raises(ModelError, match="scales embeddings"):
        borrow(model, "native")
    assert isinstance(borrow(model), HFModel)
    assert isinstance(_model(model, "auto", None), HFModel)


def test_a_class_that_was_patched_acts_as_it_does_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernel libraries do it: the module looks like any other, and its forward is another."""
    model, inputs = tiny("llama", "sdpa", hidden_size=64, head_dim=16), batch([5, 12, 30])
    base = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    kind = type(model.model.layers[0].mlp)
    whole = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 3 * whole(self, x))
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert not torch.equal(plain, base)
    assert torch.equal(plain, sooner.generate(model, **inputs, max_new_tokens=16, do_sample=False))
    with pytest.raises(ModelError, match="patched LlamaMLP"):
        borrow(model, "native")


def test_under_autocast_the_modules_run_that_follow_it() -> None:
    """Our decoder would compute in float32 what transformers computes in bfloat16."""
    model = tiny("llama", "sdpa", hidden_size=64, head_dim=16)
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(borrow(model), HFModel)
    assert isinstance(borrow(model), NativeModel)


def test_a_forward_that_was_compiled_is_followed() -> None:
    """`model.forward = torch.compile(model.forward)`, as transformers' documentation has it, was refused."""
    model, inputs = tiny("llama", "sdpa", hidden_size=64, head_dim=16), batch([5, 12])
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    model.forward = torch.compile(model.forward, backend="eager")
    before = portrait(model)
    for runtime, kind in (("auto", NativeModel), ("hf", HFModel)):
        assert isinstance(borrow(model, runtime), kind)
        ours = sooner.generate(model, **inputs, max_new_tokens=8, do_sample=False, runtime=runtime)
        assert torch.equal(plain, ours)
    assert portrait(model) == before


def test_weights_of_several_dtypes_run_in_their_own_modules() -> None:
    """Our decoder would read a float32 head as bfloat16."""
    model = tiny("llama", "sdpa", hidden_size=64, head_dim=32).to(torch.bfloat16)
    assert isinstance(borrow(model), NativeModel)
    model.lm_head.float()
    assert isinstance(borrow(model), HFModel)
