"""The newest valid checkpoint wins, what is restored is what was saved, and a full disk costs only the save."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from nanochat_lib import checkpoint, storage
from nanochat_lib.errors import UserError


class State(NamedTuple):
    params: dict
    opt_state: tuple
    step: jax.Array


def make_state(seed=0):
    k1, k2 = jax.random.split(jax.random.key(seed))
    return State(
        params={
            "transformer.wte.weight": jax.random.normal(k1, (5, 3)),
            "transformer.h.10.attn.c_q.weight": jax.random.normal(k2, (3, 3)),
            "resid_lambdas": jnp.ones(4, jnp.bfloat16) / 3,
        },
        opt_state=(optax.EmptyState(), {"mu": [jnp.arange(6.0).reshape(2, 3), jnp.array([True, False])]}),
        step=jnp.int32(7),
    )


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert isinstance(x, jax.Array) and x.dtype == y.dtype and x.shape == y.shape and x.weak_type == y.weak_type
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Checkpoints 10 and 20, written once; tests work on copies."""
    folder = tmp_path_factory.mktemp("two")
    for step in (10, 20):
        checkpoint.save(folder, step, make_state(step), {"step": step, "tokenizer": "abc"})
    return folder


@pytest.fixture
def folder(two, tmp_path):
    return Path(shutil.copytree(two, tmp_path / "base"))


# ---- round trip


def test_round_trip_is_exact(two):
    state, meta = checkpoint.load(two, like=make_state(0))
    assert_same(state, make_state(20))
    assert meta == {"step": 20, "tokenizer": "abc"}
    state, meta = checkpoint.load(two, 10, jax.eval_shape(make_state))
    assert_same(state, make_state(10))


def test_without_like_it_is_flat(two):
    flat, _ = checkpoint.load(two)
    assert set(flat) == {
        "params/transformer.wte.weight",
        "params/transformer.h.10.attn.c_q.weight",
        "params/resid_lambdas",
        "opt_state/1/mu/0",
        "opt_state/1/mu/1",
        "step",
    }
    assert flat["step"] == 7 and flat["params/resid_lambdas"].dtype == jnp.bfloat16


def test_parameters_alone(two):
    params = checkpoint.load_params(two, 20)
    assert_same(params, make_state(20).params)


def test_parameters_of_something_else(tmp_path):
    checkpoint.save(tmp_path, 1, {"x": jnp.zeros(2)}, {})
    with pytest.raises(UserError, match="holds no params"):
        checkpoint.load_params(tmp_path)


def test_numpy_and_64_bit_leaves_stay_as_they_are(tmp_path):
    state = {"a": np.arange(3, dtype=np.int64), "b": np.float64(1 / 3), "c": 5}
    checkpoint.save(tmp_path, 1, state, {})
    for restored in (checkpoint.load(tmp_path, like=state)[0], checkpoint.load(tmp_path)[0]):
        assert restored["a"].dtype == np.int64 and restored["b"] == 1 / 3 and restored["c"] == 5


def test_training_that_was_stopped_is_the_training_that_was_not(tmp_path):
    optimizer = optax.adam(0.1)

    def step(state, i):
        loss = lambda p: jnp.sum((p["w"] - i) ** 2 * jax.random.uniform(jax.random.key(i), (3,)))  # noqa: E731
        updates, opt_state = optimizer.update(jax.grad(loss)(state.params), state.opt_state)
        return State(optax.apply_updates(state.params, updates), opt_state, state.step + 1)

    params = {"w": jnp.arange(3.0)}
    state = whole = State(params, optimizer.init(params), jnp.int32(0))
    for i in range(4):
        whole = step(whole, i)
    for i in range(2):
        state = step(state, i)
    checkpoint.save(tmp_path, 2, state, {})
    fresh = State(params, optimizer.init(params), jnp.int32(0))
    state, _ = checkpoint.load(tmp_path, like=fresh)
    for i in range(int(state.step), 4):
        state = step(state, i)
    assert_same(state, whole)


