"""Tables, figures and one page that shows paper and ours side by side."""

from deepmemory.lab.report.page import write_report

__all__ = ["write_report"]
