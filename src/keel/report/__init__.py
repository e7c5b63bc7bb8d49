"""Reports: one offline HTML file, or a page of documentation, from results files."""

from __future__ import annotations

from keel.report.docs import keep_results, write_docs_page
from keel.report.page import write_report
from keel.report.speeds import speed_parts

__all__ = ["keep_results", "speed_parts", "write_docs_page", "write_report"]
