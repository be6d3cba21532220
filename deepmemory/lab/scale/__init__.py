"""Many studies: several at once on one device, on a Ray cluster, and in a hyperparameter search."""
