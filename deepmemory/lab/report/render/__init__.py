"""Shows blocks: as one HTML page, as Markdown, in a terminal."""
