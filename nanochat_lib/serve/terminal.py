"""`nanochat chat`: a conversation with the model in a terminal, or through a pipe.

On a terminal there are colours, line editing and a history (rich, prompt_toolkit). When input or output is a pipe,
every line read is a message and nothing but answers and notices is written.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

from nanochat_lib.errors import UserError
from nanochat_lib.sampling import check_sampling
from nanochat_lib.tokenizer import StreamDecoder

COMMANDS = {
    "/retry": "answer the last message anew",
    "/clear": "forget the conversation and start a new one",
    "/temperature": "show the temperature, or set it: /temperature 0.8 (0 always takes the likeliest token)",
    "/topk": "show top-k, or set it: /topk 50 (0 lets every token be drawn)",
    "/topp": "show top-p, or set it: /topp 0.9 (the likeliest tokens that make up 90 % are drawn from; 1 is off)",
    "/tokens": "show the most tokens of an answer, or set it: /tokens 256",
    "/help": "this list",
    "/quit": "leave; so do quit, exit and Ctrl-D. Ctrl-C stops an answer",
}


def chat(
    engine: Any,
    tokenizer: Any,
    *,
    prompt: str | None = None,
    temperature: float = 0.6,
    top_k: int | None = 50,
    max_tokens: int = 256,
    seed: int | None = None,
    title: str = "nanochat",
    top_p: float | None = None,
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
) -> None:
    """Answers `prompt` and returns, or talks until the input ends.

    `seed` makes the whole conversation repeatable; None draws a new one. An Engine keeps the conversation in its cache:
    a turn runs only what is new through the model. Raises UserError for an option out of range, and for a `prompt` that
    does not fit the model's context.
    """
    check_sampling(temperature, top_k, top_p)
    if max_tokens < 1:
        raise UserError(f"max_tokens {max_tokens} must be at least 1")
    stdin, stdout = stdin or sys.stdin, stdout or sys.stdout
    screen = Screen(stdout)
    with keeping_its_text(engine) as answering:
        session = Session(answering, tokenizer, screen, temperature, top_k, top_p, max_tokens, seed)
        if prompt is not None:
            session.answer(prompt)
        else:
            converse(session, screen, stdin, title if stdin.isatty() and stdout.isatty() else None)


def keeping_its_text(engine: Any) -> AbstractContextManager:
    """An Engine with one row that remembers; anything else as it is."""
    if not hasattr(engine, "setup"):
        return nullcontext(engine)
    from nanochat_lib.batching import BatchingEngine

    return BatchingEngine(engine, rows=1)


def converse(session: Session, screen: Screen, stdin: TextIO, title: str | None) -> None:
    """Answers line by line until the input ends; `title`: of a terminal."""
    if title is not None:
        screen.line(title, "bold")
        screen.line("Type a message; /help lists the commands, Ctrl-D ends.", "dim")
    for line in stdin if title is None else typed_lines():
        try:
            if not session.handle(line.strip()):
                break
        except UserError as error:
            screen.line(str(error), "red")
    if title is not None:
        screen.line("Goodbye.", "dim")


def typed_lines() -> Iterator[str]:
    """Lines from a terminal, with editing, a history and completion of commands. Ctrl-C drops the line, Ctrl-D ends."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import ANSI

    prompt = PromptSession(completer=WordCompleter(list(COMMANDS), sentence=True, meta_dict=COMMANDS))
    while True:
        try:
            yield prompt.prompt(ANSI("\n\x1b[1;36m> \x1b[0m"))
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


