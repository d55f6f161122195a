"""What a store of Mooncake's API promises, as a program: it runs against the real one and against ours.

    python conformance.py MODULE MASTER_ADDRESS        MODULE: mooncake.store or store

The master must have been started with a lease of LEASE_S. Prints {check: "" or what went wrong} as JSON.
"""

import array
import ctypes
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

LEASE_S = 1.0
MIB = 2**20

MODULE = importlib.import_module(sys.argv[1] if __name__ == "__main__" else "store")
MASTER = sys.argv[2] if __name__ == "__main__" else ""


def new_store(segment: int = 64 * MIB, buffer: int = 16 * MIB, host: str = "127.0.0.1") -> Any:
    store = MODULE.MooncakeDistributedStore()
    assert store.setup(host, "P2PHANDSHAKE", segment, buffer, "tcp", "", MASTER) == 0
    return store


def config(**values: Any) -> Any:
    made = MODULE.ReplicateConfig()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def raises(kind: type, act: Callable[[], object]) -> bool:
    try:
        act()
    except kind:
        return True
    return False


def endpoints(store: Any, key: str) -> list[str]:
    return [
        one.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for one in store.get_replica_desc(key)
    ]


def check_a_store_that_is_not_set_up_says_so(s: Any) -> None:
    assert MODULE.MooncakeDistributedStore().health_check() == 1
    assert s.health_check() == 0


def check_a_host_name_gets_a_port(s: Any) -> None:
    host, port = s.get_hostname().rsplit(":", 1)
    assert host == "127.0.0.1"
    assert int(port) > 1024


def check_put_and_get(s: Any) -> None:
    assert s.put("a", b"hello") == 0
    assert s.get("a") == b"hello"
    assert s.get_size("a") == 5
    assert s.is_exist("a") == 1


def check_put_on_an_existing_key_returns_0_and_changes_nothing(s: Any) -> None:
    assert s.put("b", b"first") == 0
    assert s.put("b", b"other") == 0
    assert s.get("b") == b"first"


def check_what_is_absent(s: Any) -> None:
    assert s.get("none") == b""
    assert s.get_buffer("none") is None
    assert s.get_size("none") == -704
    assert s.is_exist("none") == 0
    assert s.remove("none") == -704
    assert s.get_replica_desc("none") == []


def check_keyword_names(s: Any) -> None:
    assert s.put(key="kw", value=b"1", config=config()) == 0
    assert raises(TypeError, lambda: s.put(k="kw", value=b"1"))
    assert raises(TypeError, lambda: s.put("kw"))
    assert s.remove(key="kw", force=True) == 0


def check_wrong_types_are_type_errors(s: Any) -> None:
    assert raises(TypeError, lambda: s.put(3, b"x"))
    assert raises(TypeError, lambda: s.put("t", "str"))
    assert raises(TypeError, lambda: s.put("t", None))
    assert raises(TypeError, lambda: s.put("\udc80", b"x"))
    assert raises(TypeError, lambda: s.get(3))
    assert raises(TypeError, lambda: s.get_into("t", 0, -1))


def check_an_empty_key_or_value_is_refused(s: Any) -> None:
    assert s.put("", b"x") == -600
    assert s.put("e", b"") == -600
    assert s.is_exist("e") == 0
    assert s.get("") == b""
    assert s.is_exist("") == 0
    assert s.get_size("") == -704
    assert s.remove("") == -704


def check_any_buffer_can_be_put(s: Any) -> None:
    assert s.put("ba", bytearray(b"abc")) == 0
    assert s.put("mv", memoryview(b"abcdef")[1:3]) == 0
    assert s.put("ar", array.array("b", [1, 2, 3])) == 0
    assert s.get_batch(["ba", "mv", "ar"]) == [b"abc", b"bc", b"\1\2\3"]


def check_long_and_foreign_names(s: Any) -> None:
    for name in ("k" * 5000, "key with blanks/and:signs", "\u043a\u043b\u044e\u0447/\u00fc", "n\0n"):
        assert s.put(name, b"x") == 0
        assert s.get(name) == b"x"


def check_parts(s: Any) -> None:
    assert s.put_parts("pp", b"ab", b"", b"cd") == 0
    assert s.get("pp") == b"abcd"
    assert s.put_parts("pp0") == 0
    assert s.put_parts("pp1", b"") == 0
    assert s.batch_is_exist(["pp0", "pp1"]) == [0, 0]


