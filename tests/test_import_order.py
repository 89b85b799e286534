"""Modules stand in one order and import only from above; starting the command line loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "nanochat_lib"

# From the ground up. A package stands at one place as a whole; its own modules may import each other.
ORDER = """
    errors home progress compile_cache quick_compile beside preempted stopping launch allocator rendezvous runtime
    distributed
    hardware sizing run_config settings presets price budget scaling schedules sandbox doctor storage status stall
    finish supervise
    identity hub
    tokenizer_input bpe cuts tokenizer compression conversation
    prefetch parquet corpus_base primer corpus_files shards kept_ids corpus
    packing streams shares supply loader encode_ids
    compute kernels table_gradient attention fp8 layers kv_cache losses gpt
    sharding collectives muon optim train_step plan
    objects step_folders arrays durable run_folder saver checkpoint metrics guards trainer
    twin twin_optim upstream
    calculator sampling lanes decoding engine answer_text rows requests batching
    tasks rewards chat_data evaluate pretrain sft rollouts rl compiled preflight serve
    report course evaluations pipeline convert capstone eval_commands encode_commands cli __main__
""".split()

HEAVY = {
    "IPython", "fastapi", "flax", "huggingface_hub", "jax", "jaxlib", "jupyterlab", "jupytext", "matplotlib",
    "nbformat", "numpy", "optax", "orbax", "papermill", "prompt_toolkit", "psutil", "pyarrow", "regex", "rich",
    "rustbpe", "scipy", "tiktoken", "torch", "tqdm", "uvicorn",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def place(path: Path) -> str:
    """The name in ORDER that a file belongs to: its own, or its top package's."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(tree: ast.AST, package: tuple[str, ...] = ()) -> set[str]:
    """Places of nanochat_lib that a module imports, inside functions too. `package`: where relative imports start."""
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(["nanochat_lib", *package[: len(package) + 1 - node.level], *filter(None, [base])])
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "nanochat_lib" else [base]
        found |= {name.split(".")[1] for name in names if name.startswith("nanochat_lib.")}
    return {name for name in found if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()}


def test_every_module_has_a_place() -> None:
    lost = sorted({place(path) for path in modules()} - set(ORDER))
    assert not lost, f"put {', '.join(lost)} into ORDER (tests/test_import_order.py), below all that it imports"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_from_above(path: Path) -> None:
    here = place(path)
    if here not in ORDER:
        pytest.fail(f"{here} has no place in ORDER")
    package = path.relative_to(PACKAGE).parts[:-1]
    used = imports(ast.parse(path.read_text(encoding="utf-8")), package) - {here}
    below = {name for name in used if ORDER.index(name) > ORDER.index(here)}
    assert not below, f"{path.relative_to(PACKAGE)} imports {', '.join(sorted(below))}, which stand below {here}"


@pytest.mark.parametrize(
    ("text", "package", "expected"),
    [
        ("import nanochat_lib.cli", (), {"cli"}),
        ("def f():\n    from nanochat_lib.cli import main", (), {"cli"}),
        ("from nanochat_lib import cli as c, GPT", (), {"cli"}),
        ("from . import errors", (), {"errors"}),
        ("from .errors import UserError", (), {"errors"}),
        ("from ..errors import UserError", ("course",), {"errors"}),
        ("from .grammar import Cell", ("course",), {"course"}),
        ("from nanochat_lib import __version__\nimport os.path", (), set()),
    ],
)
def test_the_reader_of_imports_sees_every_form(text: str, package: tuple[str, ...], expected: set[str]) -> None:
    assert imports(ast.parse(text), package) == expected


LIGHT = {
    "help": "import runpy; sys.argv = ['nanochat', '--help']; runpy.run_module('nanochat_lib', run_name='__main__')",
    "a wrong preset": "from nanochat_lib.cli import main; sys.exit(main(['run', '--preset', 'nosuch']))",
    "presets": "from nanochat_lib.cli import main; sys.exit(main(['presets']))",
    "light modules": "import nanochat_lib, nanochat_lib.errors, nanochat_lib.progress, nanochat_lib.hardware, "
    "nanochat_lib.sizing, nanochat_lib.presets, nanochat_lib.schedules, nanochat_lib.doctor, nanochat_lib.storage, "
    "nanochat_lib.cli",
    "the course": "import nanochat_lib.course, nanochat_lib.course.cases, nanochat_lib.course.registry, "
    "nanochat_lib.course.state, nanochat_lib.course.overview, nanochat_lib.course.mode, nanochat_lib.course.notes",
}


@pytest.mark.parametrize("name", LIGHT)
def test_starting_loads_nothing_heavy(name: str) -> None:
    report = "print('LOADED', *sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    code = f"import sys, atexit; atexit.register(lambda: {report})\n{LIGHT[name]}"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    loaded = next(line for line in done.stderr.splitlines() if line.startswith("LOADED")).split()[1:]
    assert "nanochat_lib" in loaded or "argparse" in loaded
    assert not HEAVY & set(loaded)


def test_only_the_twin_and_the_converter_know_torch() -> None:
    users = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            users |= {place(path) for name in names if name.split(".")[0] == "torch"}
    assert users == {"twin", "twin_optim", "upstream"}


def test_exports_are_lazy_and_the_documented_ones() -> None:
    code = (
        "import sys, nanochat_lib\n"
        "names = ['GPTConfig', 'GPT', 'Tokenizer', 'render_conversation', 'attention', 'muon', 'make_optimizer',"
        " 'make_train_step', 'Engine']\n"
        "assert set(names) <= set(dir(nanochat_lib)) and set(names) <= set(nanochat_lib.__all__)\n"
        "assert 'upstream' in dir(nanochat_lib) and 'jax' not in sys.modules and 'torch' not in sys.modules\n"
        "assert nanochat_lib.GPTConfig(n_layer=2).n_layer == 2 and 'jax' not in sys.modules\n"
        "for name in names: assert callable(getattr(nanochat_lib, name)), name\n"
        "assert 'torch' not in sys.modules\n"
        "assert callable(nanochat_lib.upstream.load) and callable(nanochat_lib.upstream.save)\n"
        "try: nanochat_lib.nosuch\n"
        "except AttributeError as e: assert 'nosuch' in str(e)\n"
        "else: raise SystemExit('no error')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["", "import nanochat_lib.attention", "import nanochat_lib.gpt"])
def test_attention_is_the_function_whatever_was_imported_first(first: str) -> None:
    code = (
        f"{first}\nfrom nanochat_lib import attention\nassert callable(attention), attention\n"
        "import nanochat_lib\nassert callable(nanochat_lib.attention)\n"
        "from nanochat_lib.attention import attention as same\nassert same is attention"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
