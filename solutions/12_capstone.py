# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] id="title"
# # Capstone: from raw text to a chat
#
# How much text, how many numbers and how many minutes does it take until a pile of random weights answers a question?
#
# This notebook does the whole path once, with the same components that train large models, small enough for a laptop:
#
# | stage | what goes in | what comes out |
# |---|---|---|
# | tokenizer | text | a vocabulary of text pieces |
# | pretraining | documents | a **base** model that continues text |
# | base evaluation | few-shot tasks | CORE, a score that guessing cannot raise |
# | SFT | conversations | a model that **answers** |
# | RL | questions with a checkable answer | a model that answers **right more often** |
# | chat evaluation | unseen questions | a score for each of the three models |
#
# You will
#
# - choose a preset, and which functions of the pipeline are **your own**,
# - see before the run what it needs,
# - run it, read its report, and talk to the model,
# - take the model away in nanochat's own format,
# - and know the commands that do the same on a GPU node and on a TPU.
#
# Run it from top to bottom. With the preset `cpu` it takes about ten minutes on two cores. You may stop at any time:
# started again, it reuses every stage that is finished and continues a stage that is not.

# %% [markdown] id="about-parameters"
# ## What to run
#
# A *preset* fixes every size of a run. `cpu` learns something at every stage; `cpu-smoke` only shows in a minute or
# two that every stage works. `overrides` changes single settings of the preset, for example
# `pretrain.steps=100 rl.steps=20`. Change the values below, or give them from outside:
# `papermill 12_capstone.ipynb out.ipynb -p preset cpu-smoke -p seed 1`.

# %% tags=["parameters"] id="parameters"
preset: str = "cpu"  # name of the preset; `nanochat presets` lists them
run_dir: str = ""  # folder of the run; empty: runs/<preset> in the course's folder
overrides: str = ""  # single settings to change, written as in the text above
seed: int = 0  # seed of data, weights and sampling
corpus: str = ""  # your own text to train on (.txt, .jsonl, .parquet or a folder of these); empty: the preset's
mine: str = ""  # exercises whose functions of yours to use, with commas between them, or "all"; empty: the library's

# %% [markdown] id="about-check"
# Every parameter is checked now, not after an hour of training. Then the run's folder is opened (or created); all
# that the run computes is kept there.

# %% id="open"
from itertools import islice

import numpy as np

from nanochat_lib import pipeline
from nanochat_lib.course import choice, explore, predict, quiz, reveal
from nanochat_lib.course.parameters import check_parameters, project_root
from nanochat_lib.report import bars, plots, read_metrics, strips, tables
from nanochat_lib.report.show import show

config = check_parameters(globals())
folder = project_root() / (run_dir or pipeline.default_run_dir(config))
run = pipeline.open_run(folder, config, mine=mine)


def metrics():
    """What the run has logged so far, one record a line of metrics.jsonl."""
    return read_metrics(run.dir / "metrics.jsonl")[0]


print(f"{config.preset}: {config.about}\nseed {config.seed}, run folder {run.dir.name}")

# %% [markdown] id="parts-title"
# ## Which parts are yours
#
# In the chapters you wrote functions of this library: merging tokens, rotating queries, Muon's step, the loss, the
# advantage. With `mine = "all"` this run puts those that pass into the library's place, before anything is compiled. With
# `mine = "tokenizer.merge,rl.advantages"` it takes only these. The table counts them, chapter by chapter.

# %% id="parts"
from nanochat_lib.course.standing import parts_table

parts_table(run.dir)

# %% [markdown] id="parts-rule"
# A function that no longer passes its checks is left out, with a line saying so. A run that has begun keeps its choice:
# half a run with other code would be nobody's. `quiz("capstone.q_mine")`

# %% id="parts-quiz"
quiz("capstone.q_mine")

# %% [markdown] id="preflight-title"
# ## Pre-flight
#
# What will this need? Before a second is spent, sizes alone say how much memory a step holds and how fast it can be at
# best: no program does its products faster than the machine's peak.

# %% id="preflight"
from nanochat_lib.preflight import preflight
from nanochat_lib.preflight.page import page

print(page(preflight(config, compile_it=False)))

# %% [markdown] id="preflight-look"
# These are formulas. `nanochat preflight` compiles the real step too, and reads from it what the compiler will really
# hold and move. It does so for TPUs that are not here. For a large run it decides whether you rent.
#
# Now a guess of your own, before the run knows: a model of byte pairs, a mere table, needs about 3.9 bits for a byte of
# the text. How many will yours need? Write `predict("capstone.p_bpb", 2.5)`.

