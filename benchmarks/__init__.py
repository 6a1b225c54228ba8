"""Programs behind every claim about speed or accuracy: ``python -m benchmarks.<name>``."""
