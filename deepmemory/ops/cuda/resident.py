# mypy: disable-error-code="no-untyped-def,import-untyped,import-not-found"
"""Sweeps for states whose weights fit on the chip: read once, kept there through all time steps.

One program takes one run and a tile of BM sequences through all time steps, with the state in registers too.
What a step reads from memory is asked for one step ahead. The weights are loaded before the loop and the compiler
places them, in shared memory or in registers. Cells of one linear layer, and of two for dmu and rhn
(TWO_LAYERS). D and H are the state's and the hidden layer's width, padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepmemory.ops.cuda import pointwise as pw
from deepmemory.ops.cuda.memory import before, dot, get, put


@triton.jit
def weight_to_apply(w, first, rows, columns, N: tl.constexpr, K: tl.constexpr):
    """``rows`` rows of w (rows, columns) from ``first`` on, transposed and padded: [K, N]."""
    n, k = tl.arange(0, N), tl.arange(0, K)
    mask = (n < rows)[None, :] & (k < columns)[:, None]
    return tl.load(w + (first + n)[None, :] * columns + k[:, None], mask=mask, other=0.0)


@triton.jit
def weight_to_pull_back(w, first, rows, columns, N: tl.constexpr, K: tl.constexpr):
    """``rows`` rows of w (rows, columns) from ``first`` on, padded: [N, K]."""
    n, k = tl.arange(0, N), tl.arange(0, K)
    mask = (n < rows)[:, None] & (k < columns)[None, :]
    return tl.load(w + (first + n)[:, None] * columns + k[None, :], mask=mask, other=0.0)


@triton.jit
def inputs(xp, row, width, group, exists, GROUPS: tl.constexpr, BM: tl.constexpr, N: tl.constexpr):
    """The projected input of one step, up to four groups of features, each [BM, N]."""
    columns = tl.arange(0, N)
    at = tl.arange(0, BM)[:, None] * width + columns[None, :]
    mask = exists[:, None] & (columns < group)[None, :]
    xp += row * width
    x0 = tl.load(xp + at, mask=mask, other=0.0)
    x1, x2, x3 = x0, x0, x0
    if GROUPS > 1:
        x1 = tl.load(xp + at + group, mask=mask, other=0.0)
    if GROUPS > 2:
        x2 = tl.load(xp + at + 2 * group, mask=mask, other=0.0)
    if GROUPS > 3:
        x3 = tl.load(xp + at + 3 * group, mask=mask, other=0.0)
    return x0, x1, x2, x3


@triton.jit(do_not_specialize=["T", "B"])
def forward_resident(
    xp,
    h0,
    c0,
    w1,
    w2,
    biases,
    lengths,
    y,
    h_n,
    c_n,
    trace,
    T,
    B,
    d,
    h_width,
    xp_width,
    trace_width,
    w1_run,
    w2_run,
    bias_run,
    CELL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUPS: tl.constexpr,
    TWO_LAYERS: tl.constexpr,
    BIAS: tl.constexpr,
    LENGTHS: tl.constexpr,
    REVERSE: tl.constexpr,
    SAVE: tl.constexpr,
    SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
):
    """As ``forward_streamed``; biases are those of the second layer, or a GRU's on the recurrent side."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(B, BM)
    run = program // tiles
    first = (program % tiles) * BM
    local = tl.arange(0, BM)
    columns = tl.arange(0, D)
    exists = first + local < B
    known = columns < d
    mask = exists[:, None] & known[None, :]  # [BM, D]
    of_state = local[:, None] * d + columns[None, :]
    of_trace = local[:, None] * trace_width + columns[None, :]
    first_state = (run * B + first) * d
    dtype = xp.dtype.element_ty
    steps = T
    length = tl.full((BM,), 0, tl.int64) + T
    if LENGTHS:
        length = tl.minimum(tl.load(lengths + run * B + first + local, mask=exists, other=0), T)
        steps = tl.max(length, 0).to(tl.int32)

    w1 += run * w1_run
    HIDDEN: tl.constexpr = CELL == "dmu" and TWO_LAYERS
    X_GROUPS: tl.constexpr = 1 if HIDDEN else GROUPS
    X: tl.constexpr = H if HIDDEN else D
    x_width = d
    if HIDDEN:
        x_width = h_width
        hidden_known = exists[:, None] & (tl.arange(0, H) < h_width)[None, :]
        of_hidden = local[:, None] * trace_width + tl.arange(0, H)[None, :]
        wa = weight_to_apply(w1, 0, h_width, d, H, D)
        w2 += run * w2_run
        v0, v1 = weight_to_apply(w2, 0, d, h_width, D, H), weight_to_apply(w2, d, d, h_width, D, H)
    else:
        wa = weight_to_apply(w1, 0, d, d, D, D)
        if GROUPS > 1:
            wb = weight_to_apply(w1, d, d, d, D, D)
        if GROUPS > 2:
            wc = weight_to_apply(w1, 2 * d, d, d, D, D)
        if GROUPS > 3:
            wd = weight_to_apply(w1, 3 * d, d, d, D, D)
        if TWO_LAYERS:
            w2 += run * w2_run
            v0, v1 = weight_to_apply(w2, 0, d, d, D, D), weight_to_apply(w2, d, d, d, D, D)
    b0 = tl.zeros((D,), tl.float32)
    b1, b2 = b0, b0
    if BIAS:
        biases += run * bias_run
        b0, b1 = get(biases, columns, known), get(biases, columns + d, known)
        if GROUPS == 3:
            b2 = get(biases, columns + 2 * d, known)
    b0, b1, b2 = b0[None, :], b1[None, :], b2[None, :]

    h = get(h0 + first_state, of_state, mask)  # [BM, D]
    c = h
    if CELL == "lstm":
        c = get(c0 + first_state, of_state, mask)
    t = 0
    if REVERSE:
        t = tl.maximum(steps - 1, 0)
    x0, x1, x2, x3 = inputs(xp, (run * T + t) * B + first, xp_width, x_width, exists, X_GROUPS, BM, X)
    for i in range(steps):
        ahead = tl.minimum(i + 1, steps - 1)
        if REVERSE:
            t = steps - 1 - i
            ahead = steps - 1 - ahead
        else:
            t = i
        n0, n1, n2, n3 = inputs(xp, (run * T + ahead) * B + first, xp_width, x_width, exists, X_GROUPS, BM, X)
        real = (t < length)[:, None]  # [BM, 1]
        row = (run * T + t) * B + first
        trace_t = trace + row * trace_width
        operand = h.to(dtype)
        acc0 = dot(operand, wa, x0.to(tl.float32), PRECISION)
        if HIDDEN:
            a = pw.activation(acc0, ACTIVATION)  # [BM, H]
            operand = a.to(dtype)
            z = dot(operand, v0, tl.zeros((BM, D), tl.float32) + b0, PRECISION)
            candidate = dot(operand, v1, tl.zeros((BM, D), tl.float32) + b1, PRECISION)
            new, candidate = pw.dmu_update(z, candidate, h)
            if SAVE:
                gates_at = h_width
                put(trace_t, of_hidden, tl.where(real, a, 0.0), hidden_known)
                if SLOPES:
                    slope = pw.slope_from_input(acc0, ACTIVATION)
                    put(trace_t, of_hidden + h_width, tl.where(real, slope, 0.0), hidden_known)
                    gates_at = 2 * h_width
                put(trace_t, of_trace + gates_at, tl.where(real, z, 0.0), mask)
                put(trace_t, of_trace + gates_at + d, tl.where(real, candidate, 0.0), mask)
        elif CELL == "rnn":
            new = pw.activation(acc0, ACTIVATION)
        else:
            if CELL == "gru":
                acc1 = dot(operand, wb, x1.to(tl.float32), PRECISION)
                n_h = dot(operand, wc, tl.zeros((BM, D), tl.float32) + b2, PRECISION)
                new, r, z, candidate = pw.gru_update(acc0 + b0, acc1 + b1, x2.to(tl.float32), n_h, h)
                if SAVE:
                    put(trace_t, of_trace, tl.where(real, r, 0.0), mask)
                    put(trace_t, of_trace + d, tl.where(real, z, 0.0), mask)
                    put(trace_t, of_trace + 2 * d, tl.where(real, candidate, 0.0), mask)
                    put(trace_t, of_trace + 3 * d, tl.where(real, n_h, 0.0), mask)
            elif CELL == "lstm":
                acc1 = dot(operand, wb, x1.to(tl.float32), PRECISION)
                acc2 = dot(operand, wc, x2.to(tl.float32), PRECISION)
                acc3 = dot(operand, wd, x3.to(tl.float32), PRECISION)
                new, c_new, i_gate, f_gate, g_gate, o_gate = pw.lstm_update(acc0, acc1, acc2, acc3, c)
                c = tl.where(real, c_new, c)
                if SAVE:
                    put(trace_t, of_trace, tl.where(real, i_gate, 0.0), mask)
                    put(trace_t, of_trace + d, tl.where(real, f_gate, 0.0), mask)
                    put(trace_t, of_trace + 2 * d, tl.where(real, g_gate, 0.0), mask)
                    put(trace_t, of_trace + 3 * d, tl.where(real, o_gate, 0.0), mask)
                    put(trace_t, of_trace + 4 * d, tl.where(real, c_new, 0.0), mask)
            elif CELL == "dmu":
                candidate = dot(operand, wb, x1.to(tl.float32), PRECISION)
                new, candidate = pw.dmu_update(acc0, candidate, h)
                if SAVE:
                    put(trace_t, of_trace, tl.where(real, acc0, 0.0), mask)
                    put(trace_t, of_trace + d, tl.where(real, candidate, 0.0), mask)
            else:
                transform = dot(operand, wb, x1.to(tl.float32), PRECISION)
                new, candidate, opened = pw.rhn_update(acc0, transform, h)
                if SAVE:
                    put(trace_t, of_trace, tl.where(real, candidate, 0.0), mask)
                    put(trace_t, of_trace + d, tl.where(real, opened, 0.0), mask)
                if TWO_LAYERS:
                    if SAVE:
                        put(trace_t, of_trace + 4 * d, tl.where(real, new, 0.0), mask)
                    operand = new.to(dtype)
                    candidate = dot(operand, v0, tl.zeros((BM, D), tl.float32) + b0, PRECISION)
                    transform = dot(operand, v1, tl.zeros((BM, D), tl.float32) + b1, PRECISION)
                    new, candidate, opened = pw.rhn_update(candidate, transform, new)
                    if SAVE:
                        put(trace_t, of_trace + 2 * d, tl.where(real, candidate, 0.0), mask)
                        put(trace_t, of_trace + 3 * d, tl.where(real, opened, 0.0), mask)
        put(y + row * d, of_state, tl.where(real, new, 0.0), mask)
        h = tl.where(real, new, h)
        x0, x1, x2, x3 = n0, n1, n2, n3

    put(h_n + first_state, of_state, h, mask)
    if CELL == "lstm":
        put(c_n + first_state, of_state, c, mask)


