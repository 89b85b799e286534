"""What a run's chat stages read: mixtures by name, their sizes and order, missing data, identity conversations."""

import json
from collections import Counter

import chat_sets
import pytest

from nanochat_lib import chat_data, identity
from nanochat_lib.chat_data import ChatData
from nanochat_lib.cli import main
from nanochat_lib.conversation import check_conversation
from nanochat_lib.errors import UserError
from nanochat_lib.hub.sets import path_of
from nanochat_lib.presets import CPU, PRESETS, override
from nanochat_lib.schedules import sft_schedule
from nanochat_lib.sft import stage_rates
from nanochat_lib.tasks.custom_json import CustomJSON

HISTORIC = {"sft.mixture": "nanochat-historic", "sft.words": "words.txt"}


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("\n".join(a + b + c for a in "bcdfg" for b in "aeiou" for c in "lmnpr"))
    return tmp_path


def shares(config, stage: str = "sft") -> dict[str, int]:
    return dict(Counter((task.name, len(task)) for task in ChatData(config).mixture(stage).tasks))


def test_mixtures_hold_what_they_say(base, monkeypatch):
    chat_sets.put_all(talks=30, questions=20)
    identity.write(path_of("identity"), "Ada", "us", count=7)
    nanochat = override(CPU, {"sft.mixture": "nanochat"})
    assert shares(nanochat) == {("SmolTalk", 30): 1, ("MMLU", 20): 3, ("GSM8K", 20): 4}
    fewer = override(nanochat, {"sft.mmlu_copies": 0, "sft.gsm8k_copies": 1})
    assert shares(fewer) == {("SmolTalk", 30): 1, ("GSM8K", 20): 1}
    historic = shares(override(CPU, HISTORIC))
    more = {("CustomJSON", 7): 2, ("SimpleSpelling", 200_000): 1, ("SpellingBee", 80_000): 1}
    assert historic == shares(nanochat) | more
    presets = {"mid.mixture": "nanochat-historic", "mid.words": "words.txt"}
    assert shares(override(CPU, presets), "mid") == more | {("SmolTalk", 30): 1, ("MMLU", 20): 1, ("GSM8K", 20): 1}
    monkeypatch.setitem(chat_data.AFTER_MID, "SmolTalk", 25)
    preset = PRESETS["gpu-8-d24-midtrain"]
    assert shares(override(preset, {"sft.words": "words.txt"})) == {
        ("ARC-Easy", 12): 1, ("ARC-Challenge", 12): 1, ("GSM8K", 20): 1, ("SmolTalk", 25): 1, ("CustomJSON", 7): 1,
        ("SimpleSpelling", 300): 1, ("SpellingBee", 300): 1,
    }  # fmt: skip
    held_out = ChatData(nanochat).held_out()
    assert [(task.name, len(task)) for task in held_out.tasks] == [("SmolTalk", 12), ("MMLU", 12), ("GSM8K", 12)]
    assert [task.stop for task in held_out.tasks] == [None, 5200, 420]
    for mixture in (ChatData(override(CPU, HISTORIC)).mixture(), held_out):
        for i in range(0, len(mixture), max(len(mixture) // 40, 1)):
            check_conversation(mixture[i])


def test_training_never_reads_a_test_split(base):
    chat_sets.put_all()
    identity.write(path_of("identity"), "Ada", "us", count=3)
    trained = set()
    for name in ("nanochat", "nanochat-historic", "nanochat-after-mid"):
        mixture = ChatData(override(CPU, HISTORIC | {"sft.mixture": name})).mixture()
        trained |= {task.rows.folder.as_posix() for task in mixture.tasks if hasattr(task, "rows")}
    assert {folder.rsplit("/", 1)[1] for folder in trained} == {"train", "auxiliary_train"}
    data = ChatData(override(CPU, {"sft.mixture": "nanochat", "rl.task": "gsm8k", "evaluation.run_code": "limits"}))
    judged = [*data.eval_tasks().values(), *data.held_out().tasks, data.rl_task("test")]
    assert {task.rows.folder.name for task in judged} == {"test"} and data.rl_task("train").rows.folder.name == "train"


def test_the_chat_evaluation_follows_the_mixture(base):
    chat_sets.put_all()
    nanochat = override(CPU, {"sft.mixture": "nanochat"})
    plain = ["ARC-Easy", "ARC-Challenge", "MMLU", "GSM8K"]
    assert list(ChatData(nanochat).eval_tasks()) == plain
    assert "evaluation.run_code" in ChatData(nanochat).left_out()["HumanEval"]
    allowed = override(nanochat, {"evaluation.run_code": "namespaces"})
    assert list(ChatData(allowed).eval_tasks()) == [*plain, "HumanEval"] and not ChatData(allowed).left_out()
    assert ChatData(allowed).eval_tasks()["HumanEval"].run_code == "namespaces"
    spelling = ChatData(override(allowed, HISTORIC)).eval_tasks()
    assert list(spelling) == [*plain, "HumanEval", "SpellingBee"]
    assert len(spelling["SpellingBee"]) == 256 and spelling["SpellingBee"].split == "test"
    assert list(ChatData(CPU).eval_tasks())[0] == "primer-choice-text" and not ChatData(CPU).left_out()
    for data in (ChatData(allowed), ChatData(CPU)):
        questions = data.sample_questions()
        assert len(questions) > 4 and all(q["messages"][0]["role"] == "user" for q in questions)
        for question in questions:
            check_conversation(question)


@pytest.mark.parametrize(
    ("stage", "changes", "words"),
    [
        ("sft", {"sft.mixture": "nanochat"}, "not here: run `nanochat data get smoltalk mmlu gsm8k`"),
        ("mid", {"mid.mixture": "nanochat"}, "mid.mixture nanochat needs data that are not here"),
        ("sft", HISTORIC, "--name MODEL --maker YOU`, or leave them out with -s sft.identity_copies=0"),
        ("sft", HISTORIC | {"sft.identity_copies": 0}, "nanochat data get smoltalk mmlu gsm8k"),
        ("sft", HISTORIC | {"sft.identity": "none.jsonl"}, "none.jsonl is not there"),
        ("rl", {"rl.task": "gsm8k"}, "rl.task gsm8k needs data that are not here: run `nanochat data get gsm8k`"),
        ("eval_chat", {"sft.mixture": "nanochat"}, "the chat evaluation needs"),
        ("eval_chat", {"sft.mixture": "nanochat", "evaluation.run_code": "limits"}, "get arc mmlu gsm8k humaneval`"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_with_the_command(base, stage, changes, words):
    with pytest.raises(UserError) as e:
        chat_data.check(override(CPU, changes), stage)
    assert words in str(e.value) and "\n" not in str(e.value)


def test_nothing_is_missing(base):
    chat_data.check(CPU, "mid", "sft", "rl", "eval_chat")
    chat_sets.put_all()
    chat_data.check(override(CPU, {"sft.mixture": "nanochat", "rl.task": "gsm8k"}), "mid", "sft", "rl", "eval_chat")
    (path_of("mmlu") / "all/auxiliary_train/manifest.json").unlink()
    with pytest.raises(UserError, match="data get mmlu`"):
        chat_data.check(override(CPU, {"sft.mixture": "nanochat"}), "sft")
    chat_data.check(override(CPU, {"sft.mixture": "nanochat", "sft.mmlu_copies": 0}), "sft")


def test_a_person_s_own_files_are_part_of_a_stage(base):
    config = override(CPU, HISTORIC | {"sft.identity": "own.jsonl", "rl.reward": "exact+0.5*mine.py:short"})
    whole = chat_data.with_whole_paths(config)
    assert (whole.sft.identity, whole.sft.words) == (str(base / "own.jsonl"), str(base / "words.txt"))
    assert whole.rl.reward == f"exact+0.5*{base}/mine.py:short" and whole.mid == config.mid
    (base / "own.jsonl").write_text("a")
    first = chat_data.fingerprint(whole.sft)
    (base / "own.jsonl").write_text("b")
    second = chat_data.fingerprint(whole.sft)
    (base / "words.txt").write_text("b")
    assert len({first, second, chat_data.fingerprint(whole.sft)}) == 3
    assert chat_data.fingerprint(CPU.sft) is None


def test_midtraining_of_2025():
    """All tokens, rates of its own that stay until four fifths and fall to zero; SFT then begins at 2 % of them."""
    mid, sft = PRESETS["gpu-8-d24-midtrain"].mid, PRESETS["gpu-8-d24-midtrain"].sft
    for stage, factor in ((mid, 1.0), (sft, 0.02)):
        rates = stage_rates(stage, PRESETS["gpu-8-d24-midtrain"].pretrain.optim)
        assert (rates.embedding_lr, rates.unembedding_lr, rates.matrix_lr, rates.scalar_lr) == (0.2, 0.004, 0.02, 0.5)
        assert stage.lr_frac == factor and not stage.warm_start
    assert [sft_schedule(p, 0, mid).lr for p in (0, 0.5, 0.8, 0.9, 1)] == pytest.approx([1, 1, 1, 0.5, 0])
    assert [sft_schedule(p, 0, sft).lr for p in (0, 0.5, 1)] == pytest.approx([0.02, 0.01, 0])
    assert mid.all_tokens and mid.batch_tokens == 524288 and not sft.all_tokens
    head = PRESETS["gpu-8-d24"]
    assert stage_rates(head.sft, head.pretrain.optim) == head.pretrain.optim and head.sft.lr_frac == 0.8
    assert (head.sft.mixture, head.sft.mmlu_copies, head.sft.gsm8k_copies, head.rl.task) == ("nanochat", 3, 4, "gsm8k")
    assert not head.has_mid and PRESETS["gpu-8-d24-midtrain"].has_mid


# ---- identity conversations


def test_identity_conversations_are_whole_different_and_the_same_each_time():
    made = identity.conversations("Ada Test", "our class")
    assert len(made) == 1000 and len({json.dumps(c) for c in made}) == 1000
    assert made == identity.conversations("Ada Test", "our class") and made[:300] == identity.conversations(
        "Ada Test", "our class", 300
    )
    assert made[:50] != identity.conversations("Ada Test", "our class", 50, seed=1)
    for messages in made:
        check_conversation({"messages": messages})
        assert messages[-1]["role"] == "assistant"
        assert all(m["content"].strip() and m["content"].isascii() for m in messages)
        assert not any("{" in m["content"] or "}" in m["content"] for m in messages)
    said = " ".join(m["content"] for c in made for m in c if m["role"] == "assistant")
    assert said.count("Ada Test") > 100 and said.count("our class") > 50 and ". our class" not in said
    assert len({c[0]["content"] for c in made}) > 700, "too many begin alike"
    assert set(Counter(len(c) for c in made)) == {2, 4, 6, 8}


def test_every_topic_persona_and_course_of_a_conversation_occurs():
    asked = " ".join(m["content"].lower() for c in identity.conversations("A", "b", 3000) for m in c)
    for topic in (topic for topics in identity.TOPICS.values() for topic in topics):
        assert all(ask.lower().rstrip("?.") in asked for ask in topic.asks), topic.asks
        assert len(topic.asks) >= 3 and len(topic.answers) >= 3
    for persona in identity.PERSONAS.values():
        assert all(words.lower().rstrip(".!") in asked for words in persona.before)
    assert (len(identity.TOPICS), len(identity.PERSONAS), len(identity.DYNAMICS)) == (9, 12, 10)


def test_names_may_hold_anything_printable():
    for name, maker in (("{maker}", "{0}"), ("Zoë", "Škola"), ('"', "\\")):
        text = " ".join(m["content"] for c in identity.conversations(name, maker, 200) for m in c)
        assert name in text and (maker in text or maker.capitalize() in text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--name", " ", "--maker", "us"), "--name ' ' must be 1 to 100 printable characters"),
        (("--name", "A", "--maker", "x" * 101), "--maker"), (("--name", "A\nB", "--maker", "us"), "printable"),
        (("--name", "A", "--maker", "us", "--count", "0"), "--count 0 must be at least 1"),
    ],
)  # fmt: skip
def test_the_command_refuses_in_one_line(base, capsys, options, words):
    assert main(["data", "identity", *options]) == 2
    assert words in capsys.readouterr().err
    assert not path_of("identity").exists()


def test_the_command_writes_where_the_mixture_looks(base, capsys):
    argv = ["data", "identity", "--name", "Ada", "--maker", "us", "--count", "20"]
    assert main(argv) == 0 and "20 conversations of Ada" in capsys.readouterr().out
    task = CustomJSON(path_of("identity"))
    assert [c["messages"] for c in task] == identity.conversations("Ada", "us", 20)
    assert main(argv) == 2 and "--force" in capsys.readouterr().err
    assert main([*argv, "--force", "--seed", "1"]) == 0
    assert [c["messages"] for c in CustomJSON(path_of("identity"))] == identity.conversations("Ada", "us", 20, seed=1)
    assert main([*argv, "--out", str(base / "deep" / "own.jsonl")]) == 0 and (base / "deep" / "own.jsonl").exists()
