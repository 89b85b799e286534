"""What passed is saved as a module of its own, used later, and left aside with a line when it no longer passes."""

import importlib.util
import sys
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from demo_course import exercise, make_course, merge

from nanochat_lib import bpe
from nanochat_lib.course import check, mine, note, registry, saved, undo
from nanochat_lib.course.cases import example, reference
from nanochat_lib.course.install import install, uninstall
from nanochat_lib.course.sources import Unsaveable, block_of, used_names
from nanochat_lib.errors import UserError

ONE = example("one pair", ([1, 2, 3, 1, 2], (1, 2), 9), [9, 3, 9])
COUNT = reference("counts", lambda rng: ([(rng.integers(0, 3, 20).tolist(), 2)],))

CELL = '''
import itertools, numpy as np
from collections import Counter as C
from nanochat_lib.course import note
LIMIT = 1000
TABLE = np.arange(3)

def window(ids):
    """Neighbours."""
    return itertools.pairwise(ids[:LIMIT])

@note_nothing
def count_pairs(words):
    total = C()
    for ids, n in words:
        for pair in note("window", window(ids)):
            total[pair] += n
    return total
'''


@pytest.fixture
def home(monkeypatch, tmp_path):
    count = exercise(COUNT, id="demo.count", library="nanochat_lib.bpe:count_pairs")
    own = exercise(ONE, id="demo.own", library="", fallback=bpe.merge)
    yield make_course(monkeypatch, tmp_path, [exercise(ONE), count, own])
    uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "my_nanochat"]:
        del sys.modules[name]


def cell(text: str, tmp_path: Path, name: str = "cell", **given) -> types.ModuleType:
    """Runs a text as a module, as a notebook's cell would run."""
    path = tmp_path / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    vars(module).update(given)
    spec.loader.exec_module(module)
    return module


def saved_text(home: Path) -> str:
    return (home / "my_nanochat" / "demo.py").read_text(encoding="utf-8")


def test_a_function_is_saved_with_what_it_needs_and_used_later(home, tmp_path, capsys) -> None:
    text = CELL.replace("@note_nothing\n", "")
    module = cell(text, tmp_path)
    assert "Saved in my_nanochat/demo.py." in check("demo.count", module.count_pairs).footer
    kept = saved_text(home)
    for part in ("import itertools", "from collections import Counter as C", "LIMIT = 1000", "# ---- demo.count",
                 "from nanochat_lib.course import note"):  # fmt: skip
        assert kept.count(part) == 1, part
    assert "TABLE" not in kept and "numpy" not in kept and kept.index("LIMIT") < kept.index("def window")
    compile(kept, "demo.py", "exec")
    capsys.readouterr()
    function = mine("demo.count")
    assert capsys.readouterr().out == "demo.count: yours\n"
    assert function is not module.count_pairs and function([([1, 2, 1, 2], 3)]) == Counter({(1, 2): 6, (2, 1): 3})
    assert function.__module__ == "my_nanochat.demo"


def test_several_functions_share_a_file_in_the_chapters_order(home, tmp_path) -> None:
    check("demo.count", cell(CELL.replace("@note_nothing\n", ""), tmp_path).count_pairs)
    check("demo.merge", merge)
    kept = saved_text(home)
    assert kept.index("# ---- demo.merge") < kept.index("# ---- demo.count")
    assert mine("demo.count")([([1, 2], 1)]) == {(1, 2): 1} and mine("demo.merge")([1, 2], (1, 2), 3) == [3]
    check("demo.merge", mine("demo.merge"))
    assert saved_text(home) == kept, "what was saved saves as itself"


def test_a_function_that_uses_an_earlier_exercise_finds_it_in_the_file(home, tmp_path) -> None:
    check("demo.merge", merge)
    text = "def own(tokens, pair, new):\n    return merge(tokens, pair, new)\n"
    check("demo.own", cell(text, tmp_path, merge=merge).own)
    kept = saved_text(home)
    assert kept.count("def merge(") == 1 and kept.count("def own(") == 1
    assert mine("demo.own")([1, 2], (1, 2), 3) == [3]


def test_the_library_stands_in_with_a_line(home, capsys) -> None:
    assert mine("demo.merge") is bpe.merge and mine("demo.own") is bpe.merge
    assert capsys.readouterr().out.splitlines() == [
        "demo.merge: the library's (yours has not passed yet)",
        "demo.own: the library's (yours has not passed yet)",
    ]


