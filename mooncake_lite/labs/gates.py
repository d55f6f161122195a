"""Gates: what is found in a region before any of it runs.

Used by `labs check` and `grade`. Pure: text in, a finding out. Explained in docs/explain/labs.md, "Gates".
"""

from __future__ import annotations

from mooncake_lite.errors import LabError
from mooncake_lite.labs import regions
from mooncake_lite.labs.lab import Lab, LabTask
from mooncake_lite.labs.names import forbidden

MOST_CHARACTERS = 20_000
"""Of a region. Forty lines have a tenth of that; Python's parser must not be fed megabytes."""


def look_at(lab: Lab, task: LabTask, source: str, *, check_names: bool = True) -> str:
    """Look at a region in the file `source`, without running it.

    Returns why the tests of the task are not run; empty when they are.
    """
    try:
        text = regions.body(source, task.function)
        if len(text) > MOST_CHARACTERS:
            return f"the region has {len(text):,} characters; {MOST_CHARACTERS:,} are allowed"
        if regions.is_stub(text):
            return f"not written yet: {task.function} in {task.file} is a stub"
        regions.read(source, task.file, flags=0)
        function = regions.function_in(source, task.function)
        wrong = forbidden(lab, task, function, source) if check_names else []
    except SyntaxError as error:
        return f"Python cannot read {task.file}, line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"Python cannot read {task.file}: {type(error).__name__}"
    except LabError as error:
        return f"{task.file}: {error}"
    return "; ".join(wrong)


def transplanted(lab: Lab, task: LabTask, clean: str, text: str) -> str:
    """Return the clean file with a student's region in it.

    Raises LabError for a text that is not the body of one function.
    """
    if len(text) > MOST_CHARACTERS:
        raise LabError(f"the region has {len(text):,} characters; {MOST_CHARACTERS:,} are allowed")
    filled = regions.replace(clean, task.function, text)
    functions = [task.function]
    try:
        same = regions.outside(filled, functions) == regions.outside(clean, functions)
    except SyntaxError as error:
        begin = regions.find(clean, task.function).begin
        line = max(1, (error.lineno or 0) - begin)
        raise LabError(f"Python cannot read line {line} of the region: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise LabError(f"Python cannot read the region: {type(error).__name__}") from None
    if not same:
        raise LabError("the text is more than the body of one function; only a body may be handed in")
    return filled


def outside_of(lab: Lab, sources: dict[str, str]) -> dict[str, str]:
    """Return {file: digest of what it is apart from the lab's regions}; "" for one that cannot be parsed."""
    found = {}
    for file, source in sources.items():
        try:
            found[file] = regions.outside(source, lab.files[file])
        except (SyntaxError, ValueError):
            found[file] = ""
    return found
