"""Enforces the paper's gradient condition on the weights of every DMU (the setting ``condition=kept``)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import deepmemory as dm


def enforce_condition(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """Scale the rows of z and of the candidate down so that the eigenvalues of both products are within their limits.

    The spectral radius is bounded from above by ``norm(M ** 64) ** (1 / 64)``, which needs no value on the host.
    """
    for name, dmu in network.named_modules():
        if not isinstance(dmu, dm.DMU):
            continue
        prefix = f"{name}." if name else ""
        for layer in range(dmu.num_layers):
            later = [weights[f"{prefix}weight_{index}_l{layer}"] for index in range(2, dmu.depth + 1)]
            *inner, last = [weights[f"{prefix}weight_hh_l{layer}"], *later]
            limits = (dm.gradients.GATE_LIMIT, dm.gradients.CANDIDATE_LIMIT)
            for rows, limit in zip(last.chunk(2, 1), limits, strict=True):
                power = rows.double()  # float32 has too few digits where the norm of a product is far above its radius
                for matrix in reversed(inner):
                    power = power @ matrix.double()  # [R, d, d]
                log_radius = torch.zeros_like(power[:, :1, :1])
                for squarings in range(7):
                    norm = torch.linalg.matrix_norm(power)[:, None, None].clamp(min=1e-300)
                    log_radius += norm.log() / 2**squarings
                    power = (power / norm) @ (power / norm)
                rows.mul_((0.999 * limit * torch.exp(-log_radius)).clamp(max=1).to(rows.dtype))
