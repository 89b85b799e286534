"""Compares tokenizers by how many bytes of text one of their tokens carries."""

from __future__ import annotations

from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.tokenizer_input import replace_surrogates


def compression_report(tokenizers: dict[str, Tokenizer], texts: dict[str, str]) -> list[dict]:
    """How well tokenizers compress texts: a row for each pair, with its UTF-8 bytes, tokens and bytes per token.

    `saved_percent` compares with the first tokenizer on the same text: 100 × (its tokens − own tokens) / its tokens,
    above 0 when the own tokenizer needs fewer. `round_trip` says whether decoding gives the text back.
    """
    rows = []
    for text_name, text in texts.items():
        baseline = None
        for name, tokenizer in tokenizers.items():
            ids = tokenizer.encode(text)
            baseline = baseline if baseline is not None else len(ids)
            size = len(replace_surrogates(text).encode())
            rows.append(
                {
                    "text": text_name,
                    "tokenizer": name,
                    "vocab_size": tokenizer.vocab_size,
                    "bytes": size,
                    "tokens": len(ids),
                    "bytes_per_token": size / max(len(ids), 1),
                    "saved_percent": 100 * (baseline - len(ids)) / max(baseline, 1),
                    "round_trip": tokenizer.decode(ids) == text,
                }
            )
    return rows
