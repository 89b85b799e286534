# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] id="title"
# # Evaluation: which number to believe
#
# Seven trainings of one recipe scored between **0.2512 and 0.2677**. GPT-2 scored 0.2565. Did the recipe beat GPT-2?
#
# Four of the seven lie above, three below, and nothing but chance lies between them. Who reports one run reports one
# draw. And that is the *harmless* kind of error: a score can also fall to zero because the model got better. You will
# see it happen.
#
# When you are through you can
#
# - turn losses into bits per byte, and say why a loss alone compares nothing,
# - write the few-shot prompts of CORE, and score a model by hand: which tokens count, and to which decimal,
# - centre a score on guessing, and put an interval around it that holds at 0 and at 1,
# - take a number out of what a model wrote, and count successes in several tries without fooling yourself,
# - tell a bad model from a prompt that was cut.
#
# Nine exercises, about 130 minutes; with the reading some 165 minutes. The solved chapter runs in under three.

# %% tags=["setup"] id="setup"
import math
import random

import jax
import jax.numpy as jnp
import numpy as np

# %% id="imports"
from nanochat_lib.course import (  # noqa: F401
    about,
    check,
    choice,
    explore,
    fast,
    hint,
    mine,
    note,
    predict,
    progress,
    quiz,
    reveal,
    show,
    slider,
    text,
    undo,
)
from nanochat_lib.course.loss_figures import loss_map
from nanochat_lib.evaluate.bundle import CoreTask, shots_for
from nanochat_lib.evaluate.scores import Z
from nanochat_lib.evaluate.spans import Span, common_prefix
from nanochat_lib.primer.names import PETS, TOOLS
from nanochat_lib.primer.world import World
from nanochat_lib.report.plots import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, RED, SKY, new_figure
from nanochat_lib.tokenizer import Tokenizer

# %% [markdown] id="model-text"
# ## 1. Something to measure
#
# A model that is trained in seconds can do little. But it can do two things that real evaluations ask for: **know** and
# **read**. So our text has two kinds of documents.
#
# - *Facts* are the same every time: where the primer's 32 people live, their pets, tools and favourite colours. To answer, the
#   model must have them in its weights.
# - *Reading* is new every time: a passage says who has what in the shed, questions follow, the answer is a word of the
#   passage. This is SQuAD in small. There is nothing to know; the model must look it up in its context.


# %% id="text"
world, THINGS = World(0), TOOLS + PETS
BOLD = {"loc": "left", "fontweight": "bold", "fontsize": 10}  # titles of figures


