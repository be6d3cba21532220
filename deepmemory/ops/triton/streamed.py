# mypy: disable-error-code="no-untyped-def,import-untyped,import-not-found"
"""Sweeps for states of any size and depth: weights stream from the cache, activations go through memory.

One program takes one run and a tile of BM sequences through all time steps. Between two linear layers the
activations lie in the program's own scratch, *operand*: two slots of [BM, operand_width] in the dtype of the
weights, read from one and written to the other, with a barrier of the block in between. The state itself is
kept in float32 in *carry*. Widths in scratch and in the packed weights are padded to multiples of 16 with
zeros, so weights need no mask but the tile's own edge.

``table`` has one row per linear layer:

==  ====================================================================================
0   width of the input, padded
1   width of one group of outputs (a gate, or the whole hidden layer)
2   width of all outputs, each group padded
3   where its weights begin in ``packed``
4   where its bias begins in ``biases``
5   where its outputs begin in a step's trace: hidden activations, or the first gate
6   where its slopes begin in a step's trace (hidden layers, with ``SLOPES``), or the state after it (rhn)
7   where its deltas begin in a step's deltas
==  ====================================================================================

Hidden activations have the same order in the trace and in ``hidden_mask``, so column 5 serves both. Products read the
state through ``state_mask``; *carry* holds the state itself. With ``RESETS`` both are zero where a sequence begins anew
at the step to come, and going back no gradient passes there. With ``RESIDUAL``, *sums* holds the gradient by a hidden
layer, to which the layer before it adds.

``packed`` holds each layer as [groups * padded width, padded inputs] for the forward sweep and transposed, as
[padded inputs, groups * padded width], for the backward sweep: both contract over contiguous elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepmemory.ops.triton import pointwise as pw
from deepmemory.ops.triton.memory import before, continues, dot, get, put

COLUMNS = tl.constexpr(8)


@triton.jit
def products(
    a,
    a_width,
    w,
    w_width,
    group,
    columns,
    bound,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a [BM, w_width] times the rows ``columns`` of up to four groups of w, each [BM, BN]."""
    rows = tl.arange(0, BM)
    inner = tl.arange(0, BK)
    a_at = a + rows[:, None] * a_width + inner[None, :]  # [BM, BK]
    w_at = w + columns[None, :] * w_width + inner[:, None]  # [BK, BN]
    inside = columns[None, :] < bound
    acc0 = tl.zeros((BM, BN), tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for k in range(0, w_width, BK):
        left = inner < w_width - k
        some = left[:, None] & inside
        part = tl.load(a_at + k, mask=left[None, :], other=0.0)
        acc0 = dot(part, tl.load(w_at + k, mask=some, other=0.0), acc0, PRECISION)
        if GROUPS > 1:
            w1 = tl.load(w_at + (group * w_width + k), mask=some, other=0.0)
            acc1 = dot(part, w1, acc1, PRECISION)
        if GROUPS > 2:
            w2 = tl.load(w_at + (2 * group * w_width + k), mask=some, other=0.0)
            acc2 = dot(part, w2, acc2, PRECISION)
        if GROUPS > 3:
            w3 = tl.load(w_at + (3 * group * w_width + k), mask=some, other=0.0)
            acc3 = dot(part, w3, acc3, PRECISION)
    return acc0, acc1, acc2, acc3


@triton.jit
def added(
    xp, xp_at, biases, bias_at, columns, is_first, mask, known, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """What a layer adds to its product, [BM, BN]: the projected input in the first layer, a bias in the others."""
    out = tl.zeros((BM, BN), tl.float32)
    if is_first:
        out = get(xp, xp_at, mask)
    elif BIAS:
        out = out + get(biases, bias_at + columns, known)[None, :]
    return out


@triton.jit(do_not_specialize=["T", "B"])
def forward_streamed(
    xp,
    h0,
    c0,
    packed,
    biases,
    lengths,
    resets,
    state_mask,
    hidden_mask,
    table,
    y,
    h_n,
    c_n,
    trace,
    operand,
    carry,
    T,
    B,
    d,
    d_padded,
    depth,
    hidden,
    xp_width,
    trace_width,
    operand_width,
    packed_size,
    bias_size,
    mask_width,
    CELL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUPS: tl.constexpr,
    BIAS: tl.constexpr,
    LENGTHS: tl.constexpr,
    RESETS: tl.constexpr,
    STATE_MASK: tl.constexpr,
    HIDDEN_MASK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    REVERSE: tl.constexpr,
    SAVE: tl.constexpr,
    SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BN_GATES: tl.constexpr,
    BK: tl.constexpr,
):
    """xp (R, T, B, xp_width) and h0 (R, B, d) to y (R, T, B, d), final states and trace (R, T, B, trace_width)."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(B, BM)
    run = program // tiles
    local = tl.arange(0, BM)
    first = (program % tiles) * BM
    exists = first + local < B  # [BM] sequences of this program
    packed += run * packed_size
    if BIAS:
        biases += run * bias_size
    operand += program * (2 * BM * operand_width)
    carry += program * ((2 if CELL == "lstm" else 1) * BM * d_padded)
    first_state = (run * B + first) * d
    h0, h_n = h0 + first_state, h_n + first_state
    if CELL == "lstm":
        c0, c_n = c0 + first_state, c_n + first_state
    if STATE_MASK:
        state_mask += first_state
    if HIDDEN_MASK:
        hidden_mask += (run * B + first) * mask_width
    of_state = local[:, None] * d  # [BM, 1]
    steps = T
    length = tl.full((BM,), 0, tl.int64) + T
    if LENGTHS:
        length = tl.minimum(tl.load(lengths + run * B + first + local, mask=exists, other=0), T)
        steps = tl.max(length, 0).to(tl.int32)

    gates = tl.arange(0, BN_GATES)
    first_row = (run * T + (steps - 1 if REVERSE else 0)) * B + first
    on = continues(resets, first_row, local, exists & (length > 0), RESETS, BM)
    for n in range(0, d_padded, BN_GATES):
        columns = n + gates
        stored = (columns < d_padded)[None, :]
        mask = exists[:, None] & (columns < d)[None, :]
        state_at = local[:, None] * d_padded + columns[None, :]
        h = get(h0, of_state + columns[None, :], mask & on)
        put(carry, state_at, h, stored)
        if STATE_MASK:
            h = h * get(state_mask, of_state + columns[None, :], mask)
        put(operand, local[:, None] * operand_width + columns[None, :], h, stored)
        if CELL == "lstm":
            put(carry + BM * d_padded, state_at, get(c0, of_state + columns[None, :], mask & on), stored)
    tl.debug_barrier()

    slot = 0
    for i in range(steps):
        t = i
        if REVERSE:
            t = steps - 1 - i
        real = (t < length)[:, None]  # [BM, 1]
        row = (run * T + t) * B + first
        later = row - B if REVERSE else row + B
        # Of the step to come: whether there is one, and whose state it takes.
        next_t = (t - 1 if REVERSE else t + 1) + tl.zeros((BM,), tl.int32)
        on = continues(resets, later, local, exists & (next_t >= 0) & (next_t < length), RESETS, BM)
        xp_t, y_t, trace_t = xp + row * xp_width, y + row * d, trace + row * trace_width
        of_xp, of_trace = local[:, None] * xp_width, local[:, None] * trace_width  # [BM, 1]

        if CELL == "dmu":
            for k in range(hidden):
                inputs = tl.multiple_of(tl.load(table + k * COLUMNS), 16)
                width = tl.load(table + k * COLUMNS + 1)
                padded = tl.multiple_of(tl.load(table + k * COLUMNS + 2), 16)
                weight_at = tl.multiple_of(tl.load(table + k * COLUMNS + 3), 16)
                bias_at = tl.load(table + k * COLUMNS + 4)
                trace_at = tl.load(table + k * COLUMNS + 5)
                slope_at = tl.load(table + k * COLUMNS + 6)
                source = operand + slot * (BM * operand_width)
                target = operand + (1 - slot) * (BM * operand_width)
                for n in range(0, padded, BN):
                    columns = n + tl.arange(0, BN)
                    known = columns < width
                    mask = exists[:, None] & known[None, :]
                    add = added(
                        xp_t, of_xp + columns[None, :], biases, bias_at, columns, k == 0, mask, known, BIAS, BM, BN
                    )
                    acc, _, _, _ = products(
                        source, operand_width, packed + weight_at, inputs, padded, columns, padded,
                        1, BM, BN, BK, PRECISION,
                    )  # fmt: skip
                    acc += add
                    a = pw.activation(acc, ACTIVATION)
                    if SLOPES:
                        slope = pw.slope_from_input(acc, a, ACTIVATION)
                    if HIDDEN_MASK:
                        scale = get(hidden_mask, local[:, None] * mask_width + trace_at + columns[None, :], mask)
                        a, slope = a * scale, slope * scale
                    here = local[:, None] * operand_width + columns[None, :]
                    if RESIDUAL:  # noqa: SIM102 - one is known when compiling, the other is not
                        if k > 0:
                            a += get(source, here, (columns < padded)[None, :])
                    put(target, here, a, (columns < padded)[None, :])
                    if SAVE:
                        keep = of_trace + columns[None, :]
                        put(trace_t, keep + trace_at, tl.where(real, a, 0.0), mask)
                        if SLOPES:
                            put(trace_t, keep + slope_at, tl.where(real, slope, 0.0), mask)
                tl.debug_barrier()
                slot = 1 - slot

        for k in range(hidden, depth):
            inputs = tl.multiple_of(tl.load(table + k * COLUMNS), 16)
            weight_at = tl.multiple_of(tl.load(table + k * COLUMNS + 3), 16)
            bias_at = tl.load(table + k * COLUMNS + 4)
            trace_at = tl.load(table + k * COLUMNS + 5)
            after_at = tl.load(table + k * COLUMNS + 6)
            source = operand + slot * (BM * operand_width)
            target = operand + (1 - slot) * (BM * operand_width)
            for n in range(0, d_padded, BN_GATES):
                columns = n + gates
                known = columns < d
                mask = exists[:, None] & known[None, :]
                stored = (columns < d_padded)[None, :]
                state_at = local[:, None] * d_padded + columns[None, :]
                here = of_xp + columns[None, :]
                keep = of_trace + trace_at + columns[None, :]
                h = get(carry, state_at, stored)  # [BM, BN_GATES]
                if CELL == "dmu" or CELL == "rhn":
                    add0 = added(xp_t, here, biases, bias_at, columns, k == 0, mask, known, BIAS, BM, BN_GATES)
                    add1 = added(xp_t, here + d, biases, bias_at + d, columns, k == 0, mask, known, BIAS, BM, BN_GATES)
                else:
                    add0 = get(xp_t, here, mask)
                    if CELL != "rnn":
                        add1 = get(xp_t, here + d, mask)
                        add2 = get(xp_t, here + 2 * d, mask)
                    if CELL == "lstm":
                        add3 = get(xp_t, here + 3 * d, mask)
                        c = get(carry + BM * d_padded, state_at, stored)
                acc0, acc1, acc2, acc3 = products(
                    source, operand_width, packed + weight_at, inputs, d_padded, columns, d_padded,
                    GROUPS, BM, BN_GATES, BK, PRECISION,
                )  # fmt: skip
                if CELL == "dmu":
                    z = acc0 + add0
                    new, candidate = pw.dmu_update(z, acc1 + add1, h)
                    if SAVE:
                        put(trace_t, keep, tl.where(real, z, 0.0), mask)
                        put(trace_t, keep + d, tl.where(real, candidate, 0.0), mask)
                elif CELL == "rhn":
                    new, candidate, opened = pw.rhn_update(acc0 + add0, acc1 + add1, h)
                    if SAVE:
                        put(trace_t, keep, tl.where(real, candidate, 0.0), mask)
                        put(trace_t, keep + d, tl.where(real, opened, 0.0), mask)
                        if k < depth - 1:
                            put(trace_t, of_trace + after_at + columns[None, :], tl.where(real, new, 0.0), mask)
                elif CELL == "rnn":
                    new = pw.activation(acc0 + add0, ACTIVATION)
                elif CELL == "gru":
                    if BIAS:
                        acc0 += get(biases, columns, known)[None, :]
                        acc1 += get(biases, columns + d, known)[None, :]
                        acc2 += get(biases, columns + 2 * d, known)[None, :]
                    new, r, z, candidate = pw.gru_update(acc0 + add0, acc1 + add1, add2, acc2, h)
                    if SAVE:
                        put(trace_t, keep, tl.where(real, r, 0.0), mask)
                        put(trace_t, keep + d, tl.where(real, z, 0.0), mask)
                        put(trace_t, keep + 2 * d, tl.where(real, candidate, 0.0), mask)
                        put(trace_t, keep + 3 * d, tl.where(real, acc2, 0.0), mask)
                else:
                    new, c_new, i_gate, f_gate, g_gate, o_gate = pw.lstm_update(
                        acc0 + add0, acc1 + add1, acc2 + add2, acc3 + add3, c
                    )
                    c_next = tl.where(on, tl.where(real, c_new, c), 0.0)
                    put(carry + BM * d_padded, state_at, c_next, stored)
                    if SAVE:
                        put(trace_t, keep, tl.where(real, i_gate, 0.0), mask)
                        put(trace_t, keep + d, tl.where(real, f_gate, 0.0), mask)
                        put(trace_t, keep + 2 * d, tl.where(real, g_gate, 0.0), mask)
                        put(trace_t, keep + 3 * d, tl.where(real, o_gate, 0.0), mask)
                        put(trace_t, keep + 4 * d, tl.where(real, c_new, 0.0), mask)
                out = tl.where(real, new, 0.0)
                new = tl.where(real, new, h)
                if k == depth - 1:
                    put(y_t, of_state + columns[None, :], out, mask)
                    new = tl.where(on, new, 0.0)
                put(carry, state_at, new, stored)
                if STATE_MASK:
                    new = new * get(state_mask, of_state + columns[None, :], mask)
                put(target, local[:, None] * operand_width + columns[None, :], new, stored)
            tl.debug_barrier()
            slot = 1 - slot

    for n in range(0, d_padded, BN_GATES):
        columns = n + gates
        stored = (columns < d_padded)[None, :]
        mask = exists[:, None] & (columns < d)[None, :]
        state_at = local[:, None] * d_padded + columns[None, :]
        put(h_n, of_state + columns[None, :], get(carry, state_at, stored), mask)
        if CELL == "lstm":
            put(c_n, of_state + columns[None, :], get(carry + BM * d_padded, state_at, stored), mask)


@triton.jit(do_not_specialize=["T", "B"])
def backward_streamed(
    grad_y,
    grad_h,
    grad_c,
    y,
    h0,
    c0,
    trace,
    packed,
    lengths,
    resets,
    state_mask,
    table,
    deltas,
    grad_h0,
    grad_c0,
    operand,
    carry,
    sums,
    T,
    B,
    d,
    d_padded,
    depth,
    hidden,
    trace_width,
    delta_width,
    operand_width,
    packed_size,
    sums_width,
    CELL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_GRAD_Y: tl.constexpr,
    LENGTHS: tl.constexpr,
    RESETS: tl.constexpr,
    STATE_MASK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    REVERSE: tl.constexpr,
    SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BN_GATES: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradients of y (R, T, B, d) and of the final states to deltas (R, T, B, delta_width) and those of the initial."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(B, BM)
    run = program // tiles
    local = tl.arange(0, BM)
    first = (program % tiles) * BM
    exists = first + local < B  # [BM] sequences of this program
    packed += run * packed_size
    operand += program * (2 * BM * operand_width)
    carry += program * ((2 if CELL == "lstm" else 1) * BM * d_padded)
    first_state = (run * B + first) * d
    h0, grad_h, grad_h0 = h0 + first_state, grad_h + first_state, grad_h0 + first_state
    if CELL == "lstm":
        c0, grad_c, grad_c0 = c0 + first_state, grad_c + first_state, grad_c0 + first_state
    if STATE_MASK:
        state_mask += first_state
    if RESIDUAL:
        sums += program * (BM * sums_width)
    of_state = local[:, None] * d  # [BM, 1]
    steps = T
    length = tl.full((BM,), 0, tl.int64) + T
    if LENGTHS:
        length = tl.minimum(tl.load(lengths + run * B + first + local, mask=exists, other=0), T)
        steps = tl.max(length, 0).to(tl.int32)

    gates = tl.arange(0, BN_GATES)
    for n in range(0, d_padded, BN_GATES):
        columns = n + gates
        stored = (columns < d_padded)[None, :]
        mask = exists[:, None] & (columns < d)[None, :]
        state_at = local[:, None] * d_padded + columns[None, :]
        put(carry, state_at, get(grad_h, of_state + columns[None, :], mask), stored)
        if CELL == "lstm":
            dc = get(grad_c, of_state + columns[None, :], mask)
            put(carry + BM * d_padded, state_at, dc, stored)
    tl.debug_barrier()

    # A product with a gate layer's weights is taken together with the gates of the next turn, whose loads it hides.
    slot = 0
    on = tl.full((BM, 1), 1, tl.int1)
    for i in range(steps):
        t = steps - 1 - i
        if REVERSE:
            t = i
        real = (t < length)[:, None]  # [BM, 1]
        row = (run * T + t) * B + first
        y_t, trace_t, deltas_t = y + row * d, trace + row * trace_width, deltas + row * delta_width
        of_trace, of_delta = local[:, None] * trace_width, local[:, None] * delta_width  # [BM, 1]
        if REVERSE:
            has_before = (t + 1 < length)[:, None]
            row_before = row + B
        else:
            has_before = (t + tl.zeros((BM,), tl.int32) > 0)[:, None]
            row_before = row - B
        passes = on  # back from the step after this one, whose product is still to be taken
        on = continues(resets, row, local, exists, RESETS, BM)

        for j in range(depth - hidden):
            k = depth - 1 - j
            trace_at = tl.load(table + k * COLUMNS + 5)
            delta_at = tl.load(table + k * COLUMNS + 7)
            previous = 0  # the layer whose product is still to be taken
            if CELL == "rhn":
                previous = tl.where(j == 0, 0, k + 1)
            inner = tl.load(table + previous * COLUMNS + 2)
            inner = tl.multiple_of(tl.where(i + j == 0, 0, inner), 16)  # none in the first turn
            weight_at = tl.multiple_of(tl.load(table + previous * COLUMNS + 3), 16)
            source = operand + slot * (BM * operand_width)
            target = operand + (1 - slot) * (BM * operand_width)
            for n in range(0, d_padded, BN_GATES):
                columns = n + gates
                stored = (columns < d_padded)[None, :]
                mask = exists[:, None] & (columns < d)[None, :] & real
                state_at = local[:, None] * d_padded + columns[None, :]
                kept = of_trace + trace_at + columns[None, :]
                out = of_delta + delta_at + columns[None, :]
                into = local[:, None] * operand_width + columns[None, :]
                dh = get(carry, state_at, stored)  # [BM, BN_GATES]
                gy = tl.zeros((BM, BN_GATES), tl.float32)
                if HAS_GRAD_Y:  # noqa: SIM102 - one is known when compiling, the other is not
                    if k == depth - 1:
                        gy = get(grad_y + row * d, of_state + columns[None, :], mask)
                if CELL == "rnn":
                    h = get(y_t, of_state + columns[None, :], mask)
                else:
                    p0, p1 = get(trace_t, kept, mask), get(trace_t, kept + d, mask)
                known = mask & on
                if CELL == "rhn":
                    if k == 0:
                        h = before(y + row_before * d, of_state, h0, of_state, has_before, columns, known)
                    else:
                        after_at = tl.load(table + (k - 1) * COLUMNS + 6)
                        h = get(trace_t, of_trace + after_at + columns[None, :], mask)
                elif CELL == "dmu" or CELL == "gru":
                    h = before(y + row_before * d, of_state, h0, of_state, has_before, columns, known)
                if CELL == "gru" or CELL == "lstm":
                    p2, p3 = get(trace_t, kept + 2 * d, mask), get(trace_t, kept + 3 * d, mask)
                if CELL == "lstm":
                    c = get(trace_t, kept + 4 * d, mask)
                    c_before = before(
                        trace + row_before * trace_width + 4 * d, of_trace, c0, of_state, has_before, columns, known
                    )
                    dc = get(carry + BM * d_padded, state_at, stored)
                acc, _, _, _ = products(
                    source, operand_width, packed + weight_at, inner, 0, columns, d_padded,
                    1, BM, BN_GATES, BK, PRECISION,
                )  # fmt: skip
                if STATE_MASK:
                    acc *= get(state_mask, of_state + columns[None, :], exists[:, None] & (columns < d)[None, :])
                if RESETS:
                    acc = tl.where(passes | (j > 0), acc, 0.0)
                dh += acc
                g = dh + gy
                direct = tl.zeros((BM, BN_GATES), tl.float32)
                if CELL == "dmu":
                    delta0, delta1, direct = pw.dmu_gradient(g, p0, p1, h)
                elif CELL == "rhn":
                    delta0, delta1, direct = pw.rhn_gradient(g, p0, p1, h)
                elif CELL == "rnn":
                    delta0 = g * pw.slope_from_value(h, ACTIVATION)
                elif CELL == "gru":
                    delta0, delta1, delta_n, delta2, direct = pw.gru_gradient(g, p0, p1, p2, p3, h)
                    put(deltas_t, out + 2 * d, delta_n, mask)
                    put(deltas_t, out + 3 * d, delta2, mask)
                else:
                    delta0, delta1, delta2, delta3, dc_before = pw.lstm_gradient(g, dc, p0, p1, p2, p3, c, c_before)
                    put(carry + BM * d_padded, state_at, tl.where(on, tl.where(real, dc_before, dc), 0.0), stored)
                    put(deltas_t, out + 2 * d, delta2, mask)
                    put(deltas_t, out + 3 * d, delta3, mask)
                    put(target, into + 3 * d_padded, tl.where(real, delta3, 0.0), stored)
                put(carry, state_at, tl.where(on | (k > hidden), tl.where(real, direct, dh), 0.0), stored)
                put(deltas_t, out, delta0, mask)
                put(target, into, tl.where(real, delta0, 0.0), stored)
                if CELL != "rnn":
                    put(target, into + d_padded, tl.where(real, delta1, 0.0), stored)
                    put(deltas_t, out + d, delta1, mask)
                if CELL == "gru" or CELL == "lstm":
                    put(target, into + 2 * d_padded, tl.where(real, delta2, 0.0), stored)
            tl.debug_barrier()
            slot = 1 - slot
            if CELL == "dmu":
                for m in range(hidden):
                    above = hidden - m
                    inputs = tl.multiple_of(tl.load(table + above * COLUMNS), 16)
                    outputs = tl.multiple_of(tl.load(table + above * COLUMNS + 2), 16)
                    layer_at = tl.multiple_of(tl.load(table + above * COLUMNS + 3), 16)
                    width = tl.load(table + above * COLUMNS - COLUMNS + 1)
                    slope_at = tl.load(table + above * COLUMNS - COLUMNS + (6 if SLOPES else 5))
                    out_at = tl.load(table + above * COLUMNS - COLUMNS + 7)
                    source = operand + slot * (BM * operand_width)
                    target = operand + (1 - slot) * (BM * operand_width)
                    for n in range(0, inputs, BN):
                        columns = n + tl.arange(0, BN)
                        mask = exists[:, None] & (columns < width)[None, :] & real
                        slope = get(trace_t, of_trace + slope_at + columns[None, :], mask)
                        if not SLOPES:
                            slope = pw.slope_from_value(slope, ACTIVATION)
                        acc, _, _, _ = products(
                            source, operand_width, packed + layer_at, outputs, 0, columns, inputs,
                            1, BM, BN, BK, PRECISION,
                        )  # fmt: skip
                        if RESIDUAL:
                            into = local[:, None] * sums_width + columns[None, :]
                            if m > 0:
                                acc += get(sums, into, (columns < inputs)[None, :])
                            put(sums, into, acc, (columns < inputs)[None, :])
                        delta = acc * slope
                        put(deltas_t, of_delta + out_at + columns[None, :], delta, mask)
                        put(
                            target,
                            local[:, None] * operand_width + columns[None, :],
                            delta,
                            (columns < inputs)[None, :],
                        )
                    tl.debug_barrier()
                    slot = 1 - slot

    inner = tl.multiple_of(tl.where(steps == 0, 0, tl.load(table + 2)), 16)
    for n in range(0, d_padded, BN_GATES):
        columns = n + gates
        stored = (columns < d_padded)[None, :]
        mask = exists[:, None] & (columns < d)[None, :]
        state_at = local[:, None] * d_padded + columns[None, :]
        acc, _, _, _ = products(
            operand + slot * (BM * operand_width), operand_width, packed, inner, 0, columns, d_padded,
            1, BM, BN_GATES, BK, PRECISION,
        )  # fmt: skip
        if STATE_MASK:
            acc *= get(state_mask, of_state + columns[None, :], mask)
        acc = tl.where(on, acc, 0.0)
        put(grad_h0, of_state + columns[None, :], get(carry, state_at, stored) + acc, mask)
        if CELL == "lstm":
            put(grad_c0, of_state + columns[None, :], get(carry + BM * d_padded, state_at, stored), mask)