@triton.jit
def records(
    grad_y,
    y,
    h0,
    c0,
    trace,
    row,
    t,
    B,
    d,
    h_width,
    trace_width,
    length,
    mask,
    CELL: tl.constexpr,
    HAS_GRAD_Y: tl.constexpr,
    REVERSE: tl.constexpr,
    TWO_LAYERS: tl.constexpr,
    SLOPES: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
):
    """What the backward sweep reads of one step: grad_y, the state before, up to six gates; each [BM, D]."""
    local, columns = tl.arange(0, BM), tl.arange(0, D)
    of_state = local[:, None] * d
    mask = mask & (t < length)[:, None]
    if REVERSE:
        has_before = (t + 1 < length)[:, None]
        row_before = row + B
    else:
        has_before = (t + tl.zeros((BM,), tl.int32) > 0)[:, None]
        row_before = row - B
    g = tl.zeros((BM, D), tl.float32)
    if HAS_GRAD_Y:
        g = get(grad_y + row * d, of_state + columns[None, :], mask)
    gates = trace + row * trace_width
    if CELL == "dmu" and TWO_LAYERS:
        gates += h_width
        if SLOPES:
            gates += h_width
    of_trace = local[:, None] * trace_width + columns[None, :]
    p0, p1, p2, p3, p4 = g, g, g, g, g
    if CELL == "rnn":
        h = get(y + row * d, of_state + columns[None, :], mask)
    else:
        if CELL == "lstm":
            h = before(
                trace + row_before * trace_width + 4 * d, local[:, None] * trace_width, c0, of_state, has_before,
                columns, mask,
            )  # fmt: skip
        else:
            h = before(y + row_before * d, of_state, h0, of_state, has_before, columns, mask)
        p0, p1 = get(gates, of_trace, mask), get(gates, of_trace + d, mask)
        SECOND_RHN: tl.constexpr = CELL == "rhn" and TWO_LAYERS
        if (CELL == "gru" or CELL == "lstm") or SECOND_RHN:
            p2, p3 = get(gates, of_trace + 2 * d, mask), get(gates, of_trace + 3 * d, mask)
        if CELL == "lstm" or SECOND_RHN:
            p4 = get(gates, of_trace + 4 * d, mask)
    return g, h, p0, p1, p2, p3, p4


