"""What each wrong answer of a chapter is told, for instructors: the mutants of its hidden cells, run on all cases."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
from html import escape
from pathlib import Path

from nanochat_lib.course.site.executed import library
from nanochat_lib.errors import UserError


def told(stem: str, root: Path, keep: Path, reuse: bool = False) -> dict[str, list[dict]]:
    """Exercise -> its wrong answers, {"label": …, "text": what its check says} each; kept by hash in `keep`."""
    source = (root / "solutions" / f"{stem}.py").read_bytes()
    code = hashlib.sha256(source).hexdigest()[:8]
    target = keep / f"{stem}.wrong.{code}-{library(root)}.json"
    kept = [target] if target.exists() else sorted(keep.glob(f"{stem}.wrong.{code}-*.json")) if reuse else []
    if kept:
        return json.loads(kept[0].read_text(encoding="utf-8"))
    program = "import sys; from nanochat_lib.course.site.wrong import child; child(*sys.argv[1:])"
    environment = os.environ | {"COURSE_FAST": "1"}
    environment.setdefault("JAX_PLATFORMS", "cpu")
    command = [sys.executable, "-c", program, str(root), stem]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{stem}, wrong answers: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    for old in keep.glob(f"{stem}.wrong.*.json"):
        old.unlink()
    target.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    return found


def child(root: str, stem: str) -> None:
    """Prints `told` of one chapter as JSON, having run its wrong answers."""
    from nanochat_lib.course import author, mutants, namespace

    found: dict[str, list[dict]] = {}
    (chapter,) = mutants.prepare(Path(root), stem)
    for unit in chapter.units:
        for mutant in chapter.notes.get(unit.id, author.Notes()).mutants:
            names = dict(chapter.before[unit.id])
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    namespace.run(mutant.source(unit.cell), f"{stem} (mutant)", names)
                text = mutants.judged(unit, names[unit.name], chapter, mutants.SEEDS[0])[1]
            except Exception as error:  # the tests of the chapters say which mutants are at fault
                text = f"{type(error).__name__}: {error}"
            found.setdefault(unit.id, []).append({"label": mutant.label, "text": text})
    print(json.dumps(found))


def as_html(answers: list[dict]) -> str:
    """The wrong answers of one exercise, folded away."""
    items = [
        f"<p><code>{escape(answer['label'].replace('`', ''))}</code></p><pre>{escape(answer['text'])}</pre>"
        for answer in answers
    ]
    return (
        f'<details class="course-wrong"><summary>What {len(answers)} wrong answers are told</summary>'
        f"{''.join(items)}</details>"
    )
