"""A loopback hub, an empty folder for the data, and the real client pointed at both."""

import os
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants
from loopback import LoopbackHub
from samples import CLIMBMIX, SHARDS

from nanochat_lib.hub import patience


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def hub(home, monkeypatch):
    """A server with four shards of climbmix, at which this process and those it starts look for the hub."""
    server = LoopbackHub()
    for name, data in SHARDS.items():
        server.add(CLIMBMIX, name, data)
    for variable in [name for name in os.environ if name.lower().endswith("_proxy") or name.startswith("HF_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HF_ENDPOINT", server.url)  # for processes that are started
    monkeypatch.setenv("HF_HOME", str(home.parent / "hf"))
    monkeypatch.setenv("NANOCHAT_FILES_URL", f"{server.url}/beside")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)  # for this one, where the client is loaded already
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home.parent / "hf/token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    close_session()
    yield server
    server.close()
    close_session()


@pytest.fixture
def naps(monkeypatch) -> list[float]:
    """The pauses between tries, which are not slept."""
    taken: list[float] = []
    monkeypatch.setattr(patience, "sleep", taken.append)
    return taken
