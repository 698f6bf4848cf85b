"""
Builds sb3_fp16._cpu, the native CPU engine, and sb3_fp16._cuda, the kernels for CUDA devices, and places the RL Zoo
hook; everything else stands in pyproject.toml.

SB3_FP16_CPU, SB3_FP16_CUDA = auto (default: without a compiler the package installs and runs on plain torch) | 1 (fail
if it cannot be built) | 0 (leave it out).
SB3_FP16_CUDA_ARCHS = architectures to compile for, e.g. "80;90"; by default all generations that nvcc knows, and code
for later ones. nvcc is looked for in NVCC, CUDA_HOME, PATH and /usr/local/cuda.
SB3_FP16_SANITIZE = 1 builds for `make sanitize`: what runs stops at the first wrong access or undefined operation, and
can be imported only where the sanitizers' libraries are loaded before Python.
"""

import os
import platform
import shutil
import subprocess
import sys
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group


def switch(name: str) -> str:
    """An environment variable that says whether to build a module."""
    value = os.environ.get(name, "auto").lower()
    if value not in ("auto", "0", "1"):
        raise SystemExit(f"{name}={value!r}; expected auto, 0 or 1.")
    return value


CPU, CUDA = switch("SB3_FP16_CPU"), switch("SB3_FP16_CUDA")
SOURCES = ["cpu/bindings.cpp", "cpu/engine_portable.cpp"]
if platform.machine() in ("x86_64", "AMD64"):
    SOURCES += ["cpu/engine_avx2.cpp", "cpu/engine_avx512.cpp"]

# Same operations in the same order as on a GPU: no contraction outside products, which ask for it themselves.
FLAGS = [
    "-O3",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
]
SANITIZERS = []
if os.environ.get("SB3_FP16_SANITIZE") == "1":
    SANITIZERS = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
    # Python's own flags ask for integers that wrap, whose overflow would not be seen.
    FLAGS += ["-O1", "-g", "-fno-wrapv", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS", *SANITIZERS]

cpu = Pybind11Extension(
    "sb3_fp16._cpu",
    SOURCES,
    cxx_std=17,
    depends=["setup.py", *glob("cpu/*.h"), *glob("cpu/*.inl"), *glob("cuda/*.h")],
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread", *SANITIZERS],
)

# The linked runtime is static and torch is not needed, so that one binary serves every torch and imports anywhere.
GENERATIONS = (75, 80, 90, 100, 120)
NVCC_FLAGS = ["-O3", "-std=c++17", "-fmad=false", "-Xfatbin=-compress-all", "-Xcompiler=-fPIC,-fvisibility=hidden"]
cuda = Pybind11Extension(
    "sb3_fp16._cuda",
    ["cuda/bindings.cpp"],
    cxx_std=17,
    depends=["setup.py", "cuda/launch.cu", *glob("cuda/*.h"), *glob("cuda/*.cuh")],
    define_macros=[("SB3_FP16_CUDA_MODULE", "_cuda")],
)


def find_nvcc() -> "str | None":
    """The CUDA compiler."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    candidates = (os.environ.get("NVCC"), shutil.which("nvcc"), os.path.join(home, "bin", "nvcc"))
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def generated_code(nvcc: str) -> "list[str]":
    """nvcc's arguments for the architectures to compile for."""
    wanted = [int(arch) for arch in os.environ.get("SB3_FP16_CUDA_ARCHS", "").replace(",", ";").split(";") if arch]
    if not wanted:
        known = subprocess.run([nvcc, "--list-gpu-code"], check=True, capture_output=True, text=True).stdout.split()
        wanted = [arch for arch in GENERATIONS if f"sm_{arch}" in known]
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in wanted]
    return [*code, f"-gencode=arch=compute_{wanted[-1]},code=compute_{wanted[-1]}"]


class BestEffort(build_ext):
    """A build that may fail without failing the installation."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        """Compile, or say why not."""
        is_cuda = ext is cuda
        try:
            (self.build_cuda if is_cuda else super().build_extension)(ext)
        except Exception as error:
            if (CUDA if is_cuda else CPU) == "1":
                raise
            self.warn(f"{ext.name} was not built ({error}); updates will run on plain torch, some ten times slower")

    def build_cuda(self, ext: Pybind11Extension) -> None:
        """The kernels by nvcc, the bindings by the C++ compiler; nvcc links, as it knows where its runtime lies."""
        nvcc = find_nvcc()
        if nvcc is None:
            raise FileNotFoundError("no nvcc: set NVCC or CUDA_HOME")
        kernels, target = os.path.join(self.build_temp, "launch.o"), self.get_ext_fullpath(ext.name)
        for folder in (self.build_temp, os.path.dirname(target)):
            os.makedirs(folder, exist_ok=True)
        if self.force or newer_group(ext.depends, kernels):
            self.spawn([nvcc, *NVCC_FLAGS, *generated_code(nvcc), "--threads=0", "-c", "cuda/launch.cu", "-o", kernels])
        bindings = self.compiler.compile(
            ext.sources,
            output_dir=self.build_temp,
            macros=ext.define_macros,
            include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args,
            depends=ext.depends,
        )
        self.spawn([nvcc, "-shared", "-cudart=static", *bindings, kernels, "-o", target, "-Xlinker=--strip-all"])


class WithZooHook(build_py):
    """A wheel's zoo_hook/sb3_fp16_zoo.pth lies where Python reads it at its start; see docs/rl_zoo.md."""

    HOOK = "sb3_fp16_zoo.pth"

    def run(self) -> None:
        """Copy it beside the packages."""
        super().run()
        if not self.editable_mode:
            self.copy_file(os.path.join("zoo_hook", self.HOOK), self.build_lib)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Name it among the files that are installed."""
        copied = [] if self.editable_mode else [os.path.join(self.build_lib, self.HOOK)]
        return super().get_outputs(include_bytecode) + copied


ParallelCompile().install()
wanted = [cpu] if CPU == "1" or (CPU == "auto" and sys.platform != "win32") else []
if CUDA == "1" or (CUDA == "auto" and sys.platform == "linux" and find_nvcc()):
    wanted.append(cuda)
setup(ext_modules=wanted, cmdclass={"build_ext": BestEffort, "build_py": WithZooHook})
