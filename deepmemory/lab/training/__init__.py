"""Network, loop over epochs, studies, random streams, progress and trackers."""
