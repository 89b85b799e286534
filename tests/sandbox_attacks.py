"""Escapes and exhaustions for test_sandbox_attacks.py: what each tries, and how one sees that it succeeded.

An attack is a program. `P` holds what it may aim at: `secret` a file of the user's, `out` a place outside to write,
`victim` a process of the user's, `tcp`, `udp`, `abstract`, `unix` sockets that the test listens at, `shared` a readable
folder, `other` another program's scratch folder. It has succeeded when it prints HARM or when the test sees the damage:
`out` or `late` (in the scratch folder, after the end) exists, the victim is dead, a listener heard something.

limits: what the weakest level does about it: "stops", "lets" through, or it "depends" on the machine or the user.
bare: without a sandbox it succeeds (True), only as root ("root"), depending on the machine ("depends"), or it isn't
tried because it would harm the machine or has no bare form (None).
"""

from __future__ import annotations

from dataclasses import dataclass, field

START = """
import ctypes, errno, mmap, os, platform, signal, socket, stat, struct, subprocess, sys, threading, time
P = eval(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
HERE = platform.machine()
def call(x86, arm, *args):
    number = {"x86_64": x86, "aarch64": arm}[HERE]
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
def harm(yes=True):
    if yes: os.write(1, b"HARM")
def reads(path):
    harm(b"canary" in open(path, "rb").read(1000))
def touched(size, pages):
    for place in range(0, size, 4096): pages[place] = 1
    harm()
"""
MIB = 2**20


@dataclass(frozen=True)
class Attack:
    name: str
    tries: str
    code: str
    limits: str = "lets"
    bare: bool | str | None = True
    keeps: bool = False  # runs in a scratch folder that the caller keeps
    options: dict = field(default_factory=dict)