class Screen:
    """Writes styled text, as it comes, to a terminal; to anything else the same text without styles."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.console = out, None
        if out.isatty():
            from rich.console import Console

            if hasattr(out, "reconfigure"):
                out.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
            self.console = Console(file=out)

    def write(self, text: str, style: str | None = None) -> None:
        # A model may write any byte; control characters could make the terminal do things.
        shown = "".join(c for c in text if c in "\n\t" or c.isprintable())
        if self.console:
            self.console.out(shown, end="", style=style, highlight=False)
        else:
            self.out.write(shown)
        self.out.flush()

    def line(self, text: str, style: str | None = None) -> None:
        self.write(text + "\n", style)

    def waiting(self) -> Callable[[], None]:
        """Shows a spinner on a terminal; the returned function ends it, and may be called again."""
        if not self.console:
            return lambda: None
        status = self.console.status("thinking", spinner_style="dim")
        status.start()
        return status.stop


class Session:
    """One conversation: what was said as token ids, how answers are sampled, and the commands."""

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        screen: Screen,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        max_tokens: int,
        seed: int | None,
    ) -> None:
        self.engine, self.tokenizer, self.screen = engine, tokenizer, screen
        self.temperature, self.top_k, self.top_p, self.max_tokens = temperature, top_k, top_p, max_tokens
        self.seeds = random.Random(seed)
        self.exchanges: list[list[int]] = []  # each: the user's turn and the answer
        self.last = ""  # the user's text in the last of them

    def handle(self, line: str) -> bool:
        """A line of input: a command or a message. False when it asks to leave."""
        name, *values = line.split()[:2] or [""]
        if line in ("quit", "exit", "/quit", "/exit"):
            return False
        if line in ("clear", "/clear"):
            self.exchanges.clear()
            self.screen.line("New conversation.", "dim")
        elif line == "/help":
            for command, meaning in COMMANDS.items():
                self.screen.line(f"{command:<13} {meaning}", "dim")
        elif line == "/retry":
            self.retry()
        elif name == "/tokens":
            self.set_max_tokens(*values)
        elif name == "/temperature":
            self.set_temperature(*values)
        elif name == "/topk":
            self.set_top_k(*values)
        elif name == "/topp":
            self.set_top_p(*values)
        elif line.startswith("/"):
            raise UserError(f"unknown command {name}; /help lists the commands")
        elif line:
            self.answer(line)
        return True

    def retry(self) -> None:
        """Forgets the last answer and gives another one."""
        if not self.exchanges:
            raise UserError("there is no message to answer anew; type one")
        forgotten = self.exchanges.pop()
        try:
            self.answer(self.last)
        except UserError:
            self.exchanges.append(forgotten)
            raise

    def set_max_tokens(self, value: str | None = None) -> None:
        if value is not None:
            if not value.isdecimal() or int(value) < 1:
                raise UserError(f"tokens {value!r} must be a whole number of at least 1, such as 256")
            self.max_tokens = int(value)
        self.screen.line(f"at most {self.max_tokens:,} tokens an answer", "dim")

    def set_temperature(self, value: str | None = None) -> None:
        if value is not None:
            try:
                number = float(value)
            except ValueError:
                raise UserError(f"temperature {value!r} must be a number, such as 0.8") from None
            check_sampling(number, self.top_k)
            self.temperature = number
        self.screen.line(f"temperature {self.temperature:g}", "dim")

    def set_top_k(self, value: str | None = None) -> None:
        if value is not None:
            if not value.isdecimal():
                raise UserError(f"top-k {value!r} must be a whole number of at least 0, such as 50")
            self.top_k = int(value)
        self.screen.line(f"top-k {self.top_k}" if self.top_k else "top-k off: every token may be drawn", "dim")

    def set_top_p(self, value: str | None = None) -> None:
        if value is not None:
            try:
                number = float(value)
            except ValueError:
                raise UserError(f"top-p {value!r} must be a number above 0 and at most 1, such as 0.9") from None
            check_sampling(self.temperature, self.top_k, number)
            self.top_p = number
        off = self.top_p in (None, 1)
        self.screen.line("top-p off: every token may be drawn" if off else f"top-p {self.top_p:g}", "dim")

    def prompt(self, text: str) -> tuple[list[int], list[int]]:
        """(whole prompt, the user's turn). Forgets the oldest exchanges, visibly, until the answer has room too."""
        special = self.tokenizer.encode_special
        turn = [special("<|user_start|>"), *self.tokenizer.encode(text), special("<|user_end|>")]
        turn.append(special("<|assistant_start|>"))
        room = self.engine.context - min(self.max_tokens, max(self.engine.context // 4, 1))
        if 1 + len(turn) > room:
            raise UserError(
                f"the message has {len(turn) - 3:,} tokens, this model takes at most {room - 4:,}; shorten it"
            )
        forgotten = 0
        while 1 + sum(map(len, self.exchanges)) + len(turn) > room:
            self.exchanges.pop(0)
            forgotten += 1
        if forgotten:
            what = (
                "exchange no longer fits and was" if forgotten == 1 else f"{forgotten} exchanges no longer fit and were"
            )
            self.screen.line(f"(the oldest {what} forgotten)", "dim")
        return [special("<|bos|>"), *(t for exchange in self.exchanges for t in exchange), *turn], turn

    def answer(self, text: str) -> None:
        """Streams the answer to the user's `text` and remembers both."""
        ids, turn = self.prompt(text)
        special = self.tokenizer.encode_special
        end, ends = special("<|assistant_end|>"), (special("<|assistant_end|>"), special("<|bos|>"))
        view, tokens = AnswerView(self.tokenizer, self.screen), []
        finish = None  # why the answer is not whole; "" when it is
        stop_waiting = self.screen.waiting()
        try:
            for (token,), _mask in self.engine.generate(
                ids,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                seed=self.seeds.randrange(2**31),
            ):
                stop_waiting()
                if token in ends:
                    finish = ""
                    break
                tokens.append(token)
                view.show(token)
        except KeyboardInterrupt:
            finish = "stopped"
        finally:
            stop_waiting()
            view.close()
        if finish is None:
            full = self.max_tokens > self.engine.context - len(ids)
            limit = f"the model's context of {self.engine.context}" if full else f"the limit of {self.max_tokens}"
            finish = f"cut off at {limit} tokens"
        if finish:
            self.screen.line(f"({finish})", "dim")
        self.exchanges.append([*turn, *tokens, end])
        self.last = text


class AnswerView:
    """Shows an answer token by token: whole characters only, a tool call dimly as [12/60 = 0.2]."""

    def __init__(self, tokenizer: Any, screen: Screen) -> None:
        self.tokenizer, self.screen, self.decoder = tokenizer, screen, StreamDecoder(tokenizer)
        self.names = {token: name for name, token in tokenizer.special_tokens.items()}
        self.in_tool = False  # the bracket is open
        self.called = False  # the call is complete, its result may follow

    def show(self, token: int) -> None:
        name = self.names.get(token)
        if self.called and name != "<|output_start|>":
            self.leave_tool()  # there was no result
        self.called = False
        if name is None:
            self.screen.write(self.decoder.push(token), "dim" if self.in_tool else None)
            return
        self.screen.write(self.decoder.flush())
        if name == "<|python_start|>" or (name == "<|output_start|>" and not self.in_tool):
            self.enter_tool()
        if name == "<|output_start|>":
            self.screen.write(" = ", "dim")
        elif name == "<|output_end|>":
            self.leave_tool()
        elif name == "<|python_end|>":
            self.called = self.in_tool
        elif name != "<|python_start|>":
            self.screen.write(name, "dim")

    def enter_tool(self) -> None:
        self.leave_tool()
        self.screen.write("[", "dim")
        self.in_tool = True

    def leave_tool(self) -> None:
        if self.in_tool:
            self.screen.write("]", "dim")
        self.in_tool = False

    def close(self) -> None:
        """Ends the answer's last line."""
        self.screen.write(self.decoder.flush())
        self.leave_tool()
        self.screen.line("")
