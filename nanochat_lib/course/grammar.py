"""The source form of a chapter: py:percent cells, and what in them is stub, solution or hidden.

    # %% [markdown] id="title"             a cell header: kind, then metadata as key=JSON
    # %% tags=["exercise"] id="tokenizer.merge" points=2 minutes=15 level=2 library="nanochat_lib.bpe:merge"
    def merge(ids, pair, new):
        # --- stub                         what a learner gets
        raise NotImplementedError
        # --- solution                     what an instructor gets
        return …
        # --- end

Cells tagged `hidden` are for instructors only; what cells tagged `setup` define, exercises may use. Cells tagged
`slide` make the chapter's slides, so they are neither hidden nor exercises. Text in, cells out, and back; files are
build.py's matter, and what belongs to an exercise is rules.py's.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field, replace

from nanochat_lib.errors import UserError

HEADER = """\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---
"""
# Another name of the kernel, as other Jupyters write it, is read too.
HEADER_READ = re.compile(re.escape(HEADER).replace(re.escape("Python 3 (ipykernel)"), r"[^\n]*"))
KINDS = {"": "code", "[markdown]": "markdown", "[raw]": "raw"}
TAGS = ("parameters", "setup", "exercise", "hidden", "slide", "hide-input", "raises-exception", "skip-execution")
KEYS = ("tags", "id", "points", "minutes", "level", "library", "nbgrader")  # nbgrader: written by the build only
SLIDE_CHARACTERS = 1000  # of a text
EXERCISE_KEYS = ("id", "points", "minutes", "level")
EXERCISE_ONLY = ("points", "minutes", "level", "library")
MARKER = re.compile(r"\s*# --- (stub|solution|end)\s*$")
ID = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")  # of an exercise: topic.name
LIBRARY = re.compile(r"nanochat_lib(\.\w+)*:\w+(\.\w+)*")
MAGIC = re.compile(r"^\s*(?:[%!]\S.*|\S+\?{1,2}\s*)$", re.MULTILINE)
# Folders that exist on one person's machine only; "/chat/completions" and the like are routes, not files.
ABSOLUTE = re.compile(r"(?<![\w.:/~-])(?:~/|[A-Za-z]:\\|/(?:home|Users|root|work|tmp|mnt|content|usr|opt|var|etc)\b)")


@dataclass(frozen=True)
class Cell:
    kind: str  # code, markdown, raw
    source: str  # without the comment signs of the file, no newline at the end
    metadata: dict = field(default_factory=dict)
    line: int = 0  # of the cell's header in its file

    @property
    def tags(self) -> list[str]:
        return self.metadata.get("tags", [])


def parse(text: str, name: str) -> list[Cell]:
    """The cells of a chapter's source, checked. `name` is how errors call the file.

    Raises UserError with file and line for anything that the grammar does not know, so that nothing is lost silently.
    """
    cells = read(text, name)
    for cell in cells:
        _check(cell, name)
    if sum("parameters" in cell.tags for cell in cells) > 1:
        raise UserError(f"{name}: more than one cell is tagged parameters; papermill fills only the first")
    return cells


def read(text: str, name: str) -> list[Cell]:
    """The cells of any py:percent file with our header and metadata; what stands in them is not checked."""
    text = text.replace("\r\n", "\n").lstrip("\ufeff")
    if not HEADER_READ.match(text):
        raise UserError(f"{name}: must start with the header that names the kernel python3:\n{HEADER.rstrip()}")
    lines = text.split("\n")
    first = HEADER.count("\n")
    heads = [i for i, line in enumerate(lines) if re.match(r"# ?%%", line)]
    for i in range(first, heads[0] if heads else len(lines)):
        if lines[i].strip():
            raise UserError(f"{name}:{i + 1}: text before the first cell; start it with '# %%'")
    cells = []
    for start, end in zip(heads, heads[1:] + [len(lines)], strict=True):
        kind, metadata = _head(lines[start], f"{name}:{start + 1}")
        body = lines[start + 1 : end]
        while body and not body[-1].strip():
            body.pop()
        if kind != "code":
            body = [_uncomment(line, f"{name}:{start + 2 + i}", kind) for i, line in enumerate(body)]
        cells.append(Cell(kind, "\n".join(body), metadata, start + 1))
    return cells


def _head(line: str, where: str) -> tuple[str, dict]:
    """Kind and metadata of one '# %%' line."""
    match = re.fullmatch(r"# %%\s*(\[\w+\])?\s*(.*)", line)
    label = (match and match[1]) or ""
    if not match or label not in KINDS:
        raise UserError(f"{where}: {line!r} is not a cell header; write '# %%', '# %% [markdown]' or '# %% [raw]'")
    rest, metadata = match[2].strip(), {}
    while rest:
        key = re.match(r"(\w+)=", rest)
        if not key or key[1] not in KEYS or key[1] in metadata:
            raise UserError(f"{where}: cannot read {rest!r} as key=value; keys: {', '.join(KEYS)}, each once")
        try:
            value, end = json.JSONDecoder().raw_decode(rest, key.end())
        except ValueError:
            raise UserError(f"{where}: the value of {key[1]} is not JSON: {rest[key.end() :]!r}") from None
        metadata[key[1]] = value
        rest = rest[end:].strip()
    return KINDS[label], metadata


def _uncomment(line: str, where: str, kind: str) -> str:
    if line == "#":
        return ""
    if not line.startswith("# "):
        raise UserError(f"{where}: a line of a {kind} cell must start with '# ', got {line!r}")
    return line[2:]


def _check(cell: Cell, name: str) -> None:
    """Raises UserError for what would break a learner's notebook."""
    where = f"{name}:{cell.line}"
    tags = cell.tags
    if not isinstance(tags, list) or set(tags) - set(TAGS):
        raise UserError(f"{where}: tags {tags!r} are not all known; known: {', '.join(TAGS)}")
    if "slide" in tags and {"hidden", "exercise"} & set(tags):
        raise UserError(f"{where}: a slide shows neither exercises nor hidden cells; tag a cell that explains or draws")
    if "slide" in tags and cell.kind == "markdown" and len(cell.source) > SLIDE_CHARACTERS:
        raise UserError(
            f"{where}: {len(cell.source)} characters do not fit on a slide (at most {SLIDE_CHARACTERS}); tag another "
            "cell, or split this one"
        )
    if "exercise" in tags:
        if missing := [key for key in EXERCISE_KEYS if key not in cell.metadata]:
            raise UserError(f"{where}: the exercise lacks {', '.join(missing)}")
        if cell.kind != "code":
            raise UserError(f"{where}: an exercise must be a code cell")
        _check_values(cell.metadata, where)
    elif wrong := [key for key in EXERCISE_ONLY if key in cell.metadata]:
        raise UserError(f"{where}: {', '.join(wrong)} without the tag exercise")
    if "nbgrader" in cell.metadata:
        raise UserError(f"{where}: nbgrader's metadata are written by the build; leave them out")
    if cell.kind != "code":
        if found := ABSOLUTE.search(cell.source):
            raise UserError(
                f"{where}: names a place on one machine ({_around(cell.source, found.start())}); say it relative"
            )
        return
    regions = split_regions(cell, where)
    if regions and "exercise" not in tags:
        raise UserError(f"{where}: stub and solution markers belong into a cell tagged exercise")
    if "exercise" in tags and not regions:
        raise UserError(f"{where}: the exercise has no '# --- stub', '# --- solution', '# --- end'")
    for version in {cell.source, stub(cell).source, solution(cell).source}:
        try:
            tree = ast.parse(version)
        except SyntaxError as error:
            if magic := MAGIC.search(version):
                raise UserError(f"{where}: {magic[0].strip()!r} is a notebook magic; use plain Python") from None
            raise UserError(f"{where}: not valid Python ({error.msg}, line {error.lineno} of the cell)") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ABSOLUTE.match(node.value):
            raise UserError(f"{where}: {node.value!r} is a path on one machine; make it relative or a parameter")


