"""Attempts to use more time, memory, disk or output than allowed."""

from sandbox_attack import MIB, Attack

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
