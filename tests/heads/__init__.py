"""Tests of draft heads and their files."""
