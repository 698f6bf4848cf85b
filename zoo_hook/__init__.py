"""
What ``sb3_fp16_zoo.pth`` calls when Python starts, installed as ``_sb3_fp16_zoo``.

It waits until a module of RL Zoo is imported, and then lets ``sb3_fp16.zoo`` add its algorithms.

RL Zoo loads no plugins, and fills the choices of ``--algo`` before any package that it is told to import. Nothing but
``sys`` is imported here, and nothing of sb3_fp16 before RL Zoo is: Python starts as fast as without.
"""

import sys

MODULES = ("rl_zoo3.utils", "rl_zoo3.hyperparams_opt", "rl_zoo3.exp_manager")


class Watcher:
    """Finds modules of RL Zoo where the other finders find them, and has them loaded by a ``TellingLoader``."""

    def __init__(self):
        self.asks = False

    def find_spec(self, name, path=None, target=None):
        """The import system's question where a module is; None: ask the others."""
        if name not in MODULES or self.asks:
            return None
        self.asks = True  # a finder that asks all others again comes back here
        try:
            others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
            if hasattr(spec and spec.loader, "exec_module"):
                spec.loader = TellingLoader(spec.loader)
            return spec
        except Exception:
            return None
        finally:
            self.asks = False


class TellingLoader:
    """Loads as another loader does, and tells ``sb3_fp16.zoo`` of the module."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def exec_module(self, module):
        """Run a module."""
        module.__loader__ = module.__spec__.loader = self.loader  # no trace is left
        self.loader.exec_module(module)
        tell(module)


WATCHER = Watcher()


def watch():
    """Start to watch, once."""
    if WATCHER not in sys.meta_path:
        sys.meta_path.insert(0, WATCHER)


def tell(module):
    """Have a module of RL Zoo extended; if that fails, say so, watch no more, and leave RL Zoo as it is."""
    try:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # RL Zoo may have been started for another algorithm
            from sb3_fp16 import zoo
        zoo.extend(module)
    except Exception as problem:
        if WATCHER in sys.meta_path:
            sys.meta_path.remove(WATCHER)
        print(f"RL Zoo runs without ppo_fp16: {type(problem).__name__}: {problem}", file=sys.stderr)
