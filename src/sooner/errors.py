"""The exceptions a user can meet. Knows nothing of models, drafts or requests.

    SoonerError
     ├── ConfigError     an option or parameter is unknown, of the wrong type or out of range
     ├── ModelError      a model cannot be found, read, or is of a kind that is not supported
     ├── DraftError      a drafter does not fit the target, or does not keep the drafter protocol
     └── RequestError    one request cannot be served; its neighbours go on

Every message says what was wrong, what is allowed and how to mend it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SoonerError(Exception):
    """Base of all errors that are the caller's to mend. The command line prints it and exits with 2."""


class ConfigError(SoonerError, ValueError):
    """An option or parameter is unknown, of the wrong type or out of range."""


class ModelError(SoonerError):
    """A model cannot be found or read, or is of a kind that is not supported."""


class DraftError(SoonerError):
    """A drafter does not fit its target, or returned something the protocol does not allow."""


class RequestError(SoonerError):
    """One request cannot be served (empty prompt, prompt too long, broken logits)."""


def unknown(kind: str, value: str, allowed: Iterable[str]) -> str:
    """The message for an unknown name: the value, the closest allowed one, and all allowed ones."""
    names = sorted(allowed)
    close = difflib.get_close_matches(value, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {value!r}.{hint} Allowed: {', '.join(names)}."
