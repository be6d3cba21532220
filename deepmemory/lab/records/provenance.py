"""The origin of a result: device, engine, versions and commit."""

from __future__ import annotations

import platform
import subprocess
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

import deepmemory as dm


def provenance(device: str, engine: str) -> dict[str, str | None]:
    """Device, engine, versions and commit of this process."""
    return {"device": device, "engine": engine, **versions(), "git": git_commit()}


def versions() -> dict[str, str]:
    """Versions of everything that may change a number."""
    try:
        own = metadata.version("deepmemory")
    except metadata.PackageNotFoundError:
        own = "not installed"
    found = {"deepmemory": own, "python": platform.python_version(), "torch": torch.__version__}
    found["engines"] = " ".join(name for name, engine in dm.engines().items() if engine.available)
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["gpu"] = torch.cuda.get_device_name()
    found["system"] = f"{platform.system()} {platform.machine()}"
    return found


def git_commit() -> str | None:
    """The commit of the running code, followed by + if files differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(("git", *args), cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here.parents[1])).strip()
        return git("rev-parse", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
