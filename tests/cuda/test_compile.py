"""The kernels as nvcc makes them, and the module on a machine without a device."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch as th

from sb3_fp16 import PPOFP16, SHARP

ROOT = Path(__file__).parent.parent.parent
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
ARCHITECTURES = (75, 80, 90, 100, 120)
# Registers of a thread; beyond them fewer blocks run at a time, and blocks of 1024 threads do not run at all.
MOST_REGISTERS, MOST_OF_A_LARGE_BLOCK = 96, 64

# Where the build must make the kernels, as in CI, a compiler that is missing is a failure.
must_build = os.environ.get("SB3_FP16_CUDA") == "1"
needs_nvcc = pytest.mark.skipif(not must_build and not os.access(NVCC, os.X_OK), reason="no CUDA compiler")


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_strictly(architecture, tmp_path):
    """Spilled registers, local memory, double precision and any warning are errors."""
    ptxas = "-Xptxas=-v,-warn-spills,-warn-lmem-usage,-warn-double-usage,-Werror"
    host = "-Xcompiler=-Wall,-Wextra,-Werror"
    target = f"-gencode=arch=compute_{architecture},code=[sm_{architecture},compute_{architecture}]"
    line = [NVCC, "-std=c++17", "-O3", "-fmad=false", "-Werror=all-warnings", ptxas, host, target, "--keep"]
    done = subprocess.run(
        [*line, f"--keep-dir={tmp_path}", "-c", "cuda/launch.cu", "-o", tmp_path / "launch.o"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", done.stderr, flags=re.S)
    assert len(kernels) > 20
    for name, registers in kernels:
        large = "losses" in name or "statistics" in name
        assert int(registers) <= (MOST_OF_A_LARGE_BLOCK if large else MOST_REGISTERS), name
    (ptx,) = tmp_path.glob("*.ptx")
    assert ".f64" not in ptx.read_text()


def test_the_module_needs_no_driver_and_says_so_when_used():
    cuda = pytest.importorskip("sb3_fp16._cuda")
    if cuda.device_count():
        pytest.skip("there is a device")
    with pytest.raises(RuntimeError, match="CUDA: no device can be used"):
        cuda.gather(0, 0, 4, 0, 0, 0, 1, 1)
    # And what works without one goes on.
    parameter = th.ones(4).half().requires_grad_()
    parameter.grad = th.ones(4).half()
    SHARP([parameter]).step()
    assert bool((parameter < 1).all())
    assert PPOFP16("MlpPolicy", "Pendulum-v1", device="cpu").engine.name in ("native", "eager")
