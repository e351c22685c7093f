"""Tests; a package, so that they can share tests.tiny and repeat file names."""
