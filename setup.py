"""Build torchq for tools that ask for setup.py; all metadata is in pyproject.toml."""

from setuptools import setup

setup()
