"""What a learner gets, and the search in it for answers and hidden cells: text, metadata, and files of any kind.

The library itself is what the answers are, so only hidden cells are looked for there, and a line that the library holds
proves nothing in scripts or documents. A checks module may hold wrong answers that share lines with the right one, but
not the whole of it.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

from nanochat_lib.course.grammar import ID, Cell, secrets
from nanochat_lib.errors import UserError

FOLDERS = ("chapters", "nanochat_lib", "scripts", "docs", "assets", ".binder", ".devcontainer")
FILES = ("*.md", "*.toml", "*.yml", "LICENSE", "postBuild")
LEFT_OUT = ("__pycache__", ".ipynb_checkpoints", "bench", "attacks.py")  # the last two are for maintainers
# And what works only beside solutions/ and tests/, or is the instructor's.
OTHERS = ("scripts/grading/", "scripts/newest.py", "scripts/solve_course.py", "scripts/test.sh")
# Folders of the project whose files a page may name.
HOME = (*FOLDERS, "solutions", "tests", ".ci", ".github")
NAMED = re.compile(rf"(?<![\w./~-])(?:{'|'.join(map(re.escape, HOME))})/[\w./-]*")
SECRET_LINE = 24  # characters from which a single line of an answer counts as a leak
SHORTEST = 8  # characters of a whole answer that is not a coincidence


def bundle(root: Path) -> list[Path]:
    """The files that a learner needs: no solutions, no tests, nothing of maintainers and instructors."""
    found = [path for pattern in FILES for path in root.glob(pattern)]
    found += [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    found = [path for path in found if not set(LEFT_OUT) & set(path.relative_to(root).parts)]
    return sorted(path for path in found if not path.relative_to(root).as_posix().startswith(OTHERS))


def given(path: Path, root: Path, files: list[Path]) -> bytes:
    """A file as learners get it: a page that names files which they do not get says so below its title."""
    data = path.read_bytes()
    if path.suffix != ".md":
        return data
    text = data.decode("utf-8")
    if not (missing := missed(text, root, files)):
        return data
    title, line, rest = text.partition("\n")
    names = ", ".join(f"`{name}`" for name in missing)
    return f"{title}{line}\n> This is a learner's copy of the project, without {names}.\n{rest}".encode()


def missed(text: str, root: Path, files: list[Path]) -> list[str]:
    """What a text names of the project that is not in the bundle: a file, or the whole folder that is not."""
    there = {folder for path in files for folder in (path, *path.parents)}
    found = set()
    for name in NAMED.findall(text):
        path = root / name
        ways = [way for way in (*reversed(path.parents), path) if way != root and root in way.parents and way.exists()]
        if way := next((way for way in ways if way not in there), None):
            found.add(way.relative_to(root).as_posix() + ("/" if way.is_dir() else ""))
    return sorted(found)


def write_bundle(root: Path, target: Path) -> int:
    """Writes the learner's files as a zip, the same bytes each time; returns how many."""
    files = bundle(root)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            entry = zipfile.ZipInfo(f"{target.stem}/{path.relative_to(root).as_posix()}")  # dated 1980
            entry.external_attr = (path.stat().st_mode & 0o755) << 16
            archive.writestr(entry, given(path, root, files), zipfile.ZIP_DEFLATED)
    return len(files)


def leaks(root: Path, chapters: dict[str, list[Cell]]) -> list[str]:
    """Lines naming the files of the learner's bundle that show an answer, hidden text or outputs."""
    whole, single = answers(chapters)
    hidden = {_squeeze(c.source): (s, c.source.split("\n")[0]) for s, cells in chapters.items() for c in _hidden(cells)}
    library = _library(root)
    elsewhere = {needle: found for needle, found in single.items() if needle not in library} | whole
    problems = []
    for path in bundle(root):
        name = path.relative_to(root).as_posix()
        text = _text(path)
        if text is None:
            continue
        if name.startswith("nanochat_lib/course/checks/"):
            wanted = whole
        elif name.startswith("nanochat_lib/"):
            wanted = hidden
        else:
            wanted = single | whole if name.startswith("chapters/") else elsewhere
        if path.suffix == ".ipynb":
            text, outputs = _strings(path, text)
            if outputs:
                problems.append(f"{name} holds outputs")
        problems += shown(name, text, wanted)
    return problems


def answers(chapters: dict[str, list[Cell]]) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    """What must not be shown, without spaces: whole solutions and hidden cells, and telling lines of them.

    Each points at its chapter and at how a message calls it.
    """
    whole: dict[str, tuple[str, str]] = {}
    single: dict[str, tuple[str, str]] = {}
    for stem, cells in chapters.items():
        for text in secrets(cells):
            whole[_squeeze(text)] = stem, text.strip().split("\n")[0]
            single |= {_squeeze(line): (stem, line.strip()) for line in text.split("\n") if _telling(line)}
    return whole, single


def shown(name: str, text: str, wanted: dict[str, tuple[str, str]]) -> list[str]:
    """Lines saying what of `wanted` a text shows, one for each chapter. `name` is how messages call the text."""
    squeezed = _squeeze(text)
    found = {wanted[needle] for needle in wanted if len(needle) >= SHORTEST and needle in squeezed}
    one = {stem: (stem, line) for stem, line in sorted(found)}
    return [f"{name} shows an answer or hidden text of {stem} (`{line}`)" for stem, line in one.values()]


def _hidden(cells: list[Cell]) -> list[Cell]:
    return [cell for cell in cells if "hidden" in cell.tags]


def _library(root: Path) -> str:
    """All of the library's code in one, apart from the course's."""
    files = (root / "nanochat_lib").rglob("*.py")
    return "\n".join(_squeeze(_text(path) or "") for path in files if "course" not in path.relative_to(root).parts)


def _telling(line: str) -> bool:
    """Is the line, seen alone, part of an answer? Imports, comments and an exercise's id are not."""
    line = line.strip()
    if len(line) < SECRET_LINE or line.startswith(("import ", "from ", "#")):
        return False
    return not ID.fullmatch(line.strip("\"',()"))


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


def _squeeze(text: str) -> str:
    return re.sub(r"[\s#]+", "", text)


def _strings(path: Path, text: str) -> tuple[str, bool]:
    """All strings of a notebook joined, and whether any code cell has outputs."""
    try:
        document = json.loads(text)
    except ValueError:
        raise UserError(f"{path} is not a notebook; delete it and run nanochat course build") from None
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, str):
            found.append(node)
        elif isinstance(node, dict):
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    cells = document.get("cells", []) if isinstance(document, dict) else []
    return "".join(found), any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
