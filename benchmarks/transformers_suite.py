"""transformers' own tests of generation, run against the drop-in. Holds none of them; knows where they lie.

    HF_HUB_OFFLINE=1 RUN_FLAKY=1 python benchmarks/transformers_suite.py FOLDER [--models llama gpt2 ...]

FOLDER: a checkout of transformers at the version that is imported (tests/, conftest.py; put FOLDER/src on
PYTHONPATH to run its own). Needs pytest, parameterized, pytest-asyncio and datasets.

The adapter puts `custom_generate=sooner.generate` into their calls of `generate`: into those with an assistant
or prompt lookup in tests that compare with plain decoding, which stays transformers' own; into all in the others.
Calls that are not ours (beam search, encoder-decoders, families that are refused) go through unchanged.
Attentions, hidden states and caches, which we do not return, are not asked for, and the checks of these are left
out. Weights that would have to be downloaded are replaced by random tiny ones, under the tokenizer of the default
model. Masks that their testers draw with zeros on the right (transformers itself warns of such) are turned round,
for both sides.

Every test runs twice, first without the drop-in: what fails there (wrong stand-ins, say) is none of its business.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    testing_utils,
)
from transformers.generation.utils import GenerationMixin

import sooner
from sooner.errors import SoonerError
from sooner.model.hf import FAMILIES
from sooner.model.load import load_tokenizer

COMPARED = ("assisted", "prompt_lookup", "speculative")  # in a test's name: plain decoding stays transformers'
ASKED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
FOLDERS = {"gemma3_text": "gemma3"}
OF_MODELS = (
    "test_assisted_decoding",
    "test_prompt_lookup_decoding",
    "test_greedy_generate",
    "test_sample_generate",
    "test_left_padding_compatibility",
    "test_generate_with_and_without_position_ids",
    "test_generate_methods_with_logits_to_keep",
)
FILES = ("test_utils.py", "test_streamers.py", "test_stopping_criteria.py", "test_candidate_generator.py")
NOT_RETURNED = (
    "_check_attentions_for_generate",
    "_check_hidden_states_for_generate",
    "_check_past_key_values_for_generate",
)
TINY: dict[str, Callable[..., Any]] = {
    "gpt2": lambda vocab: GPT2Config(vocab_size=vocab, n_embd=32, n_layer=2, n_head=4, n_positions=512),
    "pythia": lambda vocab: GPTNeoXConfig(vocab_size=vocab, **_sizes()),
    "mistral": lambda vocab: MistralConfig(vocab_size=vocab, num_key_value_heads=2, **_sizes()),
    "llama": lambda vocab: LlamaConfig(vocab_size=vocab, num_key_value_heads=2, **_sizes()),
    "qwen": lambda vocab: LlamaConfig(vocab_size=vocab, num_key_value_heads=2, **_sizes()),
    "olmo": lambda vocab: LlamaConfig(vocab_size=vocab, num_key_value_heads=2, **_sizes()),
}


def _sizes() -> dict[str, int]:
    return {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass
class Seen:
    """One test: how it ended, calls that ran on the drop-in, the first refusal, the end of the error."""

    outcome: str = ""
    calls: int = 0
    refused: str = ""
    error: str = ""

    def kind(self, plain: str) -> str:
        """plain: how the test ended without the drop-in."""
        if not self.calls:
            return "not ours"
        if self.outcome == "failed" and plain == "failed":
            return "fails without us too"
        return "refused" if self.outcome == "failed" and self.refused else self.outcome


@dataclass
class Adapter:
    """A pytest plugin. seen: by test. plain: leaves their calls alone."""

    plain: bool
    seen: dict[str, Seen] = field(default_factory=dict)
    now: Seen = field(default_factory=Seen)
    compared: bool = False

    def generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(model: Any, *args: Any, **keywords: Any) -> Any:
            mask = keywords.get("attention_mask")
            if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not mask[:, -1].all():
                keywords = keywords | {"attention_mask": mask.flip(1)}
            if self.plain or not self._ours(model, keywords):
                return original(model, *args, **keywords)
            self.now.calls += 1
            given = {k: v for k, v in keywords.items() if k not in ("output_attentions", "output_hidden_states")}
            try:
                return original(model, *args, **given, custom_generate=sooner.generate)
            except SoonerError as error:
                self.now.refused = self.now.refused or str(error)
                raise

        return generate

    def _ours(self, model: Any, keywords: dict[str, Any]) -> bool:
        config = keywords.get("generation_config") or model.generation_config
        beams = keywords.get("num_beams") or getattr(config, "num_beams", None) or 1
        if model.config.model_type not in FAMILIES or beams > 1 or keywords.get("custom_generate") is not None:
            return False
        return not self.compared or any(keywords.get(name) is not None for name in ASKED)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for owner in {kind for item in items if item.cls for kind in item.cls.__mro__}:
            for name in NOT_RETURNED:
                if name in vars(owner):
                    setattr(owner, name, _if_returned(vars(owner)[name]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        self.now = self.seen[item.nodeid] = Seen()
        self.compared = any(word in item.name for word in COMPARED)

    def pytest_runtest_logreport(self, report: Any) -> None:
        one = self.seen[report.nodeid]
        if report.when == "call" or report.outcome != "passed":
            one.outcome = report.outcome
        if report.outcome == "failed":
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E  ")]
            one.error = " ".join(line[2:].strip() for line in lines[:3])[:300]


def _if_returned(check: Callable[..., None]) -> Callable[..., None]:
    """Their check, left out for what a call of ours does not return."""

    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        names = ("attentions", "hidden_states", "past_key_values")
        if not any(name in keywords and keywords[name] is None for name in names):
            check(self, *args, **keywords)

    return checked


def stand_in(original: Callable[..., Any], tokenizer: Any) -> Callable[..., Any]:
    """A tiny random model under the name of one that would have to be downloaded."""

    def from_pretrained(name: Any, *args: Any, **keywords: Any) -> Any:
        kind = next((kind for kind in TINY if kind in str(name).lower()), None)
        if kind is None or Path(str(name)).exists():
            return original(name, *args, **keywords)
        torch.manual_seed(0)
        config = TINY[kind](len(tokenizer))
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        return AutoModelForCausalLM.from_config(config).eval()

    return from_pretrained


def install(adapter: Adapter) -> None:
    """Patch transformers in this process."""
    tokenizer = load_tokenizer("smollm2-135m")
    GenerationMixin.generate = adapter.generate(GenerationMixin.generate)
    AutoModelForCausalLM.from_pretrained = stand_in(AutoModelForCausalLM.from_pretrained, tokenizer)
    known, flaky = AutoTokenizer.from_pretrained, testing_utils.is_flaky

    def is_flaky(max_attempts: Any = 5, **keywords: Any) -> Any:
        """Written without brackets, as above their test of prompt lookup, theirs lets a test pass unrun."""
        return max_attempts if callable(max_attempts) else flaky(max_attempts, **keywords)

    testing_utils.is_flaky = is_flaky

    def tokenizer_from(name: Any, *args: Any, **keywords: Any) -> Any:
        tiny = any(kind in str(name).lower() for kind in TINY) and not Path(str(name)).exists()
        if not tiny:
            return known(name, *args, **keywords)
        made = load_tokenizer("smollm2-135m")
        made.padding_side = keywords.get("padding_side", "left")
        return made

    AutoTokenizer.from_pretrained = tokenizer_from


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="*", default=sorted(FAMILIES))
    parser.add_argument("--plain", type=Path, help="only run without the drop-in, and write how each test ended")
    asked = parser.parse_args()
    if asked.plain is not None:
        outcomes = {name: one.outcome for name, one in tested(asked, Adapter(plain=True)).items()}
        asked.plain.write_text(json.dumps(outcomes))
        return 0
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        again = [sys.executable, __file__, str(asked.folder), "--models", *asked.models, "--plain", file.name]
        subprocess.run(again, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        plain = json.loads(Path(file.name).read_text())
    return report(tested(asked, Adapter(plain=False)), plain)


def tested(asked: argparse.Namespace, adapter: Adapter) -> dict[str, Seen]:
    os.chdir(asked.folder)
    sys.path.insert(0, str(asked.folder))
    install(adapter)
    models = [f"tests/models/{FOLDERS.get(m, m)}/test_modeling_{FOLDERS.get(m, m)}.py" for m in asked.models]
    files = [f"tests/generation/{name}" for name in FILES] + [m for m in models if Path(m).is_file()]
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--show-capture=no", "--tb=short"]
    quiet.append("--continue-on-collection-errors")
    chosen = " or ".join(("GenerationIntegrationTests", *FILES, *OF_MODELS)).replace(".py", "")
    pytest.main([*quiet, *files, "-k", chosen], plugins=[adapter])
    return adapter.seen


def report(seen: dict[str, Seen], plain: dict[str, str]) -> int:
    """Print what came of it, test by test; the last line is JSON."""
    table: dict[str, Counter[str]] = {}
    kinds = {name: one.kind(plain.get(name, "")) for name, one in seen.items()}
    for name, kind in kinds.items():
        test = name.split("::")[-1].split("[")[0]
        where = "models" if "tests/models" in name else name.split("::")[0].split("/")[-1]
        table.setdefault(f"{where}: {test}", Counter())[kind] += 1
    print("-- what came of it")
    for test, counts in table.items():
        if set(counts) != {"not ours"}:
            print(f"{test:100} {dict(counts)}")
    for name, kind in kinds.items():
        if kind in ("failed", "refused"):
            print(f"{kind}: {name}\n    {seen[name].refused or seen[name].error}")
    totals = Counter(kinds.values())
    print(json.dumps({"transformers": transformers.__version__, "totals": totals}))
    return int(totals["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