# %% id="bpb-predict"
predict("capstone.p_bpb")

# %% [markdown] id="tokenizer-title"
# ## 1. Tokenizer
#
# A model reads numbers, so text is cut into pieces from a fixed vocabulary. *Byte pair encoding* starts from the 256
# bytes and merges, again and again, the pair of neighbours that occurs most often. Frequent words end up as one
# token, rare ones as several, and nothing is ever unknown: at worst a text is its bytes.

# %% id="tokenizer"
tokenizer_stage = run.tokenizer()
tables.figures_table(tokenizer_stage.figures)

# %% [markdown] id="tokens-look"
# Each tint below is one token; `·` is a space. A space belongs to the word after it, digits come in groups of at most
# two, and common words are whole. The more bytes a token stands for, the more text fits into the model's context.

# %% tags=["slide"] id="tokens"
for pieces in tokenizer_stage.figures["examples"]:
    show(strips.token_strip(pieces))

# %% [markdown] id="batches-title"
# ## 2. Batches
#
# Training reads rows of equal length. Each document starts with the token `<|bos|>`; documents are fitted into rows
# so that as little as possible is cut off, and every row starts where a document starts. No position is wasted on
# padding.

# %% tags=["slide"] id="batch"
from nanochat_lib.loader import PretrainLoader

tokenizer = run.load_tokenizer()
context = config.model.sequence_len
with PretrainLoader(
    run.corpus, tokenizer, "train", 1, context, config.data.buffer_docs, epochs=config.data.epochs, prefetch=0
) as loader:
    rows = list(islice(loader, 0, 160, 20))  # every 20th row: neighbours are alike, the longest documents go first
inputs, targets = (np.concatenate([getattr(row, name) for row in rows]) for name in ("inputs", "targets"))
show(strips.batch_grid(inputs, tokenizer.bos_id))

# %% [markdown] id="targets-look"
# What is there to learn in a row? At every position: the next token. The targets are the inputs, moved by one.

# %% tags=["slide"] id="targets"
show(
    strips.token_strip([tokenizer.decode([i]) for i in inputs[-1, :40].tolist()], "What the model reads"),
    strips.token_strip([tokenizer.decode([i]) for i in targets[-1, :40].tolist()], "What it must say"),
)

# %% [markdown] id="pretrain-title"
# ## 3. Pretraining
#
# The model is a decoder-only transformer. It starts with random weights, so its first guess is close to uniform over
# the vocabulary: a loss of about $\ln V$ nats. One *step* reads a batch, computes
#
# $$ L = -\frac{1}{N} \sum_{t} \ln p(x_{t+1} \mid x_{\le t}) $$
#
# and moves every weight a little against the gradient. Matrices are moved by Muon, which makes all directions of a
# matrix's update equally strong; embeddings and scalars by AdamW.

# %% id="pretrain"
pretrain_stage = run.pretrain()
show(plots.loss_curve(metrics(), "pretrain"))

# %% [markdown] id="bpb-look"
# Loss per token depends on the tokenizer: larger tokens are harder to guess. *Bits per byte* does not, since it
# divides by the bytes of the original text,
#
# $$ \text{bpb} = \frac{\sum \text{nats}}{\ln 2 \cdot \sum \text{bytes}} . $$
#
# It is measured on text that was held out. The dotted line is a model that only knows how often each byte follows
# each other byte: a table of 65,536 numbers. All below that line is knowledge of words, grammar and facts.

# %% id="bpb"
figures = pretrain_stage.figures
show(plots.bpb_curve(metrics(), figures.get("byte_bigram_bpb")))
reveal("capstone.p_bpb", round(figures["val_bpb_last"], 2))
tables.figures_table(figures)

# %% [markdown] id="schedules-look"
# Two schedules steer the steps. The learning rate rises over the first steps, while the optimiser's averages settle,
# stays flat, and falls, so that the last steps average out the noise of single batches. Muon's momentum grows: at
# first, old gradients are soon out of date.

# %% id="schedules"
show(plots.schedule_plot(metrics(), "pretrain"), plots.throughput_plot(metrics()))

# %% [markdown] tags=["slide"] id="samples-look"
# What does a base model do with a prompt? It continues it, with the token it finds likeliest each time. It does not
# answer: it has never seen a conversation.

# %% id="samples"
tables.continuations_table(figures["samples"])

