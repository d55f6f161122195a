"""`mooncake-lite store master`: the process that clients of a MooncakeDistributedStore meet at.

Mounted by `mooncake_lite.tools.pool.commands`. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mooncake_lite.errors import ConfigError

if TYPE_CHECKING:
    from transport.messaging.curve import CurveKeys

STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
DEFAULT_LEASE_MS = 10_000

FULL_COLLECTIONS = 1_000_000
"""Threshold of Python's full garbage collections: none. One looks at every object of the books, for 0.3 s at
200,000 names, in which no client gets an answer; and the books have no cycles."""


@click.command()
@click.option(
    "--rpc-port",
    default=50051,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Where clients connect; 0 takes a free one.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at. Beyond this machine only with --key-file.",
)
@click.option(
    "--default-kv-lease-ttl",
    default=DEFAULT_LEASE_MS,
    show_default=True,
    metavar="MS",
    type=click.IntRange(0, 10**9),
    help="How long a read or an is_exist protects its object.",
)
@click.option(
    "--key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keys of all members; made when it is not there. Clients name it in MOONCAKE_LITE_STORE_KEYS.",
)
def master(rpc_port: int, host: str, default_kv_lease_ttl: int, key_file: Path | None) -> None:
    """Keep the books of a store that clients share.

    Clients are programs with a `store.MooncakeDistributedStore`. Prints one line when it listens; ends with
    SIGTERM or Ctrl-C.
    """
    from store.mooncake_store.master.master import Master
    from transport.errors import ChannelError
    from transport.messaging.address import tcp_endpoint

    try:
        curve = _keys(key_file) if key_file is not None else None
        address = _address(host)
        if curve is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            raise ConfigError(f"--host {host}: other machines can reach it; give --key-file as well")
        endpoint = tcp_endpoint(address, rpc_port or "*")
        server = Master(endpoint, default_kv_lease_ttl, curve)
    except ChannelError as error:
        raise ConfigError(f"store master: {error}") from None

    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS)
    for number in STOPS:
        signal.signal(number, lambda *_: server.stop())
    address = server.endpoint.removeprefix("tcp://")
    click.echo(f"store master at {address}, leases of {default_kv_lease_ttl} ms")
    server.run()
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)  # a second one does not kill it while Python ends


def _address(host: str) -> str:
    """Of a host name or an address. Raises ConfigError."""
    from transport.messaging.address import address_of

    try:
        return address_of(host)
    except (OSError, ValueError):
        raise ConfigError(f"--host {host!r} is no address of this machine; use 127.0.0.1") from None


def _keys(path: Path) -> CurveKeys:
    """The keys in this file, made and written for its owner alone when there are none."""
    from transport.errors import ChannelError
    from transport.messaging.curve import CurveKeys

    try:
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "wb") as file:
                file.write(CurveKeys.generate().to_bytes())
        return CurveKeys.from_bytes(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--key-file {path} cannot be read: {error.strerror}") from None
    except ChannelError as error:
        raise ConfigError(f"--key-file {path}: {error}; delete it and it is made anew") from None