def check_batches(s: Any) -> None:
    assert s.put_batch(["b1", "b2"], [b"1", b"22"]) == 0
    assert s.put_batch(["b1"], [b"1", b"22"]) == -600
    assert s.put_batch([], []) == 0
    assert s.put_batch(["", "b3"], [b"1", b"22"]) == -600
    assert s.is_exist("b3") == 1
    assert s.put_batch(["d1", "d1"], [b"1", b"22"]) == 0
    assert s.get("d1") == b"1"
    assert s.put_batch(["b1", "b4"], [b"x", b"44"]) == 0
    assert s.get_batch(["b1", "no", "b4"]) == [b"1", b"", b"44"]
    assert s.batch_is_exist(["b1", "no", ""]) == [1, 0, 0]
    assert s.batch_is_exist([]) == []


def check_get_buffer(s: Any) -> None:
    s.put("buf", b"bytes")
    handle = s.get_buffer("buf")
    assert handle.size() == len(handle) == 5
    assert bytes(handle) == b"bytes"
    assert ctypes.string_at(handle.ptr(), handle.size()) == b"bytes"
    first, missing = s.batch_get_buffer(["buf", "nope"])
    assert bytes(first) == b"bytes"
    assert missing is None


def memory(size: int = MIB) -> tuple[Any, int]:
    made = ctypes.create_string_buffer(size)
    return made, ctypes.addressof(made)


def check_registering(s: Any) -> None:
    _made, at = memory()
    assert s.unregister_buffer(at) == -600
    assert s.register_buffer(at, MIB) == 0
    assert s.register_buffer(at, MIB) == -600
    assert s.register_buffer(at + 4096, 4096) == -600
    assert s.register_buffer(at, 0) == -600
    assert s.register_buffer(0, 100) == -600
    assert s.unregister_buffer(at) == 0
    assert s.unregister_buffer(at) == -600


def check_addresses(s: Any) -> None:
    made, at = memory()
    s.register_buffer(at, MIB)
    made[:10] = b"0123456789"
    assert s.put_from("pf", at, 10) == 0
    assert s.put_from("pf0", at, 0) == 0
    assert s.is_exist("pf0") == 0
    assert s.get_into("pf", at + 100, 50) == 10
    assert made[100:110] == b"0123456789"
    assert s.get_into("pf", at, 9) == -600
    assert s.get_into("nope", at, 9) == -704
    s.unregister_buffer(at)


def check_batches_of_addresses(s: Any) -> None:
    made, at = memory()
    s.register_buffer(at, MIB)
    made[:4] = b"abcd"
    assert s.batch_put_from(["x1", "x2"], [at, at + 2], [2, 2]) == [0, 0]
    assert s.batch_put_from(["x1", "x3"], [at, at], [4, 1]) == [0, 0]
    assert s.batch_put_from(["x4", "x5"], [at], [1, 1]) == [-600, -600]
    assert s.batch_put_from(["", "x6"], [at, at], [1, 1]) == [-600, 0]
    assert s.batch_get_into(["x1", "no", "x2"], [at + 10, at + 20, at + 30], [9, 9, 1]) == [2, -704, -600]
    assert made[10:12] == b"ab"
    assert s.batch_get_into(["x1", "x2"], [at], [1, 1]) == [-600, -600]
    assert s.batch_get_into([], [], []) == []
    s.unregister_buffer(at)