def test_a_saved_function_that_no_longer_passes_is_left_aside_until_undo(home, capsys) -> None:
    check("demo.merge", merge)
    path = home / "my_nanochat" / "demo.py"
    good = path.read_text(encoding="utf-8")
    path.write_text(good.replace("i += 2", "i += 1"), encoding="utf-8")
    capsys.readouterr()
    assert mine("demo.merge") is bpe.merge
    assert capsys.readouterr().out == "demo.merge: the library's (yours no longer passes, first at 'one pair')\n"
    path.write_text("def merge(:", encoding="utf-8")
    assert mine("demo.merge") is bpe.merge
    assert "does not load: SyntaxError" in capsys.readouterr().out
    undo("demo.merge")
    assert "my_nanochat/demo.py" in capsys.readouterr().out
    assert path.read_text(encoding="utf-8") == good
    assert (home / "my_nanochat" / "demo.broken-1.py").read_text(encoding="utf-8") == "def merge(:"
    assert mine("demo.merge")([1, 2], (1, 2), 3) == [3]
    path.unlink()
    assert mine("demo.merge") is bpe.merge
    undo("demo.merge")
    assert mine("demo.merge") is not bpe.merge


def test_undo_goes_back_to_what_passed(home, tmp_path, capsys) -> None:
    with pytest.raises(UserError, match="no version of yours has passed yet"):
        undo("demo.merge")
    check("demo.merge", merge)
    text = "def merge(tokens, pair, new):\n    'second'\n    return [9, 3, 9]\n"
    check("demo.merge", cell(text, tmp_path, "two").merge)
    check("demo.merge", cell("def merge(tokens, pair, new):\n    return 0\n", tmp_path, "three").merge)
    assert "second" in saved_text(home)
    capsys.readouterr()
    undo("demo.merge")
    assert "back to attempt 2" in capsys.readouterr().out and "second" in saved_text(home)
    undo("demo.merge")
    assert "back to attempt 1" in capsys.readouterr().out and "second" not in saved_text(home)
    undo("demo.merge")
    assert "no earlier version that passed" in capsys.readouterr().out


def test_imports_that_are_no_longer_used_go(home, tmp_path) -> None:
    check("demo.count", cell(CELL.replace("@note_nothing\n", ""), tmp_path).count_pairs)
    plain = (
        "from nanochat_lib import bpe\n\n\ndef count_pairs(words):\n    return bpe.Counter(bpe.count_pairs(words))\n"
    )
    check("demo.count", cell(plain, tmp_path, "plain").count_pairs)
    assert "from nanochat_lib import bpe" in saved_text(home) and "itertools" not in saved_text(home)


def test_what_has_just_passed_is_not_run_again_until_its_text_changes(home, tmp_path, monkeypatch) -> None:
    ran = []
    once = saved.checker.run_cases
    monkeypatch.setattr(saved.checker, "run_cases", lambda name, *a, **k: ran.append(name) or once(name, *a, **k))
    check("demo.merge", merge)
    text = "def own(tokens, pair, new):\n    return merge(tokens, pair, new)\n"
    check("demo.own", cell(text, tmp_path, merge=merge).own)
    ran.clear()
    assert bpe.merge not in (mine("demo.merge"), mine("demo.own"))
    assert ran == [], "check has just run these cases"
    path = home / "my_nanochat" / "demo.py"
    path.write_text(saved_text(home).replace("i += 2", "i += 1"), encoding="utf-8")
    assert mine("demo.own") is bpe.merge and ran == ["demo.own"], "it uses merge, which has changed"
    path.write_text(saved_text(home).replace("i += 1", "i += 2", 1), encoding="utf-8")
    monkeypatch.setattr(saved, "_judged", {})
    mine("demo.own"), mine("demo.own")
    assert ran == ["demo.own", "demo.own"]


def test_edits_of_other_functions_survive_a_save(home, tmp_path) -> None:
    check("demo.merge", merge)
    path = home / "my_nanochat" / "demo.py"
    path.write_text(saved_text(home).replace('"""A right answer."""', '"""My words."""'), encoding="utf-8")
    check("demo.count", cell(CELL.replace("@note_nothing\n", ""), tmp_path).count_pairs)
    assert "My words." in saved_text(home)