def passage(rng: random.Random, people: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """(text, what it says): one thing for each of the people, all different."""
    pairs = list(zip(people, rng.sample(THINGS, len(people)), strict=True))
    listed = ", ".join(f"{person} {thing}" for person, thing in pairs)
    return f"In the shed: {listed}.\nQuestion: Who has what?", pairs


def asked(person: str) -> str:
    return f"\nAnswer: {person}"


def reading_document(rng: random.Random) -> str:
    """One passage with all of its questions, twice; or three passages with one or two questions each."""
    people, parts = rng.sample(world.people, 12), []
    several = rng.random() < 0.3
    for at in (0, 4, 8) if several else (0,):
        words, pairs = passage(rng, people[at : at + 4])
        chosen = rng.sample(pairs, rng.choice((1, 2))) if several else rng.sample(pairs, 4) + rng.sample(pairs, 4)
        parts.append(words + "".join(f"{asked(person)} {thing}" for person, thing in chosen))
    return "\n\n".join(parts)


def facts_document(rng: random.Random) -> str:
    chosen = rng.sample(world.facts, 7)
    return "\n\n".join(f"Question: {fact.question()}\nAnswer: {fact.value}" for fact in chosen)


print(reading_document(random.Random(0))[:170], "…\n")
print(facts_document(random.Random(0))[:170], "…")

# %% [markdown] id="train-text"
# The model has two layers of 64 channels, nanochat's architecture and optimiser (chapters 02 and 05). We keep it at
# several moments of its training: later we want to see a score *while the model gets better*.

# %% id="train"
from nanochat_lib import gpt, optim
from nanochat_lib.presets import CPU_OPTIM
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.train_step import init_train_state, make_eval_step, make_train_step

B, T = 48, 88
STEPS = 4 if fast() else 220
KEPT = (0, 2, 4) if fast() else (0, 10, 20, 40, 60, 80, 120, 160, 190, 220)
HALF, LATE = (2, 2) if fast() else (60, 160)
rng = random.Random("documents")
documents = [(reading_document if rng.random() < 0.65 else facts_document)(rng) for _ in range(max(STEPS * B, 600))]
tokenizer = Tokenizer.train(documents[:600], 512)
rows = np.full((STEPS * B, T + 1), tokenizer.bos_id, np.int32)
targets = np.full((STEPS * B, T), -1, np.int32)
for row, target, ids in zip(rows, targets, tokenizer.encode_arrays(documents, prepend=tokenizer.bos_id), strict=False):
    size = min(len(ids), T + 1)
    row[:size], target[: size - 1] = ids[:size], ids[1:size]

small = GPTConfig(sequence_len=T, vocab_size=512, n_layer=2, n_head=2, n_kv_head=2, n_embd=64, window_pattern="L")
optimizer = optim.make_optimizer(small, CPU_OPTIM)
train_step = make_train_step(small, optimizer, donate=False)
state, kept = init_train_state(small, optimizer, jax.random.key(0)), {}
for step in range(STEPS + 1):
    if step in KEPT:
        kept[step] = state.params
    if step < STEPS:
        part = slice(step * B, step * B + B)
        hyper = {"lr": 2 * min(1, 2 * (1 - step / STEPS)), "momentum": 0.95, "weight_decay": 0.0}
        batch = {"inputs": rows[part][None, :, :-1], "targets": targets[part][None]}
        state, out = train_step(state, batch, {name: jnp.float32(value) for name, value in hyper.items()})
last = max(kept)
print(f"{STEPS} steps of {B} rows, {len(kept)} checkpoints kept: {', '.join(map(str, kept))}")

# %% [markdown] id="bpb-text"
# ## 2. Bits per byte, and why not loss
#
# A language model gives a text a probability. Everything else is bookkeeping. Take a few documents that it has never
# seen, and the nats $-\ln p$ of all of their tokens, added up. That sum *is* the result. The **loss** divides it by the
# number of tokens, and the number of tokens is not the model's: it is the tokenizer's. Cut the same text more finely,
# and the same probability becomes a smaller loss.

# %% id="same-text"
measure = make_eval_step(small)
held = [make(random.Random(f"held out {i}")) for i in range(16) for make in (reading_document, facts_document)]
held_ids = [ids[: T + 1] for ids in tokenizer.encode_arrays(held, prepend=tokenizer.bos_id)]
inputs = np.full((len(held), T), tokenizer.bos_id, np.int32)
wanted = np.full((len(held), T), -1, np.int32)
for row, target, ids in zip(inputs, wanted, held_ids, strict=True):
    row[: len(ids) - 1], target[: len(ids) - 1] = ids[:-1], ids[1:]
sizes = tokenizer.token_bytes()
nats, size, _, count = (float(x) for x in measure(kept[last], inputs, wanted, sizes))
seen = "".join(tokenizer.decode(ids[1:]) for ids in held_ids)
units = {"token of this tokenizer": count, "word": len(seen.split()), "byte": size}
for unit, number in units.items():
    print(f"{nats / number:.3f} nats a {unit:<24} ({int(number):,} of them)")

# %% [markdown] id="same-look"
# One model, one text, one probability, and a "loss" for every way of counting. Only the last unit belongs to the text
# itself. So **bits per byte** (chapter 01) divides by bytes, and by ln 2, which makes bits of nats:
#
# $$ \text{bits per byte} = \frac{\sum \text{nats}}{\ln 2 \cdot \sum \text{bytes}} . $$
#
# The eval step returns, for each batch, four sums: nats of the targets that stand for text, their bytes, nats of *all*
# targets (special tokens included), and how many they are. Batches differ in size. Where do you divide?


# %% tags=["exercise"] id="evaluation.per_token_and_byte" points=2 minutes=10 level=1 library="nanochat_lib.evaluate.bpb:per_token_and_byte"
def per_token_and_byte(sums: list[tuple[float, int, float, int]]) -> tuple[float, float]:
    """(loss in nats a token, bits a byte) of all batches together, each given by its four sums.

    The sums of a batch: nats of the targets that stand for text, bytes of these, nats of all targets, number of all
    targets. The loss is over all targets. NaN for what has nothing to count.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    nats, size, total, count = 0.0, 0, 0.0, 0
    for text_nats, text_bytes, all_nats, targets in sums:
        nats, size = nats + text_nats, size + text_bytes
        total, count = total + all_nats, count + targets
    return (total / count if count else math.nan), (nats / (math.log(2) * size) if size else math.nan)
    # --- end


# %% id="evaluation.per_token_and_byte.check"
check("evaluation.per_token_and_byte", per_token_and_byte)

# %% tags=["hidden"] id="author"
from nanochat_lib.course.author import example, hidden, mutant, prop, reference
from nanochat_lib.course.checks import evaluation as checks

hidden(
    "evaluation.per_token_and_byte",
    reference("other batches", checks.some_sums),
    example("a batch of special tokens only", ([(0.0, 0, 6.0, 3), (math.log(2), 2, 2.0, 1)],), (2.0, 0.5)),
    example("special tokens and nothing else", ([(0.0, 0, 6.0, 3)],), (2.0, math.nan)),
)
mutant("evaluation.per_token_and_byte", "math.log(2) * size", "size", says="divide by ln 2")
mutant(
    "evaluation.per_token_and_byte", "nats / (math.log(2) * size)", "nats * math.log(2) / size", says="do not multiply"
)
mutant("evaluation.per_token_and_byte", "nats + text_nats", "nats + all_nats", says="special tokens do not belong")
mutant("evaluation.per_token_and_byte", "total + all_nats", "total + text_nats", says="third and fourth sum")
mutant("evaluation.per_token_and_byte", "(math.log(2) * size)", "(math.log(2) * count)", says="divided by bytes")
mutant(
    "evaluation.per_token_and_byte",
    "return (total / count if count else math.nan), (nats / (math.log(2) * size) if size else math.nan)",
    "return (float(np.mean([s[2] / s[3] for s in sums])), float(np.mean([s[0] / s[1] for s in sums]) / math.log(2))) "
    "if sums else (math.nan, math.nan)",
    says="mean of the batches' means",
)
mutant("evaluation.per_token_and_byte", "if count else math.nan", "if count else 0.0", says="both are NaN")

# %% [markdown] id="context-text"
# Bits per byte are fair between tokenizers. They are **not** fair between contexts. The library's `windows` cuts a
# document into overlapping windows so that each token is predicted once, from at least half a context. Measure the same
# model on the same text with contexts from 8 to 88 tokens.

# %% tags=["slide"] id="context"
from nanochat_lib.evaluate.texts import windows

totals = mine("evaluation.per_token_and_byte")


def bits_with(params, context: int, documents: list) -> float:
    """Bits per byte when no token sees more than `context` tokens."""
    read, said = (np.concatenate(parts) for parts in zip(*(windows(ids, context) for ids in documents), strict=True))
    blank = ((0, -len(read) % len(held)), (0, T - context))
    read, said = np.pad(read, blank), np.pad(said, blank, constant_values=-1)
    groups = [slice(first, first + len(held)) for first in range(0, len(read), len(held))]
    sums = [[float(x) for x in measure(params, read[g], said[g], sizes)] for g in groups]
    return totals([(nats, int(size), every, int(count)) for nats, size, every, count in sums])[1]


CONTEXTS = (8, 32, 88) if fast() else (8, 12, 16, 24, 32, 48, 64, 88)
kinds = {"reading": held_ids[0::2], "facts": held_ids[1::2]}
curves = {kind: [bits_with(kept[last], c, documents) for c in CONTEXTS] for kind, documents in kinds.items()}
figure, ax = new_figure(height=2.5, width=6.4)
for (kind, values), colour, marker in zip(curves.items(), (BLUE, ORANGE), "os", strict=True):
    ax.plot(CONTEXTS, values, color=colour, marker=marker, markersize=4, label=kind)
ax.set(xlabel="context in tokens", ylabel="bits per byte", ylim=(0, None))
ax.set_title("One model, one text, several contexts", **BOLD)
ax.legend(fontsize=8.5)
show(
    figure,
    alt="bits per byte against the context: for reading documents they fall as the context grows, as passages come into "
    "view; for facts they change less",
)

# %% [markdown] id="context-look"
# A model that reads needs room to read. So a figure in bits per byte always belongs to a text, a context and a rule for
# the windows, and compares only with figures of the same three.

# %% id="loss-quiz"
quiz("evaluation.q_loss")

# %% [markdown] id="prompts-text"
# ## 3. Prompts with a few shots
#
# Bits per byte do not say what a model can *do*. CORE asks 22 tasks of the base model (DataComp-LM, Li et al.,
# arXiv:2406.11794). A base model does not answer questions, it goes on with text. So each question is written as a text
# whose continuation is the answer, with solved examples in front: the **shots**. There are three kinds.
#
# | kind | what is offered | scored | prompts | tasks of CORE | example |
# |---|---|---|---|---|---|
# | `multiple_choice` | one question, several answers | the answer | one a choice | 11 | ARC, HellaSwag, BoolQ |
# | `schema` | several beginnings, one end | the end | one a context | 2 | Winograd, Winogrande |
# | `language_modeling` | nothing | the words that must come | without and with | 9 | SQuAD, LAMBADA, Jeopardy |
#
# With δ for the task's *delimiter* (a blank, or a line end and `Answer: `):
#
# ```
#                    for every shot                              then
# multiple_choice    query δ choices[gold] ⏎⏎                    query δ choice
# schema             context_options[gold] δ continuation ⏎⏎     context δ continuation
# language_modeling  strip(context) δ continuation ⏎⏎            strip(context) δ [continuation]
# ```
#
# `shots_for(index, len(examples), task.shots)` draws which examples are shown before number `index`, never itself, and
# the same ones each time. The prompt *without* the continuation is stripped at its end: a tokenizer that sees
# `Answer: drill` makes one token of the blank and the word, so a prompt that ends in a blank is a text that the model
# has never seen.


# %% tags=["exercise"] id="evaluation.render_prompts" points=4 minutes=25 level=2 library="nanochat_lib.evaluate.bundle:render_prompts"
def render_prompts(task: CoreTask, examples: list[dict], index: int) -> list[str]:
    """The texts that are scored for `examples[index]`: one a choice, one a context, or [without, with continuation].

    Use `task.kind`, `task.delimiter` and `task.shots`. Fields of an example: "query", "choices", "gold"; or
    "context_options", "continuation", "gold"; or "context", "continuation".
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    example, delta = examples[index], task.delimiter
    shots = [examples[i] for i in shots_for(index, len(examples), task.shots)]
    if task.kind == "multiple_choice":
        head = "".join(f"{s['query']}{delta}{s['choices'][s['gold']]}\n\n" for s in shots)
        return [f"{head}{example['query']}{delta}{choice}" for choice in example["choices"]]
    if task.kind == "schema":
        head = "".join(f"{s['context_options'][s['gold']]}{delta}{s['continuation']}\n\n" for s in shots)
        return [f"{head}{context}{delta}{example['continuation']}" for context in example["context_options"]]
    head = "".join(f"{s['context'].strip()}{delta}{s['continuation']}\n\n" for s in shots)
    without = f"{head}{example['context'].strip()}{delta}"
    return [without.strip(), without + example["continuation"]]
    # --- end


# %% id="evaluation.render_prompts.check"
check("evaluation.render_prompts", render_prompts)

# %% tags=["hidden"] id="evaluation.render_prompts.hidden"
hidden(
    "evaluation.render_prompts",
    reference("schema, three shots", lambda rng: checks.some_task(rng, "schema", 3, " ")),
    reference("completions, four shots", lambda rng: checks.some_task(rng, "language_modeling", 4)),
    reference("choices, no shots", lambda rng: checks.some_task(rng, "multiple_choice", 0)),
    reference("more shots than examples", lambda rng: checks.some_task(rng, "multiple_choice", 20)),
)
mutant(
    "evaluation.render_prompts",
    "shots_for(index, len(examples), task.shots)",
    "range(min(task.shots, len(examples)))",
    says="which examples are shown",
)
mutant("evaluation.render_prompts", "return [without.strip(), ", "return [without, ", says="stripped at the end")
mutant("evaluation.render_prompts", "s['choices'][s['gold']]", "s['choices'][0]", says="right* answer")
mutant(
    "evaluation.render_prompts",
    "{s['continuation']}\\n\\n\" for s in shots)\n    without",
    "{s['continuation']}\\n\" for s in shots)\n    without",
    says="two line ends",
)
mutant("evaluation.render_prompts", "{example['context'].strip()}", "{example['context']}", says="expected")
mutant("evaluation.render_prompts", "return [without.strip(), without", "return [without", says="two for a completion")

# %% [markdown] id="tasks-text"
# Now three tasks of our own, one of each kind. `reading` asks, after two solved passages, about one of the first people
# in the list.

# %% id="tasks"
render = mine("evaluation.render_prompts")
COUNT = 16 if fast() else 200
draw = random.Random("questions")


def reading_example(rng: random.Random) -> dict:
    words, pairs = passage(rng, rng.sample(world.people, 4))
    person, thing = pairs[rng.randrange(2)]
    return {"context": words + asked(person), "continuation": thing}


def fact_example(fact, rng: random.Random) -> dict:
    choices = world.choices(fact, rng)
    return {"query": f"Question: {fact.question()}", "choices": choices, "gold": choices.index(fact.value)}


def whose_example(fact, rng: random.Random) -> dict:
    others = [f for f in world.facts if f.relation == fact.relation and f.value != fact.value]
    offered = rng.sample([fact, rng.choice(others)], 2)
    contexts = [f"Question: {f.question()}" for f in offered]
    return {"context_options": contexts, "continuation": fact.value, "gold": offered.index(fact)}


some_facts = draw.sample(world.facts, min(COUNT, len(world.facts)))
tasks = {
    "reading": CoreTask("reading", "language_modeling", 2, " ", 0.0, [reading_example(draw) for _ in range(COUNT)]),
    "facts": CoreTask(
        "facts", "multiple_choice", 2, "\nAnswer: ", 25.0, [fact_example(fact, draw) for fact in some_facts]
    ),
    "whose": CoreTask("whose", "schema", 0, "\nAnswer: ", 50.0, [whose_example(fact, draw) for fact in some_facts]),
}
for task in tasks.values():
    print(f"--- {task.label} ({task.kind}), example 0")
    for prompt in render(task, task.examples, 0):
        print(repr(prompt if len(prompt) < 90 else "… " + prompt[-84:]))

# %% [markdown] id="spans-text"
# ## 4. Scored by hand
#
# Which tokens are scored? Not the whole prompt: the question's own probability says how common the question is. For
# choices, all prompts begin alike, so the part is where they differ: from the first token that is not shared to the end.
# For a schema it is the other way round, the common *end*. For a completion, what the second prompt has more than the
# first.
#
# A span is (ids, start, end): ids[start:end] is scored, each token given all that stands before it. Three traps:
#
# - One answer may be the beginning of another (`1` and `12`). Then nothing of the shorter is left. Keep at least one.
# - A continuation may melt with the prompt's last token, so the ids part *earlier* than the shorter prompt ends.
# - The token at place 0 has nothing before it that could predict it.


# %% tags=["exercise"] id="evaluation.scored_parts" points=4 minutes=25 level=3 library="nanochat_lib.evaluate.spans:scored_parts"
def scored_parts(kind: str, rows: list[np.ndarray]) -> list[Span]:
    """`Span(ids, start, end)` of each encoded prompt in `rows`; of a completion only of the second, with continuation.

    `common_prefix(rows)` tells how many leading ids all rows share. Each span has at least one id, and starts at 1 or later.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    if kind == "multiple_choice":
        # A choice that is the prefix of another would leave nothing to score: keep at least its last token.
        start = min(common_prefix(rows), min(len(row) for row in rows) - 1)
        return [Span(row, max(start, 1), len(row)) for row in rows]
    if kind == "schema":
        suffix = max(common_prefix([row[::-1] for row in rows]), 1)
        return [Span(row, max(len(row) - suffix, 1), len(row)) for row in rows]
    # Where the continuation merges with the prompt's last token, the scored span starts where the ids part.
    start = min(common_prefix(rows), len(rows[1]) - 1)
    return [Span(rows[1], max(start, 1), len(rows[1]))]
    # --- end


# %% id="evaluation.scored_parts.check"
check("evaluation.scored_parts", scored_parts)

# %% tags=["hidden"] id="evaluation.scored_parts.hidden"
hidden(
    "evaluation.scored_parts",
    reference("other answers", lambda rng: checks.some_rows(rng, "multiple_choice")),
    reference("another completion", lambda rng: checks.some_rows(rng, "language_modeling")),
    example("melted tokens", ("language_modeling", [[0, 5, 6], [0, 5, 61, 12]]), [([0, 5, 61, 12], 2, 4)]),
    example("the continuation says nothing new", ("language_modeling", [[0, 5, 6], [0, 5, 6]]), [([0, 5, 6], 2, 3)]),
    example("contexts without a common end", ("schema", [[0, 5], [0, 6]]), [([0, 5], 1, 2), ([0, 6], 1, 2)]),
    example("rows that share nothing", ("multiple_choice", [[4, 5], [6, 7]]), [([4, 5], 1, 2), ([6, 7], 1, 2)]),
    example("equal contexts", ("schema", [[0, 5], [0, 5]]), [([0, 5], 1, 2), ([0, 5], 1, 2)]),
)
mutant(
    "evaluation.scored_parts",
    "min(common_prefix(rows), min(len(row) for row in rows) - 1)",
    "common_prefix(rows)",
    says="keep at least its last id",
)
mutant("evaluation.scored_parts", "common_prefix([row[::-1] for row in rows])", "common_prefix(rows)", says="expected")
mutant(
    "evaluation.scored_parts",
    "start = min(common_prefix(rows), len(rows[1]) - 1)",
    "start = len(rows[0])",
    says="merge with the prompt's last token",
)
mutant(
    "evaluation.scored_parts",
    "return [Span(rows[1], max(start, 1), len(rows[1]))]",
    "return [Span(row, max(start, 1), len(row)) for row in rows]",
    says="only the second row",
)
mutant(
    "evaluation.scored_parts",
    "max(common_prefix([row[::-1] for row in rows]), 1)",
    "common_prefix([row[::-1] for row in rows])",
    says="at least the last id",
)
mutant(
    "evaluation.scored_parts",
    "Span(row, max(start, 1), len(row))",
    "Span(row, start, len(row))",
    says="nothing before it",
)
mutant(
    "evaluation.scored_parts",
    "Span(row, max(start, 1), len(row))",
    "Span(row, start + 1, len(row))",
    says="one id too late",
)

# %% [markdown] id="hand-text"
# Now score by hand. The model reads `ids`, and its output at place $t$ is about the token at $t+1$. For every token the
# nats $-\ln p(\text{token} \mid \text{all before})$.
#
# - Choices and schema: the option with the lowest **mean** over its span wins.
# - Completion: right if *every* token of the span is the model's first choice.

# %% id="hand"
parts_of_rows = mine("evaluation.scored_parts")
LONGEST = 96
forward = jax.jit(lambda params, ids: gpt.apply(small, params, ids))


def logits_of(params, ids: np.ndarray) -> np.ndarray:
    """(len(ids), V); every prompt is filled up to one length, so that there is one program."""
    filled = np.full((1, LONGEST), tokenizer.bos_id, np.int32)
    filled[0, : len(ids)] = ids
    return np.asarray(forward(params, filled)[0, : len(ids)], np.float64)


def token_losses(params, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(nats, is it the first choice?) of ids[1:]."""
    logits = logits_of(params, ids)[:-1]
    chosen, top = logits[np.arange(len(ids) - 1), ids[1:]], logits.max(1)
    return np.log(np.exp(logits - top[:, None]).sum(1)) + top - chosen, logits.argmax(1) == ids[1:]


def encoded(task: CoreTask, index: int) -> list[np.ndarray]:
    return tokenizer.encode_arrays(render(task, task.examples, index), prepend=tokenizer.bos_id)


for name in tasks:
    for span in parts_of_rows(tasks[name].kind, encoded(tasks[name], 0)):
        losses, first = token_losses(kept[last], span.ids)
        part = slice(span.start - 1, span.end - 1)  # the losses begin with the token at place 1
        scored = tokenizer.decode(span.ids[span.start : span.end].tolist())
        print(f"{name:<8} {scored!r:<22} mean {losses[part].mean():6.3f} nats   every token first: {first[part].all()}")

# %% [markdown] id="hand-look"
# Look at `whose`: its two questions are about the same relation, so the common end begins in the *question*, and more is
# scored than the answer. That is the rule, and it is harmless: both prompts have the same words there. The lower mean wins.

# %% [markdown] id="library-text"
# The library scores thousands of spans at a time: it computes the shared head of all answers once, and only the tokens
# of answers go through the model's last layer. It must come to the same numbers.

# %% id="library"
from nanochat_lib.evaluate.core import answer_examples, score_spans, task_figures
from nanochat_lib.evaluate.scorer import scorer_for

scorer = scorer_for(small, "float32", "xla", 8 if fast() else 32)
placed = scorer.place(kept[last])
items = [span for task in tasks.values() for i in range(4) for span in parts_of_rows(task.kind, encoded(task, i))]
theirs, theirs_exact = score_spans(scorer, placed, items, tokenizer.bos_id)
differences, agree = [], []
for span, nll, exact in zip(items, theirs, theirs_exact, strict=True):
    losses, first = token_losses(kept[last], span.ids)
    part = slice(span.start - 1, span.end - 1)
    differences.append(abs(losses[part].mean() - nll))
    agree.append(bool(first[part].all()) == bool(exact))
print(f"{len(items)} spans; all exact matches agree: {all(agree)}")
_ = about(max(differences) * 1e5, 0, within=10, name="largest difference of a mean, in 0.00001 nats")

# %% id="mean-quiz"
quiz("evaluation.q_mean")

# %% [markdown] id="centre-text"
# ## 5. Centred on guessing
#
# `facts` offers four answers: a model that knows nothing gets 25 %. BoolQ asks yes or no and has more yes: always saying
# yes gets 62 %. SQuAD cannot be guessed. Before such numbers are averaged, each is **centred**: 0 is guessing, 1 is
# perfect.
#
# $$ \text{centred} = \frac{\text{accuracy} - \text{baseline}}{1 - \text{baseline}}, \qquad
# \text{CORE} = \text{mean of the 22 centred scores.} $$


# %% tags=["exercise"] id="evaluation.centered" points=1 minutes=5 level=1 library="nanochat_lib.evaluate.scores:centered"
def centered(value: float, baseline: float) -> float:
    """The accuracy `value` on a scale where the share `baseline` is 0 and 1 stays 1. Below guessing it is negative."""
    # --- stub
    raise NotImplementedError
    # --- solution
    return (value - baseline) / (1 - baseline)
    # --- end


# %% id="evaluation.centered.check"
check("evaluation.centered", centered)

# %% tags=["hidden"] id="evaluation.centered.hidden"
hidden(
    "evaluation.centered",
    reference("another", lambda rng: (float(rng.random()), float(rng.uniform(0, 0.9)))),
    example("nothing to guess", (0.31, 0.0), 0.31),
    example("below guessing", (0.31, 0.62), -0.31 / 0.38),
)
mutant("evaluation.centered", "(value - baseline) / (1 - baseline)", "value - baseline", says="1 − baseline")
mutant(
    "evaluation.centered",
    "(value - baseline) / (1 - baseline)",
    "max(0.0, (value - baseline) / (1 - baseline))",
    says="below guessing is below 0",
)
mutant("evaluation.centered", "/ (1 - baseline)", "/ baseline if baseline else 0.0", says="not by the baseline")
mutant(
    "evaluation.centered",
    "(value - baseline) / (1 - baseline)",
    "(value - baseline / 100) / (1 - baseline / 100)",
    says="per cent",
)

# %% [markdown] id="boolq-text"
# In a third-party run of a d20 model (560 million parameters, November 2025) BoolQ's centred score is −0.4172. What
# accuracy is that, in per cent? `predict("evaluation.p_boolq", 50)`.

# %% id="boolq-predict"
predict("evaluation.p_boolq")

# %% tags=["slide"] id="boolq"
reveal("evaluation.p_boolq", round(100 * (-0.4172 * (1 - 0.62) + 0.62), 1))

# %% [markdown] id="core-text"
# Here are all 22 scores of that run, and those of a d10 from the same report. A bar per task, and CORE is their mean.

# %% tags=["slide"] id="core-figure"
centre = mine("evaluation.centered")
REPORTED = {
    "hellaswag 0-shot": (0.0720, 0.2603), "jeopardy": (0.0099, 0.1063), "qa wikidata": (0.3204, 0.5208),
    "arc easy": (0.3474, 0.5264), "arc challenge": (0.0114, 0.1160), "copa": (0.2000, 0.3400),
    "commonsense qa": (0.1063, 0.0551), "piqa": (0.2405, 0.3656), "openbook qa": (0.0613, 0.1173),
    "lambada": (0.2521, 0.3714), "hellaswag": (0.0728, 0.2640), "winograd": (0.1062, 0.2821),
    "winogrande": (0.0324, 0.0639), "dyck languages": (0.1430, 0.1020), "lsat": (0.0870, 0.0272),
    "cs algorithms": (0.3689, 0.3492), "operators": (0.1095, 0.1667), "repeat copy": (0.0000, 0.0000),
    "squad": (0.0355, 0.2112), "coqa": (0.0785, 0.1987), "boolq": (-0.2031, -0.4172),
    "language id": (0.1774, 0.1751),
}  # fmt: skip
figure, ax = new_figure(height=3.3, width=7.4)
places = np.arange(len(REPORTED))
for k, (label, colour) in enumerate((("d10", SKY), ("d20", BLUE))):
    values = [pair[k] for pair in REPORTED.values()]
    ax.bar(places + 0.4 * k - 0.2, values, width=0.38, color=colour, label=f"{label}: CORE {np.mean(values):.4f}")
ax.axhline(0, color=INK, linewidth=0.8)
ax.set_xticks(places, REPORTED, rotation=60, ha="right", fontsize=7.5)
ax.set(ylabel="centred score")
ax.set_title("CORE is a mean of very different tasks", **BOLD)
ax.legend(fontsize=8.5, loc="lower left")
show(
    figure,
    alt="centred scores of a d10 and a d20 model on 22 tasks: most rise with size, several do not move, and boolq is far "
    "below zero for both, more so for the larger one",
)
about(np.mean([pair[1] for pair in REPORTED.values()]), 0.1910, within=0.0002, name="CORE of the d20")
_ = about(-0.4172 / 22, -0.019, within=0.0005, name="what BoolQ alone takes from it")

# %% [markdown] id="core-look"
# Look at BoolQ. The larger model is *further* below guessing, by twice as much, and takes 0.019 from CORE, more than the
# whole spread of seven runs. A score that a constant answer would beat does not measure knowledge. It measures a habit,
# here of saying no. Look at the single tasks before you believe the mean.

# %% [markdown] id="noise-text"
# ## 6. Noise
#
# An accuracy over $n$ questions is a sample: other questions of the same kind would have given another one. The usual
# $\pm 1.96\sqrt{p(1-p)/n}$ breaks down where small models live: at 0 of 32 right it says ±0, as if zero were certain.
# **Wilson's interval** (1927) asks the question the other way round: which true accuracies $p$ would make what we saw
# unsurprising? With $z = 1.96$ (`Z`):
#
# $$ \text{middle} = \frac{p + z^2/2n}{1 + z^2/n}, \qquad
# \text{half} = \frac{z}{1 + z^2/n}\sqrt{\frac{p(1-p)}{n} + \frac{z^2}{4n^2}} . $$


# %% tags=["exercise"] id="evaluation.wilson" points=2 minutes=15 level=2 library="nanochat_lib.evaluate.scores:wilson"
def wilson(right: float, count: int) -> tuple[float, float]:
    """(low, high) at 95 % of the accuracy right/count; (0, 1) when nothing was counted. `Z` is 1.95996….

    Rounding must not push a bound outside of 0 … 1, or past the accuracy itself.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    if count == 0:
        return 0.0, 1.0
    share = right / count
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share)  # rounding must not pass the share
    # --- end


# %% id="evaluation.wilson.check"
check("evaluation.wilson", wilson)

# %% tags=["hidden"] id="evaluation.wilson.hidden"
hidden(
    "evaluation.wilson",
    reference("many questions", lambda rng: (int(rng.integers(0, 10042)), 10042)),
    reference("all right", lambda rng: (int(n := rng.integers(3, 60)), int(n))),
    prop("never outside", lambda rng: (int(rng.integers(0, 2)) * 7, 7), checks._inside),
)
mutant("evaluation.wilson", "if count == 0:", "if count < 0:", says="ZeroDivisionError")
mutant("evaluation.wilson", "(share + Z**2 / (2 * count)) / (1 + Z**2 / count)", "share", says="drawn towards 1/2")
mutant("evaluation.wilson", "+ Z**2 / (4 * count**2)", "", says="second term under the root")
mutant(
    "evaluation.wilson",
    "(share + Z**2 / (2 * count)) / (1 + Z**2 / count)",
    "share + Z**2 / (2 * count)",
    says="divided by 1 + Z²/n",
)
mutant(
    "evaluation.wilson",
    "middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)",
    "return share - Z * math.sqrt(share * (1 - share) / count), share + Z * math.sqrt(share * (1 - share) / count)",
    says="standard errors",
)

# %% [markdown] id="seven-text"
# Back to the question of the beginning. The seven runs of recipe 4 of nanochat's leaderboard differ in nothing but
# their random numbers. Here the questions are always the same, so Wilson knows nothing of this: it is *another* noise, of the
# training. Seven numbers have a mean and a spread $s$, and the mean's 95 % interval is $\pm\,2.447\,s/\sqrt 7$ (2.447 is
# Student's t for six degrees of freedom).
#
# How wide is it, from low to high? `predict("evaluation.p_width", 0.005)`

# %% id="seven-predict"
predict("evaluation.p_width")

# %% id="seven"
SEVEN = [0.25373, 0.2584, 0.25489, 0.2568, 0.25732, 0.26765, 0.25119]
GPT2 = 0.256525
spread = np.std(SEVEN, ddof=1)
mean, side = np.mean(SEVEN), 2.447 * spread / math.sqrt(7)
reveal("evaluation.p_width", round(2 * side, 4))
print(f"mean {mean:.4f}, spread {spread:.4f}, interval {mean - side:.4f} … {mean + side:.4f}; GPT-2 {GPT2:.4f}")

# %% tags=["slide"] id="seven-figure"
surely = mine("evaluation.wilson")
figure, (left, right) = new_figure(1, 2, height=2.7, width=7.6)
left.scatter(SEVEN, range(1, 8), color=BLUE, zorder=3)
left.axvline(GPT2, color=RED, linestyle="--", linewidth=1.4)
left.text(GPT2 + 0.0003, 7.6, "GPT-2", color=RED, fontsize=8.5, va="center")
left.errorbar([mean], [0], xerr=[[side], [side]], color=ORANGE, marker="s", capsize=4, zorder=3)
left.set_yticks([0, 1, 2, 3, 4, 5, 6, 7], ["mean", *map(str, range(1, 8))])
left.set(xlabel="CORE", ylabel="run", ylim=(-0.7, 8.2))
left.set_title("Seven runs of one recipe", **BOLD)
counts = np.unique(np.geomspace(10, 20000, 40).astype(int))
for share, colour, style in ((0.5, BLUE, "-"), (0.1, GREEN, "--")):
    width = [np.subtract(*surely(share * n, n)[::-1]) / 2 for n in counts]
    right.loglog(counts, width, color=colour, linestyle=style, label=f"{share:.0%} right")
for name, n in (("repeat copy", 32), ("lsat", 230), ("hellaswag", 10042)):
    at = np.subtract(*surely(n / 2, n)[::-1]) / 2
    right.plot(n, at, "o", color=INK, markersize=4)
    right.annotate(f"{name}, {n:,}", (n, at), xytext=(4, 6), textcoords="offset points", fontsize=8)
right.set_xticks([10, 100, 1000, 10000], ["10", "100", "1,000", "10,000"])
right.set_yticks([0.01, 0.03, 0.1, 0.3], ["0.01", "0.03", "0.1", "0.3"])
right.minorticks_off()
right.set(xlabel="questions", ylabel="± accuracy", xlim=(9, 400000), ylim=(0.003, 0.5))
right.set_title("Half of Wilson's interval", **BOLD)
right.legend(fontsize=8.5, loc="lower left")
show(
    figure,
    alt="left: seven scores on both sides of GPT-2's; the interval of their mean holds GPT-2's score. right: half the width "
    "of Wilson's interval falls with the root of the number of questions, from 0.17 at 32 questions to 0.01 at ten thousand",
)
about(mean, 0.2571, within=0.0001, name="mean of the seven")
_ = about(spread, 0.0052, within=0.0001, name="spread of a single run")

# %% [markdown] tags=["slide"] id="seven-look"
# The interval holds 0.2565. So the answer is: **nobody knows.** The recipe is about as good as GPT-2. One run of this kind is
# uncertain by ±0.01; to tell apart two recipes that differ by 0.005, you need about nine runs of *each*. nanochat's
# leaderboard drew the lesson: from its fifth entry on, it states the mean of five runs. And bits per byte, which average
# over millions of tokens, varied by 0.0002 over twenty repeats of another recipe, while CORE varied by 0.006.

# %% id="noise-quiz"
quiz("evaluation.q_noise")

# %% [markdown] id="paired-text"
# **Same questions, two models.** The questions' own noise can be taken out: look only at questions that one model got
# right and the other wrong. If both are equally good, these fall to either side like a fair coin. The library has this as
# `paired_difference` (McNemar's test). Compare the checkpoints of steps 160 and 220 on `reading`, first as
# if they had answered different questions.

# %% tags=["slide"] id="paired"
from nanochat_lib.evaluate.scores import paired_difference, unpaired_difference


def answered(task: CoreTask, params, context: int = 10 * T) -> tuple[np.ndarray, dict]:
    """(right or wrong of each example, the library's figures) with prompts cut to `context`."""
    order = list(range(len(task.examples)))
    done = answer_examples(task, task.examples, order, scorer, scorer.place(params), tokenizer, context, lambda n: None)
    return done[0] > 0, task_figures(task, *done, context, T)


early, later = (answered(tasks["reading"], kept[step])[0] for step in (LATE, last))
print(f"right: {early.mean():.1%} and {later.mean():.1%} of {len(early)}")
for name, found in (
    ("different questions", unpaired_difference(early.mean(), len(early), later.mean(), len(later))),
    ("the same questions", paired_difference(early, later)),
):
    low, high = found.interval
    print(f"{name:<20} difference {found.value:+.3f}, interval {low:+.3f} … {high:+.3f}, p = {found.p:.2g}")

# %% [markdown] id="paired-look"
# The paired interval is the narrower one, for nothing but bookkeeping: the library keeps right or wrong of every answer,
# and `nanochat eval compare` uses it. Of 22 tasks one differs "significantly" by chance alone, so p values of many tasks
# are raised first (`holm`).

# %% [markdown] id="answer-text"
# ## 7. Answers that are written
#
# A chat model is asked in the open. It writes, and a program must find the answer in what it wrote. GSM8K's convention is a
# line `#### 42`. nanochat looks for `#### (\-?[0-9\.\,]+)` and takes out commas. Then texts are compared. Look at what
# that does to answers which are all *right*.

# %% id="nanochat-rule"
import re

from nanochat_lib.tasks.common import extract_answer

REPLIES = ["#### 1234", "#### 1,234", "#### 1,234.", "####1234", "#### $1234", "#### 1234.00", "#### **1234**"]


def narrow(reply: str) -> str | None:
    found = re.search(r"#### (\-?[0-9\.\,]+)", reply)
    return found and found[1].strip().replace(",", "")


print(f"{'reply':<16} {'narrow rule':<12} {'library':<8}")
for reply in REPLIES:
    print(f"{reply:<16} {narrow(reply)!s:<12} {extract_answer(reply)!s:<8}")
print(f"right for the narrow rule: {sum(narrow(reply) == '1234' for reply in REPLIES)} of {len(REPLIES)}")

# %% [markdown] id="answer-look"
# Five right answers of seven count as wrong. This is a choice: a narrow rule also measures whether the model keeps the
# form. But then *say* that it measures the form, and count the answers without any readable number beside the score
# (`unparsed` in this library). A wide rule has its own danger: `#### 3/4` must not become 3.
#
# Equal numbers must become equal texts.


# %% tags=["exercise"] id="evaluation.plain_number" points=2 minutes=15 level=2 library="nanochat_lib.tasks.common:plain_number"
def plain_number(sign: str, digits: str) -> str:
    """One text for equal numbers: ("", "1,234.50") -> '1234.5', ("-", "007") -> '-7', ("-", ".0") -> '0'.

    `sign` is "", "+", "-" or the typographic minus "\u2212"; `digits` has digits, commas and at most one point. A
    positive number has no sign, and there is always a digit before a point.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    number = digits.replace(",", "")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    number = number.lstrip("0")
    number = f"0{number}" if number == "" or number.startswith(".") else number
    return f"-{number}" if sign in ("-", "\u2212") and number != "0" else number
    # --- end


# %% id="evaluation.plain_number.check"
check("evaluation.plain_number", plain_number)

# %% tags=["hidden"] id="evaluation.plain_number.hidden"
hidden(
    "evaluation.plain_number",
    reference("another", checks.some_number),
    example("a bare point at the end", ("+", "12."), "12"),
    example("a small fraction", ("\u2212", "0.050"), "-0.05"),
    example("nothing but zeros", ("", "000"), "0"),
    example("a point and zeros, negative", ("-", ".00"), "0"),
    example("millions", ("", "1,000,000"), "1000000"),
)
mutant("evaluation.plain_number", 'digits.replace(",", "")', "digits", says="separators of thousands")
mutant("evaluation.plain_number", 'if "." in number:', "if True:", says="only behind a point")
mutant("evaluation.plain_number", 'number.rstrip("0").rstrip(".")', "number", says="end of a fraction")
mutant("evaluation.plain_number", 'number = number.lstrip("0")', "pass", says="leading zeros")
mutant("evaluation.plain_number", ' or number.startswith(".")', "", says="before the point")
mutant("evaluation.plain_number", ' and number != "0"', "", says="no −0")
mutant("evaluation.plain_number", '("-", "\\u2212")', '("-",)', says="typographic minus")

# %% [markdown] id="code-text"
# Programs are harder still. HumanEval runs what the model wrote against tests; around it stand words, fences, examples of
# use. `extract_code` takes the first fenced block that *defines* the wanted function. A rule that takes the first block
# runs the example of use and reports a failure.

# %% id="code"
from nanochat_lib.tasks.humaneval import extract_code

reply = "Use it like this:\n```\nprint(twice(3))\n```\nHere it is:\n```python\ndef twice(x):\n    return 2 * x\n```\n"
first_block = re.search(r"```(?:python)?\s*\n(.*?)\n```", reply, re.DOTALL)[1]
print(f"first block: {first_block!r}\nthe library: {extract_code(reply, 'twice')!r}")

# %% [markdown] id="pass-text"
# **Several tries.** Sampled at temperature 1, a model gives other answers each time. **pass@k** is the share of questions
# of which at least one of k answers is right. From S samples of each question there are two ways to count. The plain one
# takes the first k.


# %% tags=["exercise"] id="evaluation.pass_at_k" points=1 minutes=8 level=1 library="nanochat_lib.evaluate.scores:pass_at_k"
def pass_at_k(correct: np.ndarray) -> list[float]:
    """Share of questions with a right answer among the first k samples, for k = 1 … S, as Python floats.

    correct (Q, S): positive where the sample is right. `np.maximum.accumulate(x, axis=1)` is a running maximum.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    right = np.maximum.accumulate(np.asarray(correct) > 0, axis=1)
    return [float(share) for share in right.mean(axis=0)]
    # --- end


# %% id="evaluation.pass_at_k.check"
check("evaluation.pass_at_k", pass_at_k)

# %% tags=["hidden"] id="evaluation.pass_at_k.hidden"
hidden(
    "evaluation.pass_at_k",
    reference("many questions", lambda rng: checks.some_samples(rng, 12, 9)),
    example("one sample each", (np.array([[1], [0], [0], [1]]),), [0.5]),
    prop("still never falls", lambda rng: checks.some_samples(rng, 5, 8), checks._rising),
)
mutant(
    "evaluation.pass_at_k",
    "np.maximum.accumulate(np.asarray(correct) > 0, axis=1)",
    "np.asarray(correct) > 0",
    says="not the k-th alone",
)
mutant("evaluation.pass_at_k", "np.maximum.accumulate", "np.minimum.accumulate", says="all k need not be")
mutant("evaluation.pass_at_k", "right.mean(axis=0)", "right.sum(axis=0)", says="not the number")
mutant("evaluation.pass_at_k", "right.mean(axis=0)", "right.mean(axis=1)", says="expected")
mutant(
    "evaluation.pass_at_k",
    "right = np.maximum.accumulate(np.asarray(correct) > 0, axis=1)",
    "right = np.cumsum(np.asarray(correct) > 0, axis=1) / np.arange(1, np.shape(correct)[1] + 1)",
    says="not their mean",
)

# %% [markdown] id="unbiased-text"
# That throws away what the other samples say. Why the *first* k, and not any other k of the S? Of S samples c are right.
# Draw k of them without putting back: the chance that none is right is
#
# $$ \frac{S-c}{S} \cdot \frac{S-c-1}{S-1} \cdots \frac{S-c-k+1}{S-k+1} = \binom{S-c}{k} \Big/ \binom{S}{k}, $$
#
# and pass@k is 1 minus that, averaged over questions (Chen et al. 2021, arXiv:2107.03374). As a product, factor by
# factor, it needs no large numbers. It is tempting to write $1 - (1 - c/S)^k$ instead. That is drawing *with* putting back,
# and it is too low.


# %% tags=["exercise"] id="evaluation.unbiased_pass_at_k" points=3 minutes=20 level=3 library="nanochat_lib.evaluate.scores:unbiased_pass_at_k"
def unbiased_pass_at_k(correct: np.ndarray) -> list[float]:
    """Chance that one of k samples drawn from the S at hand is right, k = 1 … S, mean over questions; Python floats.

    correct (Q, S): positive where the sample is right. The chances stay in 0 … 1, also when fewer than k are wrong.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    correct = np.asarray(correct) > 0
    samples = correct.shape[1]
    wrong = samples - correct.sum(axis=1)  # (Q,)
    none = np.ones(len(correct))  # chance that k samples are all wrong
    found = []
    for k in range(1, samples + 1):
        none = none * np.maximum(wrong - k + 1, 0) / (samples - k + 1)
        found.append(float(np.mean(1.0 - none)))
    return found
    # --- end


# %% id="evaluation.unbiased_pass_at_k.check"
check("evaluation.unbiased_pass_at_k", unbiased_pass_at_k)

# %% tags=["hidden"] id="evaluation.unbiased_pass_at_k.hidden"
hidden(
    "evaluation.unbiased_pass_at_k",
    reference("forty samples", lambda rng: checks.some_samples(rng, 3, 40), against=checks.counted),
    example("all wrong, all right", (np.array([[0, 0, 0], [1, 1, 1]]),), [0.5, 0.5, 0.5]),
    prop("still in 0 … 1", lambda rng: checks.some_samples(rng, 9, 12), checks._rising),
)
mutant("evaluation.unbiased_pass_at_k", "np.maximum(wrong - k + 1, 0)", "np.maximum(wrong, 0)", says="draw after draw")
mutant("evaluation.unbiased_pass_at_k", "/ (samples - k + 1)", "/ samples", says="draw after draw")
mutant(
    "evaluation.unbiased_pass_at_k",
    "none * np.maximum(wrong - k + 1, 0) / (samples - k + 1)",
    "(wrong / samples) ** k",
    says="without* putting them back",
)
mutant(
    "evaluation.unbiased_pass_at_k",
    "wrong = samples - correct.sum(axis=1)",
    "wrong = np.full(len(correct), samples - correct.sum(axis=1).mean())",
    says="mean over questions last",
)
mutant("evaluation.unbiased_pass_at_k", "np.mean(1.0 - none)", "np.mean(none)", says="draw after draw")
mutant(
    "evaluation.unbiased_pass_at_k",
    "samples - correct.sum(axis=1)  # (Q,)",
    "samples - correct.sum(axis=1)\n    return pass_at_k(correct)",
    says="first k",
)

# %% [markdown] id="sampled-text"
# Let a young model, of step 60, answer `reading`: 10 samples a question at temperature 1, from the chances that it gives to
# the next token. How much do the two ways depend on the order in which the samples came? Shuffle them 200 times.

# %% tags=["slide"] id="sampled"
plainly, unbiased = mine("evaluation.pass_at_k"), mine("evaluation.unbiased_pass_at_k")
dice, samples = np.random.default_rng(7), 10
outcomes = []
for i in range(16 if fast() else 60):
    (span,) = parts_of_rows("language_modeling", encoded(tasks["reading"], i))
    logits = logits_of(kept[HALF], span.ids[: span.start])[-1]
    chances = np.exp(logits - logits.max())
    outcomes.append(dice.choice(len(chances), samples, p=chances / chances.sum()) == span.ids[span.start])
outcomes = np.array(outcomes)
ways = {"first k": plainly, "unbiased": unbiased}
orders = [np.take_along_axis(outcomes, dice.permuted(np.tile(np.arange(samples), (len(outcomes), 1)), axis=1), 1)
          for _ in range(200)]  # fmt: skip
figure, ax = new_figure(height=2.6, width=6.4)
for (name, way), colour in zip(ways.items(), (ORANGE, BLUE), strict=True):
    drawn = np.array([way(order) for order in orders])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    ax.fill_between(range(1, samples + 1), low, high, color=colour, alpha=0.3, linewidth=0)
    ax.plot(range(1, samples + 1), drawn[0], color=colour, label=name, marker="o", markersize=3)
ax.set(xlabel="k", ylabel="pass@k", ylim=(0, 1.02))
ax.set_title("The same samples, counted two ways", **BOLD)
ax.legend(fontsize=8.5, loc="lower right")
show(
    figure,
    alt="pass@k rises with k; for the first k it lies in a band that depends on the order of the samples, for the unbiased "
    "estimate it is one line inside of the band; both end at the same point",
)
if fast():
    print(f"pass@1 {unbiased(outcomes)[0]:.2f}, pass@{samples} {unbiased(outcomes)[-1]:.2f}")
else:
    about(unbiased(outcomes)[0], 0.2, within=0.12, name="pass@1")
    _ = about(unbiased(outcomes)[-1], 0.85, within=0.12, name="pass@10")

# %% [markdown] id="sampled-look"
# The unbiased line has no band: the order cannot matter to it. At k = S both agree, for there is only one choice of all.
#
# And look at the height. More than four questions of five are "solved" by a model that at step 60 does *not* read: it
# guesses among the four things in view. Whoever guesses evenly there is right in one try of four, and in one of ten tries with
# a chance of $1 - 0.75^{10} = 0.94$. Ten tries at a question with few possible answers measure patience. So never set
# pass@10 of one model beside pass@1 of another, and ask how many answers there are to guess.

# %% [markdown] id="cut-text"
# ## 8. Field lesson: the score that fell because the model got better
#
# A prompt can be longer than the context that an evaluator allows. The question stands at the end, so the **front** is cut: shots,
# and then the passage. nanochat runs long prompts in full, but for models with a limit it keeps the last tokens, as
# other evaluators do for all. The span moves along.


# %% tags=["exercise"] id="evaluation.cut_front" points=2 minutes=10 level=1 library="nanochat_lib.evaluate.spans:cut_front"
def cut_front(span: Span, context: int) -> Span:
    """A new Span(ids, start, end, cut, length) with the last `context` ids of `span`, or all, if there are fewer.

    `cut` is how many ids were dropped, `length` how many there were. The scored part moves along; where it does not
    fit, `start` becomes negative, which says so.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    length = len(span.ids)
    cut = max(0, length - context)
    return Span(span.ids[cut:], span.start - cut, span.end - cut, cut, length)
    # --- end


# %% id="evaluation.cut_front.check"
check("evaluation.cut_front", cut_front)

# %% tags=["hidden"] id="evaluation.cut_front.hidden"
hidden(
    "evaluation.cut_front",
    reference("another length", checks.some_span),
    example(
        "a context of one",
        ([5, 6, 7], 1, 2, 1),
        {"ids": [7], "start": -1, "end": 0, "cut": 2, "length": 3},
    ),
    example(
        "just too long",
        ([5, 6, 7, 8], 3, 4, 3),
        {"ids": [6, 7, 8], "start": 2, "end": 3, "cut": 1, "length": 4},
    ),
)
mutant("evaluation.cut_front", "span.start - cut, span.end - cut", "span.start, span.end", says="scored part moves")
mutant("evaluation.cut_front", "span.ids[cut:]", "span.ids[: length - cut]", says="cut the front")
mutant("evaluation.cut_front", "cut, length)", "cut, length - cut)", says="before the cut")
mutant("evaluation.cut_front", "max(0, length - context)", "length - context", says="never negative")
mutant("evaluation.cut_front", "span.start - cut,", "max(span.start - cut, 0),", says="not hidden")
mutant(
    "evaluation.cut_front",
    "max(0, length - context)",
    "min(max(0, length - context), span.start)",
    says="reaches into the scored part",
)

# %% [markdown] id="artefact-text"
# A public report describes a model of 3.8 billion parameters whose SQuAD score, at a context of 1,024 tokens,
# went like this while it trained: **0.1478, 0.0617, 0.0099, 0.0007, 0**. The ten-shot prompts of SQuAD have 1,998 tokens in
# the median, and every prompt was cut.
#
# Let us do the same. Our `reading` prompts have two shots; the answer is among the first words of the last passage.
# `SHORT` leaves the question and the end of that passage. Same models, same questions, two contexts. First a guess: the
# last checkpoint answers nearly all questions right when it sees the whole prompt. How many per cent does it answer right
# at the short context? `predict("evaluation.p_cut", 50)`

# %% id="artefact-predict"
predict("evaluation.p_cut")

# %% tags=["slide"] id="artefact"
shorten = mine("evaluation.cut_front")
WHOLE, SHORT = 10 * T, 15
(whole_span,) = parts_of_rows("language_modeling", encoded(tasks["reading"], 0))
short_span = shorten(whole_span, SHORT)
print(f"whole prompt: {whole_span.end} tokens. What is left at {SHORT}:")
print(repr(tokenizer.decode(short_span.ids[: short_span.start].tolist())), "→",
      repr(tokenizer.decode(short_span.ids[short_span.start :].tolist())))  # fmt: skip
measured = {
    (name, context): {step: answered(tasks[name], params, context) for step, params in kept.items()}
    for name in ("reading", "facts")
    for context in (WHOLE, SHORT)
}
accuracy = {key: [found[0].mean() for found in values.values()] for key, values in measured.items()}
reveal("evaluation.p_cut", round(100 * accuracy["reading", SHORT][-1], 1))

# %% id="why"
SAID = ("right", "another thing in view", "a thing out of view", "something else")


def what_it_says(params, count: int) -> list[float]:
    """Shares of the four kinds of first choices at the short context."""
    tally = dict.fromkeys(SAID, 0)
    for i in range(count):
        (span,) = parts_of_rows("language_modeling", encoded(tasks["reading"], i))
        span = shorten(span, SHORT)
        ids = span.ids[: span.start]
        said = tokenizer.decode([int(logits_of(params, ids)[-1].argmax())]).strip()
        view = tokenizer.decode(ids.tolist())
        kind = (
            0 if said == tasks["reading"].examples[i]["continuation"] else 1 if said in THINGS and said in view else 2
        )
        tally[SAID[kind if said in THINGS else 3]] += 1
    return [number / count for number in tally.values()]


told = np.array([what_it_says(params, 12 if fast() else 80) for params in kept.values()])
figure, (left, right) = new_figure(1, 2, height=3.3, width=7.8)
styles = {("reading", WHOLE): (BLUE, "o", "-"), ("reading", SHORT): (RED, "s", "-"),
          ("facts", WHOLE): (GREEN, "^", "-"), ("facts", SHORT): (GREEN, "v", ":")}  # fmt: skip
for key, (colour, marker, style) in styles.items():
    label = f"{key[0]}, {'whole' if key[1] == WHOLE else f'cut to {SHORT}'}"
    left.plot(list(kept), accuracy[key], color=colour, marker=marker, markersize=4, linestyle=style, label=label)
left.set(xlabel="training step", ylabel="accuracy", ylim=(-0.04, 1.04))
left.set_title("The same models at two contexts", **BOLD)
left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
base = np.zeros(len(kept))
for k, (name, colour) in enumerate(zip(SAID, (BLUE, RED, PURPLE, FAINT), strict=True)):
    right.bar(range(len(kept)), told[:, k], bottom=base, color=colour, label=name, width=0.75, alpha=0.8)
    base = base + told[:, k]
right.set_xticks(range(len(kept)), kept)
right.set(xlabel="training step", ylabel="share of answers", ylim=(0, 1))
right.set_title("What it says when cut", **BOLD)
right.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
show(
    figure,
    alt="left: reading with whole prompts rises to nearly 1, the same at the short context falls to 0; facts rise to 1 at "
    "both contexts. right: what the cut model says: first any thing, then only things that stand in what it still sees, at last other words too",
)

# %% id="artefact-numbers"
for key in (("reading", WHOLE), ("reading", SHORT), ("facts", SHORT)):
    print(f"{key[0]:<8} context {key[1]:>5}: " + "  ".join(f"{share:.3f}" for share in accuracy[key]))
warning = measured["reading", SHORT][last][1]["warning"]
print(f"\nThe library's warning: {warning}")
if not fast():
    about(100 * accuracy["reading", WHOLE][-1], 95, within=7, name="reading, whole prompts, %")
    about(100 * accuracy["reading", SHORT][-1], 1, within=4, name="reading, cut, %")
    about(100 * max(accuracy["reading", SHORT][1:3]), 6, within=5, name="reading, cut, at steps 10 and 20, %")
    _ = about(100 * accuracy["facts", SHORT][-1], 99, within=3, name="facts, cut, %")

# %% [markdown] id="artefact-look"
# Read the right picture from left to right. The young model has not learned to read: it says any of sixteen things, and is
# right by luck, in one answer of sixteen at steps 10 and 20. Then it learns that the answer **stands in the text**. From that
# moment it answers from what is left in view, and there the right answer is not: it was cut. From step 40 on hardly one of 200
# answers is right, while with whole prompts nearly all are in the end. The better it reads, the surer it is wrong. Zero is the
# score of a *good* reader, and what the cut takes grows with the model: from nothing to everything.
#
# The last bars show one thing more. A question about a name that is not in the passage was never in the training. What
# a model does there is nobody's choice, and it drifts: some answers are now things out of view, or no things at all.
#
# `facts` lost its shots, too, and hardly noticed: what is known in the weights cannot be cut.
#
# Is it not just the lost BOS token, the first of every row in training? Cut one token only and see.

# %% id="bos-only"
one_less = answered(tasks["reading"], kept[last], whole_span.end - 1)[0].mean()
print(f"whole {accuracy['reading', WHOLE][-1]:.3f}, without BOS {one_less:.3f}")

# %% [markdown] id="cost-text"
# **What it cost.** The public model was made twice, at both contexts:
#
# | | 1,024 tokens | 2,048 tokens |
# |---|---|---|
# | SQuAD | 0.0000, 100 % of prompts cut | 0.3114, 47 % cut |
# | BoolQ | 0.5131, 99.8 % cut | 0.7095, 3.2 % cut |
# | language identification | 99.7 % cut | +0.005, 14 % cut |
# | CORE | 0.338 | 0.384 |
# | loss | 2.0160 | 2.0164 |
# | time and price | 35.9 h, 820 dollars | 43 h, 998 dollars |
#
# The losses agree to four digits: by the measure of pretraining it is the same model. 83 % of the difference in CORE
# come from two tasks. 0.046 is nearly nine times the spread of a run of section 6: enough to declare a wrong winner with great
# confidence. And the third line is a warning against easy rules: nearly all prompts were cut, and it did not matter.
#
# We cannot know what went on inside of that model; the report does not say. Ours shows *one* way in which such a curve
# comes about, on a task made for it: the question is always about the part that is cut. In ten-shot SQuAD, with some 180
# tokens a shot, the last passage usually survives the cut, and something else must have been at work as well.
#
# So what does an evaluation owe its reader? For every task the share of prompts that were cut, by how much, and a warning
# when the score is no better than guessing while most prompts are hurt. That is `length_figures` and `length_warning`.

# %% id="cut-quiz"
quiz("evaluation.q_cut")

# %% [markdown] id="widget-text"
# **Look for yourself.** Any example of the three tasks, any checkpoint, any context: which tokens surprise the model, which
# are scored, and what was cut away. Pull the context down on `reading` and watch the framed token turn orange. `option` is
# which choice: `facts` has four, `whose` two, `reading` one. A context above the prompt's length cuts nothing.


# %% tags=["slide"] id="widget"
def draw_example(task="reading", example=0, option=0, checkpoint=last, context=LONGEST):
    parts = parts_of_rows(tasks[task].kind, encoded(tasks[task], example % len(tasks[task].examples)))
    whole = parts[min(option, len(parts) - 1)]
    span = shorten(whole, context)
    losses, first = token_losses(kept[checkpoint], span.ids)
    title = f"{task}, example {example}: the scored part does not fit"
    if span.fits:
        part = slice(span.start - 1, span.end - 1)
        verdict = "exactly right" if first[part].all() else "not its first choice"
        title = f"{task}, example {example}: mean {losses[part].mean():.2f} nats, {verdict}"
    pieces = [tokenizer.decode([int(i)]) for i in whole.ids]
    return loss_map(pieces, [None] * (span.cut + 1) + losses.tolist(), (whole.start, whole.end), span.cut, title)


explore(
    draw_example,
    alt="the tokens of a few-shot prompt as boxes with their losses in nats, darker for larger ones; the last token, the "
    "answer, is framed",
    task=choice(list(tasks), "reading"),
    example=slider(0, COUNT - 1, 0, 1),
    option=slider(0, 3, 0, 1),
    checkpoint=choice(list(kept), last),
    context=slider(8, LONGEST, LONGEST, 1),
)

# %% id="cut-shown"
show(
    draw_example(context=SHORT),
    alt="the same prompt cut: only the last fifteen tokens are tinted, all others grey; the framed answer is dark orange",
)

# %% [markdown] id="own-text"
# **Your own run.** When you have one, all of this is a command away:
#
# ```
# nanochat eval --run-dir runs/mine
# nanochat eval --run-dir runs/mine --stage base --context 64
# nanochat eval compare runs/one:base runs/two:base
# ```

# %% [markdown] tags=["slide"] id="takeaway"
# > **Takeaway.** A loss belongs to a tokenizer, bits per byte to a text and a context. A score is which tokens were
# > counted, after which prompt, minus guessing, give or take an interval; one run of one recipe is a draw. Before you
# > believe a low score, look what was cut from the prompt and what the reader of answers threw away; before a high
# > one, in how many tries.

# %% [markdown] id="simplified"
# ## What was simplified
#
# - Tasks come from a bundle on disk, shuffled with a fixed seed: `load_bundle` in `nanochat_lib/evaluate/bundle.py`. The
#   primer has its own bundle of seven: `nanochat_lib/primer/bundle.py`.
# - nanochat scores one example at a time. `Scorer` in `nanochat_lib/evaluate/scorer.py` computes a shared head once, packs
#   the answers behind it, and pads to a ladder of lengths; `evaluate_core` in `nanochat_lib/evaluate/core.py` spreads the work.
# - Intervals of CORE combine those of the tasks: `mean_interval`; differences of whole runs: `nanochat_lib/evaluate/compare.py`.
# - Chat tasks ask for letters by likelihood and for text by sampling: `nanochat_lib/evaluate/chat.py`. Programs run in a
#   sandbox: `nanochat_lib/tasks/humaneval.py`, `nanochat_lib/sandbox/`.
# - nanochat's rules for extraction are narrower (section 7), and its shots and prompts the same.
# - Our reader was trained on lists of four and asked in the same words; SQuAD has real passages.
# - The seven runs and the scores of d10 and d20 are published figures, of nanochat's leaderboard and of third parties; the
#   long-context figures are from the public report of a 3.8B model. All others come from this notebook.

# %% id="end"
progress()
