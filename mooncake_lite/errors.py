"""The tree of errors that a user can meet. Each message is one line: what was wrong, and the fix.

UserError                exit code 2 on the command line
  ConfigError            a flag, a TOML key, a combination of them
  ModelError             a model folder or file that cannot be used
  CacheError             the cache folder cannot be used
  LaunchError            the cluster cannot be started on this machine
  TraceError             a trace that cannot be read
  RecordingError         a recording of the control plane that cannot be made or read
  TracingError           a trace of a run that cannot be made
  LabError               a lab, a submission or a release that cannot be used
ClusterError             exit code 1: the cluster ended because of something that happened in it
ThreadDied               a thread of a rank died, and the rank ends with it
RequestError             HTTP 4xx: an OpenAI error object
"""

from __future__ import annotations


class UserError(Exception):
    """What the user asked for cannot be done; the message says why and what would be right."""


class ConfigError(UserError):
    """A flag or a configuration key is wrong."""


class ModelError(UserError):
    """A model cannot be used: unknown, unsupported, incomplete."""


class CacheError(UserError):
    """The cache folder cannot be used: not writable, full."""


class LaunchError(UserError):
    """This machine cannot start what was asked for."""


class TraceError(UserError):
    """A trace cannot be read, or a line of it is not what it must be; the message names file and line."""


class RecordingError(UserError):
    """A recording of the control plane cannot be made, or a file is none that can be replayed."""


class TracingError(UserError):
    """A trace of a run, or a part of it, cannot be made, or there are no parts to join."""


class LabError(UserError):
    """A lab, a student's file or a submission is not what it must be; the message says the fix."""


class ClusterError(Exception):
    """The running cluster ended on its own; the message names the rank."""


class ThreadDied(Exception):
    """A thread of this rank died of a bug of ours; the message names the thread and the reason."""


class RequestError(Exception):
    """A request over HTTP is wrong. `param` names the field, `status` is the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code


def printable(text: str) -> str:
    """Return a stranger's text with ? for what could move the cursor of a terminal or cannot be encoded."""
    return "".join(char if char.isprintable() else "?" for char in text)
