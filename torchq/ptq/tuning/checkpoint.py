"""The file of finished trials, from which a second search goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from torchq.analysis.batches import gathered
from torchq.errors import ConfigError
from torchq.ptq.ranks import Group, rank_in
from torchq.ptq.tuning.trial import TuneTrial
from torchq.utils import parse_json, replacing

__all__ = ["TrialFile"]


class TrialFile:
    """Trials by their settings, in a JSON file that is replaced as a whole.

    Args:
        path: the file, of the first process of the group; None keeps nothing.
        group: processes that have the same trials.

    Raises:
        ConfigError: the file holds something else.
    """

    def __init__(self, path: str | Path | None, group: Group = None) -> None:
        is_first = rank_in(group) == 0
        self._path = Path(path) if path is not None and is_first else None
        error, found = None, list[TuneTrial]()
        try:
            found = list(_read(self._path))
        except ConfigError as reason:
            error = reason
        known, problem = gathered((found, str(error or "")), group)[0]
        if problem:
            raise error or ConfigError(problem)
        self._known = {trial.settings: trial for trial in known}

    def get(self, settings: str) -> TuneTrial | None:
        """Return the trial with these settings, if it is known."""
        return self._known.get(settings)

    def add(self, trial: TuneTrial) -> None:
        """Add a trial to the file."""
        is_new = trial.settings not in self._known
        self._known[trial.settings] = trial
        if self._path is not None and is_new:
            rows = [asdict(trial) for trial in self._known.values()]
            with replacing(self._path) as (path,):
                path.write_text(json.dumps({"trials": rows}, indent=1), encoding="utf-8")


def _read(path: Path | None) -> Iterable[TuneTrial]:
    """Return the trials of a file; none if there is no file."""
    if path is None or not path.exists():
        return []
    data = parse_json(path.read_text(encoding="utf-8"), f"tune: checkpoint {path}")
    try:
        return [TuneTrial(**row) for row in data["trials"]]
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"tune: checkpoint {path}: got other data ({error}); expected a file of tune"
        ) from None
