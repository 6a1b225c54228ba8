"""The report: everything about a quantized model on one page, as HTML, JSON or text."""

from torchq.analysis.page.document import Report, check_path, compare, report

__all__ = ["Report", "check_path", "compare", "report"]