FILES = [
    Attack("read-file", "reads a file of the user's", "reads(P['secret'])"),
    Attack("write-file", "writes a file outside the scratch folder", "open(P['out'], 'w').write('x')"),
    Attack("read-accounts", "reads /etc/passwd", "harm('root' in open('/etc/passwd').read())"),
    Attack("list-home", "lists a folder of the user's", "harm('secret' in os.listdir(os.path.dirname(P['secret'])))"),
    Attack("dot-dot", "climbs out by relative path", "reads('../' * 40 + P['secret'])"),
    Attack(
        "symlink", "reads through a symbolic link in the scratch folder", "os.symlink(P['secret'], 'l'); reads('l')"
    ),
    Attack(
        "hard-link",
        "makes a hard link to a file outside",
        "os.link(P['secret'], 'l'); reads('l')",
        bare="depends",
        limits="depends",
    ),
    Attack("proc-self-root", "goes through /proc/self/root", "reads('/proc/self/root' + P['secret'])"),
    Attack(
        "proc-other-root",
        "goes through the root and folder of every process it sees",
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    for way in ('root', 'cwd/' + '../' * 40):\n"
        "        try: reads(f'/proc/{pid}/{way}/{P[\"secret\"]}')\n"
        "        except OSError: pass",
    ),
    Attack(
        "proc-environment",
        "reads the environment of another process",
        "harm(b'canary' in open(f'/proc/{P[\"victim\"]}/environ', 'rb').read())",
        limits="depends",
    ),
    Attack(
        "proc-memory",
        "opens another process's memory",
        "os.open(f'/proc/{P[\"victim\"]}/mem', os.O_RDWR); harm()",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "supervisor-files",
        "opens what the process above it has open, to forge the result",
        "for number in range(64):\n"
        "    try: os.open(f'/proc/{os.getppid()}/fd/{number}', os.O_WRONLY); harm()\n"
        "    except OSError: pass",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "supervisor-memory",
        "opens the memory of the process above it",
        "os.open(f'/proc/{os.getppid()}/mem', os.O_RDWR); harm()",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "kernel-settings",
        "opens a kernel setting for writing",
        "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY); harm()",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "sysrq",
        "opens the kernel's emergency key",
        "os.open('/proc/sysrq-trigger', os.O_WRONLY); harm()",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "see-control-groups",
        "looks at control groups",
        "harm(len(os.listdir('/sys/fs/cgroup')) > 0)",
        limits="depends",
        bare="depends",
    ),
    Attack("other-scratch", "reads another program's scratch folder", "reads(P['other'] + '/answer')"),
    Attack("write-readable", "writes into a folder that is only readable", "open(P['shared'] + '/x', 'w'); harm()"),
    Attack(
        "change-readable", "changes the rights of a readable file", "os.chmod(P['shared'] + '/data', 0o777); harm()"
    ),
    Attack(
        "rename-readable", "renames a readable file", "os.rename(P['shared'] + '/data', P['shared'] + '/b'); harm()"
    ),
    Attack(
        "write-library",
        "opens a module of Python for writing",
        "open(os.__file__, 'r+b'); harm()",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "plant-module",
        "plants a file beside Python's modules",
        "p = os.path.dirname(os.__file__) + '/sandbox_canary.txt'; open(p, 'w'); os.unlink(p); harm()",
        limits="depends",
        bare="depends",
    ),
    Attack("run-shell", "runs /bin/sh", "os.execv('/bin/sh', ['sh', '-c', 'echo HARM'])"),
    Attack(
        "see-setuid",
        "looks for programs that run as root",
        "harm(any(os.stat(e).st_mode & stat.S_ISUID for d in ('/bin', '/usr/bin') if os.path.isdir(d) for e in"
        " os.scandir(d)))",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "chroot",
        "leaves by a second chroot",
        "os.mkdir('d'); os.chroot('d'); [os.chdir('..') for _ in range(60)]; os.chroot('.'); reads(P['secret'])",
        limits="stops",
        bare="root",
    ),
    Attack(
        "device-node",
        "makes a disk's device node",
        "os.mknod('d', stat.S_IFBLK | 0o600, os.makedev(254, 0)); harm()",
        limits="stops",
        bare="depends",
    ),
    Attack(
        "devices",
        "looks for devices other than null, zero, random and the like",
        "harm(bool(set(os.listdir('/dev')) - set('core fd full null ptmx pts random shm stderr stdin stdout tty"
        " urandom zero console'.split())))",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "file-handles",
        "opens files by handle, past all paths",
        "b = ctypes.create_string_buffer(struct.pack('Ii', 120, 0) + bytes(120)); n = ctypes.c_int()\n"
        "harm(call(303, 264, -100, ctypes.c_char_p(b'/'), b, ctypes.byref(n), 0) == 0)",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "kernel-log", "reads the kernel's log", "harm(call(103, 116, 10, 0, 0) >= 0)", limits="depends", bare="depends"
    ),
]

