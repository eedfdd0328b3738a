"""Whatever writes a file leaves the old one or the new one, wherever it is killed, and whenever the
disk is full.

A library in front of libc's ends the process at the nth system call that changes something below a
folder: before it, and for a write also behind its first half. Or the
disk is full from that call on.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char under[PATH_MAX];
static int left = -1, half = 0, seen = 0, full = 0;

void arm(const char *folder, int count, int halfway) {
    strcpy(under, folder); left = count; half = halfway == 1; full = halfway == 2; seen = 0;
}
int counted(void) { return seen; }

static int below(const char *path) { return path && *under && strstr(path, under) != NULL; }
static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }
static int due(int inside) {
    if (!inside || left < 0 || full) return 0;
    seen++;
    return --left == 0;
}
static int no_room(int inside) {  /* at call `left`, and at all that follow */
    if (!inside || left < 0 || !full) return 0;
    seen++;
    if (left > 1) { left--; return 0; }
    errno = ENOSPC;
    return 1;
}
static int of(int fd) {
    char link[64], path[PATH_MAX]; ssize_t n;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return below(path);
}
#define NEXT(name) static __typeof__(&name) next; if (!next) next = dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
    NEXT(write);
    if (*under && no_room(of(fd))) return -1;
    if (*under && due(of(fd))) { if (half) next(fd, data, size / 2); die(); }
    return next(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *data, int count) {
    NEXT(writev);
    if (*under && no_room(of(fd))) return -1;
    if (*under && due(of(fd))) { if (half) next(fd, data, 1); die(); }
    return next(fd, data, count);
}
#define PATHS(type, name, parameters, arguments, inside) \
    type name parameters { NEXT(name); if (due(inside)) die(); return next arguments; }
#define GROWS(type, name, parameters, arguments, inside) \
    type name parameters { \
        NEXT(name); \
        if (no_room(inside)) return -1; \
        if (due(inside)) die(); \
        return next arguments; \
    }
PATHS(int, rename, (const char *a, const char *b), (a, b), below(a) || below(b))
PATHS(int, unlink, (const char *a), (a), below(a))
PATHS(int, unlinkat, (int d, const char *a, int f), (d, a, f), below(a) || of(d))
GROWS(int, mkdir, (const char *a, mode_t m), (a, m), below(a))
PATHS(int, rmdir, (const char *a), (a), below(a))
PATHS(int, chmod, (const char *a, mode_t m), (a, m), below(a))
GROWS(int, fsync, (int fd), (fd), of(fd))
GROWS(int, ftruncate64, (int fd, off64_t n), (fd, n), of(fd))
GROWS(int, ftruncate, (int fd, off_t n), (fd, n), of(fd))
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more); \
        NEXT(name); \
        if ((flags & O_CREAT) && no_room(below(path))) return -1; \
        if ((flags & (O_CREAT | O_TRUNC)) && due(below(path))) die(); \
        return next(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
"""
HELPERS = Path(__file__).parents[1] / "helpers"
DRIVER = r"""
import ctypes, json, os, shutil, sys
from pathlib import Path

folder, name, preload, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[5]
shim = ctypes.CDLL(preload)
sys.path.insert(0, sys.argv[4])
import writers

write, read = writers.WRITERS[name](folder)
OUT = writers.OUT

def armed(value, count, half):
    # A child that writes `value` and is killed or has no room at system call `count`; whether so.
    child = os.fork()
    if not child:
        shim.arm(str(folder / "place").encode(), count, half)
        try:
            write(value)
        except OSError as error:
            os._exit(4 if half == 2 and "No space" in str(error) else 5)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(3)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if half == 2:
        assert os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, 4), status
        return os.WEXITSTATUS(status) == 4
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)

(folder / "place").mkdir()
write(2)
new, kills = read(), 0
for half in (0, 1) if mode == "killed" else (2,):
    for count in range(1, 2000):
        shutil.rmtree(folder / "place", ignore_errors=True)
        (folder / "place").mkdir()
        shim.arm(b"", -1, 0)
        before = None
        if writers.REPLACES[name]:
            write(1)
            before = read()
        killed = armed(2, count, half)
        path = folder / "place" / OUT
        now = read() if path.exists() else None
        kills += killed
        assert now in (before, new) and (killed or now == new), (count, half, now)
        if half == 2 and killed:  # nothing half-written stays
            assert now == before, (count, now)
            beside = {x.name for x in (folder / "place").iterdir()}
            assert beside <= {writers.OUT}, (count, beside)
        if not killed:
            break
        if now is None or path.is_file():  # and whoever comes next can write
            armed(2, -1, 0)
            assert read() == new
print(json.dumps({"kills": kills}))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, and Linux")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    options = ["-shared", "-fPIC", "-w", "-O1"]
    files = ["-o", folder / "shim.so", folder / "shim.c", "-ldl"]
    subprocess.run([compiler, *options, *files], check=True)
    return folder / "shim.so"


def killed(shim: Path, folder: Path, name: str, mode: str = "killed") -> dict[str, int]:
    environment = os.environ | {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", DRIVER, folder, name, shim, HELPERS, mode]
    found = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


OTHERS = ("json", "report", "statistics", "checkpoint", "maps")
SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in OTHERS]


@pytest.mark.parametrize("name", ["packed", *SLOW])
def test_a_killed_writer_leaves_the_old_file_or_the_new_one(shim, tmp_path, name) -> None:
    found = killed(shim, tmp_path, name)
    print(name, found)
    assert found["kills"] >= 5


COMMANDS = ("kvfold pack", "kvfold eval", "kvfold advise", "kvfold demo")


@pytest.mark.parametrize(
    "name",
    [
        "json",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("packed", *OTHERS[1:], *COMMANDS)),
    ],
)
def test_a_full_disk_is_told_and_leaves_the_old_file(shim, tmp_path, name) -> None:
    found = killed(shim, tmp_path, name, "full")
    print(name, found)
    assert found["kills"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_leaves_the_old_file_or_the_new_one(shim, tmp_path, name) -> None:
    found = killed(shim, tmp_path, name)
    print(name, found)
    assert found["kills"] >= 5
