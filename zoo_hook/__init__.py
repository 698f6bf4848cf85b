"""
What ``sb3_fp16_zoo.pth`` calls when Python starts, installed as ``_sb3_fp16_zoo``.

It waits until a module of RL Zoo has been loaded, and lets ``sb3_fp16.zoo`` add its algorithms.

RL Zoo loads no plugins, and fills the choices of ``--algo`` before any package that it is told to import. Nothing but
``sys`` is imported here, and nothing of sb3_fp16 before RL Zoo is: Python starts as fast as without.
"""

import sys

MODULES = ("rl_zoo3.utils", "rl_zoo3.hyperparams_opt", "rl_zoo3.exp_manager")


class Watcher:
    """Finds what the other finders find; a module of RL Zoo is shown to ``sb3_fp16.zoo`` once it has run."""

    def find_spec(self, name, path=None, target=None):
        """The import system's question where a module is; None: ask the others."""
        if name not in MODULES:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]  # those before were asked, and found nothing
        answers = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        spec = next((spec for spec in answers if spec is not None), None)
        run = getattr(spec and spec.loader, "exec_module", None)
        if run is not None:

            def exec_module(module):
                run(module)
                tell(module)

            spec.loader.exec_module = exec_module
        return spec


WATCHER = Watcher()


def watch():
    """Start to watch, once."""
    if WATCHER not in sys.meta_path:
        sys.meta_path.insert(0, WATCHER)


def tell(module):
    """Show a module of RL Zoo to ``sb3_fp16.zoo``; if that fails, say so, watch no more, and leave RL Zoo as it is."""
    try:
        from sb3_fp16 import zoo

        zoo.extend(module)
    except Exception as problem:
        if WATCHER in sys.meta_path:
            sys.meta_path.remove(WATCHER)
        print(f"RL Zoo runs without ppo_fp16: {type(problem).__name__}: {problem}", file=sys.stderr)
