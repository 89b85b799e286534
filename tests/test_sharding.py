"""Where arrays live: every row on exactly one device, what does not divide is refused at the start, nothing aliases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat_lib import checkpoint, gpt, sharding
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.bpb import bits_per_byte
from nanochat_lib.sharding import check_parameters, micro_batches, rows_of
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.train_step import make_eval_step

ROOT = Path(sharding.__file__).parents[1]
MODEL = GPTConfig(sequence_len=16, vocab_size=64, n_layer=2, n_head=1, n_kv_head=1, n_embd=32, window_pattern="L")

# ---- checks, without devices


def test_micro_batches_are_what_the_step_needs():
    assert micro_batches(2**19, 16, 2048, 8) == 2 and micro_batches(2048, 16, 128, 1) == 1


@pytest.mark.parametrize(
    ("batch_tokens", "rows", "length", "devices", "advice"),
    [
        (65_536, 16, 1024, 8, "use pretrain.device_rows 2 or 4 or 8, or pretrain.batch_tokens 131,072"),
        (300_000, 16, 1024, 8, "use pretrain.batch_tokens 262,144 or 393,216"),
        (19 * 8, 19, 8, 8, "use pretrain.batch_tokens 1,216"),  # 19 rows on 8 devices
        (1000, 1, 8, 1, None),
        (8 * 1024 * 8, 9, 1024, 8, "use pretrain.device_rows 2 or 4 or 8, or pretrain.batch_tokens 73,728"),
    ],
)
def test_a_batch_that_does_not_divide_names_what_would(batch_tokens, rows, length, devices, advice):
    if advice is None:
        assert micro_batches(batch_tokens, rows, length, devices) == 125
        return
    with pytest.raises(UserError) as e:
        micro_batches(batch_tokens, rows, length, devices)
    said = str(e.value)
    assert said.endswith(advice) and "\n" not in said
    for number in (f"{batch_tokens:,}", f"device_rows {rows}", f"{devices} devices", f"{rows * length * devices:,}"):
        assert number in said


@given(st.integers(1, 40), st.integers(1, 8), st.sampled_from([8, 16]), st.sampled_from([1, 2, 3, 8]))
def test_the_advice_for_rows_is_good(tokens, rows, length, devices):
    """Whatever device_rows the message offers, the batch then divides."""
    batch = tokens * length * devices
    try:
        assert micro_batches(batch, rows, length, devices) * rows == tokens
    except UserError as error:
        offered = str(error).split("use pretrain.device_rows ")[1].split(",")[0]
        for n in map(int, offered.split(" or ")):
            assert 0 < n <= rows and micro_batches(batch, n, length, devices) * n == tokens


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.randoms())
def test_every_row_belongs_to_one_process_and_none_is_lost(processes, local, device_rows, random):
    owners = [p for p in range(processes) for _ in range(local)]
    random.shuffle(owners)  # a TPU pod's devices need not stand together
    rows = device_rows * len(owners)
    shares = [rows_of(p, owners, rows) for p in range(processes)]
    assert sorted(np.concatenate(shares)) == list(range(rows))
    assert all(len(share) == device_rows * local for share in shares)
    if len(owners) > 1:
        with pytest.raises(UserError, match=f"{rows + 1} rows do not divide over {len(owners)} devices"):
            rows_of(0, owners, rows + 1)


def mesh_of(n, fsdp=1):
    return jax.sharding.AbstractMesh((n // fsdp, fsdp), ("data", "fsdp"))


def test_parameters_that_cannot_be_cut_are_named_with_the_counts_that_can():
    shapes = gpt.param_shapes(GPTConfig(128, 512, 2, 6, 6, 96, "L"))
    for n in (1, 2, 4, 8, 16, 32):
        check_parameters(mesh_of(n), shapes)
    check_parameters(None, shapes)
    with pytest.raises(UserError) as e:
        check_parameters(mesh_of(10, 2), {"w": (98, 98), **shapes, "small": (7, 7)})
    said = str(e.value)
    assert said.startswith("w (98, 98) does not divide over 10 devices; use 1, 2 devices, or") and "\n" not in said


def test_fsdp_must_divide_the_devices():
    with pytest.raises(UserError, match="compute.fsdp 3 does not divide the 8 devices; use 1, 2, 4, 8"):
        sharding.make_mesh(3, list(range(8)))


# ---- on one device nothing is moved


def test_without_a_mesh_everything_stays_as_it_is():
    params = {"w": jax.numpy.ones((3, 2))}
    assert sharding.replicate(params)["w"] is params["w"]
    np.testing.assert_array_equal(sharding.own_rows(None, 4), range(4))


# ---- on eight devices, in a process of its own

EIGHT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from nanochat_lib import checkpoint, gpt, sharding
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.bpb import bits_per_byte, mean_loss
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.train_step import make_eval_step
from nanochat_lib.trainer import on_devices

folder, model = sys.argv[1], GPTConfig(**json.loads(sys.argv[2]))
mesh = sharding.make_mesh(2)
assert mesh.shape == {"data": 4, "fsdp": 2}

# Batches: each row on one device, in order; the copy is the device's own.
for shape in ((3, 16, 64), (16, 64)):
    raw = np.zeros(np.prod(shape) + 16, np.int32)  # device_put would go on using aligned memory
    source = raw[(-raw.ctypes.data % 64) // 4 :][: np.prod(shape)].reshape(shape)
    source[:] = np.arange(source.size).reshape(shape)
    wanted = source.copy()
    placed = sharding.global_batch(mesh, {"inputs": source}, 16)["inputs"]
    source[:] = -1
    assert placed.shape == shape and np.array_equal(np.asarray(placed), wanted)
    rows = {shard.device.id: (shard.index[-2].start or 0) // 2 for shard in placed.addressable_shards}
    assert rows == {i: i for i in range(8)}, rows
for rows, words in ((12, "brought 12 rows for its 8 of 8 devices, not 16 of 16"), (24, "24 rows"), (8, "8 rows")):
    try:
        sharding.global_batch(mesh, {"inputs": np.zeros((2, rows, 4), np.int32)}, 16)
    except UserError as error:
        assert words in str(error), error
    else:
        raise SystemExit(f"{rows} rows were taken for 16")

# Parameters: cut by one table, whole again without a change.
params = gpt.init_params(model, jax.random.key(0))
laid = jax.device_put(params, sharding.state_sharding(mesh, params))
for name, leaf in laid.items():
    assert leaf.sharding == sharding.param_sharding(mesh, gpt.param_shapes(model))[name]
    if leaf.size >= sharding.SMALL:
        assert {shard.data.size for shard in leaf.addressable_shards} == {leaf.size // 8}, name
back = sharding.replicate(laid)
assert list(back) == list(params)
assert all(len(x.devices()) == 1 and np.array_equal(np.asarray(x), np.asarray(params[n])) for n, x in back.items())
half = sharding.replicate(laid, "bfloat16")
assert {x.dtype.name for x in half.values() if x.ndim > 1} == {"bfloat16"}
assert {x.dtype.name for x in half.values() if x.ndim < 2} == {"float32"}

# Evaluation through the same parameters, where they lie.
rng = np.random.default_rng(0)
batches = [(ids[:, :-1].copy(), ids[:, 1:].copy()) for ids in rng.integers(0, 63, (2, 8, 17)).astype(np.int32)]
batches[1][1][:, 5:] = -1
token_bytes = np.arange(64, dtype=np.int32) % 5
step = make_eval_step(model)
said = {
    "bpb": bits_per_byte(step, laid, on_devices(mesh, batches), token_bytes),
    "loss": mean_loss(step, laid, on_devices(mesh, batches), token_bytes),
}

# A checkpoint of one device comes to eight and goes back.
stacks = {"momentum": np.zeros((10, 32, 32), np.float32)}
stacks = jax.device_put(stacks, sharding.state_sharding(mesh, stacks))
like = {
    "params": laid,
    "opt_state": {"muon": {"32x32": stacks}},
    "step": jax.device_put(jnp.int32(0), NamedSharding(mesh, P())),
}
state, meta = checkpoint.load(folder + "/one", like=like)
assert meta["step"] == 5 and int(state["step"]) == 5
assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, like)
momentum = np.asarray(state["opt_state"]["muon"]["32x32"]["momentum"])
assert np.array_equal(momentum.ravel(), np.arange(1.0, 10241))
checkpoint.save(folder + "/eight", 6, state, {"step": 6})
print(json.dumps(said))
"""


