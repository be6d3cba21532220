"""``benchmarks/cycles.py`` reads machine code, and says how long a step takes by it."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Two loops: the first has no barrier. Control bits are those of nvdisasm's second line, from bit 41 on.
CODE = [
    (".L_x_1:", None),
    ("FADD R1, R1, R2", {"stall": 4}),
    ("BRA `(.L_x_1)", {"stall": 5}),
    (".L_x_2:", None),
    ("LDS.128 R4, [R8]", {"stall": 1, "written": 2}),
    ("@P0 FFMA R1, R4, R5, R1", {"stall": 4, "waits": [2]}),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", {"stall": 6}),
    ("@P1 BRA `(.L_x_2)", {"stall": 5}),
    ("EXIT", {"stall": 5}),
]


def listing():
    """As ``nvdisasm -c -hex`` prints it."""
    lines = [".section .text.sweep_forward", ".text.sweep_forward:"]
    for address, (text, control) in enumerate(CODE):
        if control is None:
            lines.append(text)
            continue
        bits = control["stall"] | control.get("written", 7) << 5 | control.get("read", 7) << 8
        bits |= sum(1 << 11 + k for k in control.get("waits", []))
        lines.append(f"        /*{16 * address:04x}*/                   {text} ;  /* 0x0000000000000000 */")
        lines.append(f"                                                   /* {bits << 41:#018x} */")
    return "\n".join([*lines, ".text.sweep_backward:", "        /*0000*/  NOP ;  /* 0x0 */", "  /* 0x0 */"])


@pytest.fixture
def cycles(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("cycles")


def test_instructions_and_what_they_wait_for_are_read(cycles):
    code, labels = cycles.decoded(listing(), "sweep_forward")
    assert [one.name for one in code] == ["FADD", "BRA", "LDS.128", "FFMA", "BAR.SYNC.DEFER_BLOCKING", "BRA", "EXIT"]
    assert labels == {".L_x_1": 0, ".L_x_2": 2}
    assert (code[2].written, code[2].read, code[3].waits, code[3].stall) == (2, None, (2,), 4)


def test_a_step_takes_as_long_as_its_chain(cycles):
    loop = cycles.step_loop(*cycles.decoded(listing(), "sweep_forward"))
    assert [one.kind for one in loop] == ["LDS", "FFMA", "BAR", "BRA"]
    # A load, the instruction that waits for it, the block's barrier, and the way back.
    alone = cycles.LATENCIES["LDS.128"] + 4 + cycles.BARRIER + 5
    total, waits = cycles.run(loop, 1)
    assert total == alone
    assert [(wait.cycles, wait.cause) for wait in waits] == [(cycles.LATENCIES["LDS.128"] - 1, "LDS.128 R4, [R8]")]
    assert alone <= cycles.run(loop, 2)[0] < alone + len(loop)  # one of two warps issues while the other waits
    assert cycles.run(loop, 40)[0] >= 40 * len(loop)  # an instruction in a cycle


def test_layers_that_share_their_code_count_each(cycles):
    inner, outer = cycles.Instruction("BAR.SYNC", 1, None, None, ()), cycles.Instruction("FADD", 1, None, None, ())
    code = [outer, inner, outer._replace(text="BRA `(.L_in)"), inner, outer._replace(text="BRA `(.L_out)")]
    loop = cycles.step_loop(code, {".L_out": 0, ".L_in": 1}, layers=3)
    assert [one.kind for one in loop] == ["FADD", *["BAR", "BRA"] * 3, "BAR", "BRA"]


def test_what_comes_before_the_steps_is_counted(cycles):
    assert cycles.before_the_steps(cycles.decoded(listing(), "sweep_forward")[0]) == 4


@pytest.mark.parametrize(("kind", "most"), [("", 0.95), ("start_", 0.65)])
def test_steps_and_what_comes_before_them_have_become_shorter(cycles, kind, most):
    before, now = (
        cycles.of_both_sweeps(rows, kind) for rows in json.loads(cycles.RESULTS.read_text())["commits"].values()
    )
    assert {shape for shape, _ in now} == set(cycles.SHAPES)
    assert max(now[key] / before[key] for key in now) < most
