"""Settings of this documentation; ``make docs`` builds it into docs/_build/html."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    MultiInputActorCriticPolicy,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sb3_fp16 import PPOFP16, ActorCriticPolicyFP16, __version__  # noqa: E402
from sb3_fp16.buffers import RolloutBufferFP16  # noqa: E402
from sb3_fp16.policies import ActorCriticCnnPolicyFP16, MultiInputActorCriticPolicyFP16  # noqa: E402

project = "sb3_fp16"
author = "The sb3_fp16 developers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
suppress_warnings: list[str] = []
nitpicky = False

autodoc_typehints = "none"  # docstrings give shapes and units; the signature below each heading gives types
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"sb3_fp16 {__version__}"
html_show_sphinx = False

# Classes that take all arguments of a class of SB3: its own parameters stand before theirs.
BASES: dict[type, type] = {
    PPOFP16: PPO,
    ActorCriticPolicyFP16: ActorCriticPolicy,
    ActorCriticCnnPolicyFP16: ActorCriticCnnPolicy,
    MultiInputActorCriticPolicyFP16: MultiInputActorCriticPolicy,
    RolloutBufferFP16: RolloutBuffer,
}


def with_parameters_of_sb3(
    app: Any, what: str, name: str, documented: object, options: object, lines: list[str]
) -> None:
    """
    Put the parameters that SB3 documents before those of a class that takes them too.

    :param app: Sphinx
    :param what: kind of the object
    :param name: of the object
    :param documented: the object
    :param options: of the directive
    :param lines: of its docstring, changed in place
    """
    if not (isinstance(documented, type) and documented in BASES):
        return
    theirs = inspect.cleandoc(BASES[documented].__doc__ or "")
    fields = theirs[theirs.index(":param") :]
    first = next(i for i, line in enumerate(lines) if line.startswith(":param"))
    lines[first:first] = re.sub(r"\n\s*\n", "\n", fields).splitlines()


def setup(app: Any) -> None:
    """
    Register the above.

    :param app: Sphinx
    """
    app.connect("autodoc-process-docstring", with_parameters_of_sb3)
