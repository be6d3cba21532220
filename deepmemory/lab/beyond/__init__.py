"""Experiments beyond the paper: what is trained, in one file each."""
