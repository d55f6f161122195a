"""Keys of CURVE, ZeroMQ's encryption: made once per cluster and handed out over MPI.

Used by `channel` on every TCP endpoint, and by the roles, which hand keys to other processes. A hub accepts
only peers with the cluster's one client pair. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import msgspec
import zmq
from zmq.utils import z85

from transport.errors import ChannelError

_Z85_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Keys in ZeroMQ's printable form (Z85, 40 characters each).

    server_public, server_secret    of the hub; the secret is empty where only a spoke needs them
    client_public, client_secret    the one pair that all members of a cluster share

    Secrets are left out of repr(), so that they do not end in a log.
    """

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def generate(cls, client: CurveKeys | None = None) -> CurveKeys:
        """Generate keys for a hub. With `client`, take the client pair from there.

        Raises ChannelError when this libzmq was built without CURVE.
        """
        try:
            server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
            client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
        except zmq.ZMQError as error:
            raise ChannelError(f"this ZeroMQ has no CURVE: {error}; install the pyzmq wheel") from None
        if client is not None:
            client_public, client_secret = client.client_public, client.client_secret
        return cls(server_public, server_secret, client_public, client_secret)

    def for_server(self, server_public: str) -> CurveKeys:
        """Return the keys that a spoke needs for the hub with that public key."""
        return replace(self, server_public=server_public, server_secret="")

    def to_bytes(self) -> bytes:
        """Return all four keys as bytes, for another member of the cluster only."""
        keys = [self.server_public, self.server_secret, self.client_public, self.client_secret]
        return msgspec.msgpack.encode(keys)

    @classmethod
    def from_bytes(cls, data: bytes) -> CurveKeys:
        """Return the keys in the bytes of to_bytes. Raises ChannelError for other bytes."""
        try:
            keys = cls(*msgspec.msgpack.decode(data, type=tuple[str, str, str, str]))
        except (msgspec.MsgspecError, ValueError) as error:
            raise ChannelError(f"these are no CURVE keys: {error}") from None
        needed = [keys.server_public, keys.client_public, keys.client_secret]
        if not all(map(_Z85_KEY.fullmatch, [*needed, *filter(None, [keys.server_secret])])):
            raise ChannelError("these are no CURVE keys: a key has 40 characters of Z85")
        return keys

    def guard(self, router: zmq.Socket) -> None:
        """Encrypt a socket that will be bound, and have its context ask a door about each peer."""
        router.curve_server = True
        router.curve_publickey = self.server_public.encode()
        router.curve_secretkey = self.server_secret.encode()
        router.setsockopt_string(zmq.ZAP_DOMAIN, "cluster")

    def answer_of_door(self, asked: list[bytes]) -> tuple[bool, list[bytes]]:
        """Decide whether a peer may connect (RFC 27, ZAP): holders of the client key alone.

        asked   the frames of a context's question. Returns whether the peer may, and the frames to send back
        """
        version, number, _domain, _address, _identity, mechanism, *credentials = asked
        welcome = mechanism == b"CURVE" and credentials == [z85.decode(self.client_public.encode())]
        status, text = (b"200", b"OK") if welcome else (b"400", b"not of this cluster")
        return welcome, [version, number, status, text, b"", b""]
