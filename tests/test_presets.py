"""Named presets, strict overrides, and the tree's way to config.json and back."""

import json
import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat_lib.errors import UserError
from nanochat_lib.presets import FIXED, PRESETS, flatten, from_dict, nearest, override, preset, to_dict

SETTINGS = [name for name in flatten(preset("cpu")) if name not in FIXED]


def refused(config, changes: dict) -> str:
    with pytest.raises(UserError) as caught:
        override(config, changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_documented_presets_are_there() -> None:
    assert list(PRESETS) == [
        "cpu-smoke", "cpu", "gpu-1-d12", "gpu-8-d24", "gpu-8-d24-midtrain", "tpu-v6e-8-d24", "tpu-v6e-8-d24-h128",
        "tpu-v5e-8-d20", "tpu-v5p-8-d24", "tpu-v6e-64-d32", "gpu-8-little-lm",
    ]  # fmt: skip
    for name, config in PRESETS.items():
        assert config.preset == name and config.about
        assert override(config, {}) == config  # and so every preset is valid as it stands


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown preset 'cpu-smok'; did you mean cpu-smoke\?"):
        preset("cpu-smok")
    with pytest.raises(UserError, match="known: cpu-smoke, cpu, gpu-1-d12"):
        preset("zzz")


def test_overrides_change_one_leaf_and_nothing_else() -> None:
    base = preset("cpu")
    changed = override(base, {"pretrain.optim.matrix_lr": 0.5, "seed": 3})
    assert flatten(changed) == flatten(base) | {"pretrain.optim.matrix_lr": 0.5, "seed": 3}
    assert preset("cpu") == base  # the named preset is not touched
    with pytest.raises(FrozenInstanceError):
        base.seed = 1


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("pretrain.steps", "1_000", 1000),
        ("pretrain.steps", "-1", -1),
        ("pretrain.optim.matrix_lr", "3e-2", 0.03),
        ("pretrain.optim.matrix_lr", "1", 1.0),
        ("pretrain.optim.matrix_lr", 1, 1.0),
        ("evaluation.bigram", "False", False),
        ("pretrain.optim.transfer", "true", True),
        ("data.corpus", "my texts/0_1.jsonl", "my texts/0_1.jsonl"),
        ("data.corpus", "007", "007"),
    ],
)
def test_text_is_read_as_the_settings_type(name: str, text: object, value: object) -> None:
    found = flatten(override(preset("cpu"), {name: text}))[name]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pretrain.steps", "many"), ("pretrain.steps", "1.5"), ("pretrain.steps", 1.5), ("pretrain.steps", True),
        ("pretrain.steps", None), ("pretrain.steps", ""), ("evaluation.bigram", "yes"), ("evaluation.bigram", 1),
        ("pretrain.optim.matrix_lr", "0,1"), ("pretrain.optim.matrix_lr", [0.1]), ("data.corpus", 7),
        ("model.recipe", None), ("seed", "0x1"),
    ],
)  # fmt: skip
def test_a_wrong_type_names_setting_type_and_value(name: str, value: object) -> None:
    message = refused(preset("cpu"), {name: value})
    kind = type(flatten(preset("cpu"))[name]).__name__
    assert message.startswith(f"{name} must be {kind}, got {value!r}")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pretrain.step", "did you mean pretrain.steps?"),
        ("Pretrain.Steps", "did you mean pretrain.steps?"),
        ("steps", "did you mean pretrain.steps or mid.steps or sft.steps or rl.steps?"),
        ("matrix_lr", "did you mean pretrain.optim.matrix_lr or mid.matrix_lr or sft.matrix_lr or rl.matrix_lr?"),
        ("depth", "did you mean model.depth?"),
        ("pretrain", "did you mean"),
        ("preset", ""),
        ("target.devices", ""),
        ("qqq", "known: seed, model.depth"),
    ],
)
def test_an_unknown_setting_names_the_nearest(name: str, hint: str) -> None:
    message = refused(preset("cpu"), {name: "1"})
    assert message.startswith(f"unknown setting {name!r}; ") and hint in message
    if "did you mean " in message:
        guesses = message.split("did you mean ")[1].rstrip("?").split(" or ")
        assert set(guesses) <= set(SETTINGS)  # what it proposes exists


