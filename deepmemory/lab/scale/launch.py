"""Launches studies: one after another or several at once on this machine, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepmemory.lab.settings import Launcher, Machine, Setting
from deepmemory.lab.training.progress import Display
from deepmemory.lab.training.studies import Tracker, Watch, run_studies


def launch(
    settings: Sequence[Setting],
    seeds: Sequence[int],
    *,
    out: Path,
    machine: Machine,
    launcher: Launcher,
    display: Display,
    track: Tracker | None = None,
    watch: Watch | None = None,
) -> list[str]:
    """Train every setting with every seed that is not recorded yet.

    Returns a line for each study, or part of one, that failed; the others are trained nevertheless.
    """
    if launcher.at_once > 1 and (launcher.on != "local" or machine.devices * machine.nodes > 1):
        raise ValueError("--at-once shares one device; leave it out with --on ray, --devices and --nodes")
    if launcher.on == "ray":
        if watch is not None:
            raise ValueError("--watch needs the weights on this machine; leave it out with --on ray")
        from deepmemory.lab.scale.ray_cluster import run_on_ray

        return run_on_ray(settings, seeds, out=out, machine=machine, launcher=launcher, display=display, track=track)
    if launcher.at_once > 1:
        from deepmemory.lab.scale.concurrent import run_concurrently

        return run_concurrently(
            settings,
            seeds,
            at_once=launcher.at_once,
            out=out,
            machine=machine,
            display=display,
            track=track,
            watch=watch,
        )
    run_studies(settings, seeds, out=out, machine=machine, display=display, track=track, watch=watch)
    return []