KERNEL = [
    Attack(
        "mount",
        "mounts over its folder",
        "harm(libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0)",
        limits="stops",
        bare=None,
    ),
    Attack(
        "new-user-namespace",
        "makes a user namespace, to be root in it",
        "harm(libc.unshare(0x10000000) == 0)",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "join-namespace",
        "joins another process's network",
        "f = os.open(f'/proc/{P[\"victim\"]}/ns/net', os.O_RDONLY); harm(libc.setns(f, 0) == 0)",
        limits="stops",
        bare="root",
    ),
    Attack("become-root", "changes its user to root", "os.setuid(0); harm()", limits="depends", bare="root"),
    Attack(
        "trace",
        "traces another process",
        "harm(libc.ptrace(16, P['victim'], 0, 0) == 0); libc.ptrace(17, P['victim'], 0, 0)",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "keyring",
        "leaves a key in the kernel's keyring",
        "harm(call(248, 217, b'user', b'sandbox-canary', b'x', 1, -2) >= 0)",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "set-clock",
        "sets the clock",
        "t = struct.pack('qq', int(time.time()), 0); harm(call(227, 112, 0, ctypes.create_string_buffer(t)) == 0)",
        limits="stops",
        bare=None,
    ),
    Attack(
        "host-name",
        "sets the host's name",
        "socket.sethostname(socket.gethostname()); harm()",
        limits="stops",
        bare="depends",
    ),
    Attack(
        "io-uring",
        "opens an io_uring, which works past call filters",
        "harm(call(425, 425, 1, ctypes.create_string_buffer(120)) >= 0)",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "page-faults",
        "catches page faults in user space",
        "harm(call(323, 282, 1) >= 0)",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "old-calls",
        "calls the kernel by its 32-bit entry, past call filters",
        "if HERE == 'x86_64':\n"
        "    m = mmap.mmap(-1, 4096, prot=7)\n"
        "    m.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"  # mov eax, 20 (getpid); int 0x80; ret
        "    harm(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))() == os.getpid())",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "other-numbers",
        "calls the kernel by its x32 numbers, past call filters",
        "harm(HERE == 'x86_64' and libc.syscall(ctypes.c_long(0x40000000 + 39)) == os.getpid())",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "raise-limits",
        "raises its own limits",
        "import resource\n"
        "for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_DATA):\n"
        "    s, h = resource.getrlimit(n)\n"
        "    if h != resource.RLIM_INFINITY:\n"
        "        try: resource.setrlimit(n, (h + 1, h + 1)); harm()\n"
        "        except (OSError, ValueError): pass",
        limits="stops",
        bare="depends",
        options={"memory_bytes": 512 * MIB},
    ),
    Attack(
        "core-dump",
        "leaves a core dump",
        "import resource\ntry: resource.setrlimit(4, (-1, -1))\nexcept ValueError: pass\n"
        "harm(resource.getrlimit(4)[0] != 0)",
        limits="stops",
        bare="depends",
    ),
    Attack(
        "terminal",
        "opens the terminal, to type into it",
        "os.open('/dev/tty', os.O_RDWR); harm()",
        limits="stops",
        bare=None,
    ),
]

NETWORK = [
    Attack(
        "tcp",
        "connects to a server on this machine",
        "s = socket.socket(); s.settimeout(2); s.connect(('127.0.0.1', P['tcp'])); harm()",
    ),
    Attack(
        "udp",
        "sends a datagram, as a name look-up does",
        "socket.socket(2, 2).sendto(b'canary', ('127.0.0.1', P['udp']))",
    ),
    Attack(
        "interfaces",
        "looks for a network interface beside the loopback",
        "harm(any(n != 'lo' and not n.startswith(('sit', 'tunl', 'ip', 'gre', 'erspan')) for _, n in"
        " socket.if_nameindex()))",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "abstract-socket",
        "connects to an abstract Unix socket",
        "socket.socket(1).connect('\\0' + P['abstract']); harm()",
    ),
    Attack("unix-socket", "connects to a Unix socket of the user's", "socket.socket(1).connect(P['unix']); harm()"),
    Attack(
        "shared-socket",
        "connects to a Unix socket in a readable folder",
        "os.chdir(P['shared']); socket.socket(1).connect('socket'); harm()",
    ),
    Attack(
        "machine-socket",
        "opens a socket to the virtual machine's host",
        "socket.socket(40, 1); harm()",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "netlink",
        "opens a socket to the kernel's network settings",
        "socket.socket(16, 3, 0); harm()",
        limits="depends",
        bare="depends",
    ),
    Attack(
        "inherited-file",
        "reads what the caller has open",
        "for n in range(3, 200):\n    try: harm(b'canary' in os.pread(n, 1000, 0))\n    except OSError: pass",
        limits="stops",
    ),
    Attack(
        "environment",
        "reads the caller's environment",
        "harm(any('canary' in v for v in os.environ.values()))",
        limits="stops",
    ),
]

