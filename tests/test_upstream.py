"""nanochat's checkpoint folders: exact both ways, safe to read, refused in one line when something is wrong.

The folders are made here with torch and pickle alone. A real one can be checked too: NANOCHAT_UPSTREAM_DIR names a
folder that also holds expected.json, what nanochat itself computes from it.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import vectors
from upstream_folders import CONFIGS, HEAD, MERGES, RATES, STEP, TABLES, pickled, read, same, trained, write

import nanochat_lib
from nanochat_lib import conversation, gpt, storage, twin, upstream
from nanochat_lib.errors import UserError
from nanochat_lib.presets import OptimConfig
from nanochat_lib.tokenizer import SPECIAL_TOKENS, Tokenizer
from nanochat_lib.train_step import TrainState, init_train_state, make_train_step
from nanochat_lib.twin_optim import MuonAdamW


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes each kind of folder once."""
    kinds: dict = {}

    def get(**kind) -> Path:
        key = tuple(sorted(kind.items()))
        if key not in kinds:
            kinds[key] = write(tmp_path_factory.mktemp("upstream") / "d2", **kind)
        return kinds[key]

    return get


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A folder of one rank to spoil."""
    return Path(shutil.copytree(made(), tmp_path / "d2"))


def refused(message: str, *words: str) -> None:
    assert "\n" not in message, message
    for word in words:
        assert word in message, message


# --- Both ways


KINDS = [
    {"recipe": recipe, "ranks": ranks, "bf16": bf16}
    for recipe, ranks, bf16 in (("head", 1, False), ("head", 3, True), ("recipe4", 1, True), ("recipe4", 3, False))
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_the_round_trip_is_exact(kind, made, tmp_path) -> None:
    source = made(**kind)
    found = upstream.load(source)
    assert found.config == CONFIGS[kind["recipe"]] and found.step == STEP and found.extras.ranks == kind["ranks"]
    assert all(p.dtype == np.float32 for p in found.params.values())
    back = upstream.save(tmp_path / "back", found)
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(back) for path in back.rglob("*") if path.is_file())
    assert len(files) == 4 + kind["ranks"]
    for name in files:
        if name.suffix == ".pt":
            assert same(read(source / name), read(back / name)), name
        else:
            assert (source / name).read_bytes() == (back / name).read_bytes(), name
    assert isinstance(read(back / f"model_{STEP:06d}.pt"), OrderedDict)
    tables = {p.dtype for name, p in read(back / f"model_{STEP:06d}.pt").items() if name in TABLES}
    assert tables == {torch.bfloat16 if kind["bf16"] else torch.float32}


@pytest.mark.parametrize("recipe", CONFIGS)
def test_shards_of_three_ranks_are_one_optimiser(recipe, made, tmp_path) -> None:
    model, optimizer = trained(CONFIGS[recipe], False)
    names = {p: name for name, p in model.named_parameters()}
    found = upstream.load(made(recipe=recipe, ranks=3, bf16=False) if recipe == "recipe4" else made(ranks=3))
    assert int(found.opt_state.step) == 2
    for group in optimizer.param_groups:
        if group["kind"] == "muon":
            r, n = group["params"][0].shape
            kept, ours = optimizer.state[group["params"][0]], found.opt_state.muon[f"{r}x{n}"]
            assert np.array_equal(kept["momentum_buffer"], ours.momentum)
            assert np.array_equal(kept["second_momentum_buffer"], ours.second)
            continue
        for p in group["params"]:
            for key in ("exp_avg", "exp_avg_sq"):
                assert np.array_equal(optimizer.state[p][key], getattr(found.opt_state, key)[names[p]])
    for name, p in model.named_parameters():
        assert np.array_equal(p.detach(), found.params[name])
    one = upstream.save(tmp_path / "one", found, ranks=1)
    assert same(read(one / f"optim_{STEP:06d}_rank0.pt"), optimizer.state_dict())


def test_a_rank_without_matrices_may_have_no_state(made, tmp_path) -> None:
    source = Path(shutil.copytree(made(ranks=3), tmp_path / "d2"))
    path = source / f"optim_{STEP:06d}_rank2.pt"
    content = read(path)
    del content["state"][8]  # the one gate of this model belongs to rank 0
    torch.save(content, path)
    assert same_state(upstream.load(source).opt_state, upstream.load(made(ranks=3)).opt_state)


def same_state(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def test_a_folder_without_optimiser_files_is_a_model(folder, tmp_path) -> None:
    (folder / f"optim_{STEP:06d}_rank0.pt").unlink()
    (folder / f"meta_{STEP:06d}.json").write_text(json.dumps({"model_config": dict(list(HEAD.to_dict().items())[:7])}))
    found = upstream.load(folder)
    assert found.opt_state is None and found.step == STEP
    assert not list(upstream.save(tmp_path / "back", found).glob("optim*"))


def test_compiled_names_missing_lambdas_and_missing_windows(folder, tmp_path) -> None:
    model, optimizer = folder / f"model_{STEP:06d}.pt", folder / f"optim_{STEP:06d}_rank0.pt"
    state, content, meta = read(model), read(optimizer), folder / f"meta_{STEP:06d}.json"
    del state["resid_lambdas"], state["x0_lambdas"]
    torch.save({f"_orig_mod.{name}": p for name, p in state.items()}, model)
    groups = [g for i, g in enumerate(content["param_groups"]) if i not in (3, 4)]
    moved = {old: new for new, old in enumerate(number for group in groups for number in group["params"])}
    content = {
        "state": {moved[number]: entry for number, entry in content["state"].items() if number in moved},
        "param_groups": [group | {"params": [moved[n] for n in group["params"]]} for group in groups],
    }
    torch.save(content, optimizer)
    values = json.loads(meta.read_text())
    del values["model_config"]["window_pattern"]
    meta.write_text(json.dumps(values))
    found = upstream.load(folder)
    assert found.config.window_pattern == "L"
    assert found.params["resid_lambdas"].tolist() == [1, 1] and found.params["x0_lambdas"].tolist() == [0, 0]
    assert found.opt_state.exp_avg_sq["x0_lambdas"].tolist() == [0, 0]
    back = upstream.save(tmp_path / "back", found)
    assert same(read(back / model.name), state) and same(read(back / optimizer.name), content)
    assert (back / meta.name).read_text() == meta.read_text()


def test_the_newest_step_or_the_one_asked_for(folder) -> None:
    for name in ("model", "meta", "optim"):
        (old,) = folder.glob(f"{name}_*")
        shutil.copy(old, folder / old.name.replace("000020", "1000000"))
    (folder / "model_000099.pt.tmp").touch()
    assert upstream.load(folder).step == 1_000_000
    assert upstream.load(folder, 20).step == 20
    with pytest.raises(UserError) as e:
        upstream.load(folder, 999)
    refused(str(e.value), "no checkpoint of step 999", "20, 1000000")


def test_what_we_write_by_ourselves_is_what_the_reference_reads(tmp_path) -> None:
    """Without extras: the twin's strict loading takes the files, and the numbers are ours."""
    config = HEAD
    params = {name: vectors.fill(name, shape) for name, shape in gpt.param_shapes(config).items()}
    optimizer = nanochat_lib.make_optimizer(config, OptimConfig())
    random = np.random.default_rng(0)
    state = jax.tree.map(lambda x: random.random(x.shape).astype(np.float32), optimizer.init(params))
    state = state._replace(step=np.int32(7))
    tokenizer, meta = Tokenizer(MERGES), {"model_config": {}}
    nanochat_lib.upstream.save(tmp_path / "d2", upstream.Checkpoint(config, params, state, tokenizer, 7, meta))
    model = twin.build(config, read(tmp_path / "d2" / "model_000007.pt"))
    theirs = MuonAdamW(model, unembedding_lr=0.008, embedding_lr=0.3)
    fresh = theirs.state_dict()["param_groups"]
    content = read(tmp_path / "d2" / "optim_000007_rank0.pt")
    assert [list(group) for group in content["param_groups"]] == [list(group) for group in fresh]
    assert content["param_groups"] == fresh
    theirs.load_state_dict(content)
    named = dict(model.named_parameters())
    assert all(np.array_equal(theirs.state[named[name]]["exp_avg"], m) for name, m in state.exp_avg.items())
    assert theirs.state[named["lm_head.weight"]]["step"] == 7
    stack = theirs.state[named["transformer.h.0.mlp.c_fc.weight"]]
    assert np.array_equal(stack["momentum_buffer"], state.muon["128x32"].momentum)


