"""The primer as streams of documents: real text and invented world, mixed in a seeded order."""

from __future__ import annotations

from nanochat_lib.presets import DataConfig
from nanochat_lib.primer.documents import world_documents
from nanochat_lib.primer.real_text import cut, real_text
from nanochat_lib.primer.world import World


def primer_streams(data: DataConfig, world: World) -> tuple[dict[str, list[str]], list[str]]:
    """({"train", "val", "val-world", "train-real"}: documents, notes on what could not be had as asked).

    `real_share` of the training characters is real. "val" is real text only, the same for every seed;
    "train-real" is the real part of "train".
    """
    notes = []
    real = [passage for text in real_text().train for passage in cut(text, data.passage_chars)]
    world.rng("real").shuffle(real)
    available = sum(map(len, real))
    world_chars = data.world_chars if data.real_share < 1 else 0
    wanted = world_chars * data.real_share / (1 - data.real_share) if world_chars else available
    if wanted > available:  # the share is what was asked for; the world gives way
        world_chars = int(available * (1 - data.real_share) / data.real_share)
        notes.append(
            f"{available:,} characters of real text exist, {int(wanted):,} were wanted: "
            f"the world is cut to {world_chars:,} characters so that {data.real_share:.0%} stays real"
        )
    taken, size = 0, 0
    while taken < len(real) and size < wanted:
        size += len(real[taken])
        taken += 1
    invented = world_documents(world, world_chars)
    train = real[:taken] + invented
    world.rng("mix").shuffle(train)
    val = [passage for text in real_text().val for passage in cut(text, data.passage_chars)]
    World(0).rng("val").shuffle(val)
    streams = {
        "train": train,
        "val": val,
        "val-world": world_documents(world, max(20_000, world_chars // 20), "val"),
        "train-real": real[:taken],
    }
    return streams, notes
