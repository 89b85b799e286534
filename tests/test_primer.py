"""The primer: determinism, the split of the real text, what is held out of the world, leaks, the CORE-shaped bundle."""

import ast
import csv
import json
import random
import re
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nanochat_lib.corpus import open_corpus
from nanochat_lib.errors import UserError
from nanochat_lib.presets import DataConfig, preset
from nanochat_lib.primer import real_text as real
from nanochat_lib.primer.bundle import FACT_TASKS, TASKS, write_core_bundle
from nanochat_lib.primer.documents import SHARES, letters, world_documents
from nanochat_lib.primer.names import SYLLABLES, number_word
from nanochat_lib.primer.world import PEOPLE, QUESTIONS, STATEMENTS, World
from nanochat_lib.tasks.primer import chat_eval_tasks, rl_task, sft_mixture
from nanochat_lib.tokenizer import Tokenizer

SMOKE = preset("cpu-smoke").data
BLOCKS_OF_EVERY_KIND = """
class A:
    async def f():
        async with x: pass
        async for y in x: pass
        else: pass
    def g():
        try: pass
        except* E: pass
        else: pass
        finally: pass
        match x:
            case 1: pass
            case [*_] if x: pass
        while x: pass
        if x: pass
        elif y: pass
"""


@pytest.fixture(scope="module")
def world():
    return World(0)


@pytest.fixture(scope="module")
def corpus():
    return open_corpus(SMOKE, 0)


@pytest.fixture(scope="module")
def pretraining(world):
    """A full-sized draw of the world's text, both streams."""
    return world_documents(world, 1_500_000) + world_documents(world, 150_000, "val")


@pytest.fixture(scope="module")
def chats(world):
    """Every conversation that anything is trained on, as text."""
    mixture = [
        *sft_mixture(world),
        *rl_task("primer-word-sums", world, "train"),
        *rl_task("primer-sums", world, "train"),
    ]
    mixture += [*rl_task("primer-spelling", world, "train")]
    return [flat(conversation) for conversation in mixture]


def flat(conversation) -> str:
    contents = [message["content"] for message in conversation["messages"]]
    return "\n".join(c if isinstance(c, str) else "\n".join(part["text"] for part in c) for c in contents)


# -- real text


def test_real_sides_share_no_twelve_words():
    text = real.real_text()
    train = set().union(*map(real.shingles, text.train))
    assert not train & set().union(*map(real.shingles, text.val))


def test_real_text_is_plain_and_large():
    text = real.real_text()
    train, val = sum(map(len, text.train)), sum(map(len, text.val))
    assert train > 1_000_000 and 0.03 < val / (train + val) < 0.08
    assert all(document.isascii() for document in text.train + text.val)
    paragraphs = [" ".join(p.split()) for d in text.train + text.val for p in d.split("\n\n")]
    long = [p for p in paragraphs if len(p) > 40]
    assert len(long) == len(set(long)), "a paragraph occurs twice"


def test_near_copies_form_one_group():
    words = [f"w{i}" for i in range(40)]
    a, b, c = " ".join(words[:20]), "x " + " ".join(words[5:18]).upper() + ", y", " ".join(words[18:40])
    assert real._groups([a, "something else", b, c]) == [[0, 2], [1], [3]]


def test_statements_are_those_that_a_walk_through_everything_finds():
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    trees = [ast.parse(path.read_bytes()) for path in random.Random(0).sample(files, 12)]
    trees.append(ast.parse(BLOCKS_OF_EVERY_KIND))
    kinds = ast.stmt, ast.Module, ast.ExceptHandler, ast.match_case
    for tree in trees:
        assert list(real._statements(tree)) == [node for node in ast.walk(tree) if isinstance(node, kinds)]
    assert sum(isinstance(node, ast.Pass) for node in real._statements(trees[-1])) == 12


