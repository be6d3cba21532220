"""Compiling, keeping and launching the nvrtc engine's kernels, with NVIDIA's libraries replaced."""

import ctypes
from array import array

import pytest
import torch

from deepmemory.ops.nvrtc import compiler


class Driver:
    """In the place of NVIDIA's: remembers calls, answers 0 or what ``answers`` says."""

    def __init__(self, **answers):
        self.answers, self.calls = answers, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            answer = self.answers.get(name, 0)
            return answer(*arguments) if callable(answer) else answer

        return call


def test_asks_the_driver_how_many_clusters_run_at_once(monkeypatch):
    def count_clusters(count, function, config):
        given = config._obj
        assert (list(given.grid), list(given.block), given.shared_bytes) == ([16, 1, 1], [512, 1, 1], 232448)
        (attribute,) = given.attributes[: given.attribute_count]
        assert (attribute.id, list(attribute.cluster)) == (compiler.CLUSTER_DIMENSION, [16, 1, 1])
        count._obj.value = 7
        return 0

    driver = Driver(cuOccupancyMaxActiveClusters=count_clusters)
    monkeypatch.setattr(compiler, "driver", lambda: driver)
    monkeypatch.setattr(compiler, "_empty_kernel", lambda capability: b"")
    assert compiler.clusters_at_once(16, 512, 232448, (9, 0), 0) == 7
    assert driver.calls[-1] == "cuModuleUnload"
    refusing = Driver(cuOccupancyMaxActiveClusters=912)
    monkeypatch.setattr(compiler, "driver", lambda: refusing)
    assert compiler.clusters_at_once(16, 512, 232448, (9, 0), 0) == 0
    sizes = ctypes.sizeof(compiler.LaunchAttribute), ctypes.sizeof(compiler.LaunchConfig)
    assert sizes == (72, 56)  # as cuda.h has them on 64-bit machines


def test_a_thread_without_a_context_enters_the_one_of_torch(monkeypatch):
    statuses = [compiler.INVALID_CONTEXT, 0]
    driver = Driver(cuLaunchKernel=lambda *_: statuses.pop(0))
    monkeypatch.setattr(compiler, "driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    kernels = compiler.Kernels(b"", 1, (0, 0), save=True, device=0)
    driver.calls.clear()
    kernels.sweep(False, array("q", [0]), 1, 1, 32)
    assert driver.calls == ["cuLaunchKernel", "cuCtxSetCurrent", "cuLaunchKernel"]


def test_sweeps_of_teams_are_launched_whole_or_not_at_all(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(compiler, "driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    kernels = compiler.Kernels(b"", 52, (0, 0), save=True, device=0, team=True)
    driver.calls.clear()
    kernels.sweep(True, array("q", [0]), 104, 1, 256)
    kernels.sum_products(array("q", [0]), 1, 1, 0)
    assert driver.calls == ["cuLaunchCooperativeKernel", "cuLaunchKernel"]


def test_kernels_that_save_nothing_have_no_way_back(monkeypatch):
    found = []
    driver = Driver(cuModuleGetFunction=lambda function, module, name: found.append(name) or 0)
    monkeypatch.setattr(compiler, "driver", lambda: driver)
    compiler.Kernels(b"", 1, (0, 0), save=False, device=0)
    assert found == [b"sweep_forward"]


class Compiler:
    """In the place of NVRTC: its machine code is the options it was given."""

    def __init__(self):
        self.compiled, self.version = [], 13

    def nvrtcVersion(self, major, minor):
        major._obj.value = self.version

    def nvrtcCreateProgram(self, *_):
        return 0

    def nvrtcCompileProgram(self, program, count, options):
        self.compiled.append(b" ".join(options[:count]))
        return 0

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = len(self.compiled[-1])

    def nvrtcGetCUBIN(self, program, cubin):
        cubin.raw = self.compiled[-1]

    def nvrtcDestroyProgram(self, program):
        pass


@pytest.fixture
def fake_compiler(monkeypatch, tmp_path):
    fake = Compiler()
    monkeypatch.setattr(compiler, "nvrtc", lambda: fake)
    monkeypatch.setenv(compiler.FOLDER, str(tmp_path / "kernels"))
    return fake


def test_a_kernel_is_compiled_once_on_a_machine(fake_compiler, tmp_path):
    first = compiler.compile_to_cubin({"D": "5"}, (9, 0))
    assert first == b"-arch=sm_90 -std=c++17 -default-device -DD=5"
    assert compiler.compile_to_cubin({"D": "5"}, (9, 0)) == first
    assert len(fake_compiler.compiled) == 1
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".cubin"]


def test_a_damaged_kernel_is_compiled_again(fake_compiler, tmp_path):
    first = compiler.compile_to_cubin({"D": "5"}, (9, 0))
    (path,) = (tmp_path / "kernels").iterdir()
    for damaged in (b"", path.read_bytes()[:-1], path.read_bytes() + b"more"):
        path.write_bytes(damaged)
        assert compiler.compile_to_cubin({"D": "5"}, (9, 0)) == first
    assert len(fake_compiler.compiled) == 4
    assert compiler.compile_to_cubin({"D": "5"}, (9, 0)) == first
    assert len(fake_compiler.compiled) == 4


def test_another_shape_gpu_compiler_or_source_is_compiled_again(fake_compiler, monkeypatch, tmp_path):
    compiler.compile_to_cubin({"D": "5"}, (9, 0))
    compiler.compile_to_cubin({"D": "6"}, (9, 0))
    compiler.compile_to_cubin({"D": "5"}, (8, 0))
    fake_compiler.version = 14
    compiler.compile_to_cubin({"D": "5"}, (9, 0))
    monkeypatch.setattr(compiler, "source", lambda: "// another")
    compiler.compile_to_cubin({"D": "5"}, (9, 0))
    assert len(fake_compiler.compiled) == 5


def test_kernels_work_where_nothing_can_be_kept(fake_compiler, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for folder in ("", str(tmp_path / "file" / "inside")):
        monkeypatch.setenv(compiler.FOLDER, folder)
        for _ in range(2):
            assert compiler.compile_to_cubin({"D": "5"}, (9, 0)).endswith(b"-DD=5")
    assert len(fake_compiler.compiled) == 4


def test_kernels_are_kept_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(compiler.FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.kernel_folder() == tmp_path / "deepmemory" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.kernel_folder() == tmp_path / ".cache" / "deepmemory" / "kernels"
