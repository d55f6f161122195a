"""The `mooncake-lite` command: finds the subcommand, and turns every error into one line.

`main` is the console entry. Subcommands live with what they do and are imported when they are used, so
that `mooncake-lite --help` answers at once. Explained in docs/reference/cli.md.

Exit codes: 0 success, 1 the cluster was lost or a check failed, 2 wrong usage or an impossible configuration,
130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from mooncake_lite import __version__
from mooncake_lite.errors import ClusterError, RequestError, UserError
from mooncake_lite.launch.place import world_from_environment

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": (
        "mooncake_lite.serve_command:serve",
        "Start a cluster with an OpenAI-compatible server.",
    ),
    "chat": ("mooncake_lite.tools.chat:chat", "Talk to a running server in the terminal."),
    "top": ("mooncake_lite.tools.top.command:top", "Watch a running cluster in the terminal."),
    "cluster": ("mooncake_lite.tools.top.status:cluster", "Ask a running cluster how it is."),
    "generate": ("mooncake_lite.engine.commands:generate", "Answer one prompt in this process, without MPI."),
    "demo": ("mooncake_lite.tools.demo.command:demo", "Show how much time reusing the KVCache saves."),
    "model": ("mooncake_lite.model.commands:model_group", "Download and inspect models."),
    "cache": ("mooncake_lite.model.commands:cache_group", "Show or empty the cache folder."),
    "store": (
        "mooncake_lite.tools.pool.commands:store",
        "Inspect and manage the KV blocks of a pool; run the master of a store.",
    ),
    "bench": (
        "mooncake_lite.tools.bench.command:bench",
        "Measure kernels, transport, store, scheduler, engine or ideas.",
    ),
    "profile": (
        "mooncake_lite.tools.profile.command:profile",
        "Measure the real engine, for `serve --engine emulated`.",
    ),
    "simulate": (
        "mooncake_lite.simulator.command:simulate",
        "Play traces on simulated clusters, and compare policies.",
    ),
    "plan": ("mooncake_lite.planner.command:plan", "Find the smallest cluster that keeps a workload's SLOs."),
    "workload": ("mooncake_lite.tools.workload:workload", "Describe and make traces of requests."),
    "replay": (
        "mooncake_lite.tools.replay:replay",
        "Play a trace against a running server, and measure latencies and goodput.",
    ),
    "replay-events": (
        "mooncake_lite.tools.replay_events:command",
        "Replay a recording of `serve --record` and compare the effects.",
    ),
    "explain": (
        "mooncake_lite.tools.explain:command",
        "Show what was compared when a request was placed or refused.",
    ),
    "join-trace": (
        "mooncake_lite.tracing.command:command",
        "Join the parts of a trace after a run of `serve --trace` was killed.",
    ),
    "arena": ("mooncake_lite.tools.arena.command:arena", "Race placement policies of your own against ours."),
    "labs": ("mooncake_lite.labs.commands:labs", "Do the labs of a course, hand them in, and grade them."),
    "doctor": (
        "mooncake_lite.tools.doctor.command:doctor",
        "Report what this machine has and what it can run.",
    ),
}
"""name -> (module:attribute, the line that --help shows); nothing of it is imported before it is used."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None when there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in --help, from COMMANDS alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=LazyGroup, context_settings=SETTINGS)
@click.version_option(__version__, "--version", prog_name="mooncake-lite", message="%(prog)s %(version)s")
def cli() -> None:
    """A disaggregated LLM server around a KVCache pool, to read, to run and to change.

    `mooncake-lite serve` starts it, `mooncake-lite demo` shows what it is about.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Never raises, never shows a traceback unasked.

    arguments   None: those of this process, which then runs the code of the release in which it works
    """
    try:
        if arguments is None:
            _run_release()
        code = cli.main(args=arguments, prog_name="mooncake-lite", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        return _complain(error.format_message(), 2)
    except (UserError, RequestError) as error:  # the second: a prompt that the model cannot take
        return _complain(str(error), 2)
    except ClusterError as error:
        return _complain(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:  # the reader of our output has left (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("MOONCAKE_LITE_DEBUG"):
            traceback.print_exc()
        return _complain(_in_words(error), 1)


def _run_release() -> None:
    """In a release of a lab, start this command again with the packages of that release.

    So one environment serves all releases of a course, and every command runs the code that `labs check`
    tests. Ranks inherit PYTHONPATH, or come here themselves.
    """
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # it was removed
        return
    trees = [tree for tree in (folder, *folder.parents) if (tree / "lab-class.json").is_file()]
    code = next((tree / "mooncake_lite/cli.py" for tree in trees), Path(__file__))
    if code.is_file() and not code.samefile(__file__):
        path = os.pathsep.join([str(code.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-P", "-m", "mooncake_lite", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})


def _in_words(error: Exception) -> str:
    """Return what to say of an error that no command expects."""
    if isinstance(error, NotImplementedError) and (stub := re.fullmatch(r"lab task (\d+)(\w)", str(error))):
        number, task = stub[1], stub[1] + stub[2]
        where = f"`mooncake-lite labs check {number} {task}` names its function"
        return f"lab {number}, task {task} is not written yet; {where}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"this command needs the package {package}, which this environment lacks: run `make venv`"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: Python cannot read this file: {error.msg}"
    return f"this is a bug: {type(error).__name__}: {error} (MOONCAKE_LITE_DEBUG=1 shows where)"


def _complain(message: str, code: int) -> int:
    """One line on stderr; inside an MPI job rank 0 speaks for all."""
    place = world_from_environment()
    if place is None or place.rank == 0:
        print(f"mooncake-lite: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code