def test_cut_keeps_every_line_and_the_size():
    text = "\n\n".join("\n".join(f"line {i} {j} " + "x" * 30 for j in range(i % 7 + 1)) for i in range(60))
    passages = real.cut(text, 400)
    assert [line for p in passages for line in p.split("\n") if line] == [line for line in text.split("\n") if line]
    assert all(len(p) <= 400 + 100 + 2 for p in passages)
    assert sum(map(len, passages)) / len(passages) > 250
    assert real.cut("a" * 2000, 400) == ["a" * 2000], "a single line is never cut inside"
    assert real.cut("  \n\n ", 400) == []


def test_python_without_sources_is_a_user_error(monkeypatch):
    monkeypatch.setattr(real, "_modules", list)
    monkeypatch.setattr(real, "language_reference", lambda: ["short"])
    with pytest.raises(UserError, match="--corpus"):
        real.real_text.__wrapped__()


# -- the corpus


def test_corpus_is_the_same_in_another_process(corpus):
    code = (
        "from nanochat_lib.corpus import open_corpus; from nanochat_lib.presets import preset; "
        "print(open_corpus(preset('cpu-smoke').data, 0).fingerprint)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == corpus.fingerprint


def test_corpus_follows_the_seed_but_real_validation_does_not(corpus):
    other = open_corpus(SMOKE, 1)
    assert other.fingerprint != corpus.fingerprint
    assert list(other.documents("val")) == list(corpus.documents("val"))
    assert list(other.documents("val-world")) != list(corpus.documents("val-world"))


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8, 1.0])
def test_real_share(share):
    corpus = open_corpus(replace(SMOKE, real_share=share), 0)
    kept = sum(map(len, corpus.documents("train-real")))
    assert kept / sum(map(len, corpus.documents("train"))) == pytest.approx(share, abs=0.01)


def test_too_little_real_text_shrinks_the_world_and_says_so():
    corpus = open_corpus(DataConfig(world_chars=1_000_000, real_share=0.9), 0)
    kept = sum(map(len, corpus.documents("train-real")))
    assert kept / sum(map(len, corpus.documents("train"))) == pytest.approx(0.9, abs=0.01)
    assert "the world is cut to" in corpus.report.notes[0]


def test_streams_are_apart(corpus):
    assert set(corpus.documents("val")) <= {p for d in real.real_text().val for p in real.cut(d, SMOKE.passage_chars)}
    train = set(corpus.documents("train"))
    assert not train & set(corpus.documents("val"))
    assert list(corpus.documents("tokenizer")) == list(corpus.documents("train"))
    assert set(corpus.documents("train-real")) < train
    assert all(text.strip() for split in corpus.splits() for text in corpus.documents(split))
    assert list(corpus.documents("train", 100)) == list(corpus.documents("train"))[100:]


def test_every_kind_of_document_has_its_share(world):
    documents = world_documents(world, 300_000)
    assert sum(map(len, documents)) == pytest.approx(300_000, rel=0.02)
    assert sum(share for _, share in SHARES) == pytest.approx(1)
    assert documents == world_documents(World(0), 300_000) != world_documents(world, 300_000, "val")
    for generate, _ in SHARES:
        made = generate(world, world.rng("train", generate.__name__))
        assert made in documents and 40 < len(made) < 600, generate


# -- the world and its leaks


