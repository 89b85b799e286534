"""The runner of chapters itself: what it must find in a notebook, it finds."""

from __future__ import annotations

import nbformat
import pytest

from nanochat_lib.course.execute import WIDGET, blemishes, execute, lasting

new = nbformat.v4


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One notebook with everything that may go wrong."""
    cells = {
        "network": "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)",
        "lookup": "import socket\nsocket.getaddrinfo('example.org', 80)",
        "loopback": "s = socket.socket(); s.settimeout(1)\ntry:\n    s.connect(('127.0.0.1', 9))\n"
        "except ConnectionRefusedError:\n    print('refused')",
        "deprecated": "import warnings\nwarnings.warn('old', DeprecationWarning)",
        "modes": "import os\nprint(os.environ['COURSE_STRICT'], os.environ['COURSE_FAST'])",
        "path": "print('see /home/somebody/file')",
        "address": "print(object())",
        "figure": "from IPython.display import display\ndisplay({'image/png': 'aGk=', 'text/plain': 'x'}, raw=True)",
        "widget": f"display({{'{WIDGET}': {{}}, 'text/plain': 'x'}}, raw=True)",
        "stderr": "import sys\nprint('careful', file=sys.stderr)",
        "volatile": "display({'text/plain': '3 s'}, metadata={'course': {'volatile': True}}, raw=True)",
        "good": "display({'image/png': 'aGk=', 'text/plain': 'y'}, metadata={'image/png': {'alt': 'a'}}, raw=True)",
        "defaults": "size = 'small'",
        "asked": "size",
        "memory": "x = bytearray(600_000_000); x[::4096] = b'1' * len(x[::4096]); 7",
    }  # fmt: skip
    notebook = new.new_notebook(cells=[new.new_code_cell(source, id=name) for name, source in cells.items()])
    notebook.cells[-3].metadata["tags"] = ["parameters"]
    path = tmp_path_factory.mktemp("run") / "chapters" / "x.ipynb"
    path.parent.mkdir()
    nbformat.write(notebook, path)
    return execute(path, strict=True, given={"size": "huge"})


def test_errors_are_kept_with_their_cells(done):
    errors = {cell.id: line for cell, line in done.errors}
    assert set(errors) == {"network", "lookup", "deprecated"}
    assert "runs offline, but something asked for 192.0.2.1" in errors["network"]
    assert "asked for example.org" in errors["lookup"] and errors["deprecated"].startswith("DeprecationWarning")


def test_blemishes_are_found_and_nothing_else(done):
    found = blemishes(done.notebook)
    assert [line.split(":")[0] for line in found] == ["path", "address", "figure", "widget", "stderr"]
    assert "/home/somebody/file" in found[0] and "object object at 0x" in found[1]


def test_texts_to_compare_leave_out_what_changes(done):
    texts = dict(lasting(done.notebook))
    assert texts["volatile"] == "" and texts["memory"] == "7" and texts["loopback"] == "refused\n"
    assert texts["modes"] == "1 1\n"


def test_time_and_memory_are_measured(done):
    assert 0.6 < done.peak_gb < 2 and 0 < done.seconds < 300
    assert [cell.id for cell in done.notebook.cells][:2] == ["network", "lookup"]  # what was put in is out again


def test_given_values_stand_in_for_parameters_and_leave_no_cell(done):
    assert dict(lasting(done.notebook))["asked"] == "'huge'"
    assert [cell.id for cell in done.notebook.cells][-3:] == ["defaults", "asked", "memory"]
