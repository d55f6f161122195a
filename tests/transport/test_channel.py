"""transport.channel: names, limits, strangers, and never a blocked sender."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.mpi import ROOT
from transport import channel
from transport.channel import QUEUE_MESSAGES, CurveKeys, Hub, Spoke
from transport.errors import ChannelError, WireError
from transport.messaging.address import reserved_port
from transport.wire import Decoder, encode

pytestmark = pytest.mark.quick
LIMIT_S = 20.0


class Note(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    text: str = ""


NOTES = Decoder(Note, max_bytes=2000)


def collect(hub: Hub, count: int) -> list[tuple[str, Note]]:
    """The next `count` messages of a hub, or fewer when they do not come within LIMIT_S."""
    return until(lambda found: len(found) >= count, lambda: hub.receive(0.05))


def until(enough: Callable[[list], bool], step: Callable[[], list]) -> list:
    found: list = []
    deadline = time.monotonic() + LIMIT_S
    while not enough(found) and time.monotonic() < deadline:
        found += step()
    return found


@contextmanager
def raw_dealer(endpoint: str, name: str = "raw") -> Iterator[zmq.Socket]:
    """A peer that speaks ZeroMQ and nothing of ours."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt_string(zmq.IDENTITY, name)
        raw.connect(endpoint)
        yield raw


@pytest.fixture
def keys() -> CurveKeys:
    return CurveKeys.generate()


@pytest.fixture
def hub(tmp_path: Path, keys: CurveKeys) -> Iterator[Hub]:
    with Hub([f"ipc://{tmp_path}/hub", "tcp://127.0.0.1:*"], NOTES, keys) as hub:
        yield hub


@pytest.mark.parametrize("which", [0, 1], ids=["ipc", "tcp"])
def test_messages_go_both_ways_and_are_counted(hub: Hub, keys: CurveKeys, which: int) -> None:
    with Spoke(hub.endpoints[which], "rank-1", NOTES, keys.for_server(keys.server_public)) as spoke:
        assert spoke.send(Note(1, "up"))
        assert collect(hub, 1) == [("rank-1", Note(1, "up"))]
        assert hub.send("rank-1", Note(2, "down"))
        assert spoke.receive(LIMIT_S) == [Note(2, "down")]
        size = len(encode(Note(1, "up")))
        assert (hub.counters.messages_in, hub.counters.bytes_in) == (1, size)
        assert (spoke.counters.messages_out, spoke.counters.bytes_out) == (1, size)
        assert (hub.counters.messages_out, spoke.counters.messages_in) == (1, 1)


def test_a_spoke_may_be_there_before_its_hub(tmp_path: Path) -> None:
    with Spoke(f"ipc://{tmp_path}/late", "early", NOTES) as spoke:
        assert spoke.send(Note(7))
        with Hub([f"ipc://{tmp_path}/late"], NOTES) as hub:
            assert collect(hub, 1) == [("early", Note(7))]


def test_a_hub_is_reached_at_each_of_its_paths(tmp_path: Path) -> None:
    paths = [f"ipc://{tmp_path}/{name}" for name in "ab"]
    with Hub(paths, NOTES) as hub, Spoke(paths[0], "a", NOTES) as a, Spoke(paths[1], "b", NOTES) as b:
        assert (a.send(Note(1)), b.send(Note(2))) == (True, True)
        assert sorted(collect(hub, 2)) == [("a", Note(1)), ("b", Note(2))]


def test_a_message_to_an_unknown_peer_is_not_sent_and_counted(hub: Hub) -> None:
    assert not hub.send("nobody", Note(1))
    assert hub.counters.unsent == 1


def test_a_peer_that_left_is_unknown_again(hub: Hub) -> None:
    with Spoke(hub.endpoints[0], "brief", NOTES) as spoke:
        spoke.send(Note(1))
        collect(hub, 1)
    sent = until(lambda found: False in found, lambda: [hub.send("brief", Note(2))])
    assert sent[-1] is False
    assert hub.counters.unsent == 1


def test_a_full_queue_refuses_instead_of_blocking(tmp_path: Path) -> None:
    with Spoke(f"ipc://{tmp_path}/nobody", "eager", NOTES) as spoke:
        results = [spoke.send(Note(number)) for number in range(QUEUE_MESSAGES + 5)]
    assert results.count(False) == spoke.counters.unsent >= 4


