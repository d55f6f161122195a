"""Service classes and tenants as configurations name them: JSON text of a flag, or a table of a TOML file.

Used by `serve.py`, whose fields hold the JSON. Knows no request. Explained in docs/explain/eviction.md.

    [classes.interactive]       the order of the tables is that of the classes, the highest first
    cache_share = 0.5
    slo_ttft_ms = 500

    [tenants.alice]
    key = "..."
    class = "interactive"
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from mooncake_lite.errors import ConfigError
from scheduler.classes import DEFAULT_CLASSES, ServiceClass, check_classes

TABLES = {"classes": '{"interactive": {"cache_share": 0.5}}', "tenants": '{"alice": {"key": "..."}}'}
"""Fields that are tables by name, and an example of each."""

_CLASS_KEYS = ("weight", "cache_share", "slo_ttft_ms", "slo_tpot_ms")
_TENANT_KEYS = ("key", "class")


class Tenant(msgspec.Struct, frozen=True):
    """A client with an API key of its own.

    class_id   the highest class that it may ask for, and the one that it gets if it asks for none; None: it
               may ask for any class, and gets the default one
    """

    name: str
    key: str
    class_id: int | None = None


def parse_classes(text: str) -> list[ServiceClass]:
    """Return the classes of a configuration; "" gives the default ones. Raises ConfigError."""
    if not text:
        return list(DEFAULT_CLASSES)
    try:
        classes = [_class(name, table) for name, table in _tables("classes", text).items()]
        check_classes(classes)
    except ValueError as error:
        raise ConfigError(f"classes: {error}") from None
    return classes


def parse_tenants(text: str, classes: Sequence[ServiceClass], api_key: str) -> list[Tenant]:
    """Return the tenants of a configuration. api_key: the server's, no tenant's. Raises ConfigError."""
    if not text:
        return []
    names = [one.name for one in classes]
    tenants = [_tenant(name, table, names) for name, table in _tables("tenants", text).items()]
    owners = {api_key: "the server"} if api_key else {}
    for tenant in tenants:
        if tenant.key in owners:
            raise ConfigError(
                f"tenants: {tenant.name} has the key of {owners[tenant.key]}; give each its own"
            )
        owners[tenant.key] = tenant.name
    return tenants


def hint(name: str, known: Collection[str]) -> str:
    """Return what to write in place of an unknown key: the nearest one, or any that is known."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _class(name: str, table: Any) -> ServiceClass:
    checked = _checked(f"[classes.{name}]", table, _CLASS_KEYS)
    for key, value in checked.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"[classes.{name}] {key}={value!r} must be a number")
    return ServiceClass(
        name=name,
        weight=checked.get("weight", 1.0),
        cache_share=checked.get("cache_share", 0.0),
        slo_ttft_s=checked.get("slo_ttft_ms", inf) / 1000,
        slo_tbt_s=checked.get("slo_tpot_ms", inf) / 1000,
    )


def _tenant(name: str, table: Any, classes: Sequence[str]) -> Tenant:
    where = f"[tenants.{name}]"
    checked = _checked(where, table, _TENANT_KEYS)
    key, wanted = checked.get("key"), checked.get("class")
    if not isinstance(key, str) or not key.strip():
        raise ConfigError(f'{where} needs its API key; write key = "..."')
    if wanted is not None and wanted not in classes:
        raise ConfigError(f"{where} class={wanted!r}: the classes are {', '.join(classes)}")
    return Tenant(name, key, None if wanted is None else classes.index(wanted))


def _checked(where: str, table: Any, known: Collection[str]) -> Mapping[str, Any]:
    """The table, if it is one and has only known keys."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, not {table!r}")
    found = {name.replace("-", "_"): value for name, value in table.items()}
    for name in found:
        if name not in known:
            raise ConfigError(f"{where}: unknown key {name!r}; {hint(name, known)}")
    return found


def _tables(field: str, text: str) -> dict[str, Any]:
    """The tables of a field by name. Raises ConfigError."""
    try:
        found = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise ConfigError(f"{field} is not JSON ({error}); write {TABLES[field]}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{field} must be a table by name; write {TABLES[field]}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are different."""
    found = dict(pairs)
    for name, _ in pairs:
        if [other for other, _ in pairs].count(name) > 1:
            raise ValueError(f"{name!r} is named twice")
    return found
