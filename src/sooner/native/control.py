"""Loads control.c, what a controller counts with. Knows not what it counts."""

from __future__ import annotations

import ctypes
import functools
from array import array
from ctypes import c_char_p, c_double, c_int64, c_void_p
from typing import Any

from sooner.native import build


def serves() -> bool:
    """Whether there is a library."""
    return library() is not None


def place(values: array[Any]) -> int:
    """Where an array lies."""
    return values.buffer_info()[0]


@functools.cache
def library() -> Any:
    """control.c, or None where it cannot be had. Its calls are short and keep the interpreter's lock: what several
    controllers share is changed by one at a time."""
    made = build.library("control.c")
    found = None if made is None else ctypes.PyDLL(made._name)
    if found is not None:
        found.filter_learn.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_double, c_double]
        found.filter_learn.restype = None
        found.price_rise.argtypes = [c_void_p, c_int64, c_double, c_double, c_int64, c_void_p]
        found.price_rise.restype = None
        found.beliefs_new.argtypes, found.beliefs_new.restype = [c_void_p], c_void_p
        found.beliefs_free.argtypes, found.beliefs_free.restype = [c_void_p], None
        found.beliefs_forget.argtypes, found.beliefs_forget.restype = [c_void_p, c_int64], None
        found.beliefs_levels.argtypes, found.beliefs_levels.restype = [c_void_p, c_int64, c_void_p], None
        found.beliefs_shift.argtypes, found.beliefs_shift.restype = [c_void_p, c_int64], c_double
        guesses = (c_void_p, c_int64, c_void_p, c_void_p)
        found.control_weigh.argtypes = [*guesses, c_char_p, c_void_p]
        found.beliefs_learn.argtypes = [*guesses, c_void_p]
        found.control_weigh.restype = found.beliefs_learn.restype = c_int64
    return found
