"""Data that is copied to a device once."""

from __future__ import annotations

import torch
from torch import Tensor


class OnDevice:
    """Tensors by name, on the CPU and on every device where they were needed."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.copies = {torch.device("cpu"): tensors}

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors on this device, copied when they are first needed there."""
        if device not in self.copies:
            self.copies[device] = {name: tensor.to(device) for name, tensor in self.copies[torch.device("cpu")].items()}
        return self.copies[device]
