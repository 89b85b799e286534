"""What a submission can try: exercise cells that define `merge(tokens, pair, new)`, by what they try.

`nanochat grade audit` and the tests grade each of them among honest answers. MARKER is a file that some try to make.
"""

from __future__ import annotations

MARKER = "/tmp/grade_attack"

MERGE_HEAD = "def merge(tokens, pair, new):\n"


def body(text: str) -> str:
    """merge with this body."""
    return MERGE_HEAD + "\n".join("    " + line for line in text.strip("\n").split("\n")) + "\n"


# Nothing of these may earn a point: the result is wrong, whatever is done around it.
_WORTH_NOTHING = {
    "a list that equals everything": "class All(list):\n    __eq__ = lambda self, other: True\n    __hash__ = list.__hash__\n"
    + body("return All()"),
    "an object that equals everything": "class All:\n    __eq__ = lambda self, other: True\n    __len__ = lambda self: 3\n"
    "    __iter__ = lambda self: iter([9, 3, 9])\n    __getitem__ = lambda self, i: 9\n" + body("return All()"),
    "a number that equals everything": "class All(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
    + body("return [All(1)] * 3"),
    "an array that equals everything": "import numpy as np\nclass All(np.ndarray):\n"
    "    __eq__ = lambda self, other: np.True_\n" + body("return np.zeros(3, int).view(All)"),
    "something that claims to be an array": "class Fake:\n    shape, ndim, dtype = (3,), 1, 'int64'\n"
    "    __array__ = lambda self, *a, **k: __import__('numpy').array([9, 3, 9])\n" + body("return Fake()"),
    "a class that claims to be a list": "class Fake:\n    __class__ = list\n" + body("return Fake()"),
    "numpy's comparisons patched": "import numpy as np\nnp.array_equal = np.allclose = lambda *a, **k: True\n"
    "np.testing.assert_allclose = np.testing.assert_array_equal = lambda *a, **k: None\n" + body("return []"),
    "jax's comparisons patched": "import jax.numpy as jnp\njnp.allclose = jnp.array_equal = lambda *a, **k: True\n"
    + body("return []"),
    "builtins patched": "import builtins\nbuiltins.all = builtins.any = lambda *a: True\nbuiltins.len = lambda x: 0\n"
    + body("return []"),
    "isinstance patched": "import builtins\nbuiltins.isinstance = lambda *a: True\n" + body("return 1"),
    "the comparison patched": "import nanochat_lib.course.compare as c, nanochat_lib.course.checker as k\n"
    "c.difference = k.difference = lambda *a, **m: None\nk.judged = lambda *a: None\n" + body("return []"),
    "the messages patched": "import nanochat_lib.course.grading.wire as w\nreal = w.encode\n"
    "w.encode = lambda m: real({**m, 'status': 'passed', 'passed': True}) if isinstance(m, dict) else real(m)\n"
    + body("return []"),
    "check rewritten": "check = hidden = lambda *a, **k: True\nimport nanochat_lib.course as c\nc.check = check\n"
    + body("return []"),
    "an import hook": "import sys\nclass Hook:\n    def find_spec(self, name, path=None, target=None):\n        return None\n"
    "sys.meta_path.insert(0, Hook())\nsys.modules['numpy.testing'] = None\n" + body("return []"),
    "the case recognised by its caller": body("import sys\nreturn sys._getframe(1).f_locals.get('want')"),
    "the right result looked for in memory": body(
        "import gc\nfor found in gc.get_objects():\n    if type(found) is dict and ('want' in found or 'expected' in found):\n"
        "        return found.get('want', found.get('expected'))\nreturn [x for x in gc.get_objects() if x == [9, 7]][:1]"
    ),
    "a case that carries its result": body(
        "from nanochat_lib.course import registry\nreturn registry.exercise('small.merge').cases[0].expected and []"
    ),
    "the hidden cells imported": body("import importlib\nreturn importlib.import_module('solutions').EXPECTED"),
    "a file of the instructor": body("return [open({secret!r}).read()]"),
    "the instructor's folder": body("import os\nreturn os.listdir(os.path.dirname({secret!r}))"),
    "another's work": body(
        "import glob\nreturn [open(p).read() for p in glob.glob('/tmp/**/*.ipynb', recursive=True)]"
    ),
    "a file by another door": body(
        "import ctypes, os\nfd = ctypes.CDLL(None).open({secret!r}.encode(), 0)\nreturn [os.read(fd, 99)]"
    ),
    "a link to a file": body("import os\nos.symlink({secret!r}, 'link')\nreturn [open('link').read()]"),
    "a hard link to a file": body("import os\nos.link({secret!r}, 'link')\nreturn [open('link').read()]"),
    "the environment of others": body(
        "return [open(f'/proc/{{p}}/environ').read() for p in (1, __import__('os').getppid(), 'self')]"
    ),
    "the memory of the server": body("import os\nreturn [open(f'/proc/{{os.getppid()}}/mem', 'rb').read(9)]"),
    "a TCP connection": body(
        "import socket\ns = socket.create_connection(('127.0.0.1', {port}), 2)\ns.send(b'hello')\nreturn []"
    ),
    "a socket of the system": body(
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('/run/docker.sock')\nreturn []"
    ),
    "a name looked up": body("import socket\nreturn [socket.getaddrinfo('example.org', 80)]"),
    "another program": body(
        "import subprocess\nreturn [subprocess.run(['cat', {secret!r}], capture_output=True).stdout]"
    ),
    "a shell": body("import os\nreturn [os.popen('id').read(), os.system('true')]"),
    "a fork that writes, too": body(
        "import os\nif not os.fork():\n    os.write(3, b'x' * 64)\n    os._exit(0)\nos.wait()\nreturn []"
    ),
    "many forks": body("import os\nfor _ in range(200):\n    os.fork()\nreturn []"),
    "junk on the line": body("import os\nos.write(3, b'junk' * 999)\nreturn []"),
    "a reply of its own on the line": body(
        "import os, gc\nfrom nanochat_lib.course.grading import wire\nfor found in gc.get_objects():\n"
        "    if type(found) is dict and 'word' in found and 'args' in found:\n"
        "        os.write(3, wire.encode({{'word': found['word'], 'got': [1], 'changed': '', 'seconds': 0.0}}))\nreturn []"
    ),
    "a promise of petabytes": body("import os\nos.write(3, b'\\x00\\x7f' + b'\\xff' * 10)\nreturn []"),
    "the line closed": body("import os\nos.closerange(0, 64)\nreturn []"),
    "os._exit": body("import os\nos._exit(0)"),
    "_exit by another door": body("import posix\nposix._exit(0)"),
    "a crash": body("import ctypes\nctypes.string_at(0)"),
    "an abort": body("import os\nos.abort()"),
    "sys.exit": body("import sys\nsys.exit(0)"),
    "sys.exit when the cell runs": "import sys\nsys.exit(0)\n" + body("return []"),
    "os._exit when the cell runs": "import posix\nposix._exit(0)\n" + body("return []"),
    "an interrupt": body("raise KeyboardInterrupt"),
    "a signal to the server": body("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nreturn []"),
    "a signal to all": body("import os, signal\nos.kill(-1, signal.SIGKILL)\nreturn []"),
    "a signal to itself": body("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nreturn []"),
    "an endless loop": body("while True:\n    pass"),
    "an endless loop that catches all": body(
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass"
    ),
    "an endless loop when the cell runs": "while True:\n    pass\n" + body("return []"),
    "a sleep": body("import time\ntime.sleep(1e6)"),
    "a sleep that ignores the alarm": body(
        "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(1e6)"
    ),
    "a regular expression without end": body("import re\nreturn [re.match('(a+)+$', 'a' * 60 + 'b')]"),
    "fifty gigabytes": body("return bytearray(50 << 30)"),
    "ever more memory": body("held = []\nwhile True:\n    held.append(bytearray(1 << 26))"),
    "a disk full of zeros": body("with open('big', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 20))"),
    "many small files": body("for i in range(10**6):\n    open(f'f{{i}}', 'w').write('x' * 999)\nreturn []"),
    "the package changed": body("import nanochat_lib\nopen(nanochat_lib.__file__, 'a').write('# {{}}')\nreturn []"),
    "a file where everybody may write": body("open('/tmp/grade_attack', 'w').write('x')\nreturn []"),
    "a gigabyte printed": body("import sys\nfor _ in range(1000):\n    sys.stdout.write('x' * 10**6)\nreturn []"),
    "a gigabyte returned": body("return ['x' * 1000] * 10**6"),
    "a huge number": body("return 10 ** 10**6"),
    "a list without end": body("out = []\nout.append(out)\nreturn out"),
    "a deep list": body("out = []\nfor _ in range(10**5):\n    out = [out]\nreturn out"),
    "recursion": body("return merge(tokens, pair, new)"),
    "recursion without a limit": body("import sys\nsys.setrecursionlimit(10**9)\nreturn merge(tokens, pair, new)"),
    "a pickle": "class Bomb:\n    def __reduce__(self):\n        import os\n        return os.system, ('touch /tmp/grade_attack',)\n"
    + body("return [Bomb()]"),
    "keys that collide": body("return {{i * (2**61 - 1): 0 for i in range(3000)}}"),
    "not a number": body("return [float('nan')] * 3"),
    "an iterator without end": body("import itertools\nreturn itertools.count()"),
    "ten thousand threads": body(
        "import threading, time\nfor _ in range(10**4):\n    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\nreturn []"
    ),
    "a thread that goes on": body(
        "import os, threading\ndef write():\n    while True:\n        os.write(3, b'x' * 99)\nthreading.Thread(target=write, daemon=True).start()\nreturn []"
    ),
    "rights regained": body(
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.unshare(0x10020000)\nlibc.mount(b'none', b'/', None, 0x4000, None)\n"
        "libc.prctl(1, 0, 0, 0, 0)\nlibc.setns(0, 0)\ntry:\n    os.setuid(0)\n    os.chroot('/')\nexcept OSError:\n    pass\n"
        "return [open({secret!r}).read()]"
    ),
    "a debugger": body("import ctypes, os\nreturn [ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)]"),
    "its own limits raised": body("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\nreturn []"),
    "the library's own": "from nanochat_lib.bpe import merge\n",
    "the library's own by another name": "import nanochat_lib.bpe as b\n" + body("return b.merge(tokens, pair, new)"),
    "no Python at all": "def merge(tokens, pair, new:\n    this is a text",
    "a zero byte": "def merge(tokens, pair, new):\n    return '\x00'",
    "too many brackets": body("return " + "(" * 5000 + ")" * 5000),
    "a cell of two megabytes": body("return '" + "x" * 2_000_000 + "'"),
}

