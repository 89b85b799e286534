"""HumanEval: Python functions to write, judged by running the problem's own tests on what the model wrote."""

from __future__ import annotations

import re
import secrets
import textwrap

from nanochat_lib.errors import UserError
from nanochat_lib.run_config import RUN_CODE
from nanochat_lib.tasks.common import Conversation, Task
from nanochat_lib.tasks.rows import open_rows

TIMEOUT = 5.0  # seconds a program may take
_LINE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^`\n]*)")  # on its own line: opens, or closes
_AFTER_TEXT = re.compile(r".*?(`{3,}|~{3,})[ \t]*\w*[ \t]*")  # an opening fence at the end of a sentence
_ONE_LINE = re.compile(r"[ \t]*(`{3,})(?:python|py)?[ \t]*([^\s`].*?)\1[ \t]*", re.IGNORECASE)


def code_blocks(text: str) -> list[str]:
    """The insides of all fenced blocks, with \\n as line ends.

    Whatever the fence: ``` or more, ~~~, any language word in any case, indented (in a list), after words on the same
    line, on one line, closed by the same fence on a line of its own or at the end of the code, or never.
    """
    blocks: list[str] = []
    fence, lines = "", []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not fence:
            if whole := _ONE_LINE.fullmatch(line):
                blocks.append(whole[2])
            elif opened := _LINE.fullmatch(line) or _AFTER_TEXT.fullmatch(line):
                fence, lines = opened[1], []
            continue
        closing = _LINE.fullmatch(line)
        if closing and closing[1].startswith(fence) and not closing[2].strip():
            blocks.append("\n".join(lines))
            fence = ""
        elif not closing and line.rstrip().endswith(fence):
            blocks.append("\n".join([*lines, line.rstrip().removesuffix(fence)]))
            fence = ""
        else:
            lines.append(line)
    return [textwrap.dedent(block).strip("\n") for block in (blocks + ["\n".join(lines)] if fence else blocks)]


def extract_code(reply: str, entry_point: str = "") -> str:
    """The program in a reply: its first block of code that defines `entry_point`, else its first that is not empty.

    Without a fence the whole reply. Text around blocks, and all other blocks (examples of use, a second try), is
    dropped.
    """
    blocks = [block for block in code_blocks(reply) if block.strip()]
    defines = re.compile(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\s*\(", re.MULTILINE)
    chosen = next((block for block in blocks if entry_point and defines.search(block)), None)
    if chosen is not None:
        return chosen
    return blocks[0] if blocks else reply.replace("\r\n", "\n").replace("\r", "\n").strip()


def imports_of(prompt: str) -> str:
    """The import lines at the top of a problem; blank lines and comments between them are skipped."""
    found = []
    for line in map(str.strip, prompt.split("\n")):
        if line.startswith(("import ", "from ")):
            found.append(line)
        elif line and not line.startswith("#"):
            break
    return "\n".join(found)


class HumanEval(Task):
    """164 problems; the first message is the function's head and docstring.

    `run_code` is the weakest isolation in which what the model wrote may run here (sandbox.LEVELS), or "no": then
    `evaluate` is refused. Nothing is run before that.
    """

    name = "HumanEval"

    def __init__(self, run_code: str = "no", **slicing: int) -> None:
        super().__init__(**slicing)
        self.run_code = run_code
        columns = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
        self.rows = open_rows("humaneval", "openai_humaneval", "test", columns)

    def num_examples(self) -> int:
        return len(self.rows)

    def get_example(self, index: int) -> Conversation:
        row = self.rows[index]
        prompt = row["prompt"]
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": f"{prompt}\n{row['canonical_solution']}"},
        ]
        return {"messages": messages, "entry_point": row["entry_point"], "test": row["test"]}

    @property
    def isolation(self) -> str:
        """In what the programs run on this machine: the strongest level that works here."""
        from nanochat_lib import sandbox

        return sandbox.level()

    def program(self, conversation: Conversation, completion: str, done: str) -> str:
        """What is run: the problem's imports, the reply's code, the tests, the call of `check`, and a line `done`."""
        entry_point = conversation["entry_point"]
        imports = imports_of(conversation["messages"][0]["content"])
        code = extract_code(completion, entry_point)
        return f"{imports}\n\n{code}\n\n{conversation['test']}\ncheck({entry_point})\nprint({done!r})\n"

    def evaluate(self, conversation: Conversation, completion: str) -> float:
        """1.0 when the program went through its tests to the end: a program that ends itself before has not."""
        if self.run_code not in RUN_CODE[1:]:
            raise UserError(
                "HumanEval runs programs that the model wrote, which has to be allowed: set evaluation.run_code to the "
                f"weakest isolation you accept ({', '.join(RUN_CODE[1:])}; docs/sandbox.md says what each keeps out)"
            )
        if not completion.strip():
            return 0.0
        from nanochat_lib import sandbox

        done = secrets.token_hex(16)  # known to nobody before, so exit(0) cannot stand in for passed tests
        program = self.program(conversation, completion, done)
        result = sandbox.run_code(program, timeout=TIMEOUT, require=self.run_code)
        return float(result.success and done in result.stdout)

    def answered(self, conversation: Conversation, completion: str) -> bool:
        """Whether the reply holds Python that can be read and defines the function."""
        import ast
        import warnings

        code = extract_code(completion, conversation["entry_point"])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return any(getattr(node, "name", "") == conversation["entry_point"] for node in tree.body)
