"""Which conversations a run trains and is judged on: the primer's, which need nothing, or nanochat's from the hub.

    primer              spelling, sums, questions with choices about the invented world
    nanochat            July 2026: SmolTalk, MMLU's training questions 3 times, GSM8K 4 times (790 thousand)
    nanochat-historic   until then: identity conversations and spelling besides (1.07 million; 848 thousand for `mid`)
    nanochat-after-mid  the small mixture that followed midtraining in 2025 (22 thousand)

Nothing is read before a conversation is asked for, and only that one.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nanochat_lib import rewards
from nanochat_lib.errors import UserError
from nanochat_lib.presets import RunConfig, SFTConfig
from nanochat_lib.storage import sha256_file

if TYPE_CHECKING:
    from nanochat_lib.primer.world import World
    from nanochat_lib.tasks.common import Conversation, Task, TaskMixture

SIMPLE_SPELLING, SPELLING_BEE = 200_000, 80_000  # conversations of nanochat-historic
AFTER_MID = {"SmolTalk": 10_000, "SimpleSpelling": 300, "SpellingBee": 300}
MMLU_HELD_OUT, GSM8K_HELD_OUT = 5200, 420  # of the validation mixture, about the shares of training
SPELLING_TEST = 256
GREETING = {"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": ""}]}
READABLE = 300  # characters of a question whose answer a person may want to read


def splits_of(stage: SFTConfig) -> dict[str, tuple[str, ...]]:
    """{data set: splits} that a nanochat mixture reads, training and validation."""
    splits = {"smoltalk": ("default/train", "default/test"), "mmlu": ("all/test",), "gsm8k": ("main/test",)}
    if stage.mmlu_copies and stage.mixture != "nanochat-after-mid":
        splits["mmlu"] += ("all/auxiliary_train",)
    if stage.gsm8k_copies:
        splits["gsm8k"] += ("main/train",)
    if stage.mixture == "nanochat-after-mid":
        splits["arc"] = ("ARC-Easy/train", "ARC-Challenge/train")
    return splits


def identity_file(stage: SFTConfig) -> Path:
    """Where the identity conversations of a stage lie, there or not."""
    from nanochat_lib.hub.sets import path_of

    return Path(stage.identity).expanduser() if stage.identity else path_of("identity")


def wants_identity(stage: SFTConfig) -> bool:
    return stage.mixture in ("nanochat-historic", "nanochat-after-mid") and stage.identity_copies > 0


def check(config: RunConfig, *stages: str) -> None:
    """Raises UserError, with the command that fetches them, when data of these chat stages are not on this machine.

    `stages` are of mid, sft, rl, eval_chat. The stages before them run all the same.
    """
    from nanochat_lib.tasks.rows import lacking

    needs: dict[str, dict[str, tuple[str, ...]]] = {}
    for name in stages:
        stage = getattr(config, name, None)
        if name in ("mid", "sft") and stage.mixture not in ("none", "primer"):
            needs[f"{name}.mixture {stage.mixture}"] = splits_of(stage)
            if wants_identity(stage) and not identity_file(stage).is_file():
                raise UserError(
                    f"{name}.mixture {stage.mixture} has identity conversations, and {identity_file(stage)} is not "
                    "there: run `nanochat data identity --name MODEL --maker YOU`, or leave them out with "
                    f"-s {name}.identity_copies=0"
                )
        elif name == "rl":
            rewards.check(config.rl.reward)
            if config.rl.task == "gsm8k":
                needs["rl.task gsm8k"] = {"gsm8k": ("main/train", "main/test")}
        elif name == "eval_chat" and config.sft.mixture != "primer":
            judged = {"arc": ("ARC-Easy/test", "ARC-Challenge/test"), "mmlu": ("all/test",), "gsm8k": ("main/test",)}
            if config.evaluation.run_code != "no":
                judged["humaneval"] = ("openai_humaneval/test",)
            needs["the chat evaluation"] = judged
    for what, splits in needs.items():
        if lost := lacking(splits):
            raise UserError(f"{what} needs data that are not here: run `nanochat data get {' '.join(lost)}`")


def with_whole_paths(config: RunConfig) -> RunConfig:
    """`config` with the files that its chat stages name by their whole paths."""

    def whole(path: str) -> str:
        return str(Path(path).expanduser().absolute()) if path else ""

    stages = {
        name: replace(stage, identity=whole(stage.identity), words=whole(stage.words))
        for name, stage in (("mid", config.mid), ("sft", config.sft))
    }
    return replace(config, **stages, rl=replace(config.rl, reward=rewards.absolute(config.rl.reward)))


def fingerprint(stage: SFTConfig) -> str | None:
    """sha256 of a person's own files that a stage reads, None when there are none: other files, another stage."""
    files = [identity_file(stage)] if wants_identity(stage) else []
    files += [Path(stage.words).expanduser()] if stage.words and stage.mixture not in ("primer", "nanochat") else []
    return hashlib.sha256("".join(map(sha256_file, files)).encode()).hexdigest() if files else None


