"""Finding the one kernel of a callable that is one linear map."""
