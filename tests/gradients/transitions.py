"""Transitions and activations that the tools are tested with."""

ACTIVATIONS = ["leaky_relu", "relu", "tanh", "silu", "gelu"]
TRANSITIONS = {"n1": [], "n2": None, "deep": [5, 4, 6], "narrow": [7, 2, 9]}