class ChatData:
    """The conversations of a run. Raises UserError when data are missing."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @cached_property
    def world(self) -> World:
        from nanochat_lib.primer.world import World

        return World(self.config.seed)

    def mixture(self, stage: str = "sft") -> TaskMixture:
        """What the stage "mid" or "sft" trains on."""
        settings: SFTConfig = getattr(self.config, stage)
        if settings.mixture == "primer":
            from nanochat_lib.tasks.primer import sft_mixture

            return sft_mixture(self.world, settings.conversations)
        from nanochat_lib.tasks.common import TaskMixture

        return TaskMixture(nanochat_tasks(settings))

    def held_out(self, stage: str = "sft") -> TaskMixture:
        """What its loss is measured on."""
        if getattr(self.config, stage).mixture == "primer":
            from nanochat_lib.tasks.primer import sft_validation

            return sft_validation(self.world)
        from nanochat_lib.tasks.choices import MMLU
        from nanochat_lib.tasks.common import TaskMixture
        from nanochat_lib.tasks.gsm8k import GSM8K
        from nanochat_lib.tasks.smoltalk import SmolTalk

        return TaskMixture([SmolTalk("test"), MMLU("test", stop=MMLU_HELD_OUT), GSM8K("test", stop=GSM8K_HELD_OUT)])

    def rl_task(self, split: str) -> Task:
        """The questions of reinforcement learning, of "train" or "test"; the two share none."""
        if self.config.rl.task == "gsm8k":
            from nanochat_lib.tasks.gsm8k import GSM8K

            return GSM8K(split)
        from nanochat_lib.tasks.primer import rl_task

        return rl_task(self.config.rl.task, self.world, split)

    def eval_tasks(self) -> dict[str, Task]:
        """{name: task} of the chat evaluation, which follow from what SFT trained on. See `left_out`."""
        settings = self.config.sft
        if settings.mixture == "primer":
            from nanochat_lib.tasks.primer import chat_eval_tasks

            return chat_eval_tasks(self.world)
        from nanochat_lib.tasks.choices import ARC, MMLU
        from nanochat_lib.tasks.gsm8k import GSM8K
        from nanochat_lib.tasks.humaneval import HumanEval
        from nanochat_lib.tasks.spelling import SpellingBee

        tasks: list[Task] = [ARC("Easy", "test"), ARC("Challenge", "test"), MMLU("test"), GSM8K("test")]
        if self.config.evaluation.run_code != "no":
            tasks.append(HumanEval(self.config.evaluation.run_code))
        if settings.mixture != "nanochat":
            tasks.append(SpellingBee(SPELLING_TEST, "test", settings.words))
        return {task.name: task for task in tasks}

    def left_out(self) -> dict[str, str]:
        """{task: why} of the tasks that nanochat evaluates and this run does not."""
        if self.config.sft.mixture == "primer" or self.config.evaluation.run_code != "no":
            return {}
        why = "it runs programs that the model wrote; allow it with -s evaluation.run_code=namespaces (docs/sandbox.md)"
        return {"HumanEval": why}

    def sample_questions(self) -> list[Conversation]:
        """A few held-out questions whose answers are worth reading."""
        if self.config.sft.mixture == "primer":
            from nanochat_lib.tasks.primer import sample_questions

            return sample_questions(self.world)
        from nanochat_lib.tasks.choices import ARC
        from nanochat_lib.tasks.gsm8k import GSM8K
        from nanochat_lib.tasks.smoltalk import SmolTalk

        firsts = [GREETING]
        for task in (SmolTalk("test", stop=50), ARC("Easy", "test", stop=50), GSM8K("test", stop=50)):
            asked = (first_turn(conversation) for conversation in task)
            short = [c for c in asked if c is not None and len(c["messages"][0]["content"]) <= READABLE]
            firsts += short[:2]
        return firsts


def first_turn(conversation: Conversation) -> Conversation | None:
    """The first question and its answer alone; None where a system message sets the scene."""
    messages = conversation["messages"]
    return None if messages[0]["role"] == "system" else {**conversation, "messages": messages[:2]}


def nanochat_tasks(settings: SFTConfig) -> list[Task]:
    """The tasks of a nanochat mixture; one that is listed n times counts n times."""
    from nanochat_lib.tasks.choices import ARC, MMLU
    from nanochat_lib.tasks.custom_json import CustomJSON
    from nanochat_lib.tasks.gsm8k import GSM8K
    from nanochat_lib.tasks.smoltalk import SmolTalk
    from nanochat_lib.tasks.spelling import SimpleSpelling, SpellingBee

    gsm8k = [GSM8K("train")] * settings.gsm8k_copies if settings.gsm8k_copies else []
    identity = [CustomJSON(identity_file(settings))] * settings.identity_copies if wants_identity(settings) else []
    if settings.mixture == "nanochat-after-mid":
        return [
            ARC("Easy", "train"),
            ARC("Challenge", "train"),
            *gsm8k,
            SmolTalk("train", stop=AFTER_MID["SmolTalk"]),
            *identity,
            SimpleSpelling(AFTER_MID["SimpleSpelling"], words=settings.words),
            SpellingBee(AFTER_MID["SpellingBee"], words=settings.words),
        ]
    mmlu = [MMLU("auxiliary_train")] * settings.mmlu_copies if settings.mmlu_copies else []
    tasks = [SmolTalk("train"), *mmlu, *gsm8k]
    if settings.mixture == "nanochat-historic":
        tasks += identity
        tasks.append(SimpleSpelling(SIMPLE_SPELLING, words=settings.words))
        tasks.append(SpellingBee(SPELLING_BEE, words=settings.words))
    return tasks
