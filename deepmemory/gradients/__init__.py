"""The paper's gradient condition, and measurements of how gradients flow back through time.

=====================  =====================================================================================
:func:`condition`      condition (star): eigenvalues of the weights between one state and the next
:func:`step_jacobian`  dh_t/dh_t-1 of a DMU in three terms: through the kept state, the gate and the candidate
:func:`flow`           the norm of dL/dh_t at every step of every recurrent layer of a model
:func:`gates`          the share of its state that a DMU keeps at each step
=====================  =====================================================================================

``docs/gradients.md`` shows how to use them, ``docs/gradients-proof.md`` has the mathematics.
"""

from deepmemory.gradients.gate_statistics import Gates, LayerGates, gates
from deepmemory.gradients.gradient_condition import (
    CANDIDATE_LIMIT,
    GATE_LIMIT,
    SLOPE,
    Condition,
    LayerCondition,
    Passage,
    condition,
)
from deepmemory.gradients.gradient_flow import Flow, StateFlow, flow
from deepmemory.gradients.jacobian import StepJacobian, step_jacobian

__all__ = [
    "CANDIDATE_LIMIT",
    "GATE_LIMIT",
    "SLOPE",
    "Condition",
    "Flow",
    "Gates",
    "LayerCondition",
    "LayerGates",
    "Passage",
    "StateFlow",
    "StepJacobian",
    "condition",
    "flow",
    "gates",
    "step_jacobian",
]