def _check_values(metadata: dict, where: str) -> None:
    """Raises UserError for an exercise's metadata that mean nothing."""
    for key, low, high in (("points", 1, 5), ("minutes", 1, 120), ("level", 1, 3)):
        value = metadata[key]
        if type(value) is not int or not low <= value <= high:
            raise UserError(f"{where}: {key} must be a whole number from {low} to {high}, got {value!r}")
    if not ID.fullmatch(str(metadata["id"])):
        raise UserError(f"{where}: an exercise's id is topic.name in lower case, got {metadata['id']!r}")
    library = metadata.get("library")
    if library is not None and not LIBRARY.fullmatch(str(library)):
        raise UserError(f'{where}: library must name a symbol as "nanochat_lib.module:name", got {library!r}')


def _around(text: str, at: int) -> str:
    return text[at : at + 30].split("\n")[0]


def split_regions(cell: Cell, where: str = "") -> list[tuple[int, int, int]]:
    """Line numbers (stub, solution, end) of every marked region of a cell's source."""
    marks = [(i, m[1]) for i, line in enumerate(cell.source.split("\n")) if (m := MARKER.match(line))]
    names = [name for _, name in marks]
    if names != ["stub", "solution", "end"] * (len(names) // 3) or len(names) % 3:
        raise UserError(f"{where}: markers must come as '# --- stub', '# --- solution', '# --- end', got {names}")
    return [tuple(at for at, _ in marks[i : i + 3]) for i in range(0, len(marks), 3)]


def _keep(cell: Cell, keep_stub: bool) -> Cell:
    lines = cell.source.split("\n")
    for a, b, c in reversed(split_regions(cell)):
        lines[a : c + 1] = lines[a + 1 : b] if keep_stub else lines[b + 1 : c]
    return replace(cell, source="\n".join(lines))


def stub(cell: Cell) -> Cell:
    """The cell as a learner gets it: stubs kept, solutions and markers removed."""
    return _keep(cell, keep_stub=True)


def solution(cell: Cell) -> Cell:
    """The cell as an instructor runs it: solutions kept, stubs and markers removed."""
    return _keep(cell, keep_stub=False)


def for_learner(cells: list[Cell]) -> list[Cell]:
    return [stub(cell) for cell in cells if "hidden" not in cell.tags]


def for_instructor(cells: list[Cell]) -> list[Cell]:
    return [solution(cell) for cell in cells]


def secrets(cells: list[Cell]) -> list[str]:
    """Texts that must never reach a learner: every solution region and every hidden cell."""
    found = [cell.source for cell in cells if "hidden" in cell.tags]
    for cell in cells:
        lines = cell.source.split("\n")
        found += ["\n".join(lines[b + 1 : c]) for _, b, c in split_regions(cell)]
    return [text for text in found if text.strip()]


def write_cell(cell: Cell) -> str:
    """One cell as lines of a py:percent file; `read` reads the same cell back."""
    label = {"code": "", "markdown": " [markdown]", "raw": " [raw]"}[cell.kind]
    meta = "".join(f" {key}={json.dumps(value, ensure_ascii=False)}" for key, value in cell.metadata.items())
    body = cell.source
    if cell.kind != "code" and body:
        body = "\n".join(f"# {line}" if line else "#" for line in body.split("\n"))
    return f"# %%{label}{meta}\n" + (body + "\n" if body else "")
