"""
Builds sb3_fp16._cpu, the native CPU engine, and places the RL Zoo hook; everything else stands in pyproject.toml.

SB3_FP16_CPU = auto (default: without a compiler the package installs and runs on plain torch) | 1 (fail if it cannot
be built) | 0 (leave it out).
SB3_FP16_SANITIZE = 1 builds for `make sanitize`: what runs stops at the first wrong access or undefined operation, and
can be imported only where the sanitizers' libraries are loaded before Python.
"""

import os
import platform
import sys
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.command.build_py import build_py

SWITCH = os.environ.get("SB3_FP16_CPU", "auto").lower()
if SWITCH not in ("auto", "0", "1"):
    raise SystemExit(f"SB3_FP16_CPU={SWITCH!r}; expected auto, 0 or 1.")

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

extension = Pybind11Extension(
    "sb3_fp16._cpu",
    SOURCES,
    cxx_std=17,
    depends=["setup.py", *glob("cpu/*.h"), *glob("cpu/*.inl"), *glob("cuda/*.h")],
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread", *SANITIZERS],
)


class BestEffort(build_ext):
    """A build that may fail without failing the installation."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        """Compile, or say why not."""
        try:
            super().build_extension(ext)
        except Exception as error:
            if SWITCH == "1":
                raise
            self.warn(f"{ext.name} was not built ({error}); updates will run on plain torch, some ten times slower")


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
wanted = SWITCH == "1" or (SWITCH == "auto" and sys.platform != "win32")
setup(ext_modules=[extension] if wanted else [], cmdclass={"build_ext": BestEffort, "build_py": WithZooHook})
