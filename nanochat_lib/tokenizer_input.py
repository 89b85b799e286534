"""What reaches the tokenizer: text of whole characters, and for training a stream of documents within stated limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nanochat_lib.errors import UserError
from nanochat_lib.progress import Progress

MAX_DOC_CAP = 500_000  # far below the million blanks in a row at which the trainer's pattern engine gives up
SHOW_FROM = 1_000_000  # characters; shorter corpora are read before a progress line could help


def replace_surrogates(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD and proper pairs joined; the same object when there are none.

    A surrogate is half a character, as broken JSON may hold it; UTF-8 has no bytes for it. Training and encoding share
    this rule.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def capped(texts: Iterable[str], max_chars: int, doc_cap: int) -> Iterator[str]:
    """What the trainer reads of a stream: the first `doc_cap` characters of each document, until `max_chars` in all.

    The document that crosses `max_chars` is still included, empty ones are skipped. One document at a time is held.
    Raises UserError for limits below 1, a document that is no string, or a stream without any text.
    """
    if isinstance(texts, str):
        raise UserError("training takes many documents: give a list or an iterator of strings, not one string")
    if not 1 <= doc_cap <= MAX_DOC_CAP or max_chars < 1:
        raise UserError(
            f"doc_cap {doc_cap:,} must be 1 to {MAX_DOC_CAP:,} characters and max_chars {max_chars:,} at least 1"
        )
    seen = 0
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f"document {i} of the tokenizer's corpus is a {type(text).__name__}, not a string")
        if not text:
            continue
        text = replace_surrogates(text[:doc_cap])
        seen += len(text)
        yield text
        if seen > max_chars:
            return
    if not seen:
        raise UserError("the tokenizer's corpus holds no text: it has no documents, or only empty ones")


def shown(texts: Iterator[str], total: int) -> Iterator[str]:
    """Passes texts on and shows, for long corpora, how much has been read."""
    seen, progress = 0, None
    try:
        for text in texts:
            yield text
            seen += len(text)
            if progress is None and seen >= SHOW_FROM:
                progress = Progress(total, "reading text for the tokenizer", "character")
            if progress is not None:
                progress.update(seen - progress.done)
    finally:
        if progress is not None:
            progress.total = seen
            progress.close()