# %% [markdown] id="core-title"
# ## 4. Base evaluation: CORE
#
# A base model cannot be asked, but it can be *shown*: a few solved examples, then the question. It "chooses" the
# answer to which it gives the highest likelihood. The facts were in its training text; can it find them again?

# %% id="core"
base_stage = run.eval_base()

# %% id="core-prompt"
from nanochat_lib.evaluate.core import load_bundle, render_prompts

task = max(load_bundle(run.dir / "core_bundle"), key=lambda task: (task.kind == "multiple_choice", task.shots))
print(f"task {task.label}, the last of {len(render_prompts(task, task.examples, 0))} candidate texts:\n")
print(render_prompts(task, task.examples, 0)[-1])

# %% [markdown] tags=["slide"] id="core-look"
# Guessing one of four is right in 25 %. To compare tasks, accuracy is *centred*,
#
# $$ \text{centred} = \frac{\text{accuracy} - \text{guessing}}{1 - \text{guessing}}, $$
#
# so 0 is guessing and 1 is perfect; CORE is the mean over the tasks. *Truncated* is the share of prompts that were
# longer than the model can read and lost their front: a low score there may be the prompt's length, not the model.

# %% id="core-scores"
show(bars.core_bars(base_stage.figures["core_tasks"]))
tables.core_table(base_stage.figures["core_tasks"])

# %% [markdown] id="sft-title"
# ## 5. Supervised fine-tuning (SFT)
#
# Now the model learns the form of a conversation. Nothing changes in the mathematics: it is next-token prediction
# again, on conversations written with special tokens such as `<|user_start|>`. One thing is new: the *mask*. The
# model reads the question but is trained only on the answer. Tool calls are part of an answer; what the calculator
# returns is not, because at chat time it is the tool that writes it.

# %% tags=["slide"] id="sft-mask"
from nanochat_lib.conversation import render_conversation