@pytest.mark.parametrize("fn", [lambda tokens, pair, new: [9, 3, 9], bpe.merge])
def test_what_is_not_the_learners_text_is_not_saved(home, fn) -> None:
    result = check("demo.merge", fn)
    assert result.passed and not (home / "my_nanochat").exists()
    assert ("only functions written with def" in result.text) or ("the library's own function" in result.text)


def test_a_class_with_its_decorator_is_saved_whole(tmp_path) -> None:
    body = "    x: int = 1\n\n    def twice(self):\n        return 2 * self.x\n"
    text = f"import dataclasses\n\n@dataclasses.dataclass(frozen=True)\nclass Point:\n{body}"
    module = cell(text, tmp_path)
    block = block_of(module.Point)
    assert block.imports == ["import dataclasses"] and block.body.startswith(
        "@dataclasses.dataclass(frozen=True)\nclass Point"
    )
    assert cell(block.module(), tmp_path, "again").Point(3).twice() == 6


def test_a_compiled_function_is_saved_with_its_decorator(tmp_path) -> None:
    text = "import jax\nimport jax.numpy as jnp\n\n\n@jax.jit\ndef double(x):\n    return jnp.add(x, x)\n"
    block = block_of(cell(text, tmp_path).double)
    assert block.imports == ["import jax", "import jax.numpy as jnp"] and block.body.startswith("@jax.jit\ndef double")


def test_what_cannot_be_found_is_said(tmp_path) -> None:
    module = cell("def f(x):\n    return x + WEIGHTS\n", tmp_path, WEIGHTS=np.ones(3))
    with pytest.raises(Unsaveable, match="it uses WEIGHTS"):
        block_of(module.f)
    assert block_of(cell("def f(x):\n    return x + K\n", tmp_path, K=3).f).body.startswith("K = 3")
    given = {"__name__": "given"}
    exec("def g(x):\n    return x\n", given)
    with pytest.raises(Unsaveable, match="text of g was not found"):
        block_of(given["g"])
    assert block_of(given["g"], "def g(x):\n    return x\n").body == "def g(x):\n    return x"


def test_names_that_a_function_uses() -> None:
    inner = "    def inner(d):\n        return d + c + E\n    return [x for x in inner(b)]\n"
    text = f"def f(a: A, b=B):\n    c = a + D\n{inner}"
    assert used_names(text) == ["A", "B", "D", "E"]


def test_install_replaces_the_function_wherever_it_was_imported_and_uninstall_puts_it_back(home, tmp_path) -> None:
    check("demo.merge", merge)
    user = types.ModuleType("nanochat_lib.some_user")
    user.merge, user.TABLE, user.other = bpe.merge, {"merge": bpe.merge}, bpe.count_pairs
    sys.modules[user.__name__] = user
    original = bpe.merge
    try:
        share = install("all")
        assert share.used == ["demo.merge"] and share.refused == {"demo.count": "yours has not passed yet"}
        assert (share.functions, share.to_dict()["share"]) == (2, 0.5)
        assert share.to_dict()["share"] == 0.5 and (share.points, share.all_points) == (2, 4)
        assert bpe.merge is user.merge is user.TABLE["merge"] is mine("demo.merge") is not original
        assert user.other is bpe.count_pairs
        assert bpe.learn_merges(["abab abab"], 1) == [b"ab"]
        assert not check("demo.merge", lambda tokens, pair, new: 0).passed
        uninstall()
        assert bpe.merge is user.merge is user.TABLE["merge"] is original
    finally:
        del sys.modules[user.__name__]


def test_install_refuses_what_fails_and_what_is_not_there(home) -> None:
    check("demo.merge", merge)
    path = home / "my_nanochat" / "demo.py"
    path.write_text(saved_text(home).replace("i += 2", "i += 1"), encoding="utf-8")
    share = install("demo.merge, demo.count")
    assert share.used == [] and "no longer passes" in share.refused["demo.merge"]
    with pytest.raises(UserError, match="stands for no function of the library"):
        install(["demo.own"])
    with pytest.raises(UserError, match="did you mean demo.merge"):
        install("demo.merg")


def test_references_stay_the_librarys_while_the_learners_function_is_installed(home, tmp_path) -> None:
    check("demo.count", cell(CELL.replace("@note_nothing\n", ""), tmp_path).count_pairs)
    original = bpe.count_pairs
    install("demo.count")
    assert bpe.count_pairs is not original and registry.library_function("demo.count") is original
    assert not check("demo.count", lambda words: Counter()).passed
    assert note("x", 1) == 1
