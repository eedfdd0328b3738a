"""The command line `kvfold`: its commands, and how errors and interrupts end them."""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    RepeatArgumentError,
    UnusedCliTokensError,
)

from kvfold.cli.advise import advise
from kvfold.cli.bench import bench
from kvfold.cli.compare import compare
from kvfold.cli.compress import compress
from kvfold.cli.demo import demo
from kvfold.cli.evaluate import evaluate
from kvfold.cli.frontier import frontier
from kvfold.cli.generate import generate
from kvfold.cli.inspect import inspect
from kvfold.cli.options import converted, flag
from kvfold.cli.pack import pack
from kvfold.cli.paths import check_paths
from kvfold.cli.push import push
from kvfold.cli.recover import recover
from kvfold.cli.route import route
from kvfold.cli.serve import serve
from kvfold.cli.settings import NOTE, Command, VerbatimError, expanded, with_settings
from kvfold.cli.version import version
from kvfold.utils.errors import SettingError
from kvfold.utils.files import check_here
from kvfold.utils.versions import check_transformers, probe_transformers

app = Command(
    name="kvfold",
    help="Make a language model's KV cache smaller, and serve and measure the model with it.\n\n"
    "MODEL is a directory, a GGUF file, a hub id such as Qwen/Qwen2.5-7B-Instruct, or a reference "
    "model: reference:gqa and reference:mha are small models inside kvfold; `make smollm2` and "
    "`make qwen` download reference:smollm2 and reference:qwen2.5-coder-1.5b.",
    version=version,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(converter=converted),
)
MAX_WORD = 1000  # characters of a word in an error
LESS_MODEL = "take a smaller model, or --device cpu where that is an option"
LESS = {  # advice when memory is short, by command
    **dict.fromkeys(
        ("eval", "compare", "frontier"), "lower --batch, --ctx or --chunk, and --kv-bytes of pages"
    ),
    "generate": "shorten the prompt, or lower --max-new-tokens, or --kv-bytes of pages",
    "serve": "lower --max-sequences or --max-tokens, or --kv-bytes of pages",
    "recover": "take a smaller model, leave --original out, or --device cpu",
    "pack": "shorten the context, or lower --kv-bytes of pages",
    "bench": "lower --batch, --tokens or --layers",
}
EXAMPLES = {  # of commands that cannot run without arguments
    **{name: f"{name} reference:gqa" for name in ("serve", "advise", "eval", "compare")},
    "frontier": "frontier reference:gqa",
    "compress": "compress reference:gqa --output maps",
    "recover": "recover folded --output recovered",
    "generate": "generate reference:gqa --prompt 'The old house'",
    "pack": "pack reference:gqa --context book.txt --output book.kvf",
    "push": "push maps USER/NAME",
    "route": "route http://127.0.0.1:8001 http://127.0.0.1:8002",
}
COMMANDS: dict[str, Callable[..., None]] = {
    "advise": advise,
    "compress": compress,
    "recover": recover,
    "generate": generate,
    "serve": serve,
    "route": route,
    "inspect": inspect,
    "eval": evaluate,
    "compare": compare,
    "frontier": frontier,
    "demo": demo,
    "pack": pack,
    "push": push,
}
for place, (name, command) in enumerate(COMMANDS.items()):
    app.command(command, name=name, sort_key=place, help_epilogue=NOTE)