SPAWN = "\nos.posix_spawn(sys.executable, [sys.executable, '-I', '-S', '-c', LATE], {}, setsid=True)"
LATE = 'LATE = \'import time; time.sleep(1); open("late", "w")\''
PROCESSES = [
    Attack("signal", "kills another process of the user's", "os.kill(P['victim'], 9)"),
    Attack("signal-all", "signals every process (with signal 0)", "os.kill(-1, 0); harm()"),
    Attack("kill-supervisor", "kills the process above it", "os.kill(os.getppid(), 9); time.sleep(0.3)", bare=None),
    Attack(
        "fork-many",
        "starts 300 processes",
        "for n in range(300):\n    if not os.fork(): time.sleep(3); os._exit(0)\ntime.sleep(1); harm()",
        limits="stops",
    ),
    Attack(
        "fork-many-more",
        "starts 300 processes where 4 are allowed",
        "for n in range(300):\n    if not os.fork(): time.sleep(3); os._exit(0)\ntime.sleep(1); harm()",
        limits="stops",
        options={"processes": 4},
    ),
    Attack(
        "threads",
        "starts 400 threads where 64 are allowed",
        "threading.stack_size(1 << 16)\n"
        "for n in range(400): threading.Thread(target=time.sleep, args=[2], daemon=True).start()\n"
        "time.sleep(1); harm()",
        limits="stops",
        options={"threads": 64},
    ),
    Attack(
        "daemon",
        "leaves a process in a session of its own",
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if not os.fork():\n"
        "        for n in (1, 2): os.close(n)\n"
        "        time.sleep(1); open('late', 'w')\n"
        "    os._exit(0)\n"
        "time.sleep(0.1)",
        limits="stops",
        options={"processes": 8},
    ),
    Attack("spawn", "leaves a process made by posix_spawn", LATE + SPAWN, limits="stops", options={"processes": 8}),
    Attack(
        "spawn-and-crash",
        "leaves a process behind by crashing",
        LATE + SPAWN + "\nos.abort()",
        limits="stops",
        options={"processes": 8},
    ),
    Attack(
        "spawn-and-hang",
        "leaves a process behind by running out of time",
        LATE + SPAWN + "\ntime.sleep(60)",
        limits="stops",
        options={"processes": 8, "timeout": 0.5},
    ),
    Attack(
        "hold-output",
        "ends, but leaves a process that holds its output open",
        "if not os.fork(): time.sleep(5.5)",
        limits="stops",
        options={"processes": 8},
    ),
]

TIME = [
    Attack("busy-loop", "loops for ever", "while True: pass", limits="stops", options={"timeout": 0.6}),
    Attack("sleep", "sleeps", "time.sleep(60)", limits="stops", options={"timeout": 0.6}),
    Attack(
        "ignore-signals",
        "ignores every signal it can",
        "for n in set(signal.valid_signals()) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile True: pass",
        limits="stops",
        options={"timeout": 0.6},
    ),
    Attack(
        "stop-itself", "stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", limits="stops", options={"timeout": 0.6}
    ),
    Attack(
        "close-outputs",
        "closes its outputs and goes on",
        "os.close(1); os.close(2); time.sleep(60)",
        limits="stops",
        options={"timeout": 0.6},
    ),
    Attack(
        "burn",
        "uses more processor time than allowed, in bits",
        "t = time.time()\nwhile time.time() < t + 1.5: pass\nharm()",
        limits="stops",
        options={"cpu_seconds": 0.4},
    ),
]

