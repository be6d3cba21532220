"""Several studies at once on one device, on a Ray cluster, and hyperparameter search."""
