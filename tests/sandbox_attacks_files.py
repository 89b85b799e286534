"""Attacks on files and on the kernel."""

from sandbox_attack import MIB, Attack

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
