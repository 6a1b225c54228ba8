"""The report: everything about a quantized model on one page, as HTML, JSON or text."""

from torchq.analysis.page.api import report
from torchq.analysis.page.comparison import compare
from torchq.analysis.page.document import Report

__all__ = ["Report", "compare", "report"]
