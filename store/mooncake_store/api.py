"""`MooncakeDistributedStore`: Mooncake's method names, arguments and return codes over our client.

Used by programs, which change one import. Wrong types raise TypeError. All other failures are a code, an
empty value or None. No call hangs: each wait in `client` has a limit. Threads may share a store.
Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from store.errors import StoreError
from store.mooncake_store import messages as say
from store.mooncake_store.arguments import (
    as_view,
    as_views,
    checked_name,
    checked_names,
    checked_number,
    checked_numbers,
    is_usable,
    memory_at,
    setup_values,
    wish_of,
)
from store.mooncake_store.buffers import BufferHandle, Buffers
from store.mooncake_store.client import Client
from store.mooncake_store.codes import BAD_PARAMETERS, INTERNAL, NO_MASTER, NOT_FOUND, OK, CodeError
from store.mooncake_store.config import ReplicateConfig, Setup
from store.mooncake_store.copying import Copying
from store.mooncake_store.ranges import get_into_ranges
from store.mooncake_store.replicas import QueryTaskResponse, ReplicaDescriptor
from store.mooncake_store.session import Session, forget_in_children
from store.mooncake_store.tensors import Tensors
from transport.errors import ChannelError
from transport.messaging.curve import CurveKeys

KEYS_VARIABLE = "MOONCAKE_LITE_STORE_KEYS"
"""The variable that names the key file of a master on another machine."""

PATH_VARIABLE = "MOONCAKE_LITE_STORE_PATH"
""" "tcp": bytes go over TCP also within this machine, as they would from another."""

log = logging.getLogger("mooncake_lite.store")

Parts = Sequence[memoryview]


class MooncakeDistributedStore(Tensors):
    """A store of objects by name, shared by all clients of one master.

    Call setup() first. Before it, and after close(), writes return -600, reads find nothing. A store whose
    last reference goes closes itself.
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self._can_copy = False
        self._buffers = Buffers()
        forget_in_children(self)

    @property
    def _client(self) -> Client | None:
        session = self._session
        return session.client if session is not None else None

    @property
    def _copying(self) -> Copying | None:
        session = self._session
        return session.copying if session is not None else None

    # ------------------------------------------------------------------------------- setup

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Join a master and lend memory.

        setup(local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol,
              rdma_devices, master_server_addr, ...), or setup(dict) with these names; sizes in bytes, in the
        dict also as "16MB". A host name without a port gets one. Returns 0; -600 for values that make no
        sense or when the master refuses; -900 when no master answers within 3 s.
        """
        try:
            setup = Setup.from_values(setup_values(args, kwargs))
            if self._session is not None:
                return OK
            keys = os.environ.get(KEYS_VARIABLE)
            curve = CurveKeys.from_bytes(Path(keys).read_bytes()) if keys else None
            self._session = Session(self, setup, curve, use_tcp=os.environ.get(PATH_VARIABLE) == "tcp")
        except CodeError as error:
            log.error("setup: %s", error)
            return error.code
        except (StoreError, ChannelError, OSError) as error:
            log.error("setup: %s", error)
            return INTERNAL
        self._can_copy = setup.local_buffer_size > 0
        return OK

    def close(self) -> int:
        """Leave the master; objects only in this segment are lost. Returns 0, also when not set up."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
        return OK

    def get_hostname(self) -> str:
        """HOST:PORT, the name of this store and of its segment; "" before setup."""
        return self._client.hostname if self._client is not None else ""

    def health_check(self) -> int:
        """Return 0 when the master answers, 1 when not set up, 2 when the master does not answer."""
        if self._client is None:
            return 1
        return 0 if self._client.is_healthy() else 2

    # ------------------------------------------------------------------------------ writing

    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store a buffer's bytes. 0 also when the key exists, which changes nothing. -200: no space."""
        return self._put(checked_name(key), [as_view(value)], config)

    def put_parts(self, key: str, *args: Any, config: ReplicateConfig | None = None) -> int:
        """Store several buffers, one after the other, as one object; without a byte, nothing (and 0)."""
        return self._put_parts(key, args, config, upsert=False)

    def put_batch(self, keys: list[str], values: list[Any], config: ReplicateConfig | None = None) -> int:
        """Store objects; 0 or the first code that is not."""
        return self._put_batch(keys, values, config, upsert=False)

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Store `size` bytes from an address of this process; nothing (and 0) for size 0."""
        return self._put_from(key, buffer_ptr, size, config, upsert=False)

    def batch_put_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Call put_from for each key; return a code for each."""
        return self._batch_put_from(keys, buffer_ptrs, sizes, config, upsert=False)

    def upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store a buffer's bytes, in place of the key's old object."""
        return self._put(checked_name(key), [as_view(value)], config, upsert=True)

    def upsert_parts(self, key: str, *args: Any, config: ReplicateConfig | None = None) -> int:
        """Call put_parts, but replace an existing object."""
        return self._put_parts(key, args, config, upsert=True)

    def upsert_batch(self, keys: list[str], values: list[Any], config: ReplicateConfig | None = None) -> int:
        """Call put_batch, but replace existing objects. Of a repeated key the first value counts."""
        return self._put_batch(keys, values, config, upsert=True)

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Call put_from, but replace an existing object."""
        return self._put_from(key, buffer_ptr, size, config, upsert=True)

    def batch_upsert_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Call batch_put_from, but replace existing objects."""
        return self._batch_put_from(keys, buffer_ptrs, sizes, config, upsert=True)

    def _put(self, name: str, parts: Parts, config: ReplicateConfig | None, *, upsert: bool = False) -> int:
        wish, client = wish_of(config), self._client
        if wish is None or client is None or not self._can_copy or not is_usable(name):
            return BAD_PARAMETERS
        try:
            return client.put(name, parts, wish, upsert=upsert) if any(map(len, parts)) else BAD_PARAMETERS
        except CodeError as error:
            return error.code

    def _put_parts(
        self, key: str, values: Sequence[Any], config: ReplicateConfig | None, *, upsert: bool
    ) -> int:
        parts = [as_view(value) for value in values]
        if not any(map(len, parts)) and checked_name(key):
            return OK
        return self._put(checked_name(key), parts, config, upsert=upsert)

    def _put_batch(self, keys: Any, values: Any, config: ReplicateConfig | None, *, upsert: bool) -> int:
        names, views = checked_names(keys), as_views(values)
        if len(names) != len(views):
            return BAD_PARAMETERS
        first = dict(zip(names[::-1], views[::-1]))  # Mooncake stores the first value of a repeated key
        codes = self._put_many(names, [[first[name]] for name in names], config, upsert)
        return next((code for code in codes if code != OK), OK)

    def _put_from(
        self, key: str, ptr: int, size: int, config: ReplicateConfig | None, *, upsert: bool
    ) -> int:
        name, ptr, size = checked_name(key), checked_number("buffer_ptr", ptr), checked_number("size", size)
        if not size:
            return OK
        return self._put(name, [memory_at(ptr, size)], config, upsert=upsert) if ptr else BAD_PARAMETERS

    def _batch_put_from(
        self, keys: Any, ptrs: Any, sizes: Any, config: ReplicateConfig | None, *, upsert: bool
    ) -> list[int]:
        names = checked_names(keys)
        addresses, lengths = checked_numbers("buffer_ptrs", ptrs), checked_numbers("sizes", sizes)
        if not len(names) == len(addresses) == len(lengths):
            return [BAD_PARAMETERS] * len(names)
        values = [[memory_at(ptr, size)] if ptr and size else [] for ptr, size in zip(addresses, lengths)]
        return self._put_many(names, values, config, upsert)

    def _put_many(
        self, names: list[str], values: Sequence[Parts], config: ReplicateConfig | None, upsert: bool
    ) -> list[int]:
        wish, client = wish_of(config), self._client
        codes = [BAD_PARAMETERS] * len(names)
        if wish is None or client is None or not self._can_copy:
            return codes
        good = [at for at, name in enumerate(names) if is_usable(name) and any(map(len, values[at]))]
        try:
            stored = client.put_many(
                [names[at] for at in good], [values[at] for at in good], wish, upsert=upsert
            )
        except CodeError as error:
            stored = [error.code] * len(good)
        for at, code in zip(good, stored):
            codes[at] = code
        return codes

    # ------------------------------------------------------------------------------ reading

    def get(self, key: str) -> bytes:
        """Return the bytes of an object, b"" when there is none or it cannot be read."""
        client = self._client
        if client is None or not self._can_copy:
            return b""
        try:
            return client.reader.get(key) or b""
        except CodeError as error:
            log.log(logging.DEBUG if error.code == NO_MASTER else logging.WARNING, "get: %s", error)
            return b""
        except (AttributeError, UnicodeEncodeError):
            checked_name(key)
            raise

    def get_batch(self, keys: list[str]) -> list[bytes]:
        """Call get for each key."""
        return [self.get(name) for name in checked_names(keys)]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """Return a copy of an object in a buffer with an address, None when there is none."""
        name = checked_name(key)
        if self._client is None or not self._can_copy:
            return None
        data = self.get(name)
        return BufferHandle(data) if data else None

    def batch_get_buffer(self, keys: list[str]) -> list[BufferHandle | None]:
        """Call get_buffer for each key."""
        return [self.get_buffer(name) for name in checked_names(keys)]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Copy an object to an address of this process; return bytes read, -600 when `size` is too small."""
        name, ptr = checked_name(key), checked_number("buffer_ptr", buffer_ptr)
        return self._get_into(name, ptr, checked_number("size", size))

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """Call get_into for each key."""
        names = checked_names(keys)
        ptrs, lengths = checked_numbers("buffer_ptrs", buffer_ptrs), checked_numbers("sizes", sizes)
        if not len(names) == len(ptrs) == len(lengths):
            return [BAD_PARAMETERS] * len(names)
        return [self._get_into(name, ptr, size) for name, ptr, size in zip(names, ptrs, lengths)]

    def _get_into(self, name: str, ptr: int, size: int) -> int:
        if self._client is None or not self._can_copy or not ptr:
            return BAD_PARAMETERS

        def take(segment: Any, offset: int, nbytes: int) -> int:
            if nbytes > size:
                return BAD_PARAMETERS
            segment.read_into([(offset, nbytes, ptr)])
            return nbytes

        try:
            return _or_missing(self._client.reader.read(name, take))
        except CodeError as error:
            return error.code

    def get_into_ranges(
        self,
        buffer_ptrs: list[int],
        all_keys: list[list[str]],
        all_dst_offsets: list[list[list[int]]],
        all_src_offsets: list[list[list[int]]],
        all_sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        """Copy ranges of objects into registered buffers: per buffer a list of keys, per key its ranges.

        Returns bytes read, or a code, in the same nested shape. A wrong range fails alone.
        """
        return get_into_ranges(
            self._client if self._can_copy else None,
            self._buffers,
            buffer_ptrs,
            all_keys,
            all_dst_offsets,
            all_src_offsets,
            all_sizes,
        )

    def get_size(self, key: str) -> int:
        """Return the bytes of an object, -704 when there is none; grants a lease."""
        return self._ask_one(checked_name(key), lambda found: found.nbytes)

    def is_exist(self, key: str) -> int:
        """Return 1 if an object exists, or 0; grants a lease."""
        code = self._ask_one(checked_name(key), lambda found: 1)
        return 0 if code == NOT_FOUND else code

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Call is_exist for each key."""
        names, client = checked_names(keys), self._client
        if client is None:
            return [BAD_PARAMETERS] * len(names)
        usable = [name for name in names if is_usable(name)]
        try:
            found = {name for name, one in zip(usable, client.reader.locate_many(usable)) if one is not None}
        except CodeError as error:
            return [error.code] * len(names)
        return [int(name in found) for name in names]

    def _ask_one(self, name: str, tell: Callable[[Any], int]) -> int:
        if self._client is None:
            return BAD_PARAMETERS
        try:
            located = self._client.reader.locate(name) if is_usable(name) else None
        except CodeError as error:
            return error.code
        return NOT_FOUND if located is None else tell(located)

    # ----------------------------------------------------------------------------- removing

    def remove(self, key: str, force: bool = False) -> int:
        """Remove an object. -704: there is none; -706: it has a lease (force: removed all the same)."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        """Call remove for each key."""
        names = checked_names(keys)
        if self._client is None:
            return [BAD_PARAMETERS] * len(names)
        usable = [name for name in names if is_usable(name)]
        codes = iter(self._client.ask_codes(say.Remove, usable, bool(force)))
        return [next(codes) if is_usable(name) else NOT_FOUND for name in names]

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove all objects whose name contains a match; return how many. -600: no regular expression.

        The expression runs here and not in the master, which a slow expression would keep busy.
        """
        try:
            pattern = re.compile(checked_name(regex_pattern, "regex_pattern"))
        except (re.error, OverflowError, RecursionError):
            return BAD_PARAMETERS
        if self._client is None:
            return BAD_PARAMETERS
        removed, listing = 0, secrets.randbits(32)
        try:
            page = self._client.ask(say.NamesAsk, listing, False)
            while page.names:
                matching = [name for name in page.names if pattern.search(name)]
                removed += self._client.ask_codes(say.Remove, matching, bool(force)).count(OK)
                if not page.more:
                    break
                page = self._client.ask(say.NamesAsk, listing, True)
        except CodeError as error:
            return error.code
        return removed

    def remove_all(self, force: bool = False) -> int:
        """Remove every object without a lease (force: with one, too); return how many."""
        client = self._client
        if client is None:
            return BAD_PARAMETERS
        try:
            removed, left = client.ask(say.RemoveAll, bool(force), False).codes
            while left:
                count, left = client.ask(say.RemoveAll, bool(force), True).codes
                removed += count
        except CodeError as error:
            return error.code
        return int(removed)

    # ----------------------------------------------------------------------------- replicas

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Return the places of an object's replicas; [] when there is none."""
        name = checked_name(key)
        return self.batch_get_replica_desc([name]).get(name, [])

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Return the places of several objects' replicas; unknown objects are left out."""
        names = [name for name in checked_names(keys) if is_usable(name)]
        return self._copying.describe(names) if self._client and self._copying else {}

    def batch_replica_clear(self, keys: list[str], segment_name: str = "") -> list[str]:
        """Drop replicas of own objects without a lease, on one segment or on all; return the keys."""
        names = [name for name in checked_names(keys) if is_usable(name)]
        segment = checked_name(segment_name, "segment_name")
        return self._copying.clear(names, segment) if self._client and self._copying else []

    def create_copy_task(self, key: str, targets: list[str]) -> tuple[tuple[int, int], int]:
        """Copy an object to these segments in the background; return (task, 0), or ((0, 0), code)."""
        return self._task(checked_name(key), "", checked_names(targets, "targets"))

    def create_move_task(self, key: str, source: str, target: str) -> tuple[tuple[int, int], int]:
        """Move an object's replica to another segment; return (task, 0), or ((0, 0), code)."""
        source = checked_name(source, "source")
        if not source:
            return (0, 0), BAD_PARAMETERS
        return self._task(checked_name(key), source, [checked_name(target, "target")])

    def _task(self, name: str, source: str, targets: list[str]) -> tuple[tuple[int, int], int]:
        if self._client is None or self._copying is None:
            return (0, 0), BAD_PARAMETERS
        return self._copying.start(name, source, targets) if is_usable(name) else ((0, 0), NOT_FOUND)

    def query_task(self, task_id: tuple[int, int]) -> tuple[QueryTaskResponse | None, int]:
        """Return (the state of a task, 0), or (None, -1400) for an unknown task."""
        if self._client is None or self._copying is None:
            return None, BAD_PARAMETERS
        return self._copying.query(task_id)

    # ------------------------------------------------------------------------------- memory

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Announce memory of this process; return -600 when it is empty or overlaps a registered range."""
        return self._buffers.register(checked_number("buffer_ptr", buffer_ptr), checked_number("size", size))

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Withdraw registered memory; return -600 when none is registered at this address."""
        return self._buffers.unregister(checked_number("buffer_ptr", buffer_ptr))


def _or_missing(count: int | None) -> int:
    return NOT_FOUND if count is None else count
