"""Every number that follows from a preset, against figures worked out apart from the library.

Where a preset is a published model, its literals are the published ones: nanochat's tables of d12, d20 and d24, recipe
4's d24 and its reproduction on TPU, the 3.8B run. The others were worked out with `by_hand` below, which counts matrix
by matrix and layer by layer from a few plain facts, and shares no code with the library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from nanochat_lib.presets import PRESETS, override, preset
from nanochat_lib.schedules import base_schedule, transferred
from nanochat_lib.sizing import count_params, flops_per_token, scaling_params


@dataclass(frozen=True)
class Facts:
    """What a preset fixes."""

    layers: int
    width: int
    head: int  # size of one head
    kv_heads: int
    vocab: int  # real size
    length: int
    pattern: str
    ratio: float = 8.0  # tokens per scaling parameter
    steps: int = 0  # 0: by ratio
    batch: int = 0  # tokens a step; 0: by the rule
    old: bool = False  # recipe 4
    reference_width: int = 768  # of the twelve-layer relative that hyper-parameters come from


def by_hand(facts: Facts) -> dict:
    """The derived numbers of `facts`, counted piece by piece."""
    c, heads, vocab = facts.width, facts.width // facts.head, (facts.vocab + 63) // 64 * 64
    kv_width = facts.kv_heads * facts.head
    tables = matrices = keys = 0
    windows = []
    for layer in range(facts.layers):
        query = output = c * c
        key = value = kv_width * c
        up = down = 4 * c * c
        matrices += query + key + value + output + up + down
        if (facts.layers - 1 - layer) % 2 == 0:  # counted back from the last layer, every other one has a table
            tables += vocab * kv_width
            matrices += (32 if facts.old else 12) * facts.kv_heads  # its gate
        short = facts.length // 2 if facts.old else (facts.length + 511) // 512 * 128
        is_long = layer == facts.layers - 1 or facts.pattern[layer % len(facts.pattern)] == "L"
        windows.append(facts.length if is_long else short)
        keys += min(windows[-1], facts.length)
    head = vocab * c
    scalars = 2 * facts.layers + (0 if facts.old else 24 + 1 + 1)  # two a layer; smear gate, smear, backout
    found = {
        "shape": (c, heads, facts.head, facts.kv_heads, vocab),
        "windows": (*windows[:4], windows[-1]),
        "groups": (head, tables, head, matrices, scalars),
        "total": 2 * head + tables + matrices + scalars,
        "scaling": matrices + head,
        # A weight is a multiplication and an addition, forward and twice backward; a visible key is so for each of a
        # layer's channels twice, in q·k and in scores·v.
        "flops": 6 * (matrices + head + (0 if facts.old else 24)) + 12 * c * keys,
    }
    if facts.layers == 12 and facts.width == facts.reference_width:
        relative = found["scaling"]
    else:
        kin = replace(
            facts, layers=12, width=facts.reference_width, kv_heads=facts.reference_width // facts.head, pattern="L"
        )
        relative = by_hand(kin)["scaling"]
    wished = 2**19 * (found["scaling"] / relative) ** 0.383
    batch = facts.batch or min((2**k for k in range(40)), key=lambda b: abs(math.log(b / wished)))
    steps = facts.steps or int(facts.ratio * found["scaling"]) // batch
    rate = math.sqrt(batch / 524288)
    return found | {
        "batch": batch,
        "steps": steps,
        "tokens": steps * batch,
        "lr_scale": rate,
        "decay_scale": rate * relative / found["scaling"],
    }


FACTS = {
    "cpu-smoke": Facts(2, 64, 32, 2, 512, 128, "L", 12, 20, 1024, reference_width=384),
    "cpu": Facts(4, 128, 64, 2, 1024, 128, "L", 12, 1500, 2048, reference_width=384),
    "gpu-1-d12": Facts(12, 768, 128, 6, 32768, 2048, "SSSL", 12),
    "gpu-8-d24": Facts(24, 1536, 128, 12, 32768, 2048, "SSSL"),
    "gpu-8-d24-midtrain": Facts(24, 1536, 128, 12, 32768, 2048, "SSSL"),
    "tpu-v6e-8-d24": Facts(24, 1536, 256, 6, 32768, 2048, "SSSL", 9.5, old=True),
    "tpu-v6e-8-d24-h128": Facts(24, 1536, 128, 12, 32768, 2048, "SSSL", 9.5, old=True),
    "tpu-v5e-8-d20": Facts(20, 1280, 128, 10, 32768, 2048, "SSSL"),
    "tpu-v5p-8-d24": Facts(24, 1536, 128, 12, 32768, 2048, "SSSL"),
    "tpu-v6e-64-d32": Facts(32, 2048, 256, 8, 32768, 2048, "SSSL"),
    "gpu-8-little-lm": Facts(28, 3072, 128, 8, 50257, 2048, "L", 12, 25_000, 1280 * 2048),
}


@dataclass(frozen=True)
class Golden:
    shape: tuple  # width, query heads, size of a head, key/value heads, padded vocabulary
    windows: tuple  # of the first four layers and of the last
    groups: tuple  # wte, value tables, head, matrices, scalars
    total: int
    scaling: int  # parameters that set horizon and batch
    flops: int  # a token
    batch: int  # tokens a step
    micro_batches: int  # a step, with the preset's devices
    steps: int
    tokens: int
    lr_scale: float
    decay_scale: float
    rates: tuple  # embedding, unembedding, matrix, scalar; Muon's weight decay. As the optimiser gets them


SSSL = (512, 512, 512, 2048, 2048)
D24 = Golden(  # nanochat's table of sizes, its table of horizons, and the speedrun's 5,568 steps
    (1536, 12, 128, 12, 32768), SSSL, (50331648, 603979776, 50331648, 679478976, 74), 1384122122, 729810624,
    4775225616, 1048576, 4, 5568, 5838471168, 1.4142136, 0.2133515,
    (0.4242641, 0.0113137, 0.0282843, 0.7071068, 0.0597384),
)  # fmt: skip
R4 = Golden(  # recipe 4's counts; steps, micro-batches and decay (0.04267) of its reproduction on 8 v6e
    (1536, 12, 128, 12, 32768), (1024, 1024, 1024, 2048, 2048), (50331648, 603979776, 50331648, 679481856, 48),
    1384124976, 729813504, 4945112064, 1048576, 32, 6612, 6933184512, 1.4142136, 0.2133521,
    (0.4242641, 0.0056569, 0.0282843, 0.7071068, 0.0426704),
)  # fmt: skip
GOLDEN = {
    "cpu-smoke": Golden(
        (64, 2, 32, 2, 512), (128, 128, 128), (32768, 32768, 32768, 98328, 30), 196662, 131096, 983328,
        1024, 1, 20, 20480, 0.0441942, 7.2247159, (0.12, 0.0033, 0.02, 0.2, 0.0),
    ),
    "cpu": Golden(
        (128, 2, 64, 2, 1024), (128,) * 5, (131072, 262144, 131072, 786480, 34), 1310802, 917552, 6291888,
        2048, 1, 1500, 3072000, 0.0625, 1.4731666, (0.12, 0.0033, 0.02, 0.2, 0.0),
    ),
    "gpu-1-d12": Golden(  # nanochat's tables
        (768, 6, 128, 6, 32768), SSSL, (25165824, 150994944, 25165824, 84935088, 50), 286261730, 110100912,
        759696048, 524288, 8, 2520, 1321205760, 1.0, 1.0, (0.3, 0.008, 0.02, 0.5, 0.28),
    ),
    "gpu-8-d24": D24,
    "gpu-8-d24-midtrain": D24,
    "tpu-v6e-8-d24": replace(  # half the heads halve the gates: 12 tables × 32 channels × 6 fewer weights
        R4, shape=(1536, 6, 256, 6, 32768), groups=(50331648, 603979776, 50331648, 679479552, 48), total=1384122672,
        scaling=729811200, flops=4945098240, decay_scale=0.2133516,
        rates=(0.4242641, 0.0056569, 0.0282843, 0.7071068, 0.0426703),
    ),
    "tpu-v6e-8-d24-h128": R4,
    "tpu-v5e-8-d20": Golden(  # nanochat's tables; steps at ratio 8
        (1280, 10, 128, 10, 32768), SSSL, (41943040, 419430400, 41943040, 393217200, 66), 896533746, 435160240,
        2886212784, 1048576, 32, 3320, 3481272320, 1.4142136, 0.3578135,
        (0.4242641, 0.0113137, 0.0282843, 0.7071068, 0.1001878),
    ),
    "tpu-v5p-8-d24": replace(D24, micro_batches=8),
    "tpu-v6e-64-d32": Golden(  # nanochat's d32 with half the heads: 16 tables × 12 channels × 8 weights fewer
        (2048, 8, 256, 8, 32768), SSSL, (67108864, 1073741824, 67108864, 1610614272, 90), 2818573914, 1677723136,
        10770982032, 2097152, 8, 6400, 13421772800, 2.0, 0.1312501, (0.6, 0.016, 0.04, 1.0, 0.03675),
    ),
    "gpu-8-little-lm": Golden(  # 3,848,798,208 in matrices and tables are published; gates and scalars come on top
        (3072, 24, 128, 8, 50304), (2048,) * 5, (154533888, 721158144, 154533888, 2818573632, 82), 3848799634,
        2973107520, 19952574480, 2621440, 20, 25000, 65536000000, 2.2360680, 0.0929357,
        (0.6708204, 0.0178885, 0.0447214, 1.1180340, 0.0260220),
    ),
}  # fmt: skip
CPU_RATES = (0.12, 0.0033, 0.02, 0.2, 0.0)  # tuned at their own size, so nothing is carried over
NANOCHAT_RATES = (0.3, 0.008, 0.02, 0.5, 0.28)
RECIPE4_RATES = (0.3, 0.004, 0.02, 0.5, 0.2)


def test_every_preset_is_here() -> None:
    assert list(FACTS) == list(GOLDEN) == list(PRESETS)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_table_is_right(name: str) -> None:
    """The literals against the count by hand: whole numbers exactly, the others to the digits they are written with."""
    want, found = GOLDEN[name], by_hand(FACTS[name])
    for part in ("shape", "windows", "groups", "total", "scaling", "flops", "batch", "steps", "tokens"):
        assert getattr(want, part) == found[part], part
    for part in ("lr_scale", "decay_scale"):
        assert getattr(want, part) == pytest.approx(found[part], abs=6e-8), part
    rates = CPU_RATES if name.startswith("cpu") else RECIPE4_RATES if FACTS[name].old else NANOCHAT_RATES
    lr, decay = (1, 1) if name.startswith("cpu") else (found["lr_scale"], found["decay_scale"])
    assert want.rates == pytest.approx([rate * lr for rate in rates[:4]] + [rates[4] * decay], abs=6e-8)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_library_gives_the_table(name: str) -> None:
    config, want = preset(name), GOLDEN[name]
    gpt, plan = config.gpt_config(), config.horizon()
    assert (gpt.n_embd, gpt.n_head, gpt.head_dim, gpt.n_kv_head, gpt.padded_vocab_size) == want.shape
    assert (*gpt.windows[:4], gpt.windows[-1]) == want.windows and len(gpt.windows) == FACTS[name].layers
    assert gpt.value_embedding_layers == tuple(range(gpt.n_layer - 1, -1, -2))[::-1]
    groups = count_params(gpt)
    names = ("wte", "value_embeds", "lm_head", "transformer_matrices", "scalars")
    assert tuple(groups[part] for part in names) == want.groups
    assert (groups["total"], scaling_params(gpt), flops_per_token(gpt)) == (want.total, want.scaling, want.flops)
    assert (plan.batch_tokens, plan.steps, plan.steps * plan.batch_tokens) == (want.batch, want.steps, want.tokens)
    micro_batch = config.pretrain.device_rows * gpt.sequence_len * config.target.devices
    assert plan.batch_tokens == want.micro_batches * micro_batch
    assert (plan.lr_scale, plan.decay_scale) == pytest.approx((want.lr_scale, want.decay_scale), abs=6e-8)
    lrs = transferred(config.pretrain.optim, plan)
    found = (lrs.embedding_lr, lrs.unembedding_lr, lrs.matrix_lr, lrs.scalar_lr, lrs.weight_decay)
    assert found == pytest.approx(want.rates, abs=6e-8)


def test_the_readme_has_these_figures() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `") and "×" in line and "e" in line.split("|")[-3]]
    named = {name: row for row in rows for name in PRESETS if f"`{name}`" in row.split("|")[1]}
    assert set(named) == {name for name in PRESETS if not name.startswith("cpu")}
    for name, row in named.items():
        want = GOLDEN[name]
        flops = f"{want.flops:.3e}".replace("e+0", "e").replace("e+", "e")
        assert [cell.strip() for cell in row.split("|")[2:5]] == [
            f"{want.total:,}", flops, f"{want.steps:,} × {want.batch:,}",
        ]  # fmt: skip


def test_published_figures() -> None:
    """As they were published, with the digits they were published with."""
    r4, little = GOLDEN["tpu-v6e-8-d24-h128"], GOLDEN["gpu-8-little-lm"]
    assert f"{r4.flops:.6e}" == "4.945112e+09" and f"{D24.flops:.6e}" == "4.775226e+09"
    assert f"{D24.flops * D24.tokens:.3e}" == "2.788e+19"  # the speedrun
    assert sum(little.groups) - 14 * 12 * 8 - 82 == 3_848_798_208
    assert little.groups[1] / little.total == pytest.approx(0.19, abs=0.003)  # "19 % of parameters"
    # 65.3B tokens at context 2048 are not a whole number of rows for 8 devices; 57.3B at 1024 are: 7 times 40 rows.
    assert little.tokens / 65.3e9 == pytest.approx(1, abs=0.004)
    changes = {"model.sequence_len": 1024, "pretrain.device_rows": 40, "pretrain.batch_tokens": 7 * 40 * 1024 * 8}
    short = override(preset("gpu-8-little-lm"), changes).horizon()
    assert round(short.steps * short.batch_tokens / 1e9, 1) == 57.3


def test_head_sizes_side_by_side() -> None:
    """6 × 256 and 12 × 128: the same matrices and tables, only the gates differ; any preset can change its heads."""
    wide, own = preset("tpu-v6e-8-d24").gpt_config(), preset("tpu-v6e-8-d24-h128").gpt_config()
    assert count_params(own)["total"] - count_params(wide)["total"] == 12 * 32 * 6
    assert override(preset("tpu-v6e-8-d24-h128"), {"model.head_dim": 256}).gpt_config() == wide
    assert preset("tpu-v6e-8-d24").pretrain == preset("tpu-v6e-8-d24-h128").pretrain


def test_schedules_of_the_presets() -> None:
    def rates(name: str, steps: tuple) -> list[float]:
        optim, total = preset(name).pretrain.optim, GOLDEN[name].steps
        return [base_schedule(step, total, optim, preset(name).model.recipe).lr for step in steps]

    assert rates("cpu", (0, 19, 600, 1499)) == pytest.approx([1 / 20, 1, 1, 0.05 + 0.95 / 900])
    assert rates("gpu-8-little-lm", (0, 1249, 12499, 24999)) == [1 / 1250, 1, 1, 0.05]
    assert rates("tpu-v6e-8-d24", (0, 3306, 6611)) == pytest.approx([1, 1, 1 / 3306])
