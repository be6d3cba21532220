"""Conversion of a PackedSequence to a padded batch with lengths, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class Unpacked(NamedTuple):
    """A packed batch laid out as (time, batch, features), in the packed (sorted) order."""

    x: Tensor
    lengths: Tensor
    places: Tensor  # index of each packed row in the padded batch, with time and batch flattened
    packed: PackedSequence

    def pack(self, y: Tensor) -> PackedSequence:
        """Pack (time, batch, features) in the same way as the caller's input."""
        data = y.flatten(0, 1).index_select(0, self.places)
        _, batch_sizes, sorted_indices, unsorted_indices = self.packed
        return PackedSequence(data, batch_sizes, sorted_indices, unsorted_indices)


def check_packed(name: str, packed: PackedSequence) -> None:
    """Raise an error that names the module if a hand-made PackedSequence is inconsistent."""
    sizes, rows = packed.batch_sizes.tolist(), packed.data.shape[0]
    if not sizes or sizes != sorted(sizes, reverse=True) or sizes[-1] < 0 or sum(sizes) != rows:
        raise RuntimeError(
            f"{name}: batch_sizes of a PackedSequence should never increase and should sum to the {rows} rows of its "
            f"data, got {sizes}; create one with torch.nn.utils.rnn.pack_padded_sequence"
        )
    for key in ("sorted_indices", "unsorted_indices"):
        order = getattr(packed, key)
        if order is not None and order.shape != (sizes[0],):
            raise RuntimeError(
                f"{name}: {key} of a PackedSequence should have one entry per sequence, shape ({sizes[0]},), "
                f"got {tuple(order.shape)}"
            )


def unpack(name: str, packed: PackedSequence) -> Unpacked:
    """Pad a packed batch with one scatter; all of its sizes are known on the host."""
    check_packed(name, packed)
    data, batch_sizes = packed.data, packed.batch_sizes
    steps, batch = len(batch_sizes), int(batch_sizes[0])
    starts = batch_sizes.cumsum(0) - batch_sizes
    time = torch.repeat_interleave(torch.arange(steps), batch_sizes)
    places = (time * batch + torch.arange(len(time)) - starts[time]).to(data.device)
    lengths = (batch_sizes > torch.arange(batch)[:, None]).sum(1).to(data.device)
    x = data.new_zeros(steps * batch, data.shape[-1]).index_copy(0, places, data)
    return Unpacked(x.unflatten(0, (steps, batch)), lengths, places, packed)
