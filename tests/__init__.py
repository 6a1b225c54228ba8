"""Tests, laid out like the package. A package itself, so that ``tests.reference`` never resolves to somebody else's ``tests``."""
