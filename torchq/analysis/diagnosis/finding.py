"""One finding, and the list of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torchq.analysis.plotting import axes_or_new
from torchq.analysis.tables import html_table
from torchq.utils import wrap

__all__ = ["SEVERITIES", "DoctorReport", "Finding", "Severity"]

Severity = Literal["error", "warning", "info"]
#: From the gravest to the mildest.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
_COLORS = {"error": "#c0392b", "warning": "#e67e22", "info": "#7f8c8d"}
_SHOWN = 12  # places of one kind in a printed report


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be.

    Attributes:
        kind: the check that found it, a key of :data:`torchq.analysis.CHECKS`.
        severity: ``"error"``: the result is wrong or cannot be exported. ``"warning"``: accuracy
            or speed is lost. ``"info"``: good to know.
        name: dotted path of the module or quantizer.
        evidence: what was seen, with figures.
        remedy: the call that mends it.
    """

    kind: str
    severity: Severity
    name: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity} {self.kind}: {self.name or '(root)'}: {self.evidence}"


@dataclass(frozen=True)
class DoctorReport:
    """All findings, the gravest first; ``print`` it.

    Attributes:
        findings: what was found.
        checks: the kinds that were looked for.
        skipped: kinds that need batches, where none were given.
    """

    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity error."""
        return self.of("error")

    @property
    def ok(self) -> bool:
        """True without a finding of severity error."""
        return not self.errors

    @property
    def headline(self) -> str:
        """The counts, in one sentence."""
        counts = Counter(finding.severity for finding in self.findings)
        found = [_counted(counts[s], s) for s in SEVERITIES if counts[s]]
        text = ", ".join(found) if found else "nothing found"
        text += f" in {len(self.checks)} checks"
        if self.skipped:
            text += f"; {len(self.skipped)} more checks need batches"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = []
        kinds = dict.fromkeys((f.severity, f.kind, f.remedy) for f in self.findings)
        for severity, kind, remedy in kinds:
            alike = [
                f
                for f in self.findings
                if (f.severity, f.kind, f.remedy) == (severity, kind, remedy)
            ]
            lines.append(f"{severity.upper()} {kind}")
            lines += [
                wrap(f"  {f.name or '(root)'}: {f.evidence}", indent="    ") for f in alike[:_SHOWN]
            ]
            if len(alike) > _SHOWN:
                lines.append(f"  and {len(alike) - _SHOWN} more")
            lines.append(wrap(f"  -> {remedy}", indent="     "))
        return "\n".join([*lines, self.headline])

    def _repr_html_(self) -> str:
        head = ("where", "severity", "kind", "evidence", "remedy")
        rows = [
            (f.name or "(root)", f.severity, f.kind, f.evidence, f.remedy) for f in self.findings
        ]
        return html_table([head, *rows], self.headline)

    def plot(self, ax: Any = None) -> Any:
        """Draw how many findings there are of each kind with matplotlib.

        Args:
            ax: axes to draw on; default new ones.

        Returns:
            The axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        counts = Counter((finding.kind, finding.severity) for finding in self.findings)
        kinds = list(dict.fromkeys(finding.kind for finding in self.findings))
        ax = axes_or_new(ax, height=1.2 + 0.3 * len(kinds))
        left = [0] * len(kinds)
        for severity in SEVERITIES:
            values = [counts[kind, severity] for kind in kinds]
            ax.barh(kinds, values, left=left, color=_COLORS[severity], label=severity)
            left = [a + b for a, b in zip(left, values, strict=True)]
        ax.invert_yaxis()
        ax.set_xlabel("findings")
        ax.set_title(self.headline)
        ax.legend()
        return ax


def _counted(number: int, severity: str) -> str:
    plural = "s" if number != 1 and severity != "info" else ""
    return f"{number} {severity}{plural}"
