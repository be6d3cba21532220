"""The properties of an H200, for tests that have none."""

from deepmemory.ops import nvrtc

HOPPER = nvrtc.Device((9, 0), 132, 232448, {2: 64, 3: 42, 4: 30, 5: 22, 6: 20, 7: 18, 8: 14, 16: 7})
