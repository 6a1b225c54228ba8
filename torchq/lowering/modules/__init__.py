"""Modules of deployed models."""