TIGHT = {"memory_bytes": 128 * MIB}
SMALL = {"files_bytes": 16 * MIB, "memory_bytes": 128 * MIB}
SIZES = [
    Attack("memory", "uses 400 MiB", "touched(400 << 20, bytearray(400 << 20))", limits="stops", options=TIGHT),
    Attack(
        "memory-in-bits",
        "uses 400 MiB, a little at a time",
        "kept = [bytearray(b'x' * (1 << 20)) for n in range(400)]; time.sleep(0.3); harm()",
        limits="stops",
        options=TIGHT,
    ),
    Attack(
        "shared-memory",
        "uses 400 MiB of shared pages",
        "touched(400 << 20, mmap.mmap(-1, 400 << 20)); time.sleep(0.3)",
        limits="stops",
        options=TIGHT,
    ),
    Attack(
        "memory-of-many",
        "uses 400 MiB in four processes",
        "for n in range(4):\n"
        "    if not os.fork(): x = bytearray(b'x' * (100 << 20)); time.sleep(2); os._exit(0)\n"
        "time.sleep(1); harm()",
        limits="stops",
        options=TIGHT | {"processes": 8},
    ),
    Attack(
        "memory-device",
        "writes 400 MiB to /dev/shm",
        "f = open('/dev/shm/sandbox-canary', 'wb')\n"
        "os.unlink(f.name)\nfor n in range(40): f.write(bytes(10 << 20))\nf.flush(); harm()",
        limits="stops",
        options=SMALL,
    ),
    Attack(
        "memory-files",
        "writes 150 MiB into files without a name, 10 MiB each",
        "for n in range(15):\n"
        "    f = call(319, 279, b'x', 0)\n"
        "    if f < 0: raise OSError\n"
        "    os.write(f, bytes(10 << 20))\n"
        "time.sleep(0.3); harm()",
        bare="depends",
        limits="depends",
        options=SMALL,
    ),
    Attack(
        "system-v-memory",
        "takes a System V segment",
        "harm(call(29, 194, 0, 400 << 20, 0o1600) >= 0)",
        bare=None,
        limits="depends",
        options=TIGHT,
    ),
    Attack(
        "big-file",
        "writes a file of 200 MiB",
        "f = open('f', 'wb')\nfor n in range(20): f.write(bytes(10 << 20))\nf.flush(); harm()",
        limits="stops",
        options=SMALL,
    ),
    Attack(
        "many-big-files",
        "writes 20 files of 10 MiB",
        "for n in range(20): open(f'f{n}', 'wb').write(bytes(10 << 20))\ntime.sleep(0.5); harm()",
        limits="stops",
        options=SMALL,
    ),
    Attack(
        "deleted-files",
        "writes 12 files of 10 MiB and deletes each while it is open",
        "kept = []\nfor n in range(12):\n"
        "    kept.append(open(f'f{n}', 'wb', 0)); os.unlink(f'f{n}'); kept[-1].write(bytes(10 << 20))\n"
        "time.sleep(0.5); harm()",
        limits="stops",
        options=SMALL,
    ),
    Attack(
        "many-big-files-kept",
        "writes 20 files of 10 MiB into a folder that is kept",
        "for n in range(20): open(f'f{n}', 'wb').write(bytes(10 << 20))\ntime.sleep(0.5); harm()",
        limits="stops",
        options=SMALL,
        bare=None,
        keeps=True,
    ),
    Attack(
        "deleted-files-kept",
        "deletes 12 open files of 10 MiB in a folder that is kept",
        "kept = []\nfor n in range(12):\n"
        "    kept.append(open(f'f{n}', 'wb', 0)); os.unlink(f'f{n}'); kept[-1].write(bytes(10 << 20))\n"
        "time.sleep(0.5); harm()",
        limits="stops",
        options=SMALL,
        bare=None,
        keeps=True,
    ),
    Attack(
        "many-files-kept",
        "makes 10,500 files in a folder that is kept",
        "for n in range(10500): os.close(os.open(f'{n}', os.O_CREAT | os.O_WRONLY))\nharm()",
        limits="stops",
        options=SMALL,
        bare=None,
        keeps=True,
    ),
    Attack(
        "sparse-file",
        "makes a file of 10 GiB without content",
        "open('f', 'wb').truncate(10 << 30); harm()",
        limits="stops",
        options=SMALL,
    ),
    Attack(
        "many-files",
        "makes 10,500 files",
        "for n in range(10500): os.close(os.open(f'{n}', os.O_CREAT | os.O_WRONLY))\ntime.sleep(0.5); harm()",
        limits="stops",
        options=SMALL,
    ),
    Attack("output", "writes 40 MiB of output", "for n in range(40): os.write(1, b'y' * (1 << 20))", limits="stops"),
    Attack(
        "error-output", "writes 40 MiB of errors", "for n in range(40): os.write(2, b'y' * (1 << 20))", limits="stops"
    ),
    Attack(
        "recursion",
        "recurses for ever",
        "sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
        limits="stops",
        bare=None,
        options=TIGHT,
    ),
    Attack(
        "stubborn-folder",
        "leaves closed and very deep folders",
        "os.mkdir('closed'); open('closed/f', 'w'); os.chmod('closed', 0)\n"
        "for n in range(900): os.mkdir('deep'); os.chdir('deep')",
        limits="stops",
        bare=None,
    ),
]

ATTACKS = FILES + KERNEL + NETWORK + PROCESSES + TIME + SIZES
