"""The report: from records to results, from results to blocks, from blocks to HTML, Markdown and the terminal.

A new table is one function in ``sections`` that returns a block, and its place in that module's page.
"""

from deepmemory.lab.report.report import print_report, write_report

__all__ = ["print_report", "write_report"]