app.command(bench)
app.register_install_completion_command(
    help="Let this shell (bash, zsh or fish) complete commands and flags."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line of kvfold, by default the process's. Returns the exit code."""
    return run(app, sys.argv[1:] if arguments is None else list(arguments))


def run(program: App, arguments: list[str]) -> int:
    """Run a command line of a program. Returns the exit code.

    A user's mistake is one line on stderr and code 2; an interrupt is 130, SIGTERM 143, and 141
    means that the reader of the output has closed it.
    """
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # an é must not end a command
    try:
        check_transformers()
        probe_transformers()
        check_here()
        with _terminable():
            reader, words = expanded(program, arguments)
            command, bound, _ = reader.parse_args(words, exit_on_error=False, print_error=False)
            check_paths(bound)
            command(*bound.args, **bound.kwargs)
            print(end="", flush=True)  # a full disk is an error here, and not at exit
    except (BrokenPipeError, SystemExit) as error:  # rich turns a broken pipe into an exit
        if not any(isinstance(x, BrokenPipeError) for x in (error, error.__context__)):
            raise
        # The reader has closed the pipe, as `| head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CycloptsError, ValueError, OSError) as error:
        message = in_words(error)
        if not isinstance(error, VerbatimError):
            message = with_settings(message, program, arguments)
        return refuse(message)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        less = LESS.get("".join(arguments[:1]), LESS_MODEL)
        return refuse(with_settings(f"{first_sentences(error)}: {less}", program, arguments))
    except Terminated:
        print("kvfold: terminated", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("kvfold: interrupted", file=sys.stderr)
        return 130
    return 0


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an interrupt, so that everything cleans up as after Ctrl-C."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Context manager: SIGTERM ends a command like an interrupt, so that no half-written files
    stay. A library may turn either into another error, such as an ImportError; that ends the
    command as the interrupt would."""
    interrupts: list[KeyboardInterrupt] = []

    def stop(number: int, _: Any) -> None:
        interrupts.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise interrupts[-1]

    def repeat(lost: Any) -> None:
        """Send a signal again whose interrupt Python dropped, which happens in finalisers and in
        callbacks of weak references."""
        if issubclass(lost.exc_type, KeyboardInterrupt):
            number = signal.SIGTERM if lost.exc_type is Terminated else signal.SIGINT
            threading.Timer(0.1, signal.raise_signal, [number]).start()
        else:
            hook(lost)

    if threading.current_thread() is not threading.main_thread():  # others cannot have handlers
        yield
        return
    before, hook = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}, sys.unraisablehook
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not nohup's, or a caller's
        before[signal.SIGINT] = signal.signal(signal.SIGINT, stop)
    sys.unraisablehook = repeat
    try:
        yield
    except Exception as error:
        if not interrupts:
            raise
        raise interrupts[0] from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def refuse(message: str) -> int:
    """Print an error as one line, with very long words shortened. Returns the exit code."""
    words = (x if len(x) <= MAX_WORD else f"{x[:100]}…{x[-100:]}" for x in message.split())
    print(f"kvfold: error: {' '.join(words)}", file=sys.stderr)
    return 2


def in_words(error: Exception) -> str:
    """An error's message in terms of flags and files."""
    if isinstance(error, SettingError):
        return error.with_names(flag)
    if isinstance(error, UnusedCliTokensError):
        words = " ".join(map(repr, error.unused_tokens or ()))
        return f"unexpected {words}: an option takes one value, quoted if it has spaces; see --help"
    if isinstance(error, MissingArgumentError):
        return missing(error)
    if isinstance(error, RepeatArgumentError):
        name, last = error.token.keyword, error.token.value
        return f"{name} is given more than once, and takes one value: leave out all but one" + (
            f"; got {last} last" if last else ""
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def missing(error: MissingArgumentError) -> str:
    """What a required argument takes, with an example of its command."""
    command, argument = " ".join(error.command_chain or ()), error.argument
    if error.keyword is not None:
        return without_value(error.keyword, error.root_input_tokens or [])
    if argument is None or not argument.required or command not in EXAMPLES:
        return str(error)
    what = (argument.parameter.help or "").partition(". ")[0].removesuffix(".")
    takes = f"{what}. For" if what else "For"
    return f"kvfold {command} needs {argument.name}. {takes} example: kvfold {EXAMPLES[command]}"


def without_value(name: str, words: Sequence[str]) -> str:
    """What to write for a flag whose value is missing, or begins with a dash. words: of the command
    line."""
    text = f"{name} needs a value, as in {name} VALUE"
    after = words[words.index(name) + 1 :] if name in words else []
    if after and re.match(r"-[^-]", after[0]):
        text += (
            f", and {after[0]!r} begins as a flag does: write {name}={after[0]} if it is the value"
        )
    return text


def out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch ran out of memory, on a GPU or on the CPU, whose error has no class."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def first_sentences(error: RuntimeError) -> str:
    """The part of an out-of-memory error that says how much memory was needed; the rest is advice
    about PyTorch's settings."""
    text = str(error).rpartition("DefaultCPUAllocator: ")[2]
    return ". ".join(text.split(". ")[:3]).rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