def check_ranges(s: Any) -> None:
    made, at = memory()
    s.register_buffer(at, MIB)
    s.put("r1", b"0123456789")
    s.put("r2", b"x")
    read = s.get_into_ranges
    assert read([at], [["r1", "no"]], [[[0, 20], [5]]], [[[0, 8], [0]]], [[[2, 2], [1]]]) == [
        [[2, 2], [-704]]
    ]
    assert (made[0:2], made[20:22]) == (b"01", b"89")
    assert read([at], [["r1"]], [[[0]]], [[[8]]], [[[5]]]) == [[[-600]]]
    assert read([at], [["r1", "r2"]], [[[MIB - 1], [0]]], [[[0], [0]]], [[[2], [1]]]) == [[[-600], [1]]]
    assert read([at], [["r1", "r2"]], [[[0], [0]]], [[[0, 1], [0]]], [[[2], [1]]]) == [[[-600], [1]]]
    assert read([at], [["r1", "r2"]], [[[0]]], [[[0]]], [[[2]]]) == [[[-600], [-600]]]
    assert read([at, at], [["r1"]], [[[0]]], [[[0]]], [[[2]]]) == [[[-600]], [[-600]]]
    assert read([], [], [], [], []) == []
    assert read([at], [["r1"]], [[[0]]], [[[0]]], [[[0]]]) == [[[0]]]
    assert read([at], [["r1"]], [[[]]], [[[]]], [[[]]]) == [[[]]]
    assert read([at + 2 * MIB], [["r1"]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600]]]
    assert raises(TypeError, lambda: read([at], [["r1"]], [[[-1]]], [[[0]]], [[[1]]]))
    s.unregister_buffer(at)


def check_upsert(s: Any) -> None:
    assert s.upsert("u", b"111") == 0
    assert s.get("u") == b"111"
    assert s.upsert("u", b"222") == 0
    assert s.get("u") == b"222"
    assert s.upsert("u", b"33333") == 0
    assert s.get("u") == b"33333"
    assert s.get_size("u") == 5
    assert s.upsert("", b"1") == -600
    assert s.upsert("u", b"") == -600
    assert s.upsert_parts("u", b"a", b"b") == 0
    assert s.upsert_batch(["u", "v"], [b"xx", b"yy"]) == 0
    assert s.get_batch(["u", "v"]) == [b"xx", b"yy"]
    made, at = memory()
    made[:2] = b"zz"
    s.register_buffer(at, MIB)
    assert s.upsert_from("u", at, 2) == 0
    assert s.batch_upsert_from(["u", "w"], [at, at], [1, 2]) == [0, 0]
    assert s.get_batch(["u", "w"]) == [b"z", b"zz"]
    s.unregister_buffer(at)


def check_upserts_of_one_name_in_a_batch(s: Any) -> None:
    assert s.upsert_batch(["b1", "b1"], [b"one", b"two"]) == 0
    assert s.get("b1") == b"one"
    assert s.upsert_batch(["b2", "b1", "b2", "b2"], [b"1", b"2", b"333", b"55555"]) == 0
    assert s.get_batch(["b1", "b2"]) == [b"2", b"1"]
    assert s.put_batch(["b3", "b3"], [b"one", b"two"]) == 0
    assert s.get("b3") == b"one"
    made, at = memory()
    made[:4] = b"1234"
    s.register_buffer(at, MIB)
    assert s.batch_upsert_from(["b4", "b5", "b4"], [at, at + 1, at + 2], [2, 2, 2]) == [0, 0, 0]
    assert s.get_batch(["b4", "b5"]) == [b"34", b"23"]
    assert s.batch_upsert_from(["b4", "b4"], [at, at], [2, 2]) == [0, 0]
    assert s.get("b4") == b"12"
    s.unregister_buffer(at)


def check_upserts_of_one_name_by_many_at_once(s: Any) -> None:
    codes: list[int] = []

    def write(letter: bytes) -> None:
        codes.extend(s.upsert("many", letter * 3000) for _ in range(50))

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"A", b"B", b"C", b"D")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 200
    found = s.get("many")
    assert (len(found), len(set(found))) == (3000, 1)


def check_a_finished_put_grants_no_lease_and_a_read_does(s: Any) -> None:
    assert s.put("l1", b"1") == 0
    assert s.remove("l1") == 0
    assert s.put("l2", b"1") == 0
    assert s.get("l2") == b"1"
    assert s.remove("l2") == -706
    assert s.remove("l2", True) == 0
    assert s.put("l3", b"1") == 0
    assert s.is_exist("l3") == 1
    assert s.remove("l3") == -706
    time.sleep(1.5 * LEASE_S)
    assert s.remove("l3") == 0


def check_get_size_grants_a_lease(s: Any) -> None:
    s.put("l4", b"1")
    assert s.get_size("l4") == 1
    assert s.remove("l4") == -706


def check_a_lease_is_extended_by_each_read(s: Any) -> None:
    s.put("l5", b"1")
    s.get("l5")
    time.sleep(0.7 * LEASE_S)
    s.get("l5")
    time.sleep(0.6 * LEASE_S)
    assert s.remove("l5") == -706


