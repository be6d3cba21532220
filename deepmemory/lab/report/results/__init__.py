"""From records to numbers and verdicts: the results for each part of the report."""
