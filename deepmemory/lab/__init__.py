"""The lab: trains with the library, repeats the paper's experiments and shows the results."""