def test_training_goes_on_as_it_would_in_the_reference(made) -> None:
    """Three more steps from the stored state, here and in torch."""
    found = upstream.load(made(ranks=3))
    model, theirs = trained(HEAD, False)
    optimizer = nanochat_lib.make_optimizer(HEAD, OptimConfig(**RATES))
    state = TrainState(jax.tree.map(np.array, dict(found.params)), found.opt_state, np.int32(STEP))
    step = make_train_step(HEAD, optimizer)
    for number in range(3):
        random = np.random.RandomState(number)
        x, y = random.randint(0, 380, (2, 16)), random.randint(0, 380, (2, 16))
        y[0, :4] = -1
        hyper = {"lr": 0.5 - 0.1 * number, "momentum": 0.9, "weight_decay": 0.2}
        for group in theirs.param_groups:
            group["lr"] = hyper["lr"] * group["initial_lr"]
            if group["kind"] == "muon":
                group |= {"momentum": hyper["momentum"], "weight_decay": hyper["weight_decay"]}
        loss = model(torch.from_numpy(x), torch.from_numpy(y))
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        state, metrics = step(state, {"inputs": x[None], "targets": y[None]}, hyper)
        assert float(metrics["loss"]) == pytest.approx(loss.item(), abs=2e-5)
    for name, p in model.named_parameters():
        if name != "backout_lambda":  # two layers: it scales what is then normalised, its gradient is rounding noise
            np.testing.assert_allclose(np.linalg.norm(state.params[name]), p.norm().item(), rtol=2e-5, err_msg=name)