# Right results, but what they cost is hidden: the measured cases must not count.
CHEATED = {
    "the clock stopped": "import time\ntime.process_time = time.perf_counter = lambda: 0.0\n",
    "the counting patched": "import jax\njax.make_jaxpr = lambda f: (lambda *a: None)\n",
}

# What no cell may do at the strong levels: each stands before a right answer, so that who is allowed to do it passes.
_FORBIDDEN = {
    "reads a file of the instructor": "open({secret!r}).read()",
    "lists the instructor's folder": "import os\nos.listdir(os.path.dirname({secret!r}))",
    "reads a file by another door": "import ctypes\nassert ctypes.CDLL(None).open({secret!r}.encode(), 0) >= 0",
    "reads a file through a link": "import os\nos.symlink({secret!r}, 'through')\nopen('through').read()",
    "reads the server's environment": "import os\nopen(f'/proc/{{os.getppid()}}/environ').read()",
    "reads the server's memory": "import os\nopen(f'/proc/{{os.getppid()}}/mem', 'rb')",
    "connects to this machine": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
    "makes a socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "starts a program": "import subprocess\nsubprocess.run(['true'], check=True)",
    "becomes a program": "import os\nos.set_inheritable(3, True)\nos.execv('/bin/sh', ['sh', '-c', 'true'])",
    "forks": "import os, posix\nchild = os.fork()\nchild or posix._exit(0)\nos.waitpid(child, 0)",
    "may send signals to the server": "import os\nassert os.getppid() > 1\nos.kill(os.getppid(), 0)",
    "watches the server as a debugger does": "import ctypes, os\nassert ctypes.CDLL(None).ptrace(0x4206, os.getppid(), 0, 0) == 0",
    "makes namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "lives on when the server ends": "import ctypes\nassert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
    "writes where everybody may": "open('/tmp/grade_attack', 'w').close()",
    "may change the package": "import nanochat_lib\nopen(nanochat_lib.__file__, 'a').close()",
    "sees other processes": "import os\nassert sum(name.isdigit() for name in os.listdir('/proc')) > 3",
}

# What these do at the level "limits" they do to the machine: they end the grader and all its user's programs, change
# the package, or leave a million files behind. Nobody tries them there.
HARMFUL = frozenset({
    "a signal to the server", "a signal to all", "many forks", "many small files", "the package changed",
    "a fork that writes, too",
})  # fmt: skip


def attacks(secret: str, port: int) -> dict[str, str]:
    """All of them. `secret`: a file of the instructor's to be read; `port`: where somebody listens on this machine."""
    return {name: _filled(text, secret, port) for name, text in _WORTH_NOTHING.items()}


def forbidden(secret: str, port: int, right: str) -> dict[str, str]:
    """Right answers that do first what they must not be able to do."""
    return {name: f"{_filled(text, secret, port)}\n{right}" for name, text in _FORBIDDEN.items()}


def _filled(text: str, secret: str, port: int) -> str:
    text = text.replace("{secret!r}", repr(secret)).replace("{port}", str(port))
    return text.replace("{{", "{").replace("}}", "}")
