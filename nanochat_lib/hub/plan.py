"""How much data a preset needs, by estimates and before a byte is fetched; a run counts exactly when it starts."""

from __future__ import annotations

import math

from nanochat_lib.errors import UserError
from nanochat_lib.home import base_dir
from nanochat_lib.hub import ledger
from nanochat_lib.hub.local import bytes_here, lacking
from nanochat_lib.hub.sets import DataSet, Shards
from nanochat_lib.presets import RunConfig, preset
from nanochat_lib.progress import format_seconds
from nanochat_lib.storage import free_bytes

# As nanochat found and made them: a tokenizer of 32,768 entries on web text, best fit into rows of 2,048, the shards.
CHARS_PER_TOKEN = 4.8
CUT = 0.35  # share of the tokens that packing cuts off where rows end
SHARD_CHARS = 250_000_000
SHARD_TOKENS = SHARD_CHARS / CHARS_PER_TOKEN * (1 - CUT)  # that a model trains on, about 34 million


def tokens_of(config: RunConfig) -> int:
    """Tokens that pretraining takes: steps × tokens a step."""
    horizon = config.horizon()
    return horizon.steps * horizon.batch_tokens


def shards_for(config: RunConfig, entry: Shards) -> int:
    """Training shards that the preset's pretraining (at its `data.epochs`) and its tokenizer need, by the estimates."""
    pretraining = tokens_of(config) / config.data.epochs / SHARD_TOKENS
    tokenizer = config.tokenizer.max_chars / SHARD_CHARS
    shards = math.ceil(max(pretraining, tokenizer))
    if shards > entry.last:
        epochs = math.ceil(config.data.epochs * shards / entry.last * 100) / 100
        raise UserError(
            f"{config.preset} needs about {shards:,} shards of {entry.name}, which has {entry.last:,}: take all with "
            f"--shards {entry.last}, and train with data.epochs={epochs:g} or fewer steps"
        )
    return shards


def print_plan(entries: list[DataSet], shards: int, preset_name: str | None) -> None:
    """What `nanochat data get` would fetch, from what is on disk and from estimates; asks no server."""
    from nanochat_lib.hub.pool import format_bytes

    total = 0.0
    for entry in entries:
        parts, missing = entry.parts(shards), lacking(entry, shards)
        here = f"{len(parts) - len(missing):,} of {len(parts):,} there"
        if not isinstance(entry, Shards):
            size = "" if not missing else ", size not known before it is fetched"
            print(f"{entry.name}: {here}{size}")
            continue
        if preset_name is not None:
            config = preset(preset_name)
            print(
                f"{preset_name} trains on {tokens_of(config):,} tokens and its tokenizer on "
                f"{config.tokenizer.max_chars:,} characters\n"
                f"  estimates: {CHARS_PER_TOKEN} characters a token, {CUT:.0%} of the tokens cut off in packing, "
                f"{SHARD_CHARS / 1e6:.0f}M characters a shard: {SHARD_TOKENS / 1e6:.1f}M tokens a shard"
            )
        print(
            f"{entry.name}: {shards:,} training shards and the validation shard, "
            f"about {format_bytes(len(parts) * entry.shard_bytes)} in all; {here}"
        )
        total += max(len(missing) * entry.shard_bytes - bytes_here(entry)[1], 0)
    if total:
        print(f"to fetch: about {format_bytes(total)}; {format_bytes(free_bytes(base_dir()))} are free on that disk")
        rate = ledger.last_rate()
        if rate is None:
            print("time: unknown until something was fetched here")
        else:
            speed, when = rate
            print(f"time: about {format_seconds(total / speed)} at {format_bytes(speed)}/s (measured here, {when})")
    print(f"into {base_dir()}")
