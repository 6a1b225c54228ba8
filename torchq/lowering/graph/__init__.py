"""Tracing a model and editing its graph."""
