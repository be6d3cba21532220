"""The tasks: each file holds one task's data, its network's shape, its loss and its metrics."""

from __future__ import annotations

from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.adding import Adding
from deepmemory.lab.tasks.batch import Batch, Task
from deepmemory.lab.tasks.noisy_sequence import NoisySequence
from deepmemory.lab.tasks.temporal_order import TemporalOrder

__all__ = ["Adding", "Batch", "NoisySequence", "Task", "TemporalOrder", "task_of"]


def task_of(setting: Setting) -> Task:
    """The task a setting names, with that setting's lengths."""
    if setting.task == "adding":
        return Adding(setting.min_length, setting.max_length)
    if setting.task == "temporal-order":
        return TemporalOrder(setting.min_length, setting.max_length)
    return NoisySequence(setting.min_length, setting.noise == "fixed")