def test_metadata_of_any_size_comes_back(tmp_path):
    meta = {"step": 3, "loader": {"buffer": {"ids": "A" * 100_000, "lengths": [1, 2]}, "position": 9}, "val_bpb": None}
    place = checkpoint.save(tmp_path, 3, {"x": jnp.zeros(2)}, meta)
    assert checkpoint.load_meta(tmp_path) == meta
    assert (place / "meta.json").stat().st_size < 1000 and (place / "meta-loader.json").exists()
    (place / "meta-loader.json").write_text("{}")
    assert checkpoint.latest(tmp_path)[0] is None


def test_metadata_that_is_not_json_leaves_nothing(tmp_path):
    with pytest.raises(ValueError):
        checkpoint.save(tmp_path, 3, {"x": jnp.zeros(2)}, {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


# ---- which one


def test_order_is_numeric(tmp_path):
    for step in (999_999, 100_000_000, 20):
        checkpoint.save(tmp_path, step, {"x": jnp.float32(step)}, {}, keep=5)
    assert checkpoint.steps(tmp_path) == [20, 999_999, 100_000_000]
    assert checkpoint.latest(tmp_path) == (100_000_000, [])


def test_no_folder_and_empty_folder(tmp_path):
    for place in (tmp_path, tmp_path / "none"):
        assert checkpoint.latest(place) == (None, [])
        with pytest.raises(UserError, match="holds no valid checkpoint"):
            checkpoint.load(place)


def test_other_names_are_not_checkpoints(folder):
    (folder / "notes.txt").write_text("hello")
    (folder / "step_00000099").write_text("a file, not a folder")
    for name in ("step_00000030_old", "old_step_00000030", "step_x", "step_-5", "30"):
        shutil.copytree(folder / "step_00000020", folder / name)
    assert checkpoint.steps(folder) == [10, 20]
    assert checkpoint.latest(folder) == (20, [])


def largest(place):
    """The file with most of the arrays."""
    return max((p for p in (place / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "zero bytes": lambda p: largest(p).write_bytes(b""),
    "zero-byte metadata": lambda p: (p / "meta.json").write_bytes(b""),
    "changed byte": lambda p: flip(largest(p)),
    "missing array file": lambda p: largest(p).unlink(),
    "missing metadata": lambda p: (p / "meta.json").unlink(),
    "missing manifest": lambda p: (p / "manifest.json").unlink(),
    "arrays only": lambda p: [f.unlink() for f in p.glob("*.json")],
    "empty folder": lambda p: (shutil.rmtree(p), p.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_named_and_left_alone(folder, damage):
    bad = folder / "step_00000020"
    DAMAGE[damage](bad)
    before = contents(bad)
    step, problems = checkpoint.latest(folder)
    assert step == 10 and problems and all(str(bad) in problem for problem in problems)
    state, _ = checkpoint.load(folder, like=make_state())
    assert_same(state, make_state(10))
    with pytest.raises(UserError, match="checkpoint 20 is damaged.*other steps found: 10"):
        checkpoint.load(folder, 20)
    checkpoint.save(folder, 30, make_state(30), {}, keep=1)
    assert contents(bad) == before and checkpoint.latest(folder)[0] == 30


def test_all_damaged(folder):
    for step in (10, 20):
        DAMAGE["zero bytes"](folder / f"step_{step:08d}")
    step, problems = checkpoint.latest(folder)
    assert step is None and len(problems) == 2
    with pytest.raises(UserError, match="no valid checkpoint: .*has 0 bytes"):
        checkpoint.load(folder)


def test_a_step_that_does_not_exist(folder):
    with pytest.raises(UserError, match="no checkpoint of step 999; steps found: 10, 20"):
        checkpoint.load(folder, 999)


def test_a_stray_file_inside_harms_nothing(folder):
    (folder / "step_00000020" / ".DS_Store").write_text("x")
    assert checkpoint.latest(folder) == (20, [])


def test_keep_the_newest(tmp_path):
    for step in (1, 2, 3, 10, 11):
        checkpoint.save(tmp_path, step, {"x": jnp.float32(step)}, {}, keep=3)
    assert checkpoint.steps(tmp_path) == [3, 10, 11]
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(UserError, match="keep=0"):
        checkpoint.save(tmp_path, 12, {"x": jnp.zeros(1)}, {}, keep=0)


def test_saving_a_step_again_replaces_it(folder):
    checkpoint.save(folder, 20, make_state(5), {"again": True})
    state, meta = checkpoint.load(folder, like=make_state())
    assert_same(state, make_state(5))
    assert meta == {"again": True} and len(list(folder.iterdir())) == 2


def test_saving_over_a_damaged_step_sets_it_aside(folder):
    flip(largest(folder / "step_00000020"))
    before = contents(folder / "step_00000020")
    checkpoint.save(folder, 20, make_state(5), {})
    assert checkpoint.latest(folder) == (20, []) and checkpoint.steps(folder) == [10, 20]
    (aside,) = folder.glob("*damaged*")
    assert contents(aside) == before


# ---- a save that does not finish

KILLED = """
import os, sys
import jax.numpy as jnp
from nanochat_lib import checkpoint, storage
stage = sys.argv[2]
if stage == "before manifest":
    storage.write_manifest = lambda *a: os._exit(9)
else:
    storage.publish_dir = lambda *a: os._exit(9)
checkpoint.save(sys.argv[1], 30, {"x": jnp.zeros(3)}, {})
"""


def child(code, *arguments, **environment):
    root = str(Path(checkpoint.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("stage", ["before manifest", "before rename"])
def test_killed_while_saving(folder, stage):
    before = contents(folder)
    assert child(KILLED, folder, stage).returncode == 9
    step, problems = checkpoint.latest(folder)
    assert step == 20 and len(problems) == 1 and "step_00000030.tmp-" in problems[0] and "never finished" in problems[0]
    after = contents(folder)
    assert before.items() < after.items()
    checkpoint.save(folder, 30, make_state(30), {})
    assert checkpoint.latest(folder)[0] == 30
    assert contents(folder).items() >= {k: v for k, v in after.items() if "tmp-" in k}.items()


def refuse(number):
    def call(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return call


def refuse_in_tensorstore(number):
    def call(*args, **kwargs):
        raise ValueError(
            f"OUT_OF_RANGE: Error writing in OCDBT database: {os.strerror(number)} [os_error_code='{number}']"
        )

    return call


REFUSALS = {
    "folder": lambda m, n: m.setattr(Path, "mkdir", refuse(n)),
    "probe": lambda m, n: m.setattr(storage.os, "fsync", refuse(n)),
    "arrays": lambda m, n: m.setattr(ocp.PyTreeCheckpointHandler, "async_save", refuse(n)),
    "tensorstore": lambda m, n: m.setattr(ocp.PyTreeCheckpointHandler, "async_save", refuse_in_tensorstore(n)),
    "metadata": lambda m, n: m.setattr(storage, "atomic_write_json", refuse(n)),
    "manifest": lambda m, n: m.setattr(storage, "write_manifest", refuse(n)),
    "rename": lambda m, n: m.setattr(storage.os, "rename", refuse(n)),
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("where", REFUSALS)
def test_a_refusing_disk(folder, monkeypatch, where, number):
    before = contents(folder)
    REFUSALS[where](monkeypatch, number)
    with pytest.raises(UserError) as caught:
        checkpoint.save(folder, 30, make_state(), {})
    monkeypatch.undo()
    message = str(caught.value)
    assert os.strerror(number) in message and str(folder) in message and "\n" not in message
    assert contents(folder) == before and len(list(folder.iterdir())) == 2


def test_too_little_room_is_seen_before_writing(folder, monkeypatch):
    before = contents(folder)
    monkeypatch.setattr(storage, "free_bytes", lambda path: 1000)
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "async_save", lambda *a, **k: pytest.fail("wrote"))
    with pytest.raises(UserError, match="needs .* bytes and 1,000 are free"):
        checkpoint.save(folder, 30, make_state(), {})
    assert contents(folder) == before and len(list(folder.iterdir())) == 2


def test_errors_of_the_program_are_not_disguised(folder, monkeypatch):
    monkeypatch.setattr(
        ocp.PyTreeCheckpointHandler, "async_save", lambda *a, **k: (_ for _ in ()).throw(ValueError("a bug"))
    )
    with pytest.raises(ValueError, match="a bug"):
        checkpoint.save(folder, 30, make_state(), {})
    assert len(list(folder.iterdir())) == 2


# ---- strictness


def change(state, **values):
    return state._replace(params=state.params | values)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (
            change(make_state(), resid_lambdas=jnp.ones(4)),
            r"resid_lambdas is bfloat16\[4\], this run needs float32\[4\]",
        ),
        (
            change(make_state(), **{"transformer.wte.weight": jnp.ones((6, 3))}),
            r"wte.weight is float32\[5, 3\], this run needs float32\[6, 3\]",
        ),
        (change(make_state(), new=jnp.ones(1)), "has no params/new"),
        (make_state()._replace(opt_state=()), "has opt_state/1/mu/0, which this run has not"),
        (make_state()._replace(step=jnp.float32(0)), r"step is int32\[\], this run needs float32\[\]"),
    ],
)
def test_shapes_dtypes_and_names_are_strict(two, like, message):
    with pytest.raises(UserError, match=message):
        checkpoint.load(two, like=like)


def test_tokenizer_and_configuration_are_compared():
    meta = {"tokenizer": "a" * 64, "model": {"n_layer": 4, "vocab_size": 512}}
    checkpoint.check_tokenizer(meta, "a" * 64)
    checkpoint.check_config(meta, {"n_layer": 4, "vocab_size": 512})
    with pytest.raises(UserError, match="tokenizer aaaaaaaaaaaa, the one given is bbbbbbbbbbbb"):
        checkpoint.check_tokenizer(meta, "b" * 64)
    with pytest.raises(UserError, match="None"):
        checkpoint.check_tokenizer({}, "b" * 64)
    with pytest.raises(UserError, match="vocab_size 512 / 300, n_embd None / 8"):
        checkpoint.check_config(meta, {"n_layer": 4, "vocab_size": 300, "n_embd": 8})


# ---- other machines

MESH = """
import sys, json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from nanochat_lib import checkpoint
mesh = jax.make_mesh((8,), ("data",))
split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
like = {"w": jax.device_put(jnp.zeros((16, 3)), split), "step": jax.device_put(jnp.int32(0), whole)}
state, meta = checkpoint.load(sys.argv[1], like=like)
assert state["w"].sharding == split and len(state["w"].addressable_shards) == 8
assert np.array_equal(np.asarray(state["w"]), np.arange(48.0).reshape(16, 3)) and int(state["step"]) == 5
checkpoint.save(sys.argv[2], 6, {"w": state["w"] * 2, "step": state["step"] + 1}, meta)
"""


def test_one_device_and_eight_read_each_other(tmp_path):
    state = {"w": jnp.arange(48.0).reshape(16, 3), "step": jnp.int32(5)}
    checkpoint.save(tmp_path / "one", 5, state, {"a": 1})
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    done = child(MESH, tmp_path / "one", tmp_path / "eight", XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    back, meta = checkpoint.load(tmp_path / "eight", like=state)
    assert_same(back, {"w": state["w"] * 2, "step": jnp.int32(6)})
    assert meta == {"a": 1} and json.dumps(meta)
    flat, _ = checkpoint.load(tmp_path / "eight")
    assert_same(flat, back)


# ---- copied from elsewhere


def test_one_that_was_copied_under_another_name_is_named_and_left_alone(folder):
    shutil.copytree(folder / "step_00000010", folder / "step_00000030")
    before = contents(folder / "step_00000030")
    step, problems = checkpoint.latest(folder)
    assert step == 20 and len(problems) == 1
    assert "step_00000030 holds step 10: it was copied under another name" in problems[0]
    with pytest.raises(UserError, match="checkpoint 30 is damaged: .*holds step 10"):
        checkpoint.load(folder, 30)
    checkpoint.save(folder, 40, make_state(), {"step": 40}, keep=1)
    assert contents(folder / "step_00000030") == before and checkpoint.steps(folder) == [30, 40]


def test_a_foreign_folder_with_a_checkpoint_s_name_is_left_alone(folder):
    (folder / "step_00000030").mkdir()
    (folder / "step_00000030" / "model.safetensors").write_bytes(b"0" * 100)
    storage.write_manifest(folder / "step_00000030")
    step, problems = checkpoint.latest(folder)
    assert step == 20 and len(problems) == 1 and "meta.json does not exist" in problems[0]
    checkpoint.save(folder, 40, make_state(), {"step": 40}, keep=1)
    assert checkpoint.steps(folder) == [30, 40]
