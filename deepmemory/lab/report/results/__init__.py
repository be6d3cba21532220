"""From records to numbers and verdicts: what each part of the report has to say."""
