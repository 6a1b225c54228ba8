"""The report as a document: HTML, JSON and text from the same data, of one model or of two."""

import json
import os
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from torch import nn

from torchq.analysis.mixed_precision import MixedPrecision
from torchq.analysis.outputs import decibel_text, percent_text, user_metric
from torchq.analysis.page.collect import collect
from torchq.errors import ConfigError
from torchq.graph import Forward
from torchq.utils import kept_batches, replacing, table, uncompiled, wrap
from torchq.utils.optional import import_optional

_SUFFIXES = (".html", ".htm", ".json", ".txt", ".md")
_SHOWN = 20
#: Findings of one kind that the text shows.
_OF_A_KIND = 3


@dataclass(frozen=True)
class Report:
    """Everything that was measured; ``print`` it, or write it as a file.

    Attributes:
        data: JSON data; of a comparison, the reports side by side under ``"reports"``.
    """

    data: dict[str, Any]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The reports in it: one, or those that are compared."""
        return list(self.data.get("reports", [self.data]))

    def to_html(self) -> str:
        """Return one HTML page that needs no other file and no network.

        Raises:
            MissingExtraError: jinja2 is not installed.
        """
        jinja2 = import_optional("jinja2", "report", "report")
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined
        )
        template = environment.from_string(_asset("report.html.jinja"))
        data = json.dumps({"reports": self.reports}, separators=(",", ":"))
        page: str = template.render(
            reports=self.reports,
            first=self.reports[0],
            style=_asset("report.css"),
            # "<" could end the script element, and this is how JSON writes it otherwise.
            data=data.replace("<", "\\u003c"),
            scripts=[
                _asset(name) for name in ("d3.min.js", "plot.min.js", "report.js")
            ],
            licenses=_asset("LICENSES.txt"),
        )
        return page

    def __str__(self) -> str:
        return "\n\n".join(_text(data) for data in self.reports)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as the suffix of ``path`` says: .html, .json, .txt or .md.

        Raises:
            ConfigError: Another suffix.
            MissingExtraError: jinja2 is not installed, which HTML needs.
        """
        check_path(path)
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            content = json.dumps(self.data, indent=1)
        else:
            content = self.to_html() if suffix.startswith(".htm") else f"{self}\n"
        with replacing(path) as (temporary,):
            temporary.write_text(content, encoding="utf-8")


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise an error where a report could not be written, before any work is done.

    Raises:
        ConfigError: The suffix is unknown, or the folder does not exist.
        MissingExtraError: jinja2 is not installed, which HTML needs.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ConfigError(
            f"report {path}: got suffix {suffix!r}; expected {', '.join(_SUFFIXES)}"
        )
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ConfigError(
            f"report {path}: the folder {folder} does not exist. Create it first"
        )
    if suffix.startswith(".htm"):
        import_optional("jinja2", "report", "report")


@cache
def _asset(name: str) -> str:
    folder = resources.files("torchq.analysis.page").joinpath("assets")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _text(data: dict[str, Any]) -> str:
    """Return one report for the terminal."""
    verdict = data["verdict"]
    lines = [
        f"{data.get('label') or data['model']}: {verdict['sentence']}",
        verdict["blame"],
        _target_text(data),
    ]
    for number, advice in enumerate(verdict["advice"], 1):
        lines.append(f"{number}. {advice['text']}")
        if advice["code"]:
            lines.append(textwrap.indent(advice["code"], "   "))
    rows = [
        ("rank", "layer", "damage", "local SQNR", "SQNR", "clipped", "bits", "bytes")
    ]
    ranked = sorted(
        data["layers"], key=lambda row: row["rank"] or len(data["layers"]) + 1
    )
    for row in ranked[:_SHOWN]:
        figures = (
            percent_text(row["damage"]),
            _ratio(row["local_sqnr"]),
            _ratio(row["sqnr"]),
        )
        bits = f"{row['weight_bits']}/{row['input_bits']}"
        columns = (percent_text(row["clipped"] or 0.0), bits, f"{row['bytes']:,.0f}")
        rows.append((str(row["rank"] or ""), row["name"], *figures, *columns))
    lines.append(table(rows))
    if len(ranked) > _SHOWN:
        lines.append(f"and {len(ranked) - _SHOWN} more layers")
    alike: dict[tuple[str, str], list[dict[str, object]]] = {}
    for finding in data["findings"]:
        if finding["severity"] != "info":
            kind = finding["severity"], finding["kind"]
            alike.setdefault(kind, []).append(finding)
    for (severity, name), findings in alike.items():
        for finding in findings[:_OF_A_KIND]:
            place = finding["name"] or "(root)"
            text = f"{severity} {name}: {place}: {finding['evidence']}"
            lines.append(wrap(text, indent="  "))
        if len(findings) > _OF_A_KIND:
            lines.append(f"and {len(findings) - _OF_A_KIND} {name} more")
    return "\n".join(line for line in lines if line)