def check_batch_remove(s: Any) -> None:
    s.put_batch(["r-a", "r-b"], [b"1", b"2"])
    s.get("r-b")
    assert s.batch_remove(["r-a", "r-none", "", "r-b"]) == [0, -704, -704, -706]
    assert s.batch_remove(["r-b"], True) == [0]
    assert s.batch_remove([]) == []


def check_remove_by_regex(s: Any) -> None:
    s.put_batch(["yy1", "ayy", "zz"], [b"1", b"2", b"3"])
    assert s.remove_by_regex("nothing like it") == 0
    assert s.remove_by_regex("(") == -600
    assert s.remove_by_regex("yy") == 2
    assert s.batch_is_exist(["yy1", "ayy", "zz"]) == [0, 0, 1]
    assert s.remove_by_regex("^zz$") == 0
    assert s.remove_by_regex("^zz$", True) == 1


def check_remove_all_skips_what_is_leased(s: Any) -> None:
    s.remove_all(True)
    s.put_batch(["all1", "all2"], [b"1", b"2"])
    s.get("all1")
    assert s.remove_all() == 1
    assert s.batch_is_exist(["all1", "all2"]) == [1, 0]
    assert s.remove_all(True) == 1


def check_replica_descriptors(s: Any) -> None:
    s.put("desc", b"12345")
    (found,) = s.get_replica_desc("desc")
    kinds = (found.is_memory_replica(), found.is_disk_replica(), found.is_local_disk_replica())
    assert kinds == (True, False, False)
    assert found.status.name == "COMPLETE"
    assert found.get_memory_descriptor().buffer_descriptor.size == 5
    assert list(s.batch_get_replica_desc(["desc", "nope"])) == ["desc"]
    assert raises(RuntimeError, found.get_disk_descriptor)


def check_replicate_config_is_validated(s: Any) -> None:
    made = MODULE.ReplicateConfig()
    defaults = (made.replica_num, made.with_hard_pin, made.soft_pin_ttl_ms, made.preferred_segment)
    assert defaults == (1, False, None, "")
    assert (made.preferred_segments, made.prefer_alloc_in_same_node, made.group_ids) == ([], False, None)
    assert made.soft_pin_action == MODULE.SoftPinAction.PRESERVE
    for name, value in (
        ("replica_num", -1),
        ("replica_num", "a"),
        ("soft_pin_ttl_ms", -1),
        ("soft_pin_ttl_ms", 2**64),
        ("preferred_segment", 3),
        ("soft_pin_action", 1),
    ):
        assert raises(TypeError, lambda name=name, value=value: setattr(made, name, value)), name
    assert raises(AttributeError, lambda: setattr(made, "nosuch", 1))
    assert s.put("c0", b"1", config(replica_num=0)) == -600
    assert s.put("c1", b"1", config(soft_pin_ttl_ms=5)) == -600
    enable, disable = MODULE.SoftPinAction.ENABLE, MODULE.SoftPinAction.DISABLE
    assert s.put("c1", b"1", config(soft_pin_ttl_ms=5, soft_pin_action=disable)) == -600
    assert s.put_batch(["c1"], [b"1"], config(soft_pin_ttl_ms=5)) == -600
    assert s.is_exist("c1") == 0
    assert s.put("c2", b"1", config(soft_pin_ttl_ms=5, soft_pin_action=enable)) == 0
    assert s.put("c3", b"1", config(with_hard_pin=True, soft_pin_action=enable)) == 0
    assert s.remove("c3") == 0
    assert s.put("c4", b"1", config(preferred_segment="no-such:1")) == 0


def check_replicas_land_on_distinct_segments(s: Any) -> None:
    assert s.put("rep1", b"1", config(replica_num=3)) == 0
    assert len(s.get_replica_desc("rep1")) == 1
    other = new_store()
    assert s.put("rep2", b"22", config(replica_num=3)) == 0
    assert len(set(endpoints(s, "rep2"))) == 2
    assert other.get("rep2") == b"22"
    other.close()


