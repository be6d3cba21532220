"""From results to blocks: a page for each part of the report, a function for each of its tables."""