def test_world_is_seeded_and_balanced():
    a, b, c = World(3), World(3), World(4)
    assert a.facts == b.facts and a.people != c.people
    assert len(a.facts) == 4 * PEOPLE and len(a.test_facts) == PEOPLE and len({f.person for f in a.facts}) == PEOPLE
    for relation, values in a.values.items():
        facts = [f for f in a.facts if f.relation == relation]
        assert all(sum(f.value == v for f in facts) == PEOPLE // len(values) for v in values)
        assert sum(f.held_out for f in facts) == PEOPLE // 4
    assert len({*a.people, *a.towns}) == PEOPLE + len(a.towns)


def test_held_out_facts_are_never_asked_in_a_chat_or_with_choices(world, pretraining, chats):
    asked = {q.format(p=f.person) for f in world.test_facts for q in QUESTIONS[f.relation]}
    said = {s.format(p=f.person, v=f.value) for f in world.test_facts for s in STATEMENTS[f.relation]}
    for text in chats:
        assert not any(line.removeprefix("Multiple Choice question: ") in asked | said for line in text.split("\n"))
    with_choices = [text for text in pretraining if "\n- " in text or "Multiple Choice" in text]
    assert with_choices and not any(person in text for text in with_choices for person in world.people)
    train = {q.format(p=f.person) for f in world.train_facts for q in QUESTIONS[f.relation]}
    assert {text.split("\n")[0].removeprefix("Multiple Choice question: ") for text in chats} >= train


def test_held_out_facts_are_told_in_pretraining(world, pretraining):
    text = "\n".join(pretraining)
    for fact in world.facts:
        assert text.count(fact.statement()) > 5, fact
        assert f"{fact.question()}\n{fact.value}" in text


def test_no_fact_is_told_wrong(world, pretraining):
    """A sentence in a fact's wording always names its true value."""
    true = {(f.relation, f.person): f.value for f in world.facts}
    for relation, wordings in STATEMENTS.items():
        for wording in wordings:
            pattern = re.escape(wording).replace(r"\{p\}", r"([A-Z]\w+)").replace(r"\{v\}", r"(\w+)")
            order = (1, 2) if wording.index("{p}") < wording.index("{v}") else (2, 1)
            for match in re.finditer(pattern, "\n".join(pretraining)):
                assert true[relation, match.group(order[0])] == match.group(order[1])


def test_no_test_word_is_spelled_or_written_anywhere(world, pretraining, chats):
    seen = set()
    for text in pretraining + chats:
        seen.update(re.findall(r"[a-z]+", text))
        seen.update(run.replace(" ", "") for run in re.findall(r"\b[a-z](?: [a-z])+\b", text))
    spelled = {word for word in seen if re.fullmatch("|".join(SYLLABLES) + "|" + f"(?:{'|'.join(SYLLABLES)})+", word)}
    assert len(spelled) > 5000
    tested = {conversation["word"] for conversation in chat_eval_tasks(world)["primer-spelling"]}
    tested |= {
        re.search("word (.*) is", json.loads(line)["context"])[1] for line in bundle_lines(world, "world_spelling")
    }
    assert len(tested) > 300 and not tested & seen
    assert all(world.is_test_word(word) for word in tested)


def bundle_lines(world, label):
    task = next(task for task in TASKS if task.label == label)
    rng = world.rng("bundle", label)
    return [json.dumps(task.make(world, i, rng)) for i in range(128)]


WORDS = {number_word(n): n for n in range(100)}
NUMBER = "(?:[0-9]+|" + "|".join(sorted(WORDS, key=len, reverse=True)) + ")"


def pairs_in(text: str) -> set[tuple[int, int]]:
    """Every pair of numbers that is added in a text, in digits or words, whatever the wording, smaller first."""
    found = re.findall(rf"\b({NUMBER})(?: ?\+ ?| plus | and )({NUMBER})\b", text)
    numbers = [sorted(WORDS[n] if n in WORDS else int(n) for n in pair) for pair in found]
    return {tuple(pair) for pair in numbers}


def test_no_test_pair_is_added_anywhere(world, pretraining, chats):
    seen = set().union(*map(pairs_in, pretraining + chats))
    assert len(seen) > 3000
    for name in ("primer-sums", "primer-word-sums"):
        tested = set().union(*(pairs_in(flat(c)) for c in chat_eval_tasks(world)[name]))
        assert len(tested) > 100 and not tested & seen, name
        assert all(world.is_test_pair(a, b) and world.is_test_pair(b, a) for a, b in tested)
    assert pairs_in("seven plus twelve, 3 + 4, Add 5 and 6.") == {(7, 12), (3, 4), (5, 6)}


def test_split_sizes(world):
    words = {world.word(random.Random(i)) for i in range(300)}
    assert not any(map(world.is_test_word, words))
    pairs = [(a, b) for a in range(100) for b in range(a, 100)]
    assert 0.10 < sum(world.is_test_pair(*pair) for pair in pairs) / len(pairs) < 0.15
    drawn = [world.word(random.Random(i), test=True) for i in range(300)]
    assert all(map(world.is_test_word, drawn)) and len(set(drawn)) > 250


def test_number_words():
    assert [number_word(n) for n in (0, 9, 13, 20, 42, 99)] == [
        "zero", "nine", "thirteen", "twenty", "forty-two", "ninety-nine"
    ]  # fmt: skip
    assert len(WORDS) == 100


@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_of_the_primer_are_what_its_tasks_need(seed):
    """A choice and its `=letter` are neighbours; letters are single; test words are pieces of training words."""
    corpus = open_corpus(replace(SMOKE, world_chars=400_000), seed)
    world = corpus.world
    tokenizer = Tokenizer.train(corpus.documents("tokenizer"), 768)
    for letter in "ABCD":
        assert len(tokenizer.encode(letter)) == len(tokenizer.encode(f"={letter}")) == 1
        before, whole = tokenizer.encode("- cat"), tokenizer.encode(f"- cat={letter}\n")
        assert whole == [*before, *tokenizer.encode(f"={letter}"), *tokenizer.encode("\n")]
    for word in ("domari", "vunateko"):
        assert len(tokenizer.encode(" " + letters(word))) == len(word), "each letter is one token"
    rng = random.Random(5)
    pieces = {i for _ in range(8000) for i in tokenizer.encode(" " + world.word(rng))}
    test = [tokenizer.encode(" " + world.word(rng, test=True)) for _ in range(1000)]
    assert all(len(ids) > 1 for ids in test), "a whole word is one token"
    assert sum(set(ids) <= pieces for ids in test) >= 995


# -- the bundle


def test_bundle_has_the_real_format(world, tmp_path):
    labels = write_core_bundle(world, tmp_path)
    listing = yaml.safe_load((tmp_path / "core.yaml").read_text())["icl_tasks"]
    with open(tmp_path / "eval_meta_data.csv", newline="") as file:
        baselines = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(file)}
    assert [entry["label"] for entry in listing] == labels == list(baselines) and 5 <= len(labels) <= 7
    assert set(FACT_TASKS) < set(labels) and all(label.startswith("world_facts") for label in FACT_TASKS)
    kinds = set()
    for entry in listing:
        kinds.add(entry["icl_task_type"])
        assert isinstance(entry["num_fewshot"], list) and isinstance(entry["continuation_delimiter"], str)
        rows = [json.loads(line) for line in (tmp_path / "eval_data" / entry["dataset_uri"]).read_text().splitlines()]
        assert len(rows) == 128
        for row in rows:
            if entry["icl_task_type"] == "multiple_choice":
                assert row["query"] and len(set(row["choices"])) == 4 and baselines[entry["label"]] == 25
                assert 0 <= row["gold"] < 4
            elif entry["icl_task_type"] == "schema":
                assert len(set(row["context_options"])) == 2 and row["continuation"] and baselines[entry["label"]] == 50
                assert 0 <= row["gold"] < 2
            else:
                assert row["context"] and row["continuation"] and baselines[entry["label"]] == 0
        golds = [row["gold"] for row in rows if "gold" in row]
        assert not golds or max(map(golds.count, set(golds))) < 0.7 * len(golds), "always the same place"
    assert kinds == {"multiple_choice", "schema", "language_modeling"}


def test_bundle_is_the_same_bytes_again_and_true(world, tmp_path):
    for name in ("a", "b"):
        write_core_bundle(world, tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) == 9
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    statements = {fact.statement() for fact in world.facts}
    for line in bundle_lines(world, "world_facts_completion"):
        row = json.loads(line)
        assert f"{row['context']} {row['continuation']}." in statements
    for line in bundle_lines(world, "world_facts_schema"):
        row = json.loads(line)
        told = [f"{context} {row['continuation']}." in statements for context in row["context_options"]]
        assert sum(told) == 1 and told.index(True) == row["gold"]
    for line in bundle_lines(world, "world_facts_zeroshot"):
        row = json.loads(line)
        told = [f"{row['query']} {choice}." in statements for choice in row["choices"]]
        assert sum(told) == 1 and told.index(True) == row["gold"]
