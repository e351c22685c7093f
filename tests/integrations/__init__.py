"""Tests of models and lanes."""
