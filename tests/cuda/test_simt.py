"""The simulator of CUDA kernels finds planted errors, and nothing in right kernels. The kernels: simt_cases.cpp."""

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
RACES = ["-fsanitize=thread"]

RIGHT = [
    "sums of odd sizes",
    "sums",
    "reversal",
    "broadcast",
    "pair",
    "late reader",
    "count",
    "count in a template",
    "count in dynamic memory",
    "neighbour",
    "block chain",
    "groups",
    "votes",
    "positions",
    "numerics",
]
OF_THE_SIMULATOR = ["fresh memory", "order", "exceptions", "misuse"]

# Errors that give wrong numbers under some seed.
SILENT = [
    "sums without barrier before read",
    "sums without barrier before reuse",
    "reversal without barrier",
    "broadcast without barrier",
    "pair without barrier",
    "late reader without barrier",
    "count from unset memory",
    "count in a template from unset memory",
    "count in dynamic memory from unset memory",
    "block chain in one launch",
]

# Errors that are refused under every seed, and what the complaint says.
REFUSED = {
    "neighbour with half a mask": ["mask of __shfl_xor_sync", "leaves out live lanes"],
    "barriers at two lines": ["__syncthreads", "while others wait in __syncthreads"],
    "barrier for some threads": ["__syncthreads", "while others wait in __syncthreads"],
    "early return": ["__syncthreads", "return"],
    "deadlock": ["deadlock: 16 wait in __syncthreads", "16 wait in __syncwarp"],
    "absent lane": ["__shfl_down_sync", "reads lane", "which is not there"],
    "groups of three": ["__shfl_sync", "in groups of 3"],
}


def compiled(folder: Path, *flags: str) -> Path:
    program = folder / "simt_cases"
    command = ["g++", *FLAGS, *flags, str(HERE / "simt_cases.cpp"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if flags and "cannot find" in done.stderr:
        pytest.skip(f"g++ has no {flags[0]}")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, case: str) -> subprocess.CompletedProcess[str]:
    options = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 atexit_sleep_ms=0"}
    return subprocess.run([program, case], capture_output=True, text=True, env=options)


def outcomes(program: Path, case: str) -> list[str]:
    """Of the seeds 0 to 19."""
    done = run(program, case)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 20
    return lines


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return compiled(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> Path:
    return compiled(tmp_path_factory.mktemp("checked"), *ADDRESS)


@pytest.fixture(scope="module")
def racing(tmp_path_factory) -> Path:
    program = compiled(tmp_path_factory.mktemp("racing"), *RACES)
    if "FATAL: ThreadSanitizer" in run(program, "positions").stderr:
        pytest.skip("the thread sanitizer does not run under this kernel")
    return program


@pytest.mark.parametrize("case", RIGHT + OF_THE_SIMULATOR)
def test_right_under_every_seed(plain, case):
    assert set(outcomes(plain, case)) == {"right"}


@pytest.mark.parametrize("case", SILENT)
def test_wrong_under_some_seed(plain, case):
    found = set(outcomes(plain, case))
    assert "wrong" in found
    assert found <= {"right", "wrong"}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_block_and_thread(plain, case):
    for complaint in outcomes(plain, case):
        assert all(words in complaint for words in REFUSED[case]), complaint
        assert "simt_cases.cpp:" in complaint
        assert "(block (" in complaint
        assert ", thread (" in complaint


def test_address_sanitizer_finds_nothing_in_right_kernels_nor_after_errors(checked):
    for case in RIGHT + OF_THE_SIMULATOR:
        assert set(outcomes(checked, case)) == {"right"}, case
    for case in REFUSED:
        assert "right" not in outcomes(checked, case), case


@pytest.mark.parametrize("case", ["out of bounds", "out of dynamic bounds"])
def test_address_sanitizer_finds_the_element_beyond_the_end(checked, case):
    done = run(checked, case)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.parametrize("case", ["sums", "broadcast", "pair", "count in a template", "block chain"])
def test_thread_sanitizer_finds_nothing_in_right_kernels(racing, case):
    done = run(racing, case)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("case", [case for case in SILENT if "barrier" in case])
def test_thread_sanitizer_finds_every_missing_barrier(racing, case):
    assert "ThreadSanitizer: data race" in run(racing, case).stderr


def test_sums_of_floats_by_atomics_do_not_compile(tmp_path):
    source = tmp_path / "atomics.cpp"
    source.write_text('#include "simt.h"\n__global__ void add(float* sum) { atomicAdd(sum, 1.0f); }\n')
    command = ["g++", "-std=c++17", "-fsyntax-only", "-I", str(HERE), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "deleted function" in done.stderr
