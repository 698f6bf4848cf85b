"""The kernels of cuda/ in the simulator, with the Python interface that they have on a device."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import pytest

from sb3_fp16 import kernels

ROOT = Path(__file__).parent.parent.parent
COMPILER = ["g++", "-std=c++17", "-fPIC", "-Wall", "-Wextra"]


def build(folder: Path, *flags: str) -> None:
    """``_simulated``, in two libraries: thread-local variables of the simulator's own are shared memory."""
    includes = [f"-I{path}" for path in (sysconfig.get_path("include"), pybind11.get_include())]
    kernels_from = ["-include", "tests/cuda/simulated.h", "-x", "c++", "cuda/launch.cu"]
    name = "-DSB3_FP16_CUDA_MODULE=_simulated"
    jobs = [
        ["-O2", "-ffp-contract=off", "-shared", *kernels_from, "-o", folder / "libsimulated.so", *flags],
        ["-O1", "-fvisibility=hidden", name, *includes, "-c", "cuda/bindings.cpp", "-o", folder / "bindings.o", *flags],
    ]
    running = [subprocess.Popen([*COMPILER, *map(str, job)], cwd=ROOT) for job in jobs]
    assert [job.wait() for job in running] == [0, 0]
    link = ["-shared", folder / "bindings.o", f"-L{folder}", "-lsimulated", "-Wl,-rpath,$ORIGIN", *flags]
    subprocess.run([*COMPILER, *map(str, link), "-o", str(folder / "_simulated.so")], check=True)


@pytest.fixture(scope="session")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated")
    sanitized = os.environ.get("SB3_FP16_SANITIZE") == "1"  # make sanitize
    build(folder, *(["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if sanitized else []))
    spec = importlib.util.spec_from_file_location("_simulated", folder / "_simulated.so")
    module = importlib.util.module_from_spec(spec)
    sys.modules["_simulated"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_cpu(simulated, monkeypatch):
    """Kernels, and not the CPU's own code, serve tensors on the CPU."""
    monkeypatch.setitem(kernels.MODULES, "cpu", simulated)
    return simulated
