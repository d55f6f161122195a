"""`--kv-events-config`: vLLM's flag and vLLM's JSON, checked before anything is started.

Read by `serve.py` (to refuse what cannot work) and by the conductor (to publish). Knows no sockets.
Explained in docs/reference/kv-events.md.
"""

from __future__ import annotations

import msgspec

from mooncake_lite.errors import ConfigError
from transport.errors import ChannelError
from transport.messaging.publisher import check_local


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The names and meanings are vLLM's; the defaults stay on this machine.

    publisher         "zmq", or "null" for none
    endpoint          where listeners connect (PUB); replay_endpoint: where they ask for what they missed
    buffer_steps      messages kept for replays
    hwm               messages that wait for a slow listener before it loses some
    max_queue_size    accepted and without effect: messages are sent when they are made
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = "kv-events"

    @property
    def wanted(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


def kv_events_config(text: str) -> KVEventsConfig:
    """The configuration in a JSON object; "" is one without events. Raises ConfigError with the fix."""
    try:
        config = msgspec.json.decode(text or "{}", type=KVEventsConfig)
    except (msgspec.DecodeError, UnicodeError) as error:
        known = ", ".join(KVEventsConfig.__struct_fields__)
        raise ConfigError(f"kv_events_config={text!r}: {error}; a JSON object of {known} is wanted") from None
    if config.publisher not in ("zmq", "null"):
        raise ConfigError(f"kv_events_config: publisher {config.publisher!r}: use zmq or null")
    if config.buffer_steps < 0 or config.hwm < 1:
        raise ConfigError("kv_events_config: buffer_steps must be at least 0 and hwm at least 1")
    try:
        for endpoint in (config.endpoint, config.replay_endpoint):
            if endpoint is not None and config.wanted:
                check_local(endpoint)
    except ChannelError as error:
        raise ConfigError(f"kv_events_config: {error}") from None
    return config
