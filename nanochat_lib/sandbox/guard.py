"""The little program that `run_code` starts: reads the code, takes a few dangerous names away, runs it as __main__.

The names guard against accidents of a language model's code, at every level alike, so that a score does not depend on
the machine. They are no boundary: the level is.
"""

MEMORY_EXIT = 113  # how the guard says that a MemoryError ended the program: a code that programs do not use

GUARD = """
def _guard():
    import os, sys, types

    size = int(sys.argv.pop(1))
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 16))
        if not part:
            os._exit(70)
        parts.append(part)
        size -= len(part)
    source = b"".join(parts).decode("utf-8", "surrogatepass")
    sys.argv[:] = ["<llm>"]

    def refused(name):
        class Refused:
            def __init__(self, *args, **kwargs):
                raise PermissionError(name + " is not available in the sandbox")
        return Refused

    import builtins, shutil, subprocess
    for name in ("exit", "quit", "help"):
        setattr(builtins, name, refused(name))
    names = "kill system remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate replace "
    names += "unlink fchmod fchown chmod chown chroot lchflags lchmod lchown chdir posix_spawn posix_spawnp"
    for module, taken in ((os, names), (shutil, "rmtree move chown"), (subprocess, "Popen")):
        for name in taken.split():
            if hasattr(module, name):
                setattr(module, name, refused(module.__name__ + "." + name))
    for name in ("ipdb", "joblib", "resource", "psutil", "tkinter"):
        sys.modules[name] = None

    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(source, "<llm>", "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        out_of_memory = isinstance(error, MemoryError)
        try:
            error.__traceback__ = error.__traceback__.tb_next  # without the guard's own line
            sys.excepthook(type(error), error, error.__traceback__)
        except MemoryError:
            pass
        if out_of_memory:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(MEMORY_EXIT)
        raise SystemExit(1)

_guard()
""".replace("MEMORY_EXIT", str(MEMORY_EXIT))
