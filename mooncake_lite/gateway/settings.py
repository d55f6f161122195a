"""The settings of a gateway process: the file gateway.json in the run folder.

Read by `__main__`; written by rank 0 before it starts the process. Knows no socket and no request.
The file holds the API key and secret keys, so it must belong to its owner alone (mode 0600).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from mooncake_lite.config.reading import config_from, read_private
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError
from transport.messaging.curve import CurveKeys

FILE_NAME = "gateway.json"


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every wait and every queue of a gateway has a limit; these are they.

    body_bytes        largest request body
    bodies_bytes      all larger bodies (body_reader.py) that are being read or worked on
    open_requests     requests between their first byte and their last; one more is refused with 429
    connections       open HTTP connections
    header_timeout_s  from the first byte of a request's headers to their end
    body_timeout_s    from the end of the headers to the end of the body
    write_timeout_s   a client that takes nothing for this long is gone
    token_timeout_s   a request that gets no token for this long has failed
    ping_s            pause between two pings of the conductor
    metrics_kept_s    the conductor is asked for metrics once in this time, however many scrapes come. It is
                      less than 1 s, so that a scrape every second always gets a new answer
    """

    body_bytes: int = 8 * 2**20
    bodies_bytes: int = 128 * 2**20
    open_requests: int = 1024
    connections: int = 4096
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    token_timeout_s: float = 600.0
    ping_s: float = 2.0
    metrics_kept_s: float = 0.9


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the settings that stands in the file as it is used.

    served_id       the id under which the model answers
    max_model_len   tokens of prompt and answer together
    weights         what the ranks compute on, in words
    name            identity on the control channel
    curve           keys of its TCP endpoint for tokens; the client pair is the one that all ranks share, and
                    its secret is not needed here
    parent_pid      process that must be alive for this one to make sense; 0 when not given
    beats           a steward expects beats, and tells of new conductors in its answers
    """

    served_id: str
    max_model_len: Annotated[int, msgspec.Meta(ge=2)]
    weights: str
    name: str = "gateway-0"
    curve: CurveKeys | None = None
    parent_pid: int = 0
    beats: bool = False
    limits: Limits = Limits()


class _File(_Told, frozen=True, kw_only=True, forbid_unknown_fields=True):
    config: dict[str, Any]
    model_folder: str
    fingerprint: str


class Settings(_Told, frozen=True, kw_only=True):
    """One gateway's settings.

    model_folder    Hugging Face folder; only its tokenizer is read
    fingerprint     of the weights and of all that changes the KV's values: the base of every salt
    """

    run_dir: Path
    config: ServeConfig
    model_folder: Path
    fingerprint: bytes

    @property
    def control_endpoint(self) -> str:
        """Return the endpoint on which the conductor listens."""
        return f"ipc://{self.run_dir}/control"

    @property
    def heart_endpoint(self) -> str:
        """Return the endpoint on which the steward takes beats."""
        return f"ipc://{self.run_dir}/heart"

    @property
    def tokens_endpoint(self) -> str:
        """Return the endpoint to which ranks on this host send tokens."""
        return f"ipc://{self.run_dir}/tokens-{self.name}"


def read_settings(run_dir: Path) -> Settings:
    """Return the settings in run_dir/gateway.json.

    Raises ConfigError when the file is missing, open to others than its owner, or malformed.
    """
    path = run_dir / FILE_NAME
    file = read_private(path, _File)
    try:
        fingerprint = bytes.fromhex(file.fingerprint)
    except ValueError as error:
        raise ConfigError(f"{path} is malformed: {error}") from None
    return Settings(
        run_dir=run_dir,
        config=config_from(file.config, str(path)),
        model_folder=Path(file.model_folder),
        fingerprint=fingerprint,
        **{name: getattr(file, name) for name in _Told.__struct_fields__},
    )
