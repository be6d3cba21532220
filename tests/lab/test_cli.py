"""The command, as people and machines use it: run, killed, stopped, run again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from lab.processes import MAIN, Forked
from lab.stories import told
from typer.testing import CliRunner

import deepmemory as dm
from deepmemory.export import graphs
from deepmemory.lab import __main__, cli
from deepmemory.lab.cli.options import AnyMachine, ManyStudies, SettingChanges, as_command
from deepmemory.lab.cli.training import papers_setting
from deepmemory.lab.records import Records
from deepmemory.lab.settings import TASKS, Launcher, Machine, Setting
from deepmemory.ops.engines import Availability

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SMALL = ["--runs", "2", "--engine", "plain", "--device", "cpu"]
SMALL += [
    f"--set={change}"
    for change in ("steps=10", "batch=8", "validation=20", "test=20", "min_length=24", "max_length=30")
]


def start(*arguments):
    command = [sys.executable, "-m", "deepmemory.lab", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_epoch(process, number):
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "epoch" and event["epoch"] >= number:
            return
    pytest.fail(process.stderr.read())


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)


def error_of(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["dmu", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_killed_and_stopped_it_resumes_to_the_same_numbers(tmp_path):
    command = ["paper", "adding", "--cells", "dmu,gru", "--epochs", "6", "--json", *SMALL, "--out"]
    killed = Forked(MAIN, *command, tmp_path / "disturbed")
    wait_for_epoch(killed, 2)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL

    stopped = start(*command, tmp_path / "disturbed")
    wait_for_epoch(stopped, 4)
    stopped.send_signal(signal.SIGINT)
    _, errors = stopped.communicate()
    assert stopped.returncode == 130
    assert "every finished epoch is saved" in errors
    assert "dmu paper adding --cells dmu,gru" in errors  # the command that resumes

    # The rest is done by two processes at once, on the same folder.
    pair = [Forked(MAIN, *command, tmp_path / "disturbed") for _ in range(2)]
    invoke(*command, tmp_path / "undisturbed")
    for process in pair:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert told(tmp_path / "disturbed") == told(tmp_path / "undisturbed")
    assert len(told(tmp_path / "disturbed")) == 4


def test_paper_trains_reports_and_names_the_page(tmp_path):
    result = invoke("paper", "adding", "--cells", "dmu", "--epochs", 1, *SMALL, "--out", tmp_path)
    assert result.exit_code == 0
    (study,) = Records(tmp_path).studies()
    assert [run.epochs for run in study.runs] == [1, 1]
    page = Path(result.output.rsplit("page: ", 1)[1].strip())
    assert page == tmp_path / "report" / "index.html"
    assert page.exists()


def test_machines_get_json(tmp_path):
    result = invoke("paper", "adding", "--cells", "gru", "--epochs", 2, "--json", *SMALL, "--out", tmp_path)
    events = [json.loads(line) for line in result.output.splitlines()]
    assert [event["event"] for event in events] == ["epoch", "epoch", "study", "report"]
    assert events[1]["epoch"] == 2
    assert events[-1]["tasks"][0]["cells"][0]["runs"] == 2


def test_open_readings_change_only_whom_they_concern(tmp_path):
    short = ["--epochs", 1, "--set=steps=1", "--set=validation=2", "--set=test=2", "--runs", 1, "--engine", "plain"]
    readings = ["--module-rate", "0.001", "--patience", "1", "--noise", "fixed"]
    result = invoke(
        "paper",
        "adding",
        "noisy-sequence",
        "--cells",
        "gru,dmu",
        *readings,
        *short,
        "--device",
        "cpu",
        "--out",
        tmp_path,
    )
    assert result.exit_code == 0
    settings = {(s.setting.task, s.setting.cell): s.setting for s in Records(tmp_path).studies()}
    assert {key: (s.module_rate, s.patience, s.noise) for key, s in settings.items()} == {
        ("adding", "gru"): ("formula", 1, "random"),
        ("adding", "dmu"): ("0.001", 1, "random"),
        ("noisy-sequence", "gru"): ("formula", 1, "fixed"),
        ("noisy-sequence", "dmu"): ("0.001", 1, "fixed"),
    }


def test_train_takes_any_setting(tmp_path):
    changes = ["--hidden", "4", "--transition", "6,5", "--activation", "tanh", "--lr", "0.1", "--weight-decay", "1e-4"]
    sizes = ["--steps", 2, "--epochs", 1, "--validation", 4, "--test", 4, "--min-length", 24, "--max-length", 25]
    result = invoke(
        "train",
        "adding",
        *changes,
        *sizes,
        "--engine",
        "plain",
        "--device",
        "cpu",
        "--precision",
        "64-true",
        "--out",
        tmp_path,
    )
    assert result.exit_code == 0
    assert f"dmu report --out {tmp_path}" in result.output
    (study,) = Records(tmp_path).studies()
    assert (study.setting.hidden, study.setting.transition, study.setting.lr) == ((4,), (6, 5), 0.1)
    assert study.setting.precision == "64-true"


def test_merge(tmp_path):
    for out, seed in (("a", 0), ("b", 2)):
        invoke("paper", "adding", "--cells", "dmu", "--epochs", 1, "--seed", seed, *SMALL, "--out", tmp_path / out)
    result = invoke("merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "c")
    assert "1 studies, 4 runs" in result.output
    assert len(told(tmp_path / "c")) == 4


SETTINGS = """--hidden --transition --depth --activation --memory-bias --forget-bias --input-bias --update-bias
    --lr --module-rate --condition --weight-decay --gamma --batch --steps --epochs --stop-below --patience
    --validation --test --min-length --max-length --noise --precision --music --window --language --release
    --pairs --feedback --pixels --limit"""
MACHINE = "--device --engine --graph --no-graph --threads --data"
EVERYWHERE = f"{MACHINE} --runs --seed --out --json --set"
TRAINING = f"{EVERYWHERE} --quick --devices --nodes --recompute --tracker --watch --on --address --group --cpus --gpus"
OPTIONS = {
    "paper": f"{TRAINING} --cells --depths --pair --pixels --epochs --module-rate --patience --noise --music --pairs "
    "--feedback --at-once",
    "beyond": f"{TRAINING.replace('--watch ', '')} --parts --kinds --at-once",
    "train": f"{TRAINING} {SETTINGS} --cell",
    "sweep": f"{EVERYWHERE} --cell --space --sampler --pruner --trials --storage --search-seed",
    "report": "--out --to --json",
    "merge": "--out",
    "bench": "--device --shapes --precisions --cells --seconds --growth --no-growth --loop --no-loop --engines "
    "--studies --data --out",
    "inspect": "--run --to --data --json",
    "export": "--format --weights --run --to --data --json",
    "compose": "--run --tune --from --given --steps --temperature --tempo --seed --to --data --json",
    "translate": "--run --beam --length-power --bleu --limit --data --json",
    "generate": "--run --words --temperature --top --seed --data --json",
    "play": "--port --out --translation --music --data --open --no-open",
}


@pytest.mark.parametrize("verb", OPTIONS)
def test_options_keep_their_names(verb):
    """Scripts rely on them; most are made from the fields of a dataclass, whose names must not change unnoticed."""
    command = typer.main.get_command(cli.app).commands[verb]
    names = {name for option in command.params for name in (*option.opts, *option.secondary_opts) if name[0] == "-"}
    assert set(OPTIONS[verb].split()) <= names
    assert all(option.help for option in command.params)


def test_options_made_from_fields_arrive_as_dataclasses():
    received = {}

    def verb(machine: AnyMachine, launcher: ManyStudies, changes: SettingChanges, out: str = "runs") -> None:
        received.update(machine=machine, launcher=launcher, changes=changes, out=out)

    app = typer.Typer()
    app.command()(as_command(verb))
    app(["--threads", "2", "--no-graph", "--at-once", "3", "--hidden", "3,2", "--lr", "1e-3"], standalone_mode=False)
    assert received == {
        "machine": Machine(threads=2, graph=False),
        "launcher": Launcher(at_once=3),
        "changes": {"hidden": "3,2", "lr": "1e-3"},
        "out": "runs",
    }


@pytest.mark.parametrize("arguments", ["--help", "--version", "train --help", "data --help"])
def test_help_does_not_wait_for_torch(arguments):
    code = "import atexit, sys; from deepmemory.lab.__main__ import main; "
    code += "atexit.register(lambda: print('torch' in sys.modules)); main()"
    command = [sys.executable, "-c", code, *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_version():
    assert invoke("--version").output == f"deepmemory {dm.__version__}\n"


def test_ctrl_c_says_how_to_resume(monkeypatch, capsys):
    monkeypatch.setattr("deepmemory.lab.report.write_report", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(sys, "argv", ["dmu", "report"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 130
    assert "dmu report" in capsys.readouterr().err


def test_ctrl_c_while_packages_are_imported(monkeypatch, capsys):
    """Some catch every exception on the way, and fail differently afterwards."""
    monkeypatch.setattr(signal, "signal", Mock())
    monkeypatch.setattr(__main__, "interruptions", 1)
    monkeypatch.setattr(cli, "main", Mock(side_effect=ImportError("cannot load module more than once per process")))
    with pytest.raises(SystemExit) as stop:
        __main__.main()
    assert stop.value.code == 130
    assert capsys.readouterr().err == "\nstopped\n"
    monkeypatch.setattr(__main__, "interruptions", 0)
    with pytest.raises(ImportError, match="more than once"):
        __main__.main()


def test_a_missing_package_of_an_export_format_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(graphs, "find_spec", lambda name: None)
    told = error_of(monkeypatch, capsys, "export", "polymusic")
    assert told == "error: format 'onnx' needs onnx; install it with: pip install 'deepmemory[export]'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["paper", "ading"], "unknown task 'ading'; choose from adding, temporal-order, noisy-sequence"),
        (["paper", "--cells", "dmu,tru"], "unknown cell 'tru'; choose from rnn, lstm, gru, rhn, dmu"),
        (["paper", "--engine", "warp"], "unknown engine 'warp'; choose from auto, plain"),
        (["paper", "--device", "tpu"], "unknown device 'tpu'; choose from auto, cpu, cuda"),
        (["paper", "--set", "lr"], "--set takes NAME=VALUE, got 'lr'"),
        (["paper", "--set", "rate=1"], "unknown setting 'rate'; choose from task, cell"),
        (["paper", "--tracker", "wandb"], "unknown tracker 'wandb'; choose from none, tensorboard, mlflow"),
        (["train", "adding", "--cell", "gru", "--depth", "3"], "depth belongs to the cell rhn"),
        (["train", "adding", "--epochs", 10**30], f"epochs should be at most 1048576, got {10**30}"),
        (["train", "adding", "--hidden", 2**31], "hidden should be at most 65536, got (2147483648,)"),
        (["paper", "--set", "lr=nan"], "lr should be a finite number, got nan"),
        (["train", "adding", "--on", "slurm"], "unknown --on 'slurm'; choose from local, ray"),
        (["train", "adding", "--on", "ray", "--watch", "gradients"], "--watch needs the weights on this machine"),
        (["train", "adding", "--epochs", "many"], "epochs should be a whole number, got 'many'"),
        (["train", "ading"], f"unknown task 'ading'; choose from {', '.join(TASKS)}. Did you mean adding?"),
        (["train", "Music"], f"unknown task 'Music'; choose from {', '.join(TASKS)}. Did you mean polymusic?"),
        (["train", "xyz"], f"unknown task 'xyz'; choose from {', '.join(TASKS)}\n"),
        (["train", "adding", "--cell", "lstm", "--memory-bias", "3"], "memory_bias belongs to the cell dmu"),
        (["train", "adding", "--set", "window=100"], "window belongs to the task natlang or ptb"),
        (["compose", "translation"], "expected a network trained on polymusic, got the task translation"),
        (["translate", "Estoy", "cansado."], "there is no checkpoint Estoy; put a text of several words in quotes"),
        (["translate", "Xyzzy plugh."], "none of the words of 'Xyzzy plugh.' is in the spanish vocabulary"),
        (["generate", "stock", "--out", "nowhere"], "--out nowhere: there is no such folder"),
        (["report"], "no records in"),
        (["merge", "nowhere", "--out", "merged"], "no records in nowhere"),
    ],
)
def test_mistakes_are_told_the_choices(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert f"error: {message}" in error_of(monkeypatch, capsys, *arguments)


def test_a_network_that_nobody_named_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(cli.app, ["translate", "Estoy cansado."])
    assert told.stderr.startswith("network: ")
    assert told.stderr.endswith("translation.safetensors\n")
    assert told.stdout == "i m tired .\n"


def test_training_ends_with_the_scores_of_the_best_epoch(tmp_path):
    options = "--hidden 3 --steps 3 --batch 4 --validation 8 --test 8 --min-length 24 --max-length 26 --transition 3,3"
    output = invoke("train", "adding", "--residual", "--epochs", 2, *options.split(), "--out", tmp_path).output
    with Records(tmp_path) as records:
        (study,) = records.studies()
    (run,) = study.runs
    loss, epoch = min((loss, epoch) for epoch, loss in enumerate(run.curves["valid_loss"], 1))
    assert f"best epoch: {epoch} of seed 0: validation loss {loss:.4g}, test loss {run.test['loss']:.4g}" in output
    assert study.setting.residual


@pytest.mark.parametrize("option", ["runs", "seed", "threads", "devices", "nodes"])
@pytest.mark.parametrize("value", [-1, 10**30, "", "nan"])
def test_numbers_that_no_machine_has_are_refused(monkeypatch, capsys, option, value):
    assert f"'--{option}'" in error_of(monkeypatch, capsys, "train", "adding", f"--{option}", value)


@pytest.mark.parametrize("full", [MemoryError(), RuntimeError("alloc_cpu.cpp: DefaultCPUAllocator: can't allocate")])
def test_a_machine_without_memory_is_told_what_to_change(monkeypatch, capsys, full):
    monkeypatch.setattr(cli, "app", Mock(side_effect=full))
    error = error_of(monkeypatch, capsys)
    assert "not enough memory" in error
    assert "--runs 10" in error


@pytest.mark.parametrize(
    "verb", [["train", "adding"], ["paper", "adding"], ["sweep", "adding"]], ids=lambda verb: verb[0]
)
def test_an_engine_that_this_machine_lacks_gets_one_line(tmp_path, monkeypatch, capsys, verb):
    lacking = {"nvrtc": Availability(False, "there is no CUDA GPU")}
    monkeypatch.setattr(dm, "engines", lambda: lacking)
    error = error_of(monkeypatch, capsys, *verb, "--engine", "nvrtc", "--out", tmp_path / "out")
    assert error.splitlines() == ["error: engine nvrtc cannot be used on this machine: there is no CUDA GPU"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_a_tracker_that_is_not_there_is_named(tmp_path, monkeypatch, capsys, tracker):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    error = error_of(monkeypatch, capsys, "paper", "--tracker", tracker, "--out", tmp_path)
    assert f"tracker {tracker} is not installed: pip install {tracker}" in error


def test_a_tracker_gets_every_epoch(tmp_path, monkeypatch):
    logged = []

    class SummaryWriter:
        def __init__(self, folder):
            assert "adding-dmu" in folder

        def add_scalar(self, *scalar):
            logged.append(scalar)

        def flush(self):
            pass

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    arguments = ["--cells", "dmu", "--epochs", 2, "--tracker", "tensorboard", *SMALL, "--out", tmp_path]
    invoke("paper", "adding", *arguments)
    assert {(name, epoch) for name, _, epoch in logged} == {
        (f"{series}/seed-{seed}", epoch)
        for series in ("train_loss", "valid_loss", "valid_accuracy")
        for seed in (0, 1)
        for epoch in (1, 2)
    }


def test_the_live_table_shows_every_study(monkeypatch):
    from rich.console import Console

    from deepmemory.lab import paper
    from deepmemory.lab.training.loop import Epoch
    from deepmemory.lab.training.progress import LiveTable

    settings = paper.settings(["adding"], ["dmu", "gru"])
    table = LiveTable()
    monkeypatch.setattr(table.live, "start", lambda: None)
    table.plan(settings, range(3))
    values = {seed: {"valid_loss": loss} for seed, loss in enumerate([0.005, 0.5, 5e-5])}
    table.epoch(settings[0], Epoch(7, values, 2.0), 3)
    with open(os.devnull, "w") as nowhere:
        console = Console(width=80, record=True, file=nowhere)
        console.print(table.table())
        lines = console.export_text().splitlines()
    dmu = next(line for line in lines if "DMU" in line)
    assert dmu.split() == ["adding", "DMU", "7/100", "2", "1", "1", "0", "0", "3", "5.0e-03", "0.5"]
    assert any("of 3 runs" in line for line in lines)
    assert any("GRU" in line for line in lines)
    assert any("time left 6:26" in line for line in lines)  # 93 epochs and 100, two seconds each


def test_the_library_never_imports_the_lab():
    code = "import sys, deepmemory; print([name for name in sys.modules if name.startswith('deepmemory.lab')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "set()")


def test_optional_packages_are_imported_only_where_they_are_used():
    optional = "{'torch', 'matplotlib', 'tensorboard', 'mlflow', 'optuna', 'ray', 'pooch'}"
    code = f"import sys, deepmemory.lab.cli; print(sys.modules.keys() & {optional})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "set()")


def test_without_the_labs_packages_the_command_says_what_to_install():
    hide = "import sys; sys.modules['typer'] = None; from deepmemory.lab.__main__ import main; main()"
    told = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "pip install 'deepmemory[lab]'" in told.stderr
    assert "Traceback" not in told.stderr


def test_a_task_without_published_settings_starts_from_the_defaults(monkeypatch):
    monkeypatch.setattr("deepmemory.lab.beyond.OF_TASK", {})
    assert papers_setting("ptb", "gru", {"lr": "0.5"}) == Setting("ptb", "gru", lr=0.5)
