"""Merging of the records of several machines in one new folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from deepmemory.lab.records.checkpoints import load_checkpoint, write_whole
from deepmemory.lab.records.database import Records, Run, Study
from deepmemory.lab.records.packing import pack, pack_curves, pack_watch
from deepmemory.lab.records.sqlite_files import connect, explained
from deepmemory.lab.settings import Setting

Chosen = dict[tuple[str, int], tuple[Records, Study, Run]]  # by the key of a study and by seed


def merge(sources: Sequence[Path | str], out: Path | str) -> Records:
    """Merge the records of several machines in a new folder, packed.

    The same run in two sources must have the same values. A merge that was killed can be repeated: one transaction
    writes all rows, and checkpoints are copied before it ends.
    """
    with ExitStack() as held:
        opened = [held.enter_context(Records(source)) for source in sources]
        studies, chosen = choose_runs(opened)
        target = Path(out)
        taken = FileExistsError(f"{target} has records already; choose a new folder with --out")
        finished = not nothing_recorded(target / "records.sqlite")
        if finished and not is_merged(target, studies, chosen):
            raise taken
        merged = Records(target, write=True)
        try:
            if not finished:
                with merged.transaction():
                    if merged.db.execute("SELECT 1 FROM study").fetchone():  # another process was faster
                        raise taken
                    copy_chosen(merged, studies, chosen)
                    for records, study, run in chosen.values():
                        copy_checkpoint(records, merged, study.setting, run.seed)
            with explained(merged.path):
                merged.db.execute("VACUUM")
        except BaseException:
            merged.close()
            raise
    return merged


def choose_runs(opened: Sequence[Records]) -> tuple[dict[str, Study], Chosen]:
    """Every study, and for each run the record with the most epochs."""
    studies, chosen = dict[str, Study](), Chosen()
    for records in opened:
        for study in records.studies():
            key = study.setting.key
            known = studies.setdefault(key, study)
            if (known.series, known.thresholds) != (study.series, study.thresholds):
                raise ValueError(f"study {key} has other series or thresholds in {records.out} than elsewhere")
            if study.setting.epochs > known.setting.epochs:
                studies[key] = study
            for run in study.runs:
                other = chosen.get((key, run.seed))
                if other is not None:
                    check_agreement(study, run, records.out, other[2], other[0].out)
                if other is None or how_far(run) > how_far(other[2]):
                    chosen[key, run.seed] = (records, study, run)
    return studies, chosen


def nothing_recorded(path: Path) -> bool:
    """Whether a database does not exist or has no study yet."""
    if not path.exists():
        return True
    with explained(path), closing(connect(path, "ro")) as db:
        made = db.execute("PRAGMA user_version").fetchone()[0] > 0
        return not made or db.execute("SELECT count(*) FROM study").fetchone()[0] == 0


def is_merged(target: Path, studies: dict[str, Study], chosen: Chosen) -> bool:
    """Whether a folder has the records that this merge would write: an earlier one was killed after its transaction."""
    if target.resolve() in {records.out.resolve() for records, *_ in chosen.values()}:
        return False
    with Records(target) as merged:
        found = merged.studies()
    settings = {study.setting.key: study.setting for study in found}
    values = {(study.setting.key, run.seed): comparable(run) for study in found for run in study.runs}
    return settings == {key: study.setting for key, study in studies.items()} and values == {
        which: comparable(run) for which, (_, _, run) in chosen.items()
    }


def comparable(run: Run) -> tuple[Any, ...]:
    """Everything recorded about a run except times; numbers are compared as bits, so that nan equals nan."""
    test = None if run.test is None else pack(list(run.test.values()))
    return run.state, run.first_under, run.best_epoch, test, *map(pack, run.curves.values()), run.epochs


def how_far(run: Run) -> tuple[int, bool]:
    """How far a run has come: its epochs, and whether it was tested."""
    return run.epochs, run.test is not None


def check_agreement(study: Study, run: Run, where: Path, other: Run, elsewhere: Path) -> None:
    """Raise if two records of one run differ in anything but the number of epochs."""
    name = f"{study.setting.task}, {study.setting.cell}, seed {run.seed}"
    for epoch in range(1, min(run.epochs, other.epochs) + 1):
        mine, theirs = run.at_epoch(epoch), other.at_epoch(epoch)
        if pack(list(mine.values())) != pack(list(theirs.values())):
            raise ValueError(
                f"{name}: {where} and {elsewhere} differ at epoch {epoch}: {mine} and {theirs}. The same seed was "
                "trained twice with different results; delete one of the two, or train with other seeds (--seed)"
            )
    tests = {pack(list(one.test.values())) for one in (run, other) if one.test is not None}
    if run.epochs == other.epochs and len(tests) > 1:
        raise ValueError(f"{name}: {where} and {elsewhere} differ in their test results: {run.test} and {other.test}")


def copy_chosen(merged: Records, studies: dict[str, Study], chosen: Chosen) -> None:
    """Write all chosen runs, with their studies and sessions, inside a transaction."""
    sessions: dict[tuple[Path, int], int] = {}
    watched: dict[tuple[Path, str], dict[int, dict[str, dict[int, float]]]] = {}
    ids = {
        key: merged.insert(
            "study",
            key=key,
            settings=study.setting.to_json(),
            series=json.dumps(study.series),
            thresholds=json.dumps(study.thresholds),
        )
        for key, study in studies.items()
    }
    for (key, seed), (records, _, run) in sorted(chosen.items(), key=lambda item: item[0]):
        origin = (records.out, run.session)
        if origin not in sessions:
            row = records.db.execute(
                "SELECT started, machine, git FROM session WHERE id = ?", (run.session,)
            ).fetchone()
            sessions[origin] = merged.insert("session", started=row[0], machine=row[1], git=row[2])
        run_id = merged.insert(
            "run",
            study=ids[key],
            seed=seed,
            state=run.state,
            first_under=json.dumps(run.first_under),
            best_epoch=run.best_epoch,
            test=None if run.test is None else pack(list(run.test.values())),
            seconds=run.seconds,
            session=sessions[origin],
        )
        if run.epochs:
            merged.insert("packed", run=run_id, **{'"values"': pack_curves(run.curves)})
        if (records.out, key) not in watched:
            watched[records.out, key] = records.watched(key)
        if values := watched[records.out, key].get(seed):
            merged.insert("packed_watch", run=run_id, **{'"values"': pack_watch(values)})


def copy_checkpoint(records: Records, merged: Records, setting: Setting, seed: int) -> None:
    """Copy the checkpoint that holds this run, so that the merged folder can be trained further."""
    for path in sorted(records.checkpoint_folder(setting).glob("*.safetensors")):
        target = merged.checkpoint_folder(setting) / path.name
        if seed in load_checkpoint(path)[1]["seeds"] and not target.exists():
            write_whole(target, path.read_bytes())
            shutil.copystat(path, target)
