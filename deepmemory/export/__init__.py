"""Export of models to run without this library: ONNX, ``torch.export`` and AOTInductor, for sequences or steps, and C.

A recurrence on the plain engine is exported as one loop of torch's own operators, for any length and batch size. In C
it is one step of one sequence.
"""

from deepmemory.export.c99 import c
from deepmemory.export.graphs import FORMATS, Step, portable, program, save
from deepmemory.export.rounding import rounded

__all__ = ["FORMATS", "Step", "c", "portable", "program", "rounded", "save"]
