"""Bits per byte of any text: every token once, divided by the bytes of the original."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.texts import bpb_of_text, read_text, windows
from nanochat_lib.losses import token_nll

V = 300


class Letters:
    """A tokenizer of one id a byte. `rewrite` lengthens the text before it is encoded."""

    vocab_size, bos_id = V, 299

    def __init__(self, rewrite=lambda text: text):
        self.rewrite = rewrite

    def encode(self, text, prepend):
        return [prepend, *self.rewrite(text).encode()]


def uniform(params, inputs, targets, token_bytes):
    nll = np.asarray(token_nll(np.zeros((*targets.shape, V), np.float32), targets))
    sizes = np.where(targets >= 0, token_bytes[np.where(targets >= 0, targets, 0)], 0)
    return (nll * (sizes > 0)).sum(), sizes.sum(), nll.sum(), (targets >= 0).sum()


@given(st.integers(2, 90), st.integers(1, 20))
def test_every_token_is_scored_once_with_half_a_context_before_it(count, context):
    ids = np.random.default_rng(0).integers(0, V, count).astype(np.int32)
    inputs, targets = windows(ids, context)
    scored = []
    for row, wanted in zip(inputs, targets, strict=True):
        places = np.flatnonzero(wanted >= 0)
        scored += wanted[places].tolist()
        begin = next(b for b in range(count) if np.array_equal(ids[b : b + places[-1] + 1], row[: places[-1] + 1])
                     and np.array_equal(ids[b + places + 1], wanted[places]))  # fmt: skip
        assert begin == 0 or places[0] + 1 >= context // 2
    assert scored == ids[1:].tolist()


@pytest.mark.parametrize("text", ["a b c", "Hi", "x" * 100, "é→" * 9, "\n\n"])
def test_a_uniform_model_pays_log2_v_a_token(text):
    size = len(text.encode())
    found = bpb_of_text(uniform, {}, Letters(), text, size, 8, 3, "t")
    assert found["bpb"] == pytest.approx(math.log2(V), rel=1e-6) and found["bytes"] == found["tokens"] == size


def test_a_tokenizer_that_lengthens_the_text_pays_for_it():
    text = "Hello World"
    plain = bpb_of_text(uniform, {}, Letters(), text, 11, 8, 3, "t")
    marked = Letters(lambda text: "".join(f"^^^{c.lower()}" if c.isupper() else c for c in text))
    longer = bpb_of_text(uniform, {}, marked, text, 11, 8, 3, "t")
    assert longer["bytes"] == 11 and longer["bpb"] == pytest.approx(plain["bpb"] * 17 / 11)


def test_nothing_to_count_is_infinity():
    assert bpb_of_text(uniform, {}, Letters(), "", 0, 8, 3, "t")["bpb"] == math.inf


def test_files_are_read_as_they_are(tmp_path):
    (tmp_path / "a").write_bytes("é\r\n".encode())
    assert read_text(tmp_path / "a") == ("é\r\n", 4)
    (tmp_path / "b").write_bytes(b"ok\xff")
    (tmp_path / "c").touch()
    for name, words in {"b": "is not UTF-8 text", "c": "is empty", "none": "cannot be read"}.items():
        with pytest.raises(UserError, match=words) as e:
            read_text(tmp_path / name)
        assert "\n" not in str(e.value)
