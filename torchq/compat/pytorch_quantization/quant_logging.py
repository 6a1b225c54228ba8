"""Loggers that other libraries have given handlers of their own."""

import logging


def reset_logger_handler() -> None:
    """Remove all handlers of the root logger, as old scripts do before they log."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
