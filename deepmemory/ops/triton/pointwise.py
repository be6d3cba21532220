# mypy: disable-error-code="no-untyped-def,import-untyped,import-not-found"
"""What the cells do element by element, in Triton: activations, gates, and their gradients.

All of it in float32. Gates come with their complement, computed without the cancellation of ``1 - gate``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepmemory.ops.recurrence import LEAKY_SLOPE

SLOPE = tl.constexpr(LEAKY_SLOPE)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_TAU = tl.constexpr(0.3989422804014327)


@triton.jit
def gate(x):
    """sigmoid(x) and sigmoid(-x), both to full relative accuracy however saturated."""
    e = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(x >= 0, large, small), tl.where(x >= 0, small, large)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) without overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def tanh(x):
    """tanh to the absolute accuracy of float32, without overflow."""
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x >= 0, size, -size)


@triton.jit
def activation(x, NAME: tl.constexpr):
    """f(x) of a hidden layer or of an RNN's state."""
    if NAME == "tanh":
        return tanh(x)
    elif NAME == "relu":
        return tl.where(x <= 0, 0.0, x)
    elif NAME == "leaky_relu":
        return tl.where(x > 0, x, x * SLOPE)
    elif NAME == "silu":
        return x * sigmoid(x)
    else:
        return 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))


@triton.jit
def slope_from_input(x, a, NAME: tl.constexpr):
    """f'(x), for a = f(x)."""
    if NAME == "silu":
        s = sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif NAME != "gelu":
        return slope_from_value(a, NAME)
    else:
        return 0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * INV_SQRT_TAU * tl.exp(-0.5 * x * x)


@triton.jit
def slope_from_value(a, NAME: tl.constexpr):
    """f'(x) from a = f(x)."""
    if NAME == "tanh":
        return 1.0 - a * a
    elif NAME == "relu":
        return tl.where(a <= 0, 0.0, 1.0)  # 1 for NaN, as torch's
    else:
        return tl.where(a > 0, 1.0, SLOPE)


@triton.jit
def dmu_update(z, candidate, h):
    """The new state and tanh(candidate)."""
    keep, release = gate(z)
    c = tanh(candidate)
    return h * keep + c * release, c


@triton.jit
def dmu_gradient(g, z, c, h):
    """From the gradient of the new state to those of z, of the candidate, and of h past the transition."""
    keep, release = gate(z)
    return g * (h - c) * keep * release, g * release * (1.0 - c * c), g * keep


@triton.jit
def rhn_update(candidate, transform, s):
    """The new state, tanh(candidate), sigmoid(transform)."""
    opened, closed = gate(transform)
    c = tanh(candidate)
    return c * opened + s * closed, c, opened


@triton.jit
def rhn_gradient(g, c, opened, s):
    """Gradients of candidate, of transform, and of s past the layer."""
    closed = 1.0 - opened
    return g * opened * (1.0 - c * c), g * (c - s) * opened * closed, g * closed


@triton.jit
def gru_update(r_in, z_in, n_x, n_h, h):
    """The new state, r, z, n."""
    r = sigmoid(r_in)
    keep, release = gate(z_in)
    n = tanh(n_x + r * n_h)
    return h * keep + n * release, r, keep, n


@triton.jit
def gru_gradient(g, r, z, n, n_h, h):
    """Gradients of r, z, n before their activation, of n_h, and of h past the gates."""
    dn = g * (1.0 - z) * (1.0 - n * n)
    dr = dn * n_h * r * (1.0 - r)
    return dr, g * (h - n) * z * (1.0 - z), dn, dn * r, g * z


@triton.jit
def lstm_update(i_in, f_in, g_in, o_in, c):
    """The new h and c, and the four gates."""
    i, f, o = sigmoid(i_in), sigmoid(f_in), sigmoid(o_in)
    g = tanh(g_in)
    c = f * c + i * g
    return o * tanh(c), c, i, f, g, o


@triton.jit
def lstm_gradient(dh, dc, i, f, g, o, c, c_before):
    """Gradients of the four gates before their activation, and of the c before."""
    t = tanh(c)
    do = dh * t * o * (1.0 - o)
    dc = dc + dh * o * (1.0 - t * t)
    return dc * g * i * (1.0 - i), dc * c_before * f * (1.0 - f), dc * i * (1.0 - g * g), do, dc * f
