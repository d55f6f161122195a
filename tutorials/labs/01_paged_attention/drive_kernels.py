"""The child's side of 1d and 1e: launches the kernels with what the tests send, and tells what was seen.

It runs beside a student's code, so it knows no expected value. Kernels run in Numba's simulator under the
race checker. With MOONCAKE_LITE_LABS_GPU they run on a GPU, and nothing is recorded. NaN travels as null.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

from mooncake_lite.labs.child import GPU

ON_GPU = GPU in os.environ
if not ON_GPU:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # Numba reads it when it is imported

import numpy as np  # noqa: E402

from kernels_numba.attention import attention_cuda  # noqa: E402
from kernels_numba.gpu.backend_cuda import cuda  # noqa: E402
from mooncake_lite.labs.access_map import AccessMap, access_map  # noqa: E402
from mooncake_lite.labs.race_checker import READS, Finding, Recording, watch  # noqa: E402

LAUNCHES: dict[str, Callable[..., None]] = {
    "attention_v1": attention_cuda.launch_plain,
    "attention_v1_shared": attention_cuda.launch_shared,
}

warnings.simplefilter("ignore", RuntimeWarning)  # poison overflows, and tests look at results


def launch(inputs: dict[str, Any]) -> dict[str, Any]:
    """Launch a kernel. Tells its result, what the race checker has found, and how much was read.

    reads   elements of keys and of values that all threads have read, and of keys that the busiest one has
    drawn   an access map: of the array of the first finding, else of a shared array, else of the keys;
            without findings it shows `block` of the inputs
    """
    element = np.uint16 if inputs["dtype"] == "bfloat16" else np.float32
    arrays = [np.array(inputs[name], element) for name in ("query", "key_cache", "value_cache")]
    arrays += [np.array(inputs[name], np.int32) for name in ("block_tables", "query_lens", "context_lens")]
    out = np.full(arrays[0].shape, 0x7FC0 if element is np.uint16 else np.nan, element)
    *given, result = (cuda.to_device(array) for array in (*arrays, out))
    run = LAUNCHES[inputs["kernel"]]
    if ON_GPU:
        run(*given, inputs["scale"], result, inputs["window"])
        numbers = result.copy_to_host().ravel().tolist()
        return {"out": numbers, "findings": [], "reads": None, "drawn": None}
    with watch(["key_cache", "value_cache"]) as recording:
        try:
            run(*given, inputs["scale"], result, inputs["window"])
        except AttributeError as error:
            raise _in_other_words(error).with_traceback(error.__traceback__) from None
    findings = recording.findings()
    return {
        "out": result.copy_to_host().ravel().tolist(),
        "findings": [{"kind": finding.kind, "text": str(finding)} for finding in findings],
        "reads": {
            "keys": recording.count("key_cache", READS),
            "values": recording.count("value_cache", READS),
            "keys_of_busiest": recording.most_of_a_thread("key_cache", READS),
        },
        "drawn": _drawn(recording, findings[:1], tuple(inputs["block"])),
    }


def _in_other_words(error: AttributeError) -> AttributeError:
    """Return the error; one that names a part of CUDA that the simulator lacks says so."""
    missing = re.search(r"'FakeCUDA\w*' object has no attribute '(\w+)'", str(error))
    if missing is None:
        return error
    return AttributeError(
        f"Numba's simulator, in which the tests run, has no cuda.{missing[1]}; it has cuda.syncthreads"
    )


def _drawn(recording: Recording, findings: list[Finding], block: tuple[int, ...]) -> AccessMap | None:
    """Return a picture of one block; None when no thread of it touched anything that is watched."""
    for finding in findings:
        if finding.array:
            return access_map(recording, finding.array, block=finding.block)
    block = findings[0].block if findings else block
    for name in (*sorted(recording.shared_names), "key_cache"):
        if name in recording.shapes:
            return access_map(recording, name, unit="page" if name == "key_cache" else "cell", block=block)
    return None


CALLS = {"launch": launch}