# --- The tokenizer


TEXTS = ("Hello world! It's 12345.", "aa ab ac abac\n\n", "naïve café — 你好 🙂", "<|bos|> is text")


def test_the_tokenizer_encodes_as_the_pickled_one(folder) -> None:
    theirs = pickle.loads((folder / "tokenizer" / "tokenizer.pkl").read_bytes())
    ours = upstream.load(folder).tokenizer
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode_ordinary(text)
    assert ours.special_tokens == theirs._special_tokens and ours.vocab_size == theirs.n_vocab


def test_merges_in_another_order_mean_the_same(folder, tmp_path) -> None:
    path = folder / "tokenizer" / "tokenizer.pkl"
    before, encoding = upstream.load(folder).tokenizer, pickle.loads(path.read_bytes())
    encoding._mergeable_ranks = dict(reversed(encoding._mergeable_ranks.items()))
    path.write_bytes(pickle.dumps(encoding, protocol=5))
    found = upstream.load(folder)
    assert found.tokenizer.fingerprint == before.fingerprint
    back = (upstream.save(tmp_path / "back", found) / "tokenizer" / "tokenizer.pkl").read_bytes()
    assert back[:2] == b"\x80\x05" and pickle.loads(back)._mergeable_ranks == encoding._mergeable_ranks


def test_byte_counts_of_before_july_2026_are_kept(folder, tmp_path) -> None:
    path = folder / "tokenizer" / "token_bytes.pt"
    table = read(path)
    table[128:256] = 3  # one byte of several decodes to U+FFFD
    torch.save(table, path)
    found = upstream.load(folder)
    assert found.tokenizer.token_bytes()[128] == 1
    assert torch.equal(read(upstream.save(tmp_path / "back", found) / "tokenizer" / "token_bytes.pt"), table)


def test_where_the_tokenizer_is_looked_for(folder, tmp_path) -> None:
    home = tmp_path / "home"
    moved = home / "base_checkpoints" / "d2"
    shutil.copytree(folder, moved)
    (moved / "tokenizer").rename(home / "tokenizer")  # nanochat's own place
    assert upstream.load(moved).tokenizer.vocab_size == 380
    (home / "tokenizer").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError) as e:
        upstream.load(moved)
    refused(str(e.value), "tokenizer.pkl is in none of", "--tokenizer")
    assert upstream.load(moved, tokenizer=tmp_path / "elsewhere").step == STEP
    (tmp_path / "elsewhere" / "token_bytes.pt").unlink()  # it can be counted
    shutil.copy(tmp_path / "elsewhere" / "tokenizer.pkl", moved)
    assert upstream.load(moved).step == STEP


# --- What is refused