def test_malformed_and_oversized_messages_are_dropped_and_counted(hub: Hub) -> None:
    with raw_dealer(hub.endpoints[0], "odd") as raw:
        good = encode(Note(3))
        for frames in ([b"junk"], [b""], [good, good], [encode(Note(1, "x" * 3000))], [b"\x01\xc1"], [good]):
            raw.send_multipart(frames)
        assert collect(hub, 1) == [("odd", Note(3))]
        assert hub.counters.dropped == 5


def test_a_huge_message_costs_its_sender_the_connection_and_nobody_else(hub: Hub) -> None:
    with raw_dealer(hub.endpoints[0]) as raw:
        raw.send(b"\x01" + b"x" * 10**6)
        with Spoke(hub.endpoints[0], "good", NOTES) as spoke:
            spoke.send(Note(4))
            assert collect(hub, 1) == [("good", Note(4))]
        assert hub.counters.bytes_in < 1000


def test_names_that_are_not_wanted_are_dropped_and_counted(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/picky"
    with (
        Hub([endpoint], NOTES, may_join={"rank-1"}.__contains__) as hub,
        Spoke(endpoint, "rank-1", NOTES) as wanted,
        Spoke(endpoint, "rank-9", NOTES) as other,
    ):
        other.send(Note(9))
        until(lambda _: hub.counters.dropped > 0, lambda: hub.receive(0.05))
        wanted.send(Note(1))
        assert collect(hub, 1) == [("rank-1", Note(1))]
        assert hub.counters.dropped == 1
        assert not hub.send("rank-9", Note(1))


def test_a_stranger_with_other_keys_is_refused_and_counted(hub: Hub, keys: CurveKeys) -> None:
    stranger = CurveKeys.generate().for_server(keys.server_public)
    with Spoke(hub.endpoints[1], "stranger", NOTES, stranger) as spoke:
        spoke.send(Note(666))
        seen = until(lambda _: hub.counters.strangers > 0, lambda: hub.receive(0.05))
    assert seen == []
    assert hub.counters.strangers >= 1


def test_a_stranger_without_curve_is_refused_and_counted(hub: Hub) -> None:
    with raw_dealer(hub.endpoints[1]) as raw:
        with suppress(zmq.Again):  # it may have been refused before it could send
            raw.send(encode(Note(666)), zmq.NOBLOCK)
        seen = until(lambda _: hub.counters.strangers > 0, lambda: hub.receive(0.05))
    assert seen == []
    assert hub.counters.strangers >= 1


def test_a_stranger_that_does_not_speak_zeromq_disturbs_nobody(hub: Hub, keys: CurveKeys) -> None:
    port = int(hub.endpoints[1].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as web:
        web.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 50)
        with Spoke(hub.endpoints[1], "good", NOTES, keys.for_server(keys.server_public)) as spoke:
            spoke.send(Note(5))
            assert collect(hub, 1) == [("good", Note(5))]
    assert hub.counters.messages_in == 1


MANY_STRANGERS = """
import socket
from tests.transport.test_channel import NOTES, CurveKeys, Hub

hub = Hub(["tcp://127.0.0.1:*"], NOTES, CurveKeys.generate())
address = ("127.0.0.1", int(hub.endpoints[0].rpartition(":")[2]))
for _ in range(2100):  # libzmq queues 2,000 events, then its thread waits for who reads them
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\0" + b"NULL".ljust(20, b"\\0") + bytes(32))
        stranger.settimeout(0.3)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            break
hub.close()
print("strangers", hub.counters.strangers > 0)
"""


def test_strangers_that_nobody_has_counted_yet_keep_no_hub_from_its_end() -> None:
    run = subprocess.run(
        [sys.executable, "-c", MANY_STRANGERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout == "strangers True\n"


def test_a_hub_remembers_no_more_names_than_its_limit_the_last_ones_it_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_PEERS", 2)
    endpoint = f"ipc://{tmp_path}/hub"
    with Hub([endpoint], NOTES) as hub:
        spokes = {name: Spoke(endpoint, name, NOTES) for name in "abc"}
        for name in "abac":
            spokes[name].send(Note(1))
            assert collect(hub, 1) == [(name, Note(1))]
        assert not hub.send("b", Note(2))
        for name in "ac":
            assert hub.send(name, Note(3))
            assert spokes[name].receive(LIMIT_S) == [Note(3)]
        for spoke in spokes.values():
            spoke.close()


def test_tcp_without_keys_is_refused() -> None:
    with pytest.raises(ChannelError, match="only used with CURVE"):
        Hub(["tcp://127.0.0.1:*"], NOTES)
    with pytest.raises(ChannelError, match="only used with CURVE"):
        Spoke("tcp://127.0.0.1:1", "x", NOTES)


def test_tcp_without_keys_is_for_loopback_and_for_who_asks_for_it() -> None:
    with (
        Hub(["tcp://127.0.0.1:*"], NOTES, plain_loopback=True) as hub,
        Spoke(hub.endpoints[0], "near", NOTES, plain_loopback=True) as spoke,
    ):
        spoke.send(Note(3))
        assert collect(hub, 1) == [("near", Note(3))]
    for endpoint in ("tcp://0.0.0.0:*", "tcp://*:*", "tcp://192.0.2.1:1", "tcp://localhost:1"):
        with pytest.raises(ChannelError, match="only used with CURVE"):
            Hub([endpoint], NOTES, plain_loopback=True)


def test_a_taken_port_is_named(hub: Hub, keys: CurveKeys) -> None:
    with pytest.raises(ChannelError, match="cannot be bound"):
        Hub([hub.endpoints[1]], NOTES, keys)


def test_a_reserved_port_serves_one_hub_after_the_other(keys: CurveKeys) -> None:
    with reserved_port("127.0.0.1") as keeper:
        endpoint = f"tcp://127.0.0.1:{keeper.getsockname()[1]}"
        with Spoke(endpoint, "rank-1", NOTES, keys) as spoke:
            for number in range(2):
                with Hub([endpoint], NOTES, keys) as hub:
                    spoke.send(Note(number))
                    assert collect(hub, 1) == [("rank-1", Note(number))]


def test_a_hub_takes_the_place_of_one_that_was_killed(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control"
    bind = f"import os, zmq; s = zmq.Context().socket(zmq.ROUTER); s.bind({endpoint!r})"
    program = f"{bind}; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert (tmp_path / "control").is_socket()
    with Spoke(endpoint, "rank-1", NOTES) as spoke, Hub([endpoint], NOTES) as hub:
        spoke.send(Note(1))
        assert collect(hub, 1) == [("rank-1", Note(1))]


def test_a_socket_path_that_linux_cannot_hold_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match=r"has 1\d\d bytes, Linux allows 107"):
        Hub([f"ipc://{tmp_path}/{'x' * 100}"], NOTES)


def test_an_unusable_endpoint_or_name_is_refused() -> None:
    with pytest.raises(ChannelError, match="is no endpoint"):
        Hub(["udp://here"], NOTES)
    with pytest.raises(ChannelError, match="printable"):
        Spoke("ipc://x", "two\nlines", NOTES)


def test_a_message_too_large_to_send_raises_at_its_sender(tmp_path: Path) -> None:
    with (
        Spoke(f"ipc://{tmp_path}/x", "x", NOTES, max_send_bytes=100) as spoke,
        pytest.raises(WireError, match="limit is 100"),
    ):
        spoke.send(Note(1, "x" * 100))


def test_wake_ends_a_wait_from_any_thread(hub: Hub) -> None:
    waker = threading.Thread(target=hub.wake)
    start = time.monotonic()
    waker.start()
    assert hub.receive(LIMIT_S) == []
    waker.join()
    assert time.monotonic() - start < LIMIT_S / 2
    hub.close()
    hub.wake()  # after the end: nothing happens


def test_keys_survive_their_way_over_mpi_and_hide_in_logs(keys: CurveKeys) -> None:
    assert CurveKeys.from_bytes(keys.to_bytes()) == keys
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys)
    assert keys.for_server(keys.server_public).server_secret == ""
    with pytest.raises(ChannelError, match="no CURVE keys"):
        CurveKeys.from_bytes(b"\x90")


def test_a_renewed_spoke_hears_and_says_nothing_of_before(hub: Hub) -> None:
    with Spoke(hub.endpoints[0], "rank-1", NOTES) as spoke:
        spoke.send(Note(1))
        assert collect(hub, 1) == [("rank-1", Note(1))]
        hub.send("rank-1", Note(2))
        time.sleep(0.1)
        spoke.renew()
        spoke.send(Note(3))
        assert collect(hub, 1) == [("rank-1", Note(3))]
        hub.send("rank-1", Note(4))
        assert spoke.receive(5.0) == [Note(4)]