def _target_text(data: dict[str, Any]) -> str:
    """Return what runs the model, and its time and size beside float."""
    speed = data["speed"]
    if speed is None:
        note = f"; {data['speed_note']}" if data["speed_note"] else ""
        return f"for {data['target']}{note}" if data["target"] else "for no target"
    megabytes, float_megabytes = speed["bytes"] / 1e6, speed["float_bytes"] / 1e6
    return (
        f"for {data['target']}: {speed['ms']:.3g} ms, float {speed['float_ms']:.3g} ms; "
        f"{megabytes:.3g} MB, float {float_megabytes:.3g} MB; {speed['call']}"
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else decibel_text(value)


@uncompiled()
def report(
    model: nn.Module,
    batches: Iterable[object],
    path: str | os.PathLike[str] | None = None,
    metric: object = None,
    *,
    plan: MixedPrecision | bool = True,
    forward: Forward | None = None,
    num_batches: int | None = None,
    timed: bool = True,
    progress: bool = True,
) -> Report:
    """Measure everything about a quantized model, and write it on one page.

    The page says in one sentence what quantization does to the model, which layers are to blame
    and what to do; then error along the network, ranking, histograms with the range of every
    method, weights per channel, sizes, alternatives and findings. The HTML file needs no network.

    Args:
        model: quantized and calibrated; left unchanged.
        batches: each holds the arguments of one call, perhaps followed by labels; see
            :func:`torchq.graph.call_arguments`. They are kept in memory.
        path: a file with suffix .html, .json, .txt or .md; None writes none.
        metric: ``metric(output, batch)`` or ``metric(model)``, larger for a better model;
            ``"detections"`` or a :class:`torchq.analysis.Detections`, which then ranks layers too.
            None compares predictions alone.
        plan: a result of :func:`torchq.mixed_precision` to show; True makes one, False does not.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        timed: time a model for a runtime that is here beside the float model, and measure the files
            of both, which takes an export of each.
        progress: show bars.

    Returns:
        The report; ``print`` it, or ``save`` it under other names.

    Raises:
        ConfigError: The model has no quantizer that is on, or an argument is invalid.
        CalibrationError: There was no batch.
        MissingExtraError: jinja2 is not installed, which HTML needs.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> swapped = torchq.quantize_(model)
        >>> batches = [torch.randn(8, 4)]
        >>> calibrated = torchq.calibrate(model, batches, progress=False)
        >>> found = torchq.report(model, batches, progress=False, plan=False)
        >>> found.data["verdict"]["grade"]
        'good'
    """
    sample_batches = _checked("report", batches, num_batches, path, metric)
    return _saved(
        Report(collect(model, sample_batches, metric, plan, forward, timed, progress)),
        path,
    )


@uncompiled()
def compare(
    a: nn.Module,
    b: nn.Module,
    batches: Iterable[object],
    path: str | os.PathLike[str] | None = None,
    metric: object = None,
    *,
    labels: tuple[str, str] = ("A", "B"),
    forward: Forward | None = None,
    num_batches: int | None = None,
    timed: bool = True,
    progress: bool = True,
) -> Report:
    """Put two quantized models side by side: two recipes, or two checkpoints.

    Args:
        a: quantized and calibrated; left unchanged.
        b: the other one, with the same inputs.
        batches: as for :func:`torchq.report`.
        path: a file with suffix .html, .json, .txt or .md; None writes none.
        metric: as for :func:`torchq.report`.
        labels: what the two are called.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        timed: time a model for a runtime that is here beside the float model, and measure the files
            of both, which takes an export of each.
        progress: show bars.

    Returns:
        One report of both; ``print`` it, or ``save`` it.

    Raises:
        ConfigError: A model has no quantizer that is on, or an argument is invalid.
        CalibrationError: There was no batch.

    Example:
        >>> models = [torch.nn.Sequential(torch.nn.Linear(4, 2)) for _ in range(2)]
        >>> batches = [torch.randn(8, 4)]
        >>> for model, bits in zip(models, (8, 4)):
        ...     swapped = torchq.quantize_(model, torchq.recipes.integer(bits, bits))
        ...     calibrated = torchq.calibrate(model, batches, progress=False)
        >>> labels = ("INT8", "INT4")
        >>> found = torchq.analysis.compare(*models, batches, labels=labels, progress=False)
        >>> [data["label"] for data in found.reports]
        ['INT8', 'INT4']
    """
    sample_batches = _checked("compare", batches, num_batches, path, metric)
    reports = [
        {
            **collect(model, sample_batches, metric, False, forward, timed, progress),
            "label": label,
        }
        for model, label in zip((a, b), labels, strict=True)
    ]
    return _saved(Report({"reports": reports}), path)


def _saved(found: Report, path: str | os.PathLike[str] | None) -> Report:
    if path is not None:
        found.save(path)
    return found


def _checked(
    where: str,
    batches: Iterable[object],
    num_batches: int | None,
    path: Any,
    metric: object,
) -> list[Any]:
    """Return the batches after the checks that come before any work."""
    user_metric(where, metric)
    if path is not None:
        check_path(path)
    return kept_batches(where, batches, num_batches)
