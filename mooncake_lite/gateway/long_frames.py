"""Messages between a gateway and its process for long prompts: frames over one Unix socket.

A frame is the length of a message (u32, big-endian) and the message (transport/wire.py). The body behind a
PromptTask and the JSON behind a PromptAnswer follow as they are, so that they are copied once.
Used by `long_prompts` and `long_prompts_process`; explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import struct

import msgspec

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.prompt_work import Kind, Prepared
from mooncake_lite.messages import HintArrived
from mooncake_lite.messages.parts import Message
from transport.wire import Decoder, encode

LENGTH = struct.Struct("!I")


class PromptTask(Message, frozen=True):
    """Gateway -> process: do this with the body that follows, of nbytes bytes."""

    kind: Kind
    request_id: str
    nbytes: int


class PromptAnswer(Message, frozen=True):
    """Process -> gateway: the JSON that follows, of nbytes bytes, is the answer."""

    nbytes: int


class Problem(Message, frozen=True):
    """Process -> gateway: the request is wrong. The fields are those of RequestError."""

    message: str
    param: str | None
    status: int
    code: str | None

    @classmethod
    def of(cls, error: RequestError) -> Problem:
        """The message that carries an error."""
        return cls(error.message, error.param, error.status, error.code)

    def error(self) -> RequestError:
        """The error again."""
        return RequestError(self.message, param=self.param, status=self.status, code=self.code)


TO_PROCESS = Decoder(PromptTask)
TO_GATEWAY = Decoder(Prepared | HintArrived | PromptAnswer | Problem)


def frame(message: msgspec.Struct) -> bytes:
    """The frame of a message. Raises WireError when it is longer than a message may be."""
    data = encode(message)
    return LENGTH.pack(len(data)) + data
