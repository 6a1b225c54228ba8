"""Programs that back every claim about speed or accuracy; run them as ``python -m benchmarks.<name>``."""
