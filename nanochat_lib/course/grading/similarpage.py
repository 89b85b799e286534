"""The page of `nanochat grade similarity`: pairs, most alike first, and both answers of each side by side.

The answers stand there as they were compared: without comments, docstrings and annotations, and with the names that a
function gives itself numbered in the order in which they come up.
"""

from __future__ import annotations

import ast
from difflib import SequenceMatcher
from html import escape

from nanochat_lib.course.grading.page import Raw, page, table
from nanochat_lib.course.grading.similarity import CANNOT, Pair

SHOWN = 200  # pairs whose answers are shown
LINES = 120  # of one answer
STYLE = """<style>
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }
.pair pre { margin: 0; padding: .5rem; overflow-x: auto }
.pair mark { background: #0072b233; color: inherit; display: block } .pair span { display: block }
</style>"""


class _Plain(ast.NodeTransformer):
    """Takes out what does not count and numbers the function's own names."""

    def __init__(self, own: set[str]) -> None:
        self.own, self.numbers = own, {}

    def name(self, name: str) -> str:
        return f"v{self.numbers.setdefault(name, len(self.numbers) + 1)}" if name in self.own else name

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.name(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg, node.annotation = self.name(node.arg), None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.returns = self.name(node.name), None
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value else None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        self.generic_visit(node)
        return None if isinstance(node.value, ast.Constant) else node


def plain(source: str) -> str:
    """An answer as it is compared; the text itself where that is no Python."""
    try:
        tree = ast.parse(source)
        own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        inner = {part.name for one in functions for part in ast.walk(one) if isinstance(part, ast.FunctionDef)}
        own |= inner - {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        return ast.unparse(ast.fix_missing_locations(_Plain(own).visit(tree)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


def similarity_page(pairs: list[Pair], answers: dict[str, dict[str, str]]) -> str:
    """The whole page. `answers`: exercise -> learner -> source."""
    parts = [STYLE, "<h1>Answers that are alike</h1>", f"<p><b>{escape(CANNOT)}</b></p>"]
    if not pairs:
        return page("Similarity", "\n".join([*parts, "<p>No two answers are alike beyond what everybody has.</p>"]))
    rows = []
    for i, pair in enumerate(pairs):
        link = Raw(f'<a href="#pair-{i}">{escape(pair.exercise)}</a>') if i < SHOWN else pair.exercise
        same = "the same text" if pair.same_text else ""
        rows.append([pair.first, pair.second, link, f"{pair.share:.0%}", pair.own, same])
    head = ["learner", "learner", "exercise", "alike", "marks compared", ""]
    parts.append(table(head, rows, numbers=(3, 4)))
    parts.append(
        "<p>Alike: the share of the smaller answer's own marks (hashes of its syntax tree that neither the stub nor "
        "the library's answer nor a quarter of the class has) that the other has, too. Below, lines that both have "
        "are coloured; comments are left out, and names that a function gives itself are numbered.</p>"
    )
    parts += [_pair(i, pair, answers.get(pair.exercise, {})) for i, pair in enumerate(pairs[:SHOWN])]
    return page("Similarity", "\n".join(parts))


def _pair(number: int, pair: Pair, by_learner: dict[str, str]) -> str:
    a, b = (plain(by_learner.get(name, "")).splitlines()[:LINES] for name in (pair.first, pair.second))
    matches = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    in_a = {i for m in matches for i in range(m.a, m.a + m.size)}
    in_b = {i for m in matches for i in range(m.b, m.b + m.size)}
    sides = []
    for name, lines, alike in ((pair.first, a, in_a), (pair.second, b, in_b)):
        text = "".join(_line(line, i in alike) for i, line in enumerate(lines))
        sides.append(f"<div><b>{escape(name)}</b><pre>{text}</pre></div>")
    title = f"{escape(pair.exercise)}: {escape(pair.first)} and {escape(pair.second)}, {pair.share:.0%}"
    return f'<h2 id="pair-{number}">{title}</h2><div class="pair">{"".join(sides)}</div>'


def _line(line: str, alike: bool) -> str:
    tag = "mark" if alike else "span"
    return f"<{tag}>{escape(line) or ' '}</{tag}>"