questions = run.chats.sample_questions()
for conversation in questions[:: max(len(questions) // 3, 1)][:4]:
    rendered = render_conversation(tokenizer, conversation, context)
    show(strips.mask_strip([tokenizer.decode([i]) for i in rendered.ids], rendered.mask))

# %% [markdown] id="sft-batch-look"
# Seen from above, a batch of conversations: whole conversations packed into rows, grey where nothing is trained.

# %% tags=["slide"] id="sft-batch"
from nanochat_lib.loader import ChatLoader

with ChatLoader(run.chats.mixture(), tokenizer, 8, context, prefetch=0) as loader:
    batch = next(islice(loader, 20, None))
show(strips.batch_grid(batch.inputs, tokenizer.bos_id, batch.targets, "A batch of conversations"))

# %% [markdown] id="sft-run-look"
# The learning rate starts lower than in pretraining and falls to zero: the model must keep what it knows while it
# learns how to say it.

# %% id="sft"
sft_stage = run.sft()
show(plots.loss_curve(metrics(), "sft"))
tables.figures_table(sft_stage.figures)

# %% [markdown] id="sft-compare-look"
# The same questions to the model before and after SFT. Both write the likeliest token each time, so any difference is
# training.

# %% id="sft-compare"
from functools import cache

from nanochat_lib.conversation import render_for_completion

engine = cache(run.engine)  # the text generator of one of the run's models


def ask(stage, conversations, max_tokens=48):
    """Greedy answers of one of the run's models ("base", "sft", "rl") to the last question of each conversation."""
    prompts = [render_for_completion(tokenizer, conversation) for conversation in conversations]
    rows = engine(stage).generate_batch(prompts, max_tokens=max_tokens, temperature=0.0).sequences
    return [tokenizer.decode(row[len(prompt) :]) for prompt, row in zip(prompts, rows, strict=True)]


some = questions[::2]
asked = [conversation["messages"][0]["content"] for conversation in some]
before_after = zip(asked, ask("base", some), ask("sft", some), strict=True)
tables.Table(("question", "base", "after SFT"), list(before_after), wide=("base", "after SFT"))

# %% [markdown] tags=["slide"] id="rl-title"
# ## 6. Reinforcement learning (RL)
#
# SFT imitates given answers. In RL the model writes its own, several to each question, and a checker says which are
# right: *reward* 1 or 0. An answer is made likelier if it is better than the others to the same question, and less
# likely if it is worse:
#
# $$ \text{advantage}_{q,s} = \text{reward}_{q,s} - \text{mean}_s\,\text{reward}_{q,s} . $$
#
# Below are the rewards of real answers of the SFT model, to the questions of one RL step.

# %% tags=["slide"] id="rl-advantages"
from nanochat_lib.rl import question_order, rollout

train_questions = run.chats.rl_task("train")
first = question_order(len(train_questions), config.seed, 0, config.rl.questions_per_step)
_, _, rewards = rollout(
    engine("sft"), tokenizer, train_questions, first, config.rl.samples, config.rl, seed=config.seed
)
show(strips.advantage_plot(rewards[:8]))

# %% [markdown] id="rl-advantages-look"
# A row whose answers are all right, or all wrong, has advantage 0 everywhere: it teaches nothing. So RL needs
# questions that the model gets right *sometimes*. The figure `groups that taught nothing` counts the others.
#
# Count the rewards above: so many are right before RL. And after? `predict("capstone.p_reward", 50)`

# %% id="rl-predict"
predict("capstone.p_reward")

# %% id="rl"
rl_stage = run.rl()
show(plots.reward_curve(metrics()))
reveal("capstone.p_reward", round(100 * rl_stage.figures["reward_last"]))
tables.figures_table(rl_stage.figures)

# %% [markdown] id="rl-pass-look"
# *pass@k* is the share of questions with at least one right answer among k samples. If pass@1 rises toward what
# pass@k was before, RL has made the model choose what it could already do; new abilities would lift pass@k as well.

# %% [markdown] tags=["slide"] id="chat-title"
# ## 7. Chat evaluation
#
# Three models, the same unseen questions. A task with offered answers is scored by likelihood, an open one by what
# the model writes. The thin lines are one standard error: less than two of them mean nothing. *ChatCORE* is the mean of
# the centred scores.

# %% id="chat"
chat_stage = run.eval_chat()
show(bars.before_after_bars(chat_stage.figures["stages"]))
tables.chat_table(chat_stage.figures["stages"])

# %% [markdown] id="chat-quiz-text"
# Every score stands with its interval: where it would fall with other questions, in 95 of 100 cases. How much is a change
# worth? `quiz("capstone.q_moved")`

# %% id="chat-quiz"
quiz("capstone.q_moved")

# %% [markdown] id="chat-samples-look"
# Scores hide how a model is wrong. Read a few answers.

# %% id="chat-samples"
tables.answers_table(chat_stage.figures["samples"])

# %% [markdown] id="own-title"
# ## 8. Your turn
#
# Ask your own question; change it and run the cell again. It is a very small model that knows one small world and
# some Python documentation, so stay near what you saw above. `nanochat chat` opens the same model in a terminal.

# %% id="own"
question = asked[0]
print(question)
print(ask("rl", [{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": ""}]}])[0])

# %% [markdown] id="report-title"
# ## 9. Report
#
# Everything above in one page to keep or to send: `report.html` in the run's folder, with `report.json` beside it for
# programs.

# %% id="report"
report = run.report()
tables.summary_table(report)

# %% id="report-time"
times = {tables.STAGE_TITLES[name]: stage["seconds"] for name, stage in report["stages"].items() if stage}
show(bars.time_bars(times))
print(f"report.html is in {run.dir}")
tables.time_table(report)

# %% [markdown] id="curves-look"
# Every logged step is a line of `metrics.jsonl`. Choose a stage and a figure.

# %% id="curves"
from nanochat_lib.report.plots import any_curve


def draw_curve(stage="pretrain", figure="loss"):
    return any_curve(metrics(), stage, figure)


explore(
    draw_curve,
    alt="one logged figure of one stage over its steps",
    stage=choice(["pretrain", "sft", "rl"], "pretrain"),
    figure=choice(["loss", "lr", "grad_norm", "tokens_per_s", "reward"], "grad_norm"),
)

# %% [markdown] id="certificate-title"
# ## 10. Certificate
#
# The last page of the report is for you. It says what share of the pipeline's exercise functions was your own code, which
# exercises passed, and which goals this run reached: better than its bar by more than noise. Open `report.html`, write your
# name on it, print it.

# %% id="certificate"
from nanochat_lib.report import certificate

found = report["certificate"]
if found:
    print("\n".join(certificate.lines(found)))
else:
    print("Solve an exercise in any chapter, or run with mine: then the report has a certificate.")
certificate.goals_table({"goals": certificate.goals(report["stages"])})

# %% [markdown] id="export-title"
# ## 11. Take it away
#
# The model is yours. The command `convert to-upstream` writes it as nanochat's own files: weights, the optimiser's state and
# the tokenizer, for PyTorch. Reading them back gives the same numbers, to the last bit. (Here for a model that is small; the
# command does it for any.)

# %% id="export"
from nanochat_lib import upstream
from nanochat_lib.convert import to_upstream

exported = run.dir / "for-nanochat"
small = pretrain_stage.figures["params"]["total"] < 20_000_000
if small and not exported.exists():
    print(to_upstream(run.dir, exported, stage="rl").replace(str(exported), exported.name))
if small:
    again, (_, params, _) = upstream.load(exported).params, run.load_model("rl")
    equal = sum(np.array_equal(again[name], value) for name, value in params.items())
    print(f"{equal} of {len(params)} arrays read back are the same to the last bit")

# %% [markdown] id="real-title"
# ## 12. The same on real hardware
#
# Nothing in this notebook is for small models only. What changes is the preset, the JAX underneath, and that data must be
# fetched. First look at what you would rent, from here, for nothing:
#
# ```bash
# nanochat preflight --preset gpu-8-d24            # a page from formulas
# nanochat preflight --preset tpu-v6e-8-d24        # compiled for the TPU; needs the extra `tpu`
# nanochat data get climbmix --preset gpu-8-d24 --plan
# ```

# %% [markdown] id="real-gpu"
# **A GPU node** (8×H100, Ubuntu, a driver that `nvidia-smi` shows). Clone the course there, then:
#
# ```bash
# NANOCHAT_EXTRAS=cuda12 bash scripts/setup.sh
# .venv/bin/nanochat doctor                                        # are all eight seen?
# .venv/bin/nanochat data get climbmix --preset gpu-8-d24
# .venv/bin/nanochat data get smoltalk mmlu gsm8k arc humaneval core
# NANOCHAT_EXTRAS=cuda12 bash scripts/capstone.sh gpu-8-d24 --run-dir runs/d24 -s ops.on_finish=shutdown
# ```
#
# The last line runs this notebook with papermill. Stopped, it continues. One large GPU takes `gpu-1-d12` instead.

# %% [markdown] id="real-tpu"
# **A TPU VM** (v6e-8, the runtime `v2-alpha-tpuv6e`; the recipes in `scripts/cloud/` make one, and delete it again). On it:
#
# ```bash
# NANOCHAT_EXTRAS=tpu bash scripts/setup.sh
# .venv/bin/nanochat doctor                                        # eight chips, and nobody else holds them
# .venv/bin/nanochat data get climbmix --preset tpu-v6e-8-d24
# .venv/bin/nanochat data get smoltalk mmlu gsm8k arc humaneval core
# NANOCHAT_EXTRAS=tpu bash scripts/capstone.sh tpu-v6e-8-d24 --run-dir runs/d24 -s ops.durable=gs://my-bucket/d24
# ```
#
# `ops.durable` is a bucket: a spot machine may go at any minute, and the next one continues from there. A slice of several
# machines has no notebook: there, each runs the same commands, stage by stage.
#
# ```bash
# .venv/bin/nanochat tokenizer --preset tpu-v6e-64-d32 --run-dir runs/d32 -s ops.durable=gs://my-bucket/d32
# .venv/bin/nanochat pretrain --preset tpu-v6e-64-d32 --run-dir runs/d32 -s ops.durable=gs://my-bucket/d32
# ```
#
# Costs, capacity, and what happens when the machine is taken away: `docs/rented-machines.md`.

# %% [markdown] id="next"
# ## What you have seen
#
# - One objective, next-token prediction, gave language, facts and the form of a chat; only the data and the mask
# changed.
# - A number means something beside its yardstick: the byte bigram for bpb, guessing for choices, the model before for
# RL.
# - RL did not add knowledge: it made right answers, which the model already gave sometimes, likelier.
#
# > **Takeaway.** A chat model is one objective run four times: on text, on conversations, on its own answers, and each
# > time on data that somebody chose. The code between is short enough to have been written by you.
#
# **What was simplified.** The world and its questions are invented and small, the model has a thousandth of a d24's numbers,
# and every evaluation has 128 questions. The steps, the order, the optimiser, the chat format, the tool and the evaluation
# are nanochat's. They are in `nanochat_lib/pipeline.py`, a stage a method.
#
# Try next: another `seed` (how much do the scores move?), `overrides = "pretrain.steps=200"` (what breaks first,
# facts or spelling?), or `corpus` with your own text.
