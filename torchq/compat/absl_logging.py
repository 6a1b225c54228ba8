"""Stand-in for the part of ``absl.logging`` that quantization scripts use."""

import logging
from importlib.machinery import ModuleSpec
from types import ModuleType

_LEVELS = {
    "FATAL": (-3, logging.CRITICAL),
    "ERROR": (-2, logging.ERROR),
    "WARNING": (-1, logging.WARNING),
    "WARN": (-1, logging.WARNING),
}
_LEVELS |= {"INFO": (0, logging.INFO), "DEBUG": (1, logging.DEBUG)}


def stand_in() -> dict[str, ModuleType]:
    """Return modules for ``absl`` and ``absl.logging`` that send messages to the logger "absl"."""
    log = logging.getLogger("absl")
    module = ModuleType("absl.logging", "Stand-in of torchq.compat for absl.logging.")

    def set_verbosity(level: int | str) -> None:
        asked_level = level.upper() if isinstance(level, str) else level
        levels = (
            std
            for name, (number, std) in _LEVELS.items()
            if asked_level in (name, number)
        )
        log.setLevel(next(levels, logging.INFO))

    def log_first_n(level: int, text: str, n: int, *args: object) -> None:
        if level <= 0:
            log.log(
                next(std for number, std in _LEVELS.values() if number == level),
                text,
                *args,
            )

    module.__dict__.update({name: number for name, (number, _) in _LEVELS.items()})
    for name in ("debug", "info", "warning", "error", "fatal", "exception"):
        setattr(module, name, getattr(log, "critical" if name == "fatal" else name))
    module.__dict__.update(
        set_verbosity=set_verbosity,
        log_first_n=log_first_n,
        use_absl_handler=lambda: None,
        # OpenVINO takes it off the root logger.
        _absl_handler=logging.NullHandler(),
        STANDS_FOR=__name__,
    )
    package = ModuleType("absl", "Stand-in of torchq.compat for absl.")
    package.__dict__.update(logging=module, __path__=[], STANDS_FOR=__name__)
    for fake_module in (package, module):
        # For find_spec("absl").
        fake_module.__spec__ = ModuleSpec(
            fake_module.__name__, None, is_package=fake_module is package
        )
    return {"absl": package, "absl.logging": module}
