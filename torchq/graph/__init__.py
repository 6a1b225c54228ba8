"""Models as graphs of calls."""