def test_nearest_prefers_the_same_last_part() -> None:
    assert nearest("lr", ["a.lr", "b.lr", "lrx"]) == "did you mean a.lr or b.lr?"
    assert nearest("c.lr", ["a.lr", "b.lr", "c.lrx"]) == "did you mean a.lr or b.lr?"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pretrain.batch_tokens": 2049}, "use 2,048 or 4,096"),
        ({"pretrain.device_rows": 0}, "device_rows"),
        ({"pretrain.device_rows": -1}, "pretrain.device_rows is -1, must be at least 1"),
        ({"sft.batch_tokens": 2049}, "sft.batch_tokens 2,049 is not a multiple"),
        ({"model.n_embd": 130}, "n_embd 130 is not a multiple of model.head_dim 64; use 128 or 192"),
        ({"model.n_embd": 32}, "n_embd 32 is not a multiple of model.head_dim 64; use 64 or 128"),
        ({"model.head_dim": 65}, "head size 65 is odd"),
        ({"model.kv_groups": 3}, "kv_groups 3 does not divide the 2 query heads"),
        ({"model.window_pattern": "XL"}, "only the letters S and L"),
        ({"model.recipe": "new"}, "use head or recipe4"),
        ({"model.depth": 0}, "is 0, must be"),
        ({"data.real_share": 0.0}, "above 0"),
        ({"data.real_share": 1.1}, "at most 1"),
        ({"data.epochs": 0}, "above 0"),
        ({"rl.samples": 1}, "at least 2"),
        ({"compute.dtype": "float16"}, "compute.dtype 'float16' is unknown, use auto, float32 or bfloat16"),
        ({"compute.attention": "flash"}, "use auto, reference, xla, pallas, splash or cudnn"),
        ({"compute.masters": "auto"}, "compute.masters 'auto' is unknown, use float32 or bfloat16"),
        ({"compute.remat": "all"}, "use auto, none or blocks"),
        ({"compute.loss_chunks": 0}, "above 0, or -1"),
        ({"compute.fp8": True, "compute.dtype": "float32"}, "use compute.dtype=bfloat16 or compute.fp8=false"),
        ({"compute.fsdp": 2}, "compute.fsdp 2 does not divide the preset's 1 device; use 1"),
        ({"compute.fsdp": 0}, "compute.fsdp 0 does not divide"),
        ({"pretrain.optim.schedule": "linear"}, "use nanochat, trapezoid or cosine"),
        ({"pretrain.optim.warmdown_ratio": 1.5}, "pretrain.optim.warmdown_ratio is 1.5, must be at most 1"),
        ({"mid.mixture": "primer", "mid.batch_tokens": 2049}, "mid.batch_tokens 2,049 is not a multiple"),
        ({"sft.mixture": "nano"}, "use primer, nanochat, nanochat-historic or nanochat-after-mid"),
        ({"mid.mixture": "nanochat-after-mid"}, "use none, primer, nanochat or nanochat-historic"),
        ({"rl.task": "gsm"}, "rl.task 'gsm' is unknown, use primer-word-sums, primer-sums, primer-spelling or gsm8k"),
        ({"evaluation.run_code": "yes"}, "use no, limits, namespaces or bubblewrap"),
        ({"sft.gsm8k_copies": -1}, "sft.gsm8k_copies is -1, must be at least 0"),
        ({"rl.rollout_rows": 0}, "rl.rollout_rows is 0, must be above 0"),
        ({"rl.embedding_lr": -1}, "rl.embedding_lr is -1.0, must be at least 0"),
        ({"sft.embedding_lr": -0.5}, "sft.embedding_lr is -0.5, must be at least 0 or -1 (left open)"),
        ({"sft.final_lr_frac": 2}, "sft.final_lr_frac is 2.0, must be at most 1"),
        ({"rl.max_new_tokens": 113}, "rl.max_new_tokens is 113, must be at most 112: model.sequence_len 128 holds the"),
        ({"evaluation.chat_max_new_tokens": 127}, "evaluation.chat_max_new_tokens is 127, must be at most 112"),
        ({"model.sequence_len": 16, "rl.max_new_tokens": 9}, "rl.max_new_tokens is 9, must be at most 8"),
    ],
)
def test_settings_that_do_not_fit_each_other_name_what_would(changes: dict, words: str) -> None:
    assert words in refused(preset("cpu"), changes)


def test_the_longest_answers_leave_room_for_a_question() -> None:
    changes = {"rl.max_new_tokens": 112, "evaluation.chat_max_new_tokens": 112}
    assert override(preset("cpu"), changes).rl.max_new_tokens == 112


