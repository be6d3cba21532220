"""Speed of the engines against their peers: ``python benchmarks/speed.py --device cuda --out results.json``."""

import argparse
from pathlib import Path

import torch

from deepmemory.lab import bench

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="*", choices=list(bench.SHAPES))
    parser.add_argument("--precisions", nargs="*", choices=bench.PRECISIONS)
    parser.add_argument("--cells", nargs="*", default=["DMU"], choices=["DMU", "RHN", "GRU", "LSTM", "RNN"])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contestant at each shape")
    parser.add_argument("--growth", action="store_true", help="also let one size grow at a time")
    parser.add_argument("--no-loop", action="store_true", help="leave out the Python loop")
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"))
    args = parser.parse_args()
    shapes = args.shapes or list(bench.GPU_SHAPES if args.device == "cuda" else bench.CPU_SHAPES)
    modes = args.precisions or (["float32", "tf32", "bfloat16"] if args.device == "cuda" else ["float32"])
    bench.bench(args.device, shapes, modes, args.cells, args.seconds, args.growth, not args.no_loop, args.out)
