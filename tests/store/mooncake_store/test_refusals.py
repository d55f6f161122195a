"""What a client makes of lost answers, refusals and damaged memory, with stand-ins for what is far away."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from store import MooncakeDistributedStore, ReplicateConfig
from store.errors import StoreError
from store.mooncake_store import link as link_module
from store.mooncake_store import messages as say
from store.mooncake_store import segments as segments_module
from store.mooncake_store import session as session_module
from store.mooncake_store.codes import BAD_PARAMETERS, INTERNAL, NO_MASTER, OK, TRANSFER_FAILED, CodeError
from store.mooncake_store.config import Setup
from store.mooncake_store.link import Link
from store.mooncake_store.master.master import FIRST_PORT, LAST_PORT, Master, _text
from store.mooncake_store.memory import Lent, make_memfd, map_foreign
from store.mooncake_store.reader import Reader
from store.mooncake_store.replicas import BufferDescriptor
from store.mooncake_store.segments import Segments
from store.mooncake_store.session import Session
from store.mooncake_store.shared_table import OFFSET_BITS, Busy, Found
from store.mooncake_store.writer import DRAINS, Writer
from tests.descriptors import no_descriptor_left

pytestmark = pytest.mark.quick

NAME = "a"
DATA = [memoryview(b"bytes")]
SETUP = Setup("here", 0, 1, "tcp", "127.0.0.1:1")


def refuse(*_: object, **__: object) -> Any:
    raise CodeError(NO_MASTER, "the master is gone")


class Asked:
    """A link: what it was asked, and answers by the kind of the question."""

    def __init__(self, **answers: Any):
        self.asked: list[tuple[Any, ...]] = []
        self.answers = answers
        self.welcome = SimpleNamespace(lease_ttl_ns=10**9)
        self.late: Callable[[Any], None] = lambda reply: None

    def ask(self, kind: Any, *values: Any) -> Any:
        self.asked.append((kind.__name__, *values))
        answer = self.answers.get(kind.__name__)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def poll(self) -> bool:
        return False


# ------------------------------------------------------------------------------------------------ api


def test_every_verb_of_a_store_whose_master_is_gone_has_its_code() -> None:
    store = MooncakeDistributedStore()
    client: Any = SimpleNamespace(
        reader=SimpleNamespace(get=refuse, read=refuse, locate=refuse, locate_many=refuse),
        ask=refuse,
        put=refuse,
        put_many=refuse,
        ask_codes=lambda kind, names, *values: [NO_MASTER] * len(names),
        interrupt=lambda: False,
        close=lambda: None,
    )
    store._session = SimpleNamespace(  # type: ignore[assignment]
        client=client, copying=session_module.Copying(client), close=lambda: None
    )
    store._can_copy = True
    where = memoryview(bytearray(8))
    assert store.put(NAME, b"1") == store.upsert_batch([NAME], [b"1"]) == NO_MASTER
    assert (store.get(NAME), store.get_into(NAME, id(where), 8)) == (b"", NO_MASTER)
    assert store.get_into_ranges([1], [[NAME]], [[[0, 0]]], [[[0, 0]]], [[[1, 1]]]) == [[[NO_MASTER] * 2]]
    assert store.get_size(NAME) == store.is_exist(NAME) == store.remove(NAME) == NO_MASTER
    assert store.batch_is_exist([NAME, "b"]) == [NO_MASTER] * 2
    assert store.remove_by_regex(NAME) == store.remove_all() == NO_MASTER
    assert (store.get_replica_desc(NAME), store.batch_replica_clear([NAME])) == ([], [])
    assert store.create_copy_task(NAME, ["there"]) == ((0, 0), NO_MASTER)
    assert store.query_task((1, 0)) == (None, NO_MASTER)


def test_what_cannot_be_is_refused_before_a_master_is_asked() -> None:
    store = MooncakeDistributedStore()
    assert store.remove_by_regex("(") == store.remove_by_regex(NAME) == BAD_PARAMETERS
    assert store.create_move_task(NAME, "", "there") == ((0, 0), BAD_PARAMETERS)
    with pytest.raises(TypeError, match="at most 13 arguments, 14 were given"):
        store.setup(*range(14))


def test_a_setup_that_fails_in_our_own_code_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_LITE_STORE_KEYS", "/no/such/file")
    assert MooncakeDistributedStore().setup("here", "x", 0, 1, "tcp", "", "127.0.0.1:1") == INTERNAL


def test_descriptors_and_configs_show_their_values() -> None:
    place = BufferDescriptor(5, "here:1", 64)
    assert (place.size, place.transport_endpoint, place.buffer_address) == (5, "here:1", 64)
    assert repr(ReplicateConfig()).startswith("ReplicateConfig(replica_num=1, with_hard_pin=False, ")


# --------------------------------------------------------------------------------------------- memory


def test_memory_that_the_system_refuses_is_an_error_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match="cannot be made"):
        make_memfd("test", 2**70)
    with no_descriptor_left(), pytest.raises(StoreError, match="cannot be made"):
        make_memfd("test", 4096)
    with open("/dev/null", "rb+") as file, pytest.raises(StoreError, match="cannot be mapped"):
        map_foreign(os.getpid(), file.fileno(), 0, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_write_beyond_a_segment_or_to_a_closed_one_writes_nothing() -> None:
    memory = Lent(4096)
    with pytest.raises(ValueError, match="4095\\+5 of a segment of 4096 B"):
        memory.write_cold(4095, DATA[0])
    assert bytes(memory.view) == bytes(4096)
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.write_cold(0, DATA[0])


def told(**values: Any) -> say.Segment:
    fields = {
        "name": "lender:1",
        "nbytes": 4096,
        "machine": "this",
        "pid": os.getpid(),
        "fd": 0,
        "inode": 1,
        "host": "127.0.0.1",
        "port": 1,
        "secret": b"s" * 32,
    }
    return say.Segment(**fields | values)


def test_memory_of_this_machine_that_cannot_be_mapped_is_reached_over_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote = SimpleNamespace(view=None, close=lambda: None)
    monkeypatch.setattr(segments_module, "RemoteSegment", lambda told, limit_s: remote)
    segments = Segments(lambda number: told(), "this")
    assert segments.get(7) is remote
    assert segments.opened(7) is remote


def test_a_segment_that_is_opened_while_the_client_closes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    remote = SimpleNamespace(view=None, close=lambda: closed.append(True))
    segments = Segments(lambda number: told(machine="other"), "this")

    def connect(told: say.Segment, limit_s: float) -> Any:
        segments.close()
        return remote

    monkeypatch.setattr(segments_module, "RemoteSegment", connect)
    assert segments.get(7) is None
    assert (closed, segments.opened(7)) == ([True], None)


def test_the_name_of_a_segment_that_was_not_opened_is_asked_once() -> None:
    asked: list[int] = []
    segments = Segments(lambda number: asked.append(number) or (told() if number == 3 else None), "this")
    assert [segments.name(3), segments.name(3), segments.name(4)] == ["lender:1", "lender:1", ""]
    assert asked == [3, 4]


# --------------------------------------------------------------------------------------------- reader


class Table:
    """A table whose slot changes: a lease is refused for the first `changes` looks."""

    def __init__(self, found: Found | None, changes: int = 0, still: list[bool] | None = None):
        self.found, self.changes, self.still = found, changes, still or []

    def find(self, whole: int) -> Found | None:
        if self.found is None:
            raise Busy
        return self.found

    def extend_lease(self, found: Found, until_ns: int) -> bool:
        self.changes -= 1
        return self.changes < 0

    def is_still(self, found: Found) -> bool:
        if not self.still:
            raise ValueError("closed")
        return self.still.pop(0)


SLOT = Found(0, 0, 5, (1 << OFFSET_BITS,))


def reader_of(table: Table | None, link: Asked) -> Reader:
    segments = SimpleNamespace(views={}, get=lambda number, limit_s: "segment", forget=lambda number: None)
    reader = Reader(link, segments, threading.Event())  # type: ignore[arg-type]
    reader.table = table  # type: ignore[assignment]
    return reader


def test_an_object_that_changes_while_it_is_read_is_read_again() -> None:
    takes: list[int] = []
    reader = reader_of(Table(SLOT, changes=2, still=[False, True]), Asked())
    assert reader.read(NAME, lambda segment, offset, nbytes: takes.append(nbytes) or len(takes)) == 2
    assert takes == [5, 5]


def test_a_read_below_a_close_ends_with_the_code_for_it() -> None:
    with pytest.raises(CodeError, match="this store is closed") as caught:
        reader_of(Table(SLOT), Asked()).read(NAME, lambda *_: None)
    assert caught.value.code == NO_MASTER


@pytest.mark.parametrize("table", [Table(None), Table(SLOT, changes=10**6)])
def test_the_master_is_asked_where_the_table_gives_no_answer(table: Table) -> None:
    link = Asked(Find=say.Places(0, [say.Place(9, [1 << OFFSET_BITS])]))
    located = reader_of(table, link).locate(NAME)
    assert located is not None
    assert (located.nbytes, located.found) == (9, None)
    assert link.asked == [("Find", [NAME], True)]


def test_a_new_table_that_cannot_be_opened_is_an_internal_error() -> None:
    nowhere = say.Memory("this", os.getpid(), 2**30, 1, 4096)
    reader = reader_of(old := Table(SLOT), Asked(TableAsk=say.TableIs(0, nowhere)))  # type: ignore[assignment]
    with pytest.raises(CodeError, match="cannot be opened") as caught:
        reader._renew_table(old)  # type: ignore[arg-type]
    assert caught.value.code == INTERNAL
    reader._closed.set()
    reader._renew_table(old)  # type: ignore[arg-type]
    assert reader.table is old, "nothing is opened any more"

    with pytest.raises(CodeError) as caught:
        reader_of(old, Asked(TableAsk=CodeError(NO_MASTER, "gone")))._renew_table(old)  # type: ignore[arg-type]
    assert caught.value.code == NO_MASTER


# --------------------------------------------------------------------------------------------- writer


GRANT = say.Grant(7, [1 << OFFSET_BITS])


def writer_of(link: Asked, write: Callable[..., None] | None, *, full: bool = False) -> Writer:
    """A writer into one segment (write None: it is gone); its journal is full, or takes every record."""
    segment = write and SimpleNamespace(write=write)
    segments: Any = SimpleNamespace(get=lambda number: segment, scattered=lambda replica: segment)
    writer = Writer(link, segments, SimpleNamespace())  # type: ignore[arg-type]
    writer.journals = SimpleNamespace(losses=0, append=lambda put, name=b"": not full)  # type: ignore[assignment]
    return writer


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("in_advance", [False, True])
def test_space_of_an_interrupted_put_goes_back(in_advance: bool) -> None:
    wish = say.Wish()
    writer = writer_of(Asked(PutStart=say.Grants(0, [GRANT])), interrupted)
    if in_advance:
        writer._spares.append(GRANT)
        writer._kind = (5, wish)
    with pytest.raises(KeyboardInterrupt):
        writer.put(NAME, DATA, wish, False)
    assert (writer._back, list(writer._spares)) == ([7], [])


def test_a_put_whose_end_is_not_answered_has_the_code_of_that() -> None:
    link = Asked(PutStart=say.Grants(0, [GRANT]), PutEnd=CodeError(NO_MASTER, "gone"))
    assert writer_of(link, lambda *_: None, full=True).put(NAME, DATA, say.Wish(), False) == NO_MASTER


@pytest.mark.parametrize("grant", [GRANT, say.Grant(7, [], [[(1 << OFFSET_BITS, 5)]])])
def test_a_put_into_a_segment_that_is_gone_is_revoked(grant: say.Grant) -> None:
    link = Asked(PutStart=say.Grants(0, [grant]))
    assert writer_of(link, None).put(NAME, DATA, say.Wish(), False) == TRANSFER_FAILED
    assert link.asked[1:] == [("PutEnd", [7], False)]


def test_a_put_that_finds_the_journal_full_has_it_emptied_and_gives_up_in_the_end() -> None:
    link = Asked()
    writer = writer_of(link, lambda *_: None, full=True)
    writer._spares.append(GRANT)
    writer._kind = (5, say.Wish())
    assert writer.put(NAME, DATA, say.Wish(), False) == INTERNAL
    assert link.asked == [("Drain",)] * DRAINS + [("PutEnd", [7], False)]


# ------------------------------------------------------------------------------------- link, session


class Far:
    """A spoke whose far side answers with these messages, one after the other."""

    wake_fd = -1

    def __init__(self, *answers: Any, takes: bool = True):
        self.answers, self.takes = list(answers), takes

    def __call__(self, *_: Any, **__: Any) -> Far:
        return self

    def send(self, message: Any) -> bool:
        return self.takes

    def receive(self, wait_s: float) -> list[Any]:
        return [self.answers.pop(0)]

    def close(self) -> None:
        pass


def welcome(protocol: int = say.PROTOCOL) -> say.Welcome:
    return say.Welcome(1, protocol, say.Memory("", 0, 0, 0, 0), 10**9, "")


@pytest.mark.parametrize(
    ("far", "why"),
    [
        (Far(welcome(say.PROTOCOL + 1)), "no master of this version"),
        (Far(say.Stats(1, {})), "no master of this version"),
        (Far(takes=False), "takes no more messages"),
        (Far(say.Failed(1, NO_MASTER)), "cannot answer"),
    ],
)
def test_what_is_no_master_of_ours_is_refused(monkeypatch: pytest.MonkeyPatch, far: Far, why: str) -> None:
    monkeypatch.setattr(link_module, "Spoke", far)
    with pytest.raises(CodeError, match=why) as caught:
        Link("127.0.0.1:1", None)
    assert caught.value.code == NO_MASTER


def test_answers_to_abandoned_questions_are_told_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Any] = []
    monkeypatch.setattr(link_module, "Spoke", Far(welcome(), say.Codes(1, [5]), say.Codes(2, [OK])))
    link = Link("127.0.0.1:1", None)
    link.late = late.append
    assert link.ask(say.Beat) == say.Codes(2, [OK])
    assert late == [say.Codes(1, [5])]


def test_a_session_tries_until_a_master_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def client(*_: Any, **__: Any) -> Any:
        made.append(SimpleNamespace(hostname="here:1", closed=[]))
        made[-1].close = lambda one=made[-1]: one.closed.append(True)
        if len(made) == 2:
            raise CodeError(NO_MASTER, "not yet")
        return made[-1]

    monkeypatch.setattr(session_module, "Client", client)
    monkeypatch.setattr(session_module, "REJOIN_S", 0.0)
    holder: Any = weakref.WeakSet()  # anything that can be referred to weakly
    session = Session(holder, SETUP, None, use_tcp=False)
    session.ending.detach()
    session._rejoin()
    assert (len(made), session.client is made[2], made[0].closed) == (3, True, [True])

    def closed_meanwhile(*_: Any, **__: Any) -> Any:
        session._closed.set()
        return client()

    monkeypatch.setattr(session_module, "Client", closed_meanwhile)
    session._rejoin()
    assert (session.client is made[2], made[3].closed) == (True, [True]), "the new client leaves again"


# --------------------------------------------------------------------------------------------- master


def test_a_master_refuses_a_name_that_is_lent_and_serves_clients_without_a_journal() -> None:
    master = Master("tcp://127.0.0.1:*")
    try:
        machine, pid = master._machine, os.getpid()

        def join(peer: str, hostname: str) -> say.Joined:
            segment = told(name=hostname, nbytes=4096, machine=machine)
            return master._join(peer, say.Join(1, master._token, machine, pid, hostname, segment), 0)

        assert (join("one", "here:1").code, join("two", "here:1").code) == (OK, BAD_PARAMETERS)
        master._journals.open = lambda: None  # type: ignore[method-assign]
        without = join("three", "there:1")
        assert (without.code, without.segment, without.journals) == (OK, 2, None)

        master._next_port = LAST_PORT - 1
        assert join("four", "host").hostname == f"host:{LAST_PORT}"
        assert join("five", f"host:{FIRST_PORT}").code == OK
        assert join("six", "host").hostname == f"host:{FIRST_PORT + 1}", "the first one is taken"
    finally:
        master._close()


def test_an_answer_that_is_too_long_gives_its_space_back(monkeypatch: pytest.MonkeyPatch) -> None:
    master = Master("tcp://127.0.0.1:*")
    try:
        segment = told(name="here:1", nbytes=2**20, machine="elsewhere")
        master._join("one", say.Join(1, master._token, "elsewhere", 1, "here:1", segment), 0)
        said: list[Any] = []

        def send(peer: str, reply: Any) -> None:
            if isinstance(reply, say.Grants):
                raise link_module.WireError("too long")
            said.append(reply)

        monkeypatch.setattr(master, "_send", send)
        free = master.stats()["free_bytes"]
        master._handle("one", say.PutStart(5, ["a", "b"], [4096, 2**21], say.Wish(), False), 0)
        assert (said, master.stats()["free_bytes"]) == ([say.Failed(5, -200)], free)
    finally:
        master._close()


def test_a_name_in_a_journal_that_is_no_text_names_nothing() -> None:
    assert [_text(b"a\xc3\xa9"), _text(b"\xff"), _text(None)] == ["aé", "", ""]
