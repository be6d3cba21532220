"""What happened: database, checkpoints, merging, provenance."""