@triton.jit
def hidden_slopes(
    trace,
    row,
    h_width,
    trace_width,
    mask,
    ACTIVATION: tl.constexpr,
    SLOPES: tl.constexpr,
    BM: tl.constexpr,
    H: tl.constexpr,
):
    """f' of a DMU's hidden layer at one step, [BM, H]."""
    at = tl.arange(0, BM)[:, None] * trace_width + tl.arange(0, H)[None, :]
    if SLOPES:
        return get(trace + row * trace_width + h_width, at, mask)
    else:
        return pw.slope_from_value(get(trace + row * trace_width, at, mask), ACTIVATION)


@triton.jit(do_not_specialize=["T", "B"])
def backward_resident(
    grad_y,
    grad_h,
    grad_c,
    y,
    h0,
    c0,
    trace,
    w1,
    w2,
    lengths,
    deltas,
    grad_h0,
    grad_c0,
    T,
    B,
    d,
    h_width,
    trace_width,
    delta_width,
    w1_run,
    w2_run,
    CELL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUPS: tl.constexpr,
    TWO_LAYERS: tl.constexpr,
    HAS_GRAD_Y: tl.constexpr,
    LENGTHS: tl.constexpr,
    REVERSE: tl.constexpr,
    SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
):
    """As ``backward_streamed``."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(B, BM)
    run = program // tiles
    first = (program % tiles) * BM
    local = tl.arange(0, BM)
    columns = tl.arange(0, D)
    exists = first + local < B
    mask = exists[:, None] & (columns < d)[None, :]  # [BM, D]
    of_state = local[:, None] * d + columns[None, :]
    of_delta = local[:, None] * delta_width + columns[None, :]
    first_state = (run * B + first) * d
    h0 += first_state
    if CELL == "lstm":
        c0 += first_state
    dtype = y.dtype.element_ty
    steps = T
    length = tl.full((BM,), 0, tl.int64) + T
    if LENGTHS:
        length = tl.minimum(tl.load(lengths + run * B + first + local, mask=exists, other=0), T)
        steps = tl.max(length, 0).to(tl.int32)

    w1 += run * w1_run
    HIDDEN: tl.constexpr = CELL == "dmu" and TWO_LAYERS
    if HIDDEN:
        hidden_known = exists[:, None] & (tl.arange(0, H) < h_width)[None, :]
        of_hidden = local[:, None] * delta_width + tl.arange(0, H)[None, :]
        wa = weight_to_pull_back(w1, 0, h_width, d, H, D)
        w2 += run * w2_run
        v0, v1 = weight_to_pull_back(w2, 0, d, h_width, D, H), weight_to_pull_back(w2, d, d, h_width, D, H)
    else:
        wa = weight_to_pull_back(w1, 0, d, d, D, D)
        if GROUPS > 1:
            wb = weight_to_pull_back(w1, d, d, d, D, D)
        if GROUPS > 2:
            wc = weight_to_pull_back(w1, 2 * d, d, d, D, D)
        if GROUPS > 3:
            wd = weight_to_pull_back(w1, 3 * d, d, d, D, D)
        if TWO_LAYERS:
            w2 += run * w2_run
            v0, v1 = weight_to_pull_back(w2, 0, d, d, D, D), weight_to_pull_back(w2, d, d, d, D, D)

    dh = get(grad_h + first_state, of_state, mask)
    dc = dh
    if CELL == "lstm":
        dc = get(grad_c + first_state, of_state, mask)
    t = tl.maximum(steps - 1, 0)
    if REVERSE:
        t = t * 0
    row = (run * T + t) * B + first
    gy, h, p0, p1, p2, p3, p4 = records(
        grad_y, y, h0, c0, trace, row, t, B, d, h_width, trace_width, length, mask,
        CELL, HAS_GRAD_Y, REVERSE, TWO_LAYERS, SLOPES, BM, D,
    )  # fmt: skip
    slope = dh
    if HIDDEN:
        slope = hidden_slopes(trace, row, h_width, trace_width, hidden_known, ACTIVATION, SLOPES, BM, H)
    for i in range(steps):
        ahead = tl.minimum(i + 1, steps - 1)
        if REVERSE:
            t = i
        else:
            t = steps - 1 - i
            ahead = steps - 1 - ahead
        row = (run * T + t) * B + first
        row_ahead = (run * T + ahead) * B + first
        next_gy, next_h, n0, n1, n2, n3, n4 = records(
            grad_y, y, h0, c0, trace, row_ahead, ahead, B, d, h_width, trace_width, length, mask,
            CELL, HAS_GRAD_Y, REVERSE, TWO_LAYERS, SLOPES, BM, D,
        )  # fmt: skip
        next_slope = slope
        if HIDDEN:
            next_slope = hidden_slopes(trace, row_ahead, h_width, trace_width, hidden_known, ACTIVATION, SLOPES, BM, H)
        real = (t < length)[:, None]  # [BM, 1]
        write = mask & real
        deltas_t = deltas + row * delta_width
        g = tl.where(real, dh + gy, 0.0)  # what is zero here makes every delta of the step zero
        if CELL == "dmu":
            delta0, delta1, direct = pw.dmu_gradient(g, p0, p1, h)
            if HIDDEN:
                put(deltas_t, of_delta + h_width, delta0, write)
                put(deltas_t, of_delta + h_width + d, delta1, write)
                pulled = dot(delta0.to(dtype), v0, tl.zeros((BM, H), tl.float32), PRECISION)
                pulled = dot(delta1.to(dtype), v1, pulled, PRECISION) * slope
                put(deltas_t, of_hidden, pulled, hidden_known & real)
                new = dot(pulled.to(dtype), wa, direct, PRECISION)
            else:
                put(deltas_t, of_delta, delta0, write)
                put(deltas_t, of_delta + d, delta1, write)
                new = dot(delta0.to(dtype), wa, direct, PRECISION)
                new = dot(delta1.to(dtype), wb, new, PRECISION)
        elif CELL == "rhn":
            if TWO_LAYERS:
                delta0, delta1, direct = pw.rhn_gradient(g, p2, p3, p4)
                put(deltas_t, of_delta + 2 * d, delta0, write)
                put(deltas_t, of_delta + 3 * d, delta1, write)
                g = dot(delta0.to(dtype), v0, direct, PRECISION)
                g = dot(delta1.to(dtype), v1, g, PRECISION)
            delta0, delta1, direct = pw.rhn_gradient(g, p0, p1, h)
            put(deltas_t, of_delta, delta0, write)
            put(deltas_t, of_delta + d, delta1, write)
            new = dot(delta0.to(dtype), wa, direct, PRECISION)
            new = dot(delta1.to(dtype), wb, new, PRECISION)
        elif CELL == "rnn":
            delta0 = g * pw.slope_from_value(h, ACTIVATION)
            put(deltas_t, of_delta, delta0, write)
            new = dot(delta0.to(dtype), wa, tl.zeros((BM, D), tl.float32), PRECISION)
        elif CELL == "gru":
            delta0, delta1, delta_n, delta2, direct = pw.gru_gradient(g, p0, p1, p2, p3, h)
            put(deltas_t, of_delta, delta0, write)
            put(deltas_t, of_delta + d, delta1, write)
            put(deltas_t, of_delta + 2 * d, delta_n, write)
            put(deltas_t, of_delta + 3 * d, delta2, write)
            new = dot(delta0.to(dtype), wa, direct, PRECISION)
            new = dot(delta1.to(dtype), wb, new, PRECISION)
            new = dot(delta2.to(dtype), wc, new, PRECISION)
        else:
            delta0, delta1, delta2, delta3, dc_before = pw.lstm_gradient(
                g, tl.where(real, dc, 0.0), p0, p1, p2, p3, p4, h
            )
            dc = tl.where(real, dc_before, dc)
            put(deltas_t, of_delta, delta0, write)
            put(deltas_t, of_delta + d, delta1, write)
            put(deltas_t, of_delta + 2 * d, delta2, write)
            put(deltas_t, of_delta + 3 * d, delta3, write)
            new = dot(delta0.to(dtype), wa, tl.zeros((BM, D), tl.float32), PRECISION)
            new = dot(delta1.to(dtype), wb, new, PRECISION)
            new = dot(delta2.to(dtype), wc, new, PRECISION)
            new = dot(delta3.to(dtype), wd, new, PRECISION)
        dh = tl.where(real, new, dh)
        gy, h, p0, p1, p2, p3, p4, slope = next_gy, next_h, n0, n1, n2, n3, n4, next_slope

    put(grad_h0 + first_state, of_state, dh, mask)
    if CELL == "lstm":
        put(grad_c0 + first_state, of_state, dc, mask)
