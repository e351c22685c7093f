"""Tests of bug reports of other implementations."""
