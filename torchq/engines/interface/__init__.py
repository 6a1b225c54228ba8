"""How a model is called and what it returns: its arguments by name, and the shape of results."""
