"""Tests, laid out like the package.

This is a package, so that ``tests.reference`` never resolves to somebody else's ``tests``.
"""
