"""Turning a callable that is one linear map into one kernel."""
