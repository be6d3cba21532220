"""Speed against peers, and what a Python loop would take."""
