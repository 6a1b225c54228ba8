"""Passes over the graph of a deployed model."""