def saved_state():
    stack = np.arange(1.0, 10241, dtype=np.float32).reshape(10, 32, 32)
    return {
        "params": gpt.init_params(MODEL, jax.random.key(0)),
        "opt_state": {"muon": {"32x32": {"momentum": jax.numpy.asarray(stack)}}},
        "step": jax.numpy.int32(5),
    }


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    checkpoint.save(folder / "one", 5, saved_state(), {"step": 5})
    devices = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    flags = {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", EIGHT, str(folder), json.dumps(MODEL.to_dict())],
        env=os.environ | flags, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_evaluation_on_eight_devices_gives_one_device_s_number(eight):
    rng = np.random.default_rng(0)
    batches = [(ids[:, :-1].copy(), ids[:, 1:].copy()) for ids in rng.integers(0, 63, (2, 8, 17)).astype(np.int32)]
    batches[1][1][:, 5:] = -1
    token_bytes = np.arange(64, dtype=np.int32) % 5
    params, step = saved_state()["params"], make_eval_step(MODEL)
    assert eight[1]["bpb"] == pytest.approx(bits_per_byte(step, params, batches, token_bytes), rel=1e-6)
    from nanochat_lib.evaluate.bpb import mean_loss

    assert eight[1]["loss"] == pytest.approx(mean_loss(step, params, batches, token_bytes), rel=1e-6)


def test_a_checkpoint_of_eight_devices_comes_back_to_one(eight):
    like = saved_state()
    state, meta = checkpoint.load(eight[0] / "eight", like=jax.tree.map(jax.numpy.zeros_like, like))
    assert meta == {"step": 6}
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert one.sharding == other.sharding and one.committed == other.committed
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", [(10, 32, 16), (12, 32, 32), (8, 32, 32)])
def test_another_shape_is_refused(eight, shape):
    like = saved_state()
    like["opt_state"]["muon"]["32x32"]["momentum"] = jax.numpy.zeros(shape)
    with pytest.raises(UserError, match="momentum is float32"):
        checkpoint.load(eight[0] / "eight", like=like)
    like = saved_state()
    like["params"]["lm_head.weight"] = jax.numpy.zeros((128, 32))
    with pytest.raises(UserError, match="lm_head.weight is float32"):
        checkpoint.load(eight[0] / "eight", like=like)
