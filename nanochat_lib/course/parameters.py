"""What the capstone notebook was started with, checked before anything is spent.

papermill only warns about a name it does not know, and guesses types from text (`true` stays text, `007` becomes 7), so
the notebook's second cell calls `check_parameters(globals())`.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Mapping
from pathlib import Path

from nanochat_lib import presets
from nanochat_lib.errors import UserError
from nanochat_lib.presets import RunConfig, nearest

PARAMETERS = {"preset": str, "run_dir": str, "overrides": str, "seed": int, "corpus": str, "mine": str}
INJECTED = "# Parameters"  # first line of the cell that papermill puts in


def check_parameters(namespace: Mapping[str, object]) -> RunConfig:
    """The configuration that the notebook's parameters describe. `namespace` is the notebook's globals().

    Raises UserError for a parameter that does not exist (naming the nearest one), a value of the wrong type, an unknown
    preset, or a setting that the preset does not have.
    """
    for name in injected_names(namespace.get("In", [])):
        if name not in PARAMETERS:
            hint = nearest(name, list(PARAMETERS))
            setting = [s for s in presets.flatten(presets.CPU) if s == name or s.endswith(f".{name}")]
            if setting:
                hint = f'a setting of the preset goes into overrides, e.g. -p overrides "{setting[0]}=…"'
            raise UserError(f"unknown parameter {name!r}; {hint}")
    for name, wanted in PARAMETERS.items():
        if name not in namespace:
            raise UserError(f"parameter {name} is missing; run the parameters cell above first")
        value = namespace[name]
        if type(value) is not wanted:
            raw = f"; with papermill use -r {name} VALUE, which keeps text as text" if wanted is str else ""
            raise UserError(f"{name} must be {wanted.__name__}, got {value!r} ({type(value).__name__}){raw}")
    changes: dict[str, object] = {"seed": namespace["seed"]} if namespace["seed"] else {}
    if namespace["corpus"]:
        changes["data.corpus"] = str(project_root() / Path(namespace["corpus"]).expanduser())
    return presets.override(presets.preset(namespace["preset"]), changes | parse_overrides(namespace["overrides"]))


def parse_overrides(text: str) -> dict[str, str]:
    """'pretrain.steps=100 seed=1' -> {"pretrain.steps": "100", "seed": "1"}; quote values that hold spaces."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"overrides {text!r} cannot be read ({error}); write name=value name=value") from None
    changes = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UserError(f"override {word!r} has no value; write name=value, e.g. pretrain.steps=100")
        changes[name] = value
    return changes


def injected_names(cells: list[str]) -> list[str]:
    """Names that papermill's injected cell assigns; `cells` are the sources run so far. The newest such cell counts."""
    for source in reversed(list(cells)):
        if isinstance(source, str) and source.split("\n", 1)[0].strip() == INJECTED:
            return [
                target.id
                for node in ast.parse(source).body
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            ]
    return []


def project_root(start: str | Path = ".") -> Path:
    """The course's folder: the nearest one above `start` that holds chapters/ and nanochat_lib/, else `start` itself.

    A notebook in JupyterLab starts in its own folder, a script in the course's: both find the same runs/.
    """
    start = Path(start).resolve()
    for folder in (start, *start.parents):
        if (folder / "chapters").is_dir() and (folder / "nanochat_lib").is_dir():
            return folder
    return start
