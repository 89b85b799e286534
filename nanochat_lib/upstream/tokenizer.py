"""nanochat's tokenizer.pkl (a pickled tiktoken.Encoding) and token_bytes.pt, and our Tokenizer.

The pickle is read by an unpickler that knows one name, tiktoken's Encoding, and puts an empty object in its place: its
state is plain data, and nothing of tiktoken runs. Writing goes through tiktoken itself. What nanochat pickled comes
back byte for byte; a table of merges that stood there in another order comes back sorted by rank, with equal meaning.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch

from nanochat_lib.errors import UserError
from nanochat_lib.tokenizer import SPECIAL_TOKENS, Tokenizer
from nanochat_lib.upstream.files import read_torch

PICKLE, TABLE = "tokenizer.pkl", "token_bytes.pt"
KEYS = {"name", "pat_str", "mergeable_ranks", "special_tokens"}
NAME, PROTOCOL = "rustbpe", 4  # nanochat's name for it, and Python's pickle protocol until 3.13


class Inert:
    """Stands in for tiktoken.core.Encoding: keeps the state it is given."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) == ("tiktoken.core", "Encoding"):
            return Inert
        raise PermissionError(f"{module}.{name}")


def find(folder: str | Path) -> Path:
    """Where the tokenizer of a checkpoint folder lies: within it, or where nanochat keeps it, two folders up."""
    folder = Path(folder)
    places = (folder / "tokenizer", folder, folder.resolve().parent.parent / "tokenizer")
    for place in places:
        if (place / PICKLE).is_file():
            return place
    looked = ", ".join(map(str, places))
    raise UserError(f"{PICKLE} is in none of {looked}: give the folder that holds it with --tokenizer")


def load(folder: str | Path) -> tuple[Tokenizer, dict]:
    """(tokenizer, what is needed to write the same files again) from tokenizer.pkl and, if there, token_bytes.pt."""
    path, table = Path(folder) / PICKLE, Path(folder) / TABLE
    state, protocol = read_pickle(path)
    tokenizer = from_state(state, path)
    counting = check_table(tokenizer, table) if table.is_file() else "raw"
    return tokenizer, {"name": state["name"], "protocol": protocol, "counting": counting}


def read_pickle(path: Path) -> tuple[dict, int]:
    """(state of the pickled Encoding, pickle protocol). UserError for everything else."""
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    data = path.read_bytes()
    if not data:
        raise UserError(f"{path} is empty (0 bytes): copy it again")
    try:
        with open(path, "rb") as file:
            found = SafeUnpickler(file).load()
    except PermissionError as error:
        raise UserError(
            f"{path} holds more than a tokenizer's data ({error}): reading it could run code, so it is refused"
        ) from None
    except Exception as error:
        raise UserError(f"{path} is damaged or no pickle ({type(error).__name__}: {error}): copy it again") from None
    state = found.state if isinstance(found, Inert) else None
    if not isinstance(state, dict) or state.keys() != KEYS:
        raise UserError(f"{path} is no pickled tokenizer of nanochat")
    return state, data[1] if data[0] == 0x80 else 0


def from_state(state: dict, where: object) -> Tokenizer:
    """Our tokenizer; UserError when ids would mean something else with it."""
    ranks, specials = state["mergeable_ranks"], state["special_tokens"]
    try:
        tokens = sorted(ranks, key=ranks.__getitem__)
        names = sorted(specials, key=specials.__getitem__)
        usual = [ranks[token] for token in tokens] == list(range(len(tokens)))
        usual = usual and tokens[:256] == [bytes([byte]) for byte in range(256)]
        tokenizer = Tokenizer(tokens[256:], names, state["pat_str"])
        usual = usual and tokenizer.special_tokens == specials and isinstance(state["name"], str)
    except (UserError, ValueError, TypeError, KeyError, AttributeError):
        usual = False
    if not usual or set(names) != set(SPECIAL_TOKENS):
        raise UserError(
            f"{where} is another kind of tokenizer: nanochat's has the 256 bytes, then merges, then its "
            f"{len(SPECIAL_TOKENS)} special tokens"
        )
    return tokenizer


def decoded_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """(V,) int32 as nanochat counted until July 2026: half a character decodes to U+FFFD and counts three bytes."""
    counts = [len(tokenizer.decode([i]).encode()) for i in range(tokenizer.vocab_size)]
    return np.where(tokenizer.token_bytes() == 0, 0, counts).astype(np.int32)


COUNTINGS = {"raw": Tokenizer.token_bytes, "decoded": decoded_bytes}


def check_table(tokenizer: Tokenizer, path: Path) -> str:
    """Which of COUNTINGS token_bytes.pt follows; UserError when neither: it is another tokenizer's."""
    table = read_torch(path)
    for name, count in COUNTINGS.items():
        if isinstance(table, torch.Tensor) and torch.equal(table, torch.from_numpy(count(tokenizer))):
            return name
    raise UserError(f"{path} does not belong to the tokenizer beside it: copy both again")


def save(folder: Path, tokenizer: Tokenizer, extras: dict | None = None) -> None:
    """Writes tokenizer.pkl and token_bytes.pt into `folder`, which is made."""
    extras = {"name": NAME, "protocol": PROTOCOL, "counting": "raw"} | (extras or {})
    ordinary = tokenizer.vocab_size - len(tokenizer.special_tokens)
    encoding = tiktoken.Encoding(
        extras["name"],
        pat_str=tokenizer.pattern,
        mergeable_ranks={tokenizer.id_to_bytes(i): i for i in range(ordinary)},
        special_tokens=tokenizer.special_tokens,
    )
    folder.mkdir(parents=True)
    (folder / PICKLE).write_bytes(pickle.dumps(encoding, protocol=extras["protocol"]))
    with open(folder / TABLE, "wb") as file:
        torch.save(torch.from_numpy(COUNTINGS[extras["counting"]](tokenizer)), file)
