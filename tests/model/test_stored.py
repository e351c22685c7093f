"""A model read from its files against the same one read by transformers: equal bits, or left to transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sooner.errors import ModelError
from sooner.model import decoder, hf, native, stored
from sooner.model.load import load
from sooner.model.safetensors_map import MappedTensors, NotPlainError
from tests.model.test_fused import run
from tests.model.test_native import made
from tests.tiny import make_tiny, tiny_tokenizer

BIASED = [(family, {"attention_bias": True}) for family in ("llama", "gemma", "gemma2", "qwen3", "olmo2")]
VARIANTS = [
    *((family, {}) for family in sorted(decoder.FAMILIES)),
    *BIASED,
    ("llama", {"mlp_bias": True}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    ("smollm3", {"use_sliding_window": True, "no_rope_layers": [1, 0, 1]}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"vocab_size": 99}),  # the last panel of the head is not whole
    ("gemma2", {"tie_word_embeddings": False}),
    ("llama", {"sliding_window": 3}),  # a setting that these modules do not look at
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
]


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register()


def saved(folder: Path, family: str, **extra: Any) -> Path:
    """A model whose norms and biases show, and a tokenizer, in `folder`."""
    heads = {} if family in ("phi3", "olmo2") else {"head_dim": 32}
    wide = {"hidden_size": 128} if family in ("phi3", "olmo2") else {}
    made(family, **heads | wide | extra).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def lying(folder: Path, dtype: torch.dtype = torch.float32) -> stored.Stored | None:
    return stored.read(str(folder), AutoConfig.from_pretrained(folder), dtype)


def by_transformers(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=hf.NAME).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "extra"), VARIANTS)
def test_its_bits_are_those_of_the_way_through_transformers(
    family: str, extra: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = saved(tmp_path, family, **extra)
    found = lying(folder, dtype)
    assert found is not None
    assert native.serves(found)
    want, features = run(native.NativeModel(by_transformers(folder, dtype)))
    got, seen = run(native.NativeModel(found))
    assert want.std() > 1e-3
    assert torch.equal(got, want)
    assert torch.equal(seen, features)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_at_fewer_bits_are_the_same_too(quantize: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    found = lying(folder, torch.bfloat16)
    assert found is not None
    want, _ = run(native.NativeModel(by_transformers(folder, torch.bfloat16), quantize))
    assert torch.equal(run(native.NativeModel(found, quantize))[0], want)


@pytest.mark.parametrize("tied", [True, False])
def test_it_shares_its_ends_and_its_first_layers(tied: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", tie_word_embeddings=tied)
    found = lying(folder)
    assert found is not None
    model, module = native.NativeModel(found), by_transformers(folder, torch.float32)
    ends = model.ends()
    assert torch.equal(ends.embedding, module.model.embed_tokens.weight)
    assert torch.equal(ends.head(), module.lm_head.weight)
    assert ends.norm is not None
    assert torch.equal(ends.norm, module.model.norm.weight)
    early = native.NativeModel(module).first_layers(2)
    assert model.first_layers(2).lanes.store.shape == early.lanes.store.shape


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    module = made("llama", head_dim=32)
    module.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    found = lying(tmp_path)
    assert found is not None
    assert torch.equal(run(native.NativeModel(found))[0], run(native.NativeModel(module))[0])


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reconfigured(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


Q = "model.layers.1.self_attn.q_proj.weight"
ODD: dict[str, Callable[[Path], object]] = {
    "a tensor is missing": lambda f: rewritten(f, lambda t: t.pop(Q)),
    "a tensor too many": lambda f: rewritten(f, lambda t: t.update(spare=torch.zeros(3))),
    "a bias the configuration does not know": lambda f: rewritten(
        f, lambda t: t.update({Q.replace("weight", "bias"): torch.ones(128)})
    ),
    "another shape": lambda f: rewritten(f, lambda t: t.update({Q: torch.zeros(64, 64)})),
    "a type that is not read": lambda f: rewritten(f, lambda t: t.update({Q: t[Q].double()})),
    "quantised": lambda f: reconfigured(f, quantization_config={"quant_method": "fp8"}),
    "angles that follow the text": lambda f: reconfigured(
        f, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "a part of the head turns": lambda f: reconfigured(
        f, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "a head although it is tied": lambda f: reconfigured(f, tie_word_embeddings=True),
    "another activation": lambda f: reconfigured(f, hidden_act="no_such"),
    "another family": lambda f: reconfigured(f, model_type="gpt2"),
    "an adapter": lambda f: (f / "adapter_config.json").write_text("{}"),
    "no safetensors": lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
    "half a file": lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:20_000]
    ),
    "an empty file": lambda f: (f / "model.safetensors").write_bytes(b""),
    "no header": lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64),
    "a shard is missing": lambda f: (
        (f / "model.safetensors").rename(f / "other.safetensors"),
        (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "no.safetensors"}}'),
    ),
    "an index that is none": lambda f: (
        (f / "model.safetensors").rename(f / "other.safetensors"),
        (f / "model.safetensors.index.json").write_text("[]"),
    ),
}


@pytest.mark.parametrize("odd", sorted(ODD))
def test_what_is_not_as_the_family_has_it_is_left_to_transformers(odd: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    config = AutoConfig.from_pretrained(folder)
    assert stored.read(str(folder), config, torch.float32) is not None
    ODD[odd](folder)
    if odd not in ("quantised",):
        config = AutoConfig.from_pretrained(folder)
    else:
        config.quantization_config = {"quant_method": "fp8"}
    assert stored.read(str(folder), config, torch.float32) is None


def test_what_transformers_reads_goes_on_being_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    want, _ = run(load(str(folder), dtype="float32").model)  # type: ignore[arg-type]  # native
    ODD["a tensor too many"](folder)
    got, _ = run(load(str(folder), dtype="float32").model)  # type: ignore[arg-type]  # native
    assert torch.equal(got, want)


def test_a_damaged_file_is_a_mistake_in_one_line(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    ODD["half a file"](folder)
    with pytest.raises(ModelError, match="could not be loaded"):
        load(str(folder))


@pytest.mark.parametrize("generation", [{"eos_token_id": [5, 7]}, {}, None])
def test_ends_of_text_are_those_of_the_generation_config_or_else_the_model(
    generation: dict[str, Any] | None, tmp_path: Path
) -> None:
    folder = make_tiny(tmp_path, seed=0, hidden=64, eos=3)
    path = folder / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation))
    assert lying(folder) is not None
    assert load(str(folder), dtype="float32").eos_ids == ((5, 7) if generation else (3,))


def test_loading_and_writing_need_none_of_transformers_modelling_code(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, seed=0, hidden=64)
    script = (
        "import sys, sooner\n"
        f"llm = sooner.LLM({str(folder)!r}, dtype='float32')\n"
        "assert llm.generate('once upon', sooner.SamplingParams(max_tokens=8)).token_ids\n"
        "assert type(llm.target.model).__name__ == 'NativeModel'\n"
        "heavy = ['transformers.modeling_utils', 'transformers.generation.utils', 'torch._dynamo']\n"
        "heavy += ['torch._inductor', 'scipy', 'numba', 'matplotlib', 'rich']\n"
        "heavy += ['transformers.models.llama.modeling_llama']\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr


def test_pages_that_were_read_are_given_back(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(8_000_000), "b": torch.ones(3)}, file)
    tensors = MappedTensors([file])
    before = in_files()
    assert tensors["a"].sum() == 8_000_000
    assert in_files() - before > 25  # MB
    tensors.give_back(tensors)
    assert in_files() - before < 8
    assert torch.equal(tensors["b"], torch.ones(3))


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"x": torch.ones(3)}, tmp_path / name)
    with pytest.raises(NotPlainError, match="repeats"):
        MappedTensors([tmp_path / "a", tmp_path / "b"])


def in_files() -> float:
    """Resident memory that belongs to mapped files, in MB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssFile:")).split()[1]) / 1024
