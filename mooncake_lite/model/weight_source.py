"""Which files a model computes on: GGUF blocks as they were published, tensors, or each where it is faster.

Used by weights.py, which reads them, by the fingerprint and by the checks before a start. Knows files, no
tensors. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.config.serve import check_weight_choice
from mooncake_lite.errors import ConfigError, ModelError
from mooncake_lite.model.config import DType, read_json
from mooncake_lite.model.manifest import MANIFEST, damage


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The files of one model; at least one of the two.

    blocks    the GGUF file whose blocks are multiplied by a few tokens as they lie; None: tensors are
    tensors   safetensors files, of the same values; empty: for many tokens the blocks are unpacked
    """

    blocks: Path | None
    tensors: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them, the GGUF first."""
        return (*([self.blocks] if self.blocks else []), *self.tensors)

    def formats(self) -> tuple[str, ...]:
        """Of the weights that linear layers multiply by a few tokens, as `kernels_numba.ahead` names them.

        Raises ModelError when the GGUF file cannot be used.
        """
        if self.blocks is None:
            return ("tensor",)
        from mooncake_lite.model.gguf_tensors import gguf_tensors

        stored = {tensor.format for tensor in gguf_tensors(self.blocks).values() if len(tensor.shape) == 2}
        return tuple(sorted("tensor" if name == "F32" else name for name in stored))

    def describe(self, dtype: str) -> str:
        """In a few words, for /health."""
        if self.blocks is None:
            return dtype
        return "published" + (f", {dtype} in large batches" if self.tensors else "")


def weight_source(folder: Path, choice: str, dtype: DType, device: str) -> WeightSource:
    """The files that `choice` means for this folder.

    auto        where a pull made the folder from a GGUF that still lies in it, dtype is float32 and device
                cpu: blocks and tensors; else tensors
    published   the folder's one GGUF alone
    float32     the safetensors files alone

    Raises ModelError when the choice is not possible here, or a file is missing.
    """
    try:
        check_weight_choice(choice, dtype, device)
    except ConfigError as error:
        raise ModelError(str(error)) from None
    if choice == "published":
        return WeightSource(_only_gguf(folder), ())
    tensors = tuple(weight_files(folder))
    if choice == "auto" and (dtype, device) == ("float32", "cpu"):
        return WeightSource(_origin(folder, tensors), tensors)
    return WeightSource(None, tensors)


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise ModelError(
            f"weights=published are read from the one GGUF file in the model folder, and {folder} has "
            f"{len(found)}; use weights=auto"
        )
    return found[0]


def _origin(folder: Path, tensors: tuple[Path, ...]) -> Path | None:
    """The GGUF that the folder's tensors were made from, if it is known to be that.

    A GGUF that somebody put beside the tensors may hold other values, and so may tensors that were changed
    later: only the manifest of a pull, with the digests of both as they are now, says that they are the same.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        listed, source = set(manifest["files"]), manifest["source_sha256"]
        names = [name for name in listed if name.endswith(".gguf")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if len(names) != 1 or Path(names[0]).name != names[0] or not listed >= {path.name for path in tensors}:
        return None
    return folder / names[0] if damage(folder, source) is None else None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the single one, or those that its index names, sorted.

    Raises ModelError when there is neither, or the index names a file that is missing or lies elsewhere.
    """
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise ModelError(f"{folder} has no model.safetensors and no model.safetensors.index.json")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index} names {name!r}; a shard must lie in the same folder")
        if not (folder / name).is_file():
            raise ModelError(f"{index} names {name}, which is missing")
    return [folder / name for name in names]
