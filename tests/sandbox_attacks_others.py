"""Attacks on the network and on other processes, and attempts to live on."""

from sandbox_attack import Attack

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
