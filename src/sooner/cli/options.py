"""Options that several commands share, and how the library's words for them are put on the command line."""

from __future__ import annotations

import re
from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="Packaged model, folder of a transformers model, or hub id.")]
K = Annotated[
    int | None,
    typer.Option(
        "--k", metavar="N", help="Most tokens guessed in one step; 0 = plain decoding.", show_default="by drafter"
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Most branches at one point of a draft; 1 = a chain.", show_default="by drafter"
    ),
]
MaxTokens = Annotated[int, typer.Option(metavar="N", help="Most tokens to write.")]
Temperature = Annotated[float, typer.Option(metavar="T", help="0 = always the likeliest token; above, sampling.")]
Dtype = Annotated[
    str,
    typer.Option(help="auto, float32, bfloat16 or float16; auto = bfloat16 where the machine has it."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda; auto = the GPU if there is one.")]
Runtime = Annotated[
    str, typer.Option(help="fused (our decoder), hf (transformers' modules), or auto (fused where it can).")
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="BITS", help="int8 or int4: the target's weights at fewer bits.", show_default="as they are"
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Threads the CPU computes with.", show_default="as many as pay on this machine"
    ),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-memory",
        metavar="SIZE",
        help="Most memory for keys and values of target and drafter, like 512MiB.",
        show_default="as much as is needed",
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the model's chat template.")]

# First words of ConfigError messages that are parameters of the library with an option of the same name.
_PARAMETERS = frozenset(
    {
        "batch",
        "arrival",
        "concurrency",
        "device",
        "frequency_penalty",
        "k",
        "kv_memory",
        "limit",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "quantize",
        "repeat",
        "repetition_penalty",
        "seed",
        "stop",
        "temperature",
        "threads",
        "top_k",
        "top_p",
        "typical_p",
        "width",
    }
)


def in_options(message: str) -> str:
    """The message, with the parameter it begins with written as the option: max_tokens -> --max-tokens."""
    found = re.match("[a-z_]+", message)
    if found is None or found.group() not in _PARAMETERS:
        return message
    return f"--{found.group().replace('_', '-')}{message[found.end() :]}"
