"""Models for places without this library: ONNX, ``torch.export`` and AOTInductor, whole or one step at a time, and C.

Exported, a recurrence on the plain engine is one loop made of torch's own operators, for any length and batch. In C it
is one step of one sequence.
"""

from deepmemory.export.c99 import c
from deepmemory.export.graphs import FORMATS, Step, portable, program, save
from deepmemory.export.rounding import rounded

__all__ = ["FORMATS", "Step", "c", "portable", "program", "rounded", "save"]
