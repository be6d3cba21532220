"""Training: networks, groups of runs, the loop, studies, random streams, progress and trackers."""
