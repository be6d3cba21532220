"""Studies on a real Ray cluster of two nodes: the numbers of one machine, whatever dies meanwhile."""

import gc
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lab.made_studies import made, record
from lab.processes import Forked
from lab.stories import told

pytest.importorskip("ray", reason="--on ray needs Ray: pip install 'deepmemory[ray]'")

import ray
from ray.cluster_utils import Cluster

from deepmemory.lab import cli, paper
from deepmemory.lab.beyond import depth
from deepmemory.lab.records import RUNNING, SPENT, Records
from deepmemory.lab.scale import ray_cluster
from deepmemory.lab.scale.ray_cluster import Driver, EpochFinished, divide, group_size, run_on_ray
from deepmemory.lab.settings import Launcher, Machine, Setting
from deepmemory.lab.training.progress import PlainLines
from deepmemory.lab.training.studies import recorded_runs, run_studies

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
CPU = Machine("cpu", engine="plain", threads=1)
TINY = Setting(
    transition=(3,), hidden=(3,), min_length=24, max_length=26, batch=4, steps=2, epochs=8, validation=8, test=8
)
GRU = replace(TINY, cell="gru", transition=())
PAIRS = Launcher("ray", group=2)
ROOT = Path(__file__).parents[3]
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 10,
}


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on loopback; the driver sits on the first."""
    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "_system_config": QUICK_TO_NOTICE, "include_dashboard": False},
    )
    nodes.add_node(num_cpus=1)
    ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
    nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    gc.collect()  # what Ray leaves open is its own; nobody else's test should hear of it


class Recorder(PlainLines):
    """A display that records what it was told."""

    def __init__(self):
        super().__init__()
        self.said = []

    def say(self, text):
        self.said.append(text)


def run(settings, out, display=None, launcher=PAIRS, seeds=range(4), **options):
    display = display or PlainLines()
    return run_on_ray(settings, seeds, out=out, machine=CPU, launcher=launcher, display=display, **options)


@pytest.fixture
def after_message(monkeypatch):
    """Call ``act(job, message)`` after the driver has recorded a message."""
    original = Driver.record

    def install(act):
        def record(self, job, message):
            original(self, job, message)
            act(job, message)

        monkeypatch.setattr(Driver, "record", record)

    return install


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """In the same groups: how many runs are stacked changes the last bits that a matrix product rounds."""
    out = tmp_path_factory.mktemp("undisturbed")
    for seeds in (range(2), range(2, 4)):
        run_studies([TINY, GRU], seeds, out, CPU, PlainLines())
    return told(out)


def test_a_cluster_tells_what_one_machine_tells_and_knows_who_computed(cluster, tmp_path, undisturbed):
    tracked = []
    assert run([TINY, GRU], tmp_path, track=lambda *epoch: tracked.append(epoch)) == []
    assert told(tmp_path) == undisturbed
    assert len(tracked) == 2 * 2 * TINY.epochs
    records = Records(tmp_path)
    assert len(records.sessions()) == 4  # groups of two runs
    assert {session["device"] for session in records.sessions().values()} == {"cpu"}
    records.close()
    assert len(list(tmp_path.glob("checkpoints/*/*.safetensors"))) == 4
    # What is recorded is not trained again, neither here nor on the cluster.
    run_studies([TINY, GRU], range(4), tmp_path, CPU, PlainLines())
    assert run([TINY, GRU], tmp_path) == []
    assert told(tmp_path) == undisturbed


def test_a_killed_worker_and_a_lost_node(cluster, tmp_path, undisturbed, after_message):
    """Both in one study: a worker by SIGKILL, then a node with all that runs on it; the other node takes over."""
    deaths, resumed = set(), []

    def disturb(job, message):
        process, node = re.search(r"process (\d+) .*node (\w+)", job.worker).groups()
        if isinstance(message, ray_cluster.Started):
            resumed.append(message.epoch)
        elif isinstance(message, EpochFinished) and message.epoch.number == 3:
            if node == cluster.head_node.node_id and "worker" not in deaths:
                deaths.add("worker")
                os.kill(int(process), signal.SIGKILL)
            elif node != cluster.head_node.node_id and "node" not in deaths:
                deaths.add("node")
                cluster.remove_node(*cluster.worker_nodes, allow_graceful=False)

    after_message(disturb)
    display = Recorder()
    assert run([TINY, GRU], tmp_path, display) == []
    assert deaths == {"worker", "node"}
    assert any(epoch >= 1 for epoch in resumed)  # a group may have run ahead of its node and ended
    assert any("its worker died" in text and "resumes from epoch" in text for text in display.said)
    assert len(display.said) >= 1  # a worker whose node is lost may live just long enough to end its group
    assert told(tmp_path) == undisturbed


def test_a_poisoned_group_is_given_up_and_the_rest_finishes(cluster, tmp_path, undisturbed):
    """The checkpoint of one group is not of this model, as a group that fails wherever it goes."""
    run_studies([replace(TINY, epochs=2)], range(2), tmp_path, CPU, PlainLines())
    (path,) = tmp_path.glob("checkpoints/*/*.safetensors")
    display = Recorder()
    original = ray_cluster.Driver.submit

    def submit(self, job):
        if job.path == path:
            job = replace(job, setting=replace(job.setting, hidden=(4,)))
        return original(self, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_cluster.Driver, "submit", submit)
        (failed,) = run([TINY, GRU], tmp_path, display)
    assert failed.startswith("adding dmu, seeds 0 to 1: ")
    assert sum("seeds 0 to 1" in text for text in display.said) == ray_cluster.ATTEMPTS
    assert display.said[-1].endswith("given up")
    story = told(tmp_path)
    assert {key: story[key] for key in undisturbed if key[1] > 1 or key[0] == GRU.key} == {
        key: undisturbed[key] for key in undisturbed if key[1] > 1 or key[0] == GRU.key
    }
    assert run([TINY, GRU], tmp_path, display) == []
    assert told(tmp_path) == undisturbed


def test_the_command(cluster, tmp_path, monkeypatch, capsys, undisturbed):
    command = ["train", "adding", "--hidden", "3", "--transition", "3", "--min-length", "24", "--max-length", "26"]
    command += ["--batch", "4", "--steps", "2", "--epochs", "8", "--validation", "8", "--test", "8", "--runs", "4"]
    command += ["--lr", str(TINY.lr), "--device", "cpu", "--engine", "plain", "--on", "ray", "--group", "3"]
    monkeypatch.setattr(sys, "argv", ["dmu", *command, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code in (0, None), capsys.readouterr().err
    assert told(tmp_path) == {key: story for key, story in undisturbed.items() if key[0] == TINY.key}


def test_what_no_node_has_is_said(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "PATIENCE", 0.2)
    display = Recorder()

    def stop_waiting(text):
        display.said.append(text)
        raise KeyboardInterrupt

    display.say = stop_waiting
    with pytest.raises(KeyboardInterrupt):
        run([TINY], tmp_path, display, Launcher("ray", cpus=99, gpus=1))
    (said,) = display.said
    assert "99 CPUs and 1 GPUs" in said


def test_runs_whose_last_epoch_is_recorded_are_not_handed_out(tmp_path):
    setting = paper.setting("pixel-mnist", "dmu")
    record(tmp_path, [made(setting, [0.98] * 2, state=RUNNING), made(replace(setting, lr=0.5), [0.98] * 2, epochs=3)])
    records, said = Records(tmp_path, write=True), []

    def seeds_to_train(of):
        known = {run.seed: run for run in recorded_runs(records, of)}
        return [job.seeds for job in divide(records, of, range(3), known, 9, said.append)]

    assert seeds_to_train(setting) == [[2]]
    assert "seeds [0, 1] finished from the records" in said[0]
    assert {run.state for run in recorded_runs(records, setting)} == {SPENT}
    assert seeds_to_train(replace(setting, lr=0.5)) == [[0, 1, 2]]
    records.close()


def test_groups_are_even_and_a_gpu_takes_all(tmp_path):
    records = Records(tmp_path, write=True)
    jobs = divide(records, TINY, range(51), {}, group_size(Launcher("ray"), TINY, 51), print)
    assert sorted(len(job.seeds) for job in jobs) == [12, 13, 13, 13]
    assert sorted(seed for job in jobs for seed in job.seeds) == list(range(51))
    assert len({job.path for job in jobs}) == 4
    assert len(divide(records, TINY, range(51), {}, group_size(Launcher("ray", gpus=1), TINY, 51), print)) == 1
    records.close()


def test_large_networks_have_a_group_for_each_run_unless_groups_are_chosen():
    large = depth.setting("lstm")
    assert [group_size(Launcher("ray", gpus=gpus), large, 3) for gpus in (0, 1)] == [1, 1]
    assert group_size(Launcher("ray", gpus=1, group=2), large, 3) == 2


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999"])
def test_a_cluster_that_is_not_there_is_named(tmp_path, monkeypatch, address):
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=f"no Ray cluster at {address}"):
        run([TINY], tmp_path, launcher=Launcher("ray", address=address))


LISTENS = """
import ray, psutil  # in this order: Ray brings psutil along
from deepmemory.lab.scale import ray_cluster
ray_cluster.connect(None, print)
ray.get([ray.remote(lambda: None).remote() for _ in range(4)])  # workers listen, too
here = psutil.Process()
for process in (here, *here.children(recursive=True)):
    for socket in process.net_connections():
        if socket.status == psutil.CONN_LISTEN:
            print(process.name(), *socket.laddr)
"""


def test_ray_on_this_machine_alone_listens_to_this_machine_alone():
    """Whoever reaches one of its ports can run code."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", LISTENS]
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=120)
    sockets = [line.split() for line in told.stdout.splitlines()]
    assert {"gcs_server", "raylet"} <= {name for name, *_ in sockets}
    assert {host for _, host, _ in sockets} <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_a_ray_that_listens_to_others_is_told_of(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray_cluster.ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    said = []
    ray_cluster.connect(None, said.append)
    assert "listens on 192.0.2.7" in said[0]


def test_without_ray_the_command_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['ray'] = None; from deepmemory.lab import cli; cli.main()"
    process = Forked(code, "train", "adding", "--on", "ray", "--out", tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert "error: --on ray needs Ray: pip install 'deepmemory[ray]'" in errors
