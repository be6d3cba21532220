"""A page to try things out: one server on this machine, one page, nothing from anywhere else."""
