"""The training step on eight devices: the numbers of one, nothing computed twice, every message accounted for."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MESHES = {"data": "1", "fsdp": "8", "mixed": "2"}  # the fsdp axis of each
WHOLE = 1024  # parameters with fewer numbers are not cut


@pytest.fixture(scope="module")
def seen() -> dict:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    script = Path(__file__).with_name("mesh_step.py")
    env["PYTHONPATH"] = str(script.parents[1])
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def cut_bytes(seen: dict) -> int:
    """Float32 bytes of the parameters that are cut over the devices."""
    return sum(4 * math.prod(shape) for shape in seen["params"].values() if math.prod(shape) >= WHOLE)


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_of_one_device(seen, mesh):
    one, many = seen["runs"]["None"], seen["runs"][MESHES[mesh]]
    np.testing.assert_allclose(many["losses"], one["losses"], rtol=1e-6)
    # AdamW divides by the size of each gradient, so roundings of the smallest ones grow: 2.3e-5 was seen.
    np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=1e-4)


def test_weights_and_ignored_targets_count_once(seen):
    one, mixed = seen["weighted"]["None"], seen["weighted"]["2"]
    assert mixed[1] == one[1] == 3 * 8 * 64 - 15
    np.testing.assert_allclose(mixed, one, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_step_compiles_once(seen, mesh):
    assert seen["runs"][MESHES[mesh]]["compiles"] == 1


@pytest.mark.parametrize("mesh", MESHES)
def test_every_device_owns_an_eighth_of_the_state(seen, mesh):
    assert seen["runs"][MESHES[mesh]]["share"] < 1 / 8 + 0.01


@pytest.mark.parametrize("mesh", MESHES)
def test_no_product_is_done_twice(seen, mesh):
    """A device does an eighth of the model's products; along fsdp two narrow ones of each layer are made again, with
    the weights that are gathered again. Of a stack of K matrices it orthogonalises ceil(K/8): of the stacks here, of
    2 and 4, one each, where one device does all."""
    one, many = seen["runs"]["None"], seen["runs"][MESHES[mesh]]
    share = one["model_flops"] / 8
    assert share <= many["model_flops"] <= share * (1 if mesh == "data" else 1.03)
    assert many["muon_flops"] < 0.55 * one["muon_flops"]


def test_along_data_parameters_are_gathered_once_a_step_and_gradients_scattered_once(seen):
    found = seen["runs"]["1"]
    assert not found["looped"], "a message with every micro-batch"
    cut = cut_bytes(seen)
    assert found["collectives"]["reduce-scatter"][1] == cut / 8
    # Muon's matrices come back from their owners by all-to-all: what is gathered is the parameters alone.
    assert found["collectives"]["all-gather"][1] == cut
    assert found["collectives"]["all-reduce"][1] < 10_000  # the loss, norms and small parameters


@pytest.mark.parametrize("mesh", ["fsdp", "mixed"])
def test_along_fsdp_parameters_are_gathered_with_every_micro_batch(seen, mesh):
    found = seen["runs"][MESHES[mesh]]
    assert {"all-gather", "reduce-scatter"} <= set(found["looped"])


def test_along_fsdp_the_backward_pass_gathers_again(seen):
    """As it is written; a CPU's compiler, which has memory to spare, does both gatherings of a weight at once."""
    dense = [s for n, s in seen["params"].items() if not n.startswith(("transformer.wte", "value_embeds"))]
    cut = sum(math.prod(shape) >= WHOLE for shape in dense)
    assert seen["runs"]["8"]["gathers"] == 2 * cut + 1  # and the ids of the batch, for the tables' rows
    assert seen["runs"]["1"]["gathers"] == cut + len(seen["params"]) - len(dense)
