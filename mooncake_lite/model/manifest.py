"""The manifest of a built model folder: what lies in it, so that damage is noticed.

Used by resolve.py. Written last, so a folder without one was never finished. Explained in
docs/explain/model.md.
"""

from __future__ import annotations

import json
from pathlib import Path

from mooncake_lite.model.digest import file_digest

MANIFEST = "manifest.json"
_VERSION = 1


def write_manifest(folder: Path, source_sha256: str) -> None:
    """List every file of the folder with its size and XXH3-128. Raises OSError."""
    files = {
        path.name: {"bytes": path.stat().st_size, "xxh3_128": file_digest(path, remembered=False).hex()}
        for path in sorted(folder.iterdir())
    }
    manifest = {"version": _VERSION, "source_sha256": source_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def damage(folder: Path, source_sha256: str) -> str | None:
    """What is wrong with a built folder, in a few words; None when nothing is.

    Every file's size and digest are compared. The digest of a large file is remembered while the file
    stays what it was (digest.py), so a check costs milliseconds, or 0.1 s when a file is new or was touched.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] != _VERSION or manifest["source_sha256"] != source_sha256:
            return "it was made by another version or from another file"
        for name, entry in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes instead of {entry['bytes']}"
            if file_digest(folder / name).hex() != entry["xxh3_128"]:
                return f"the bytes of {name} are not those that were written"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} or a file that it names cannot be read"
    return None
