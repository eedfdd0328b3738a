"""Runs one untrusted program and prints its outcome: a script that `sandbox` starts by its path.

    python sandbox_child.py CPU_SECONDS WALL_SECONDS MEMORY_BYTES < program.py

This process is the supervisor. It forks the process that runs the program, waits for its outcome,
and then kills every process that is left of it. On Linux the supervisor is a "child subreaper": a
process that the program started becomes the supervisor's child when its parent dies, so that none
can outlive it by leaving the process group or the session.

The program runs behind an audit hook. What starts a process or thread, writes a file, uses the
network or signals another process ends the program at once, with that as its outcome. Limits of the
operating system stand behind the hook. The one line on stdout is JSON: [outcome, detail].

Imports nothing of kvfold and nothing large: it starts once for every program.
"""

import _thread
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
import types

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
OPEN_FILES = 64
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EVENTS = {  # audit events of Python that end a program, by outcome
    "forked": {
        "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.exec", "pty.spawn",
        "subprocess.Popen", "_thread.start_joinable_thread",
    },
    "wrote": {
        "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate",
        "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil.rmtree",
    },
    "connected": {
        "socket.__new__", "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg",
        "socket.getaddrinfo", "socket.gethostbyname",
    },
    "signalled": {"os.kill", "os.killpg"},
}  # fmt: skip
OUTCOMES = {event: outcome for outcome, events in EVENTS.items() for event in events}


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# -- the process that runs the program ------------------------------------------------------------


def limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Limits that the operating system keeps. NPROC does not bind root, and a system may refuse to
    set one: the hook and the supervisor do not depend on them."""
    for name, value in (
        ("RLIMIT_CPU", cpu_seconds), ("RLIMIT_AS", memory_bytes), ("RLIMIT_FSIZE", 0),
        ("RLIMIT_CORE", 0), ("RLIMIT_NPROC", 0), ("RLIMIT_NOFILE", OPEN_FILES),
    ):  # fmt: skip
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, OSError, ValueError):
            continue


def run(program: str, report: int, cpu_seconds: int, memory_bytes: int) -> None:
    """Execute `program`, write its outcome to the file descriptor `report`, and end the process."""
    exit_now, write, dumps, open_writes = os._exit, os.write, json.dumps, WRITES

    def end(outcome: str, detail: str = "") -> None:
        write(report, dumps([outcome, detail[:300]]).encode())
        exit_now(0)

    def watch(event: str, arguments: tuple) -> None:
        if event == "open":
            mode, flags = arguments[1], arguments[2]
            writes = isinstance(flags, int) and flags & open_writes
            if (writes or set(mode or "") & set("wax+")) and arguments[0] != os.devnull:
                end("wrote", f"open {arguments[0]!r}")
        elif event in OUTCOMES:
            end(OUTCOMES[event], event)

    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, report)
    os.closerange(report + 1, 256)
    module = types.ModuleType("answer")  # not __main__: its demonstration does not run
    sys.modules["answer"] = module
    sys.argv = ["answer"]
    limit(cpu_seconds, memory_bytes)
    # Python 3.11 has no event of it. NPROC refuses threads to users and not to root: none for both.
    vars(_thread)["start_new_thread"] = lambda *_, **__: end("forked", "a thread")
    sys.addaudithook(watch)
    try:
        exec(compile(program, "answer.py", "exec"), module.__dict__)
    except MemoryError:
        end("memory")
    except BaseException as error:
        end("failed", f"{type(error).__name__}: {error}".rstrip(": "))
    end("passed")


# -- the supervisor -------------------------------------------------------------------------------


def wait(report: int, seconds: float) -> list[str] | None:
    """The outcome that the program's process wrote; [] if it ended without one, None if the time is
    over."""
    text, deadline = b"", time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([report], [], [], left)[0]:
            break
        part = os.read(report, 4096)
        text += part
        if not part or text.endswith(b"]"):
            try:
                return json.loads(text)
            except ValueError:
                if not part:
                    return []
    return None


def children() -> list[int]:
    """Processes whose parent is this one; none where there is no /proc."""
    pids, parent = [], os.getpid()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != b"Z":
                pids.append(int(name))
    return pids


def kill_all(group: int, seconds: float = 5.0) -> tuple[int, int]:
    """Kill a process group, then every process that became a child of this one, until none is left.
    Returns the wait status of the process `group` and how many others there were."""
    status, others, deadline = 0, 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        for target in (-group, *children()):
            try:
                os.kill(target, signal.SIGKILL)
            except OSError:
                continue
        try:
            while True:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    time.sleep(0.001)
                    break
                status, others = (wait_status, others) if pid == group else (status, others + 1)
        except ChildProcessError:
            break
    return status, others


def outcome_of(report: list[str] | None, status: int, others: int) -> list[str]:
    """What happened, from what was reported, how the process ended, and what else it left."""
    if others:
        return ["forked", f"{others} processes were left"]
    if report is None:
        return ["timed out", "wall-clock time"]
    if report:
        return report
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return ["timed out", "CPU time"]
        return ["failed", f"ended by {signal.Signals(number).name}"]
    return ["failed", "ended the process"]


def main() -> None:
    cpu_seconds, wall_seconds, memory_bytes = (int(x) for x in sys.argv[1:])
    program = sys.stdin.buffer.read().decode()
    prctl(SET_CHILD_SUBREAPER, 1)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        prctl(SET_PDEATHSIG, signal.SIGKILL)
        run(program, write_end, cpu_seconds, memory_bytes)
    os.close(write_end)
    outcome = wait(read_end, wall_seconds)
    if outcome == []:  # it is ending by itself: its own status says why
        time.sleep(0.01)
    print(json.dumps(outcome_of(outcome, *kill_all(pid))))


if __name__ == "__main__":
    main()
