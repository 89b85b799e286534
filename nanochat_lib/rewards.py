"""What reinforcement learning rewards: plain functions `(conversation, completion) -> number`, named by `rl.reward`.

    exact                     1 for a right answer, else 0
    format                    1 for an answer in the form that is asked for, right or wrong
    my_rewards:short          a function of a module that Python can import
    rewards/mine.py:short     a function in a file
    exact+0.1*format          a weighted sum of these

`conversation` is a task's: {"messages": [...], ...}, the reference answer last. `completion` is what the model wrote,
tool calls and results included by their special tokens' names, without the token that ends it.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import inspect
import math
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nanochat_lib.errors import UserError
from nanochat_lib.settings import nearest

if TYPE_CHECKING:
    from nanochat_lib.tasks.common import Conversation, Task

Reward = Callable[[dict, str], float]  # (conversation, completion)
BUILT_IN: dict[str, Callable] = {
    "exact": lambda task: task.reward,
    "format": lambda task: lambda conversation, completion: float(task.answered(conversation, completion)),
}
LARGEST = 1e6  # of a reward, either sign: squares and sums of such numbers still fit into float32
_TERM = re.compile(r"\s*(?:([-+]?[0-9.]+(?:e-?[0-9]+)?)\s*\*)?\s*(\S.*?)\s*", re.IGNORECASE)


def terms(spec: str) -> list[tuple[float, str]]:
    """'exact+0.1*format' -> [(1.0, 'exact'), (0.1, 'format')]. UserError for a text that is no such sum."""
    found = []
    for term in spec.split("+"):
        match = _TERM.fullmatch(term)
        try:
            weight = float(match[1] or 1)
        except (TypeError, ValueError):
            weight = math.nan
        if not math.isfinite(weight):
            raise UserError(f"rl.reward {spec!r} cannot be read at {term!r}; write it like exact+0.1*format")
        found.append((weight, match[2]))
    return found


def absolute(spec: str) -> str:
    """The same sum with the files' whole paths, for a process that works in another folder."""
    return "+".join(f"{weight:g}*{_absolute(name)}" if weight != 1 else _absolute(name) for weight, name in terms(spec))


def _absolute(name: str) -> str:
    path, colon, function = name.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{function}" if colon and path.endswith(".py") else name


def fingerprint(spec: str) -> str | None:
    """sha256 of the files that `spec` names, None when it names none: another text of them is another reward."""
    files = [name.rpartition(":")[0] for _, name in terms(spec) if name.rpartition(":")[0].endswith(".py")]
    if not files:
        return None
    return hashlib.sha256(b"\0".join(_read(Path(path).expanduser()) for path in files)).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"rl.reward: {path} cannot be read ({error.strerror})") from None


def load(spec: str, task: Task) -> Reward:
    """The reward function of `spec` for `task`. UserError, in one line, for whatever cannot be found or imported.

    What it returns is checked at each call: a number between -LARGEST and LARGEST, or a UserError.
    """
    parts = [(weight, name, _function(name, task)) for weight, name in terms(spec)]

    def reward(conversation: Conversation, completion: str) -> float:
        total = sum(weight * _called(name, function, conversation, completion) for weight, name, function in parts)
        if not abs(total) <= LARGEST:
            raise UserError(f"rl.reward {spec} came to {total:g}, it must stay within ±{LARGEST:g}; scale it down")
        return total

    return reward


def check(spec: str) -> None:
    """Raises UserError when a function of `spec` cannot be had, before anything is spent."""
    for _, name in terms(spec):
        if name not in BUILT_IN:
            _own(name)


def _function(name: str, task: Task) -> Reward:
    return BUILT_IN[name](task) if name in BUILT_IN else _own(name)


def _own(name: str) -> Reward:
    """The function `module:function` or `file.py:function` of the user's."""
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function.isidentifier():
        known = [*BUILT_IN, "module:function", "file.py:function"]
        raise UserError(f"rl.reward: unknown function {name!r}; {nearest(name, known)}")
    module = _module(place)
    found = getattr(module, function, None)
    if not callable(found):
        ours = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise UserError(f"rl.reward: {place} has no function {function!r}; it has {', '.join(ours) or 'none'}")
    try:
        inspect.signature(found).bind({}, "")
    except TypeError:
        raise UserError(
            f"rl.reward: {name} must take (conversation, completion), it takes {inspect.signature(found)}"
        ) from None
    except ValueError:  # a built-in function does not say
        pass
    return found


def _module(place: str) -> object:
    if place.endswith(".py"):
        path = Path(place).expanduser()
        if not path.is_file():
            raise UserError(f"rl.reward: there is no file {path}")
        spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        work = lambda: spec.loader.exec_module(module)  # noqa: E731
    else:
        module, work = None, lambda: importlib.import_module(place)
    try:
        return work() or module
    except (Exception, SystemExit) as error:  # whatever the user's code raises, a script's own exit() included
        raise UserError(f"rl.reward: {place} cannot be imported ({_reason(error)})") from error


def _called(name: str, function: Reward, conversation: Conversation, completion: str) -> float:
    if name in BUILT_IN:
        return function(conversation, completion)
    try:
        value = function(copy.deepcopy(conversation), completion)
    except (Exception, SystemExit) as error:
        question = str(conversation["messages"][0]["content"])[:60]
        raise UserError(f"rl.reward: {name} failed with {_reason(error)} (question {question!r})") from error
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several numbers
        number = math.nan
    if not math.isfinite(number) or isinstance(value, str | bytes):
        shown = " ".join(reprlib.repr(value).split())
        raise UserError(f"rl.reward: {name} returned {shown}, it must return a finite number")
    return number


def _reason(error: BaseException) -> str:
    """The error's kind and what it says, short and in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120] or 'no reason given'}"