def check_closing_one_of_two_stores_leaves_the_others_replica(s: Any) -> None:
    other = new_store()
    assert s.put("survivor", b"s" * 1000, config(replica_num=2)) == 0
    assert other.close() == 0
    assert s.get("survivor") == b"s" * 1000
    assert other.close() == 0


def check_a_store_can_be_set_up_again_after_close(s: Any) -> None:
    other = new_store()
    other.close()
    assert other.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", MASTER) == 0
    assert other.put("again", b"1") == 0
    assert other.get("again") == b"1"
    other.close()


def check_batch_replica_clear(s: Any) -> None:
    s.put_batch(["cl1", "cl2"], [b"1", b"2"])
    s.get("cl1")
    assert s.batch_replica_clear(["cl1"], "") == []
    assert s.batch_replica_clear(["cl2"], "no-such-segment") == []
    assert s.batch_replica_clear([], "") == []
    time.sleep(1.5 * LEASE_S)
    assert s.batch_replica_clear(["cl1", "nope"], "") == ["cl1"]
    assert s.is_exist("cl1") == 0
    other = new_store()
    assert other.batch_replica_clear(["cl2"], "") == []
    other.close()


def check_tasks_that_make_no_sense(s: Any) -> None:
    here = s.get_hostname()
    s.put("task", b"1")
    assert s.create_copy_task("nope", [here]) == ((0, 0), -704)
    assert s.create_copy_task("task", ["no-such"]) == ((0, 0), -600)
    assert s.create_copy_task("task", []) == ((0, 0), -600)
    assert s.create_move_task("task", "no-such", here) == ((0, 0), -600)
    assert s.create_move_task("task", here, here) == ((0, 0), -600)
    assert s.query_task((1, 2)) == (None, -1400)


def check_a_copy_task_makes_a_replica(s: Any) -> None:
    s.put("cpy", b"c" * 1000)
    other = new_store(host="127.0.0.2")
    before = set(endpoints(s, "cpy"))
    target = other.get_hostname()
    task, code = s.create_copy_task("cpy", [target])
    assert code == 0
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline:
        answer, code = s.query_task(task)
        assert code == 0
        if answer.status.name not in ("PENDING", "PROCESSING"):
            break
        time.sleep(0.05)
    assert answer.status.name == "SUCCESS", answer
    assert before < set(endpoints(s, "cpy"))
    other.close()
    assert s.get("cpy") == b"c" * 1000


def check_setup_from_a_dictionary(s: Any) -> None:
    def code(**values: Any) -> int:
        given = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": "16 MB",
            "local_buffer_size": "16MB",
            "protocol": "tcp",
            "rdma_devices": "",
            "master_server_addr": MASTER,
        }
        other = MODULE.MooncakeDistributedStore()
        found = other.setup({**given, **values})
        other.close()
        return found

    assert code() == 0
    assert code(bogus="1") == 0
    for size in ("16mb", "16M", "0", 16 * MIB, "16777216"):
        assert code(global_segment_size=size) == 0, size
    for size in ("50%", "abc", -1, "-1", "1.5MB", "", None):
        assert code(global_segment_size=size) == -600, size
    assert MODULE.MooncakeDistributedStore().setup({"local_hostname": "127.0.0.1"}) == -600


def check_a_client_without_a_segment_reads_and_writes(s: Any) -> None:
    other = new_store(segment=0)
    assert other.put("noseg", b"1") == 0
    assert s.get("noseg") == b"1"
    other.close()
    assert s.get("noseg") == b"1"


def check_without_a_local_buffer_put_and_get_fail(s: Any) -> None:
    s.put("lb", b"1")
    other = new_store(segment=16 * MIB, buffer=0)
    assert other.put("lb0", b"1") < 0
    assert other.get("lb") == b""
    assert other.is_exist("lb") == 1
    other.close()


def check_what_does_not_fit_is_refused(s: Any) -> None:
    assert s.put("huge", b"x" * (65 * MIB)) < 0
    assert s.get("huge") == b""
    assert s.get_size("huge") == -704


def main() -> None:
    results = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            store = new_store()
            try:
                check(store)
                results[name] = ""
            except BaseException:
                results[name] = traceback.format_exc()
            store.remove_all(True)
            store.close()
    print("RESULTS" + json.dumps(results), flush=True)
    os._exit(0)  # the real one may crash in its destructors


if __name__ == "__main__":
    main()