class Code:
    """Pickles to a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


MODEL, META, OPTIM = f"model_{STEP:06d}.pt", f"meta_{STEP:06d}.json", f"optim_{STEP:06d}_rank0.pt"
PICKLE, BYTES = "tokenizer/tokenizer.pkl", "tokenizer/token_bytes.pt"


@pytest.mark.parametrize("name", [MODEL, OPTIM, BYTES, PICKLE])
def test_code_in_a_pickle_is_refused_and_never_runs(name, folder, tmp_path) -> None:
    trace = tmp_path / "trace"
    torch.save({"a": Code(trace)}, folder / name)
    if name == PICKLE:
        (folder / name).write_bytes(pickle.dumps(Code(trace)))
    with pytest.raises(UserError) as e:
        upstream.load(folder)
    refused(str(e.value), str(folder / name), "mkdir", "refused")
    assert not trace.exists()


def test_code_inside_of_a_tokenizers_state_is_refused_too(folder, tmp_path) -> None:
    encoding = pickle.loads((folder / PICKLE).read_bytes())
    encoding.name = Code(tmp_path / "trace")
    (folder / PICKLE).write_bytes(pickle.dumps(encoding))
    with pytest.raises(UserError, match="refused"):
        upstream.load(folder)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", [MODEL, OPTIM, BYTES, PICKLE, META])
@pytest.mark.parametrize("damage", ["half", "empty", "text", "bit"])
def test_damaged_files_are_named(name, damage, folder) -> None:
    path = folder / name
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0xFF
    spoiled = {"half": data[: len(data) // 2], "empty": b"", "text": b"not a checkpoint", "bit": bytes(flipped)}
    path.write_bytes(spoiled[damage])
    if damage == "bit" and name in (PICKLE, META):
        return  # plain bytes without a checksum: such a change may be valid content
    with pytest.raises(UserError) as e:
        upstream.load(folder)
    refused(str(e.value), name)


def change(path: Path, edit) -> None:
    content = read(path)
    edit(content)
    torch.save(content, path)


def config(edit):
    def apply(folder: Path) -> None:
        meta = json.loads((folder / META).read_text())
        edit(meta["model_config"])
        (folder / META).write_text(json.dumps(meta))

    return apply


def weights(edit):
    return lambda folder: change(folder / MODEL, edit)


def optimiser(edit):
    return lambda folder: change(folder / OPTIM, edit)


def without(*parts: str):
    def edit(state: dict) -> None:
        for name in [name for name in state if any(part in name for part in parts)]:
            del state[name]

    return weights(edit)


def smaller_tokenizer(folder: Path) -> None:
    (folder / PICKLE).write_bytes(pickled(MERGES[:-1]))
    (folder / BYTES).unlink()


def second_step(content: dict) -> None:
    content["state"][0]["step"] = 3


WRONG = {
    "no folder": (shutil.rmtree, ["is not a folder"]),
    "no model": (lambda f: (f / MODEL).unlink(), ["no model_<step>.pt"]),
    "no meta": (lambda f: (f / META).unlink(), [META, "does not exist"]),
    "meta of something else": (lambda f: (f / META).write_text("[1]"), [META, "no model_config"]),
    "no tokenizer": (lambda f: (f / PICKLE).unlink(), ["tokenizer.pkl is in none of"]),
    "another vocabulary": (smaller_tokenizer, ["380", "379", "the model's own tokenizer"]),
    "another table": (lambda f: torch.save(torch.zeros(380), f / BYTES), [BYTES, "does not belong"]),
    "special tokens elsewhere": (
        lambda f: (f / PICKLE).write_bytes(pickled(specials={n: 400 + i for i, n in enumerate(SPECIAL_TOKENS)})),
        [PICKLE, "another kind of tokenizer"],
    ),
    "other special tokens": (
        lambda f: (f / PICKLE).write_bytes(pickled(specials={"<|endoftext|>": 371})),
        [PICKLE, "another kind of tokenizer"],
    ),
    "another pickle": (lambda f: (f / PICKLE).write_bytes(pickle.dumps({"a": 1})), ["no pickled tokenizer"]),
    "launch": (without("ve_gate", "value_embeds", "lambda", "smear"), ["older than January 2026", "recipe 4"]),
    "between": (without("smear", "backout"), ["gates of 12 channels and no smear", "head (July 2026)"]),
    "half of smear": (without("smear_gate"), ["another generation", "backout_lambda, smear_lambda"]),
    "a parameter missing": (without("h.0.attn.c_q"), ["1 layers", "n_layer 2"]),
    "a matrix missing": (without("h.0.attn.c_k"), ["h.0.attn.c_k.weight is missing", "(1 such differences)"]),
    "a parameter too many": (weights(lambda s: s.update(extra=torch.zeros(1))), ["extra is (1,)", "no such parameter"]),
    "another width": (config(lambda c: c.update(n_embd=64)), ["does not fit its model_config"]),
    "another depth": (config(lambda c: c.update(n_layer=10**9)), ["2 layers", "n_layer 1000000000"]),
    "a field missing": (config(lambda c: c.pop("n_head")), ["model_config lacks n_head"]),
    "a field too many": (config(lambda c: c.update(n_extra=1)), ["unknown keys n_extra"]),
    "a field of another type": (config(lambda c: c.update(n_embd="32")), ["n_embd is '32'", "int"]),
    "heads that do not divide": (config(lambda c: c.update(n_head=3)), ["not a multiple"]),
    "float64": (weights(lambda s: s.update(x0_lambdas=s["x0_lambdas"].double())), ["x0_lambdas", "float64"]),
    "no state dict": (lambda f: torch.save([1, 2], f / MODEL), ["no state dict"]),
    "another optimiser": (lambda f: torch.save({"state": {}, "param_groups": []}, f / OPTIM), ["not the optimiser's"]),
    "groups of objects": (
        optimiser(lambda c: c["param_groups"][0].update(lr=torch.tensor(0.1))), ["rank 0", "not the optimiser's state"],
    ),
    "a moment missing": (optimiser(lambda c: c["state"][3].pop("exp_avg")), ["rank 0", "not the optimiser's state"]),
    "a moment of another shape": (
        optimiser(lambda c: c["state"][3].update(exp_avg=torch.zeros(5))), ["exp_avg of resid_lambdas", "(5,)", "(2,)"],
    ),
    "a stack of another shape": (
        optimiser(lambda c: c["state"][8].update(momentum_buffer=torch.zeros(1, 3, 3))), ["momentum_buffer of 1x12"],
    ),
    "steps that differ": (optimiser(second_step), ["different numbers of steps (2, 3)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_one_line(name, folder) -> None:
    spoil, words = WRONG[name]
    spoil(folder)
    with pytest.raises(UserError) as e:
        upstream.load(folder)
    refused(str(e.value), str(folder), *words) if name != "another vocabulary" else refused(str(e.value), *words)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_every_rank_is_needed(missing, made, tmp_path) -> None:
    source = Path(shutil.copytree(made(ranks=3), tmp_path / "d2"))
    (source / f"optim_{STEP:06d}_rank{missing}.pt").unlink()
    with pytest.raises(UserError) as e:
        upstream.load(source)
    here = ", ".join(str(rank) for rank in range(3) if rank != missing)
    refused(str(e.value), "files of 3 ranks", f"those of {here}")


def test_ranks_of_different_runs_are_noticed(made, tmp_path) -> None:
    source = Path(shutil.copytree(made(ranks=3), tmp_path / "d2"))
    change(source / f"optim_{STEP:06d}_rank1.pt", lambda c: c["state"][3]["exp_avg"].add_(1))
    with pytest.raises(UserError, match="exp_avg of resid_lambdas differs between the ranks"):
        upstream.load(source)
    change(source / f"optim_{STEP:06d}_rank1.pt", lambda c: c["param_groups"][0].update(lr=0.5))
    with pytest.raises(UserError, match="different param_groups"):
        upstream.load(source)


def test_saving_is_whole_or_not_at_all(made, tmp_path, monkeypatch) -> None:
    found, target = upstream.load(made()), tmp_path / "out" / "d2"
    with pytest.raises(UserError, match="384 rows, which 5 ranks cannot share"):
        upstream.save(target, found, ranks=5)
    with pytest.raises(UserError, match="ranks 0 must be at least 1"):
        upstream.save(target, found, ranks=0)
    with pytest.raises(UserError, match="lm_head.weight"):
        params = {name: p for name, p in found.params.items() if name != "lm_head.weight"}
        upstream.save(target, replace(found, params=params))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "free_bytes", lambda path: 1000)
        with pytest.raises(UserError, match="1,000 are free"):
            upstream.save(target, found)

    def full(*args, **options):
        raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(UserError) as e:
            upstream.save(target, found)
        refused(str(e.value), str(target), "file write failed")
    assert list((tmp_path / "out").iterdir()) == []
    upstream.save(target, found)
    with pytest.raises(UserError, match="exists already"):
        upstream.save(target, found)


# --- A real checkpoint


REAL = os.environ.get("NANOCHAT_UPSTREAM_DIR")


@pytest.mark.skipif(not REAL, reason="NANOCHAT_UPSTREAM_DIR names no folder with a real checkpoint and expected.json")
def test_a_real_checkpoint_gives_nanochats_numbers(tmp_path) -> None:
    """Logits, loss, three more steps, token ids, a conversation, a greedy answer; and the way back, byte for byte."""
    from nanochat_lib import convert, schedules
    from nanochat_lib.engine import Engine

    source = Path(REAL)
    expected, found = json.loads((source / "expected.json").read_text()), upstream.load(source)
    back = upstream.save(tmp_path / "back", found)
    for path in back.rglob("*"):
        assert path.is_dir() or path.read_bytes() == (source / path.relative_to(back)).read_bytes(), path.name
    measured = {}

    config, length, vocab = found.config, expected["T"], found.config.vocab_size
    assert {name: getattr(config, name) for name in expected["config"]} == expected["config"]
    random = np.random.RandomState(1234)
    x, y = (random.randint(0, vocab, (2, length)).astype(np.int32) for _ in range(2))
    y[0, :7] = -1
    logits = np.asarray(jax.jit(lambda p: gpt.apply(config, p, x))(found.params), np.float64)
    for key, value in (
        ("logits_0_last", logits[0, -1, :8]), ("logits_1_17", logits[1, 17, :8]), ("logits_sum", logits.sum()),
        ("logits_abs", np.abs(logits).sum()),
    ):  # fmt: skip
        measured[key] = np.abs(value - expected[key]).max()

    run = convert.run_config(found, {})
    rates = schedules.transferred(run.pretrain.optim, run.horizon(vocab))
    optimizer = nanochat_lib.make_optimizer(config, rates)
    step, more = make_train_step(config, optimizer, donate=False), expected["continue"]
    state = init_train_state(config, optimizer, found.params)._replace(opt_state=found.opt_state)
    hyper = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
    here = {"inputs": x[None], "targets": y[None]}
    measured["loss"] = abs(float(step(state, here, hyper)[1]["loss"]) - expected["loss"])
    losses = []
    for number in range(3):
        random = np.random.RandomState(100 + number)
        batch = [random.randint(0, vocab, (2, length)) for _ in range(2)]
        state, metrics = step(state, {"inputs": batch[0][None], "targets": batch[1][None]}, hyper)
        losses.append(float(metrics["loss"]))
    measured["losses of three more steps"] = np.abs(np.array(losses) - more["losses"]).max()
    measured["loss after"] = abs(float(step(state, here, hyper)[1]["loss"]) - more["loss_after"])
    norms = {name: np.linalg.norm(np.asarray(p, np.float64)) for name, p in state.params.items()}
    assert norms.keys() == more["norms"].keys()
    relative = {name: abs(norms[name] / norm - 1) for name, norm in more["norms"].items()}
    if config.n_layer // 2 == config.n_layer - 1:  # backout scales what is normalised next: no gradient but rounding
        del relative["backout_lambda"]
    measured["norms, relative"] = max(relative.values())

    tokenizer = found.tokenizer
    assert {text: tokenizer.encode(text) for text in expected["tokenizer"]} == expected["tokenizer"]
    assert tokenizer.token_bytes().sum() == expected["token_bytes_sum"]
    rendered = conversation.render_conversation(tokenizer, expected["conversation"]["conversation"])
    assert rendered.ids == expected["conversation"]["ids"] and rendered.mask == expected["conversation"]["mask"]
    answer = expected["greedy_after_continue"]
    prompt = [tokenizer.bos_id, *tokenizer.encode("ROMEO:")]
    assert answer[: len(prompt)] == prompt
    engine = Engine(config, state.params, tokenizer)
    written = engine.generate_batch([prompt], max_tokens=len(answer) - len(prompt), temperature=0.0).sequences[0]
    assert list(written) == answer

    print({name: float(f"{value:.2g}") for name, value in measured.items()})
    sums = {"logits_sum", "logits_abs"}  # of 200,000 numbers
    assert max(value for name, value in measured.items() if name not in sums) < 2e-5
    assert max(measured[name] for name in sums) < 0.05