def test_a_step_is_whole_micro_batches_on_every_device() -> None:
    """8 devices × 16 rows × 2048 tokens are 262,144: what divides over one device need not divide over eight."""
    eight = preset("gpu-8-d24")
    refusal = refused(eight, {"pretrain.batch_tokens": 5 * 16 * 2048})
    assert "163,840 is not a multiple of device_rows 16 × sequence_len 2,048 × 8 devices = 262,144" in refusal
    assert refusal.endswith("use 262,144 or 524,288")
    assert refused(eight, {"pretrain.batch_tokens": 2**20 + 1}).endswith("use 1,048,576 or 1,310,720")
    assert override(preset("gpu-1-d12"), {"pretrain.batch_tokens": 10 * 32 * 2048, "sft.batch_tokens": 2**19})
    for change in ({"pretrain.device_rows": 3}, {"pretrain.device_rows": 128}, {"sft.device_rows": 5}):
        name = next(iter(change)).split(".")[0]
        assert refused(eight, change).startswith(f"{name}.batch_tokens 1,048,576 is not a multiple of device_rows")
    assert override(eight, {"pretrain.device_rows": 64}).pretrain.device_rows == 64  # one micro-batch of everything


@pytest.mark.parametrize("fsdp", range(1, 10))
def test_fsdp_divides_the_devices(fsdp: int) -> None:
    if fsdp in (1, 2, 4, 8):
        assert override(preset("tpu-v6e-8-d24"), {"compute.fsdp": fsdp}).compute.fsdp == fsdp
    else:
        message = refused(preset("tpu-v6e-8-d24"), {"compute.fsdp": fsdp})
        assert message == f"compute.fsdp {fsdp} does not divide the preset's 8 devices; use 1, 2, 4 or 8"


def test_fp8_keeps_company_with_bfloat16_only() -> None:
    for dtype in ("auto", "bfloat16"):
        assert override(preset("gpu-8-d24"), {"compute.fp8": True, "compute.dtype": dtype}).compute.fp8
    assert "fp8" in refused(preset("gpu-8-little-lm"), {"compute.dtype": "float32"})
    assert {config.compute.dtype for config in PRESETS.values()} == {"auto"}  # bfloat16 on every accelerator


@pytest.mark.parametrize("name", PRESETS)
def test_the_tree_survives_json(name: str) -> None:
    config = override(preset(name), {"seed": 9, "pretrain.eval_every": 7})
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@given(st.sampled_from(SETTINGS), st.data())
def test_any_valid_change_survives_json(name: str, data: st.DataObject) -> None:
    current = flatten(preset("cpu"))[name]
    kind = {int: st.integers(1, 64), float: st.floats(0.01, 1), bool: st.booleans(), str: st.text(max_size=8)}
    try:
        config = override(preset("cpu"), {name: data.draw(kind[type(current)])})
    except UserError:
        return  # it does not fit the other settings
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_foreign_configuration_is_refused() -> None:
    values = to_dict(preset("cpu"))
    with pytest.raises(UserError, match="unknown setting 'pretrain.stepz'; did you mean pretrain.steps"):
        from_dict(values | {"pretrain": values["pretrain"] | {"stepz": 1}})
    with pytest.raises(UserError, match="lacks pretrain.steps; it was written by another version"):
        from_dict(values | {"pretrain": {k: v for k, v in values["pretrain"].items() if k != "steps"}})
    older = {key: value for key, value in values.items() if key != "compute"}  # the dtype was a setting of the model
    with pytest.raises(UserError, match="lacks compute.attention, compute.dtype.*written by another version"):
        from_dict(older | {"model": values["model"] | {"dtype": "auto"}})
    with pytest.raises(UserError, match="unknown setting 'model.dtype'; did you mean compute.dtype"):
        from_dict(values | {"model": values["model"] | {"dtype": "auto"}})
    with pytest.raises(UserError, match="unknown preset"):
        from_dict(values | {"preset": "gone"})
    with pytest.raises(UserError, match="unknown preset"):
        from_dict({})


@pytest.mark.parametrize("text", ["0", "-5", "-1", "nan", "inf", "-inf", "1e400", "999999999999", "0.5"])
def test_any_number_is_accepted_or_refused_in_one_line(text: str) -> None:
    """Never a ZeroDivisionError, an OverflowError or a machine out of memory; and never NaN or infinity accepted."""
    for name in SETTINGS:
        try:
            value = flatten(override(preset("cpu"), {name: text}))[name]
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert isinstance(value, str) or (math.isfinite(value) and (value >= -1 or name == "seed")), name


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_a_seed_outside_its_range_is_refused(seed: int) -> None:
    with pytest.raises(UserError, match="seed is"):
        override(PRESETS["cpu"], {"seed": seed})
