"""Merging the parallel branches of re-parameterisable blocks."""
