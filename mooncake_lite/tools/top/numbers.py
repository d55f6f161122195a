"""Numbers as a reader wants them in a table: few digits, a unit, a bounded width. None is a dash.

Used by `screen.py`. Pure.
"""

from __future__ import annotations

NONE = "–"
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
_COUNTS = ("", "k", "M", "G", "T", "P", "E")


def count(value: float | None) -> str:
    """Return a number of things or a rate of them, in 6 characters at most: 0, 2.3, 87, 1,204, 204k."""
    if value is None:
        return NONE
    if value < 99_999.5:
        return f"{value:.1f}" if 0 < value < 9.95 and value != round(value) else f"{value:,.0f}"
    scaled, unit = _scaled(value, 1000, _COUNTS)
    return f"{scaled:.3g}{unit}"


def rate(bytes_per_s: float | None) -> str:
    """Return bytes per second: 12.3 MB/s."""
    if bytes_per_s is None:
        return NONE
    return f"{moved(bytes_per_s)}/s"


def moved(nbytes: float) -> str:
    """Return a number of bytes that were moved, in decimal units as rates are: 1.2 GB."""
    scaled, unit = _scaled(nbytes, 1000, _DECIMAL)
    return f"{_digits(scaled)} {unit}"


def of_size(used: float | None, total: float | None) -> str:
    """Return used and total bytes: 32 / 512 MiB, 330 MiB / 1 GiB."""
    if used is None or total is None:
        return NONE
    part, part_unit = _scaled(used, 1024, _BINARY)
    whole, unit = _scaled(total, 1024, _BINARY)
    shown = _digits(part) if part_unit == unit or not used else f"{_digits(part)} {part_unit}"
    return f"{shown} / {_digits(whole)} {unit}"


def duration(seconds: float | None) -> str:
    """Return a short time: 24 ms, 1.23 s."""
    if seconds is None:
        return NONE
    if seconds < 0.9995:
        ms = seconds * 1e3
        return f"{ms:.1f} ms" if ms < 9.95 else f"{ms:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.0f} s"


def span(seconds: float) -> str:
    """Return the length of an interval: 0.5 s, 5 s."""
    return f"{seconds:.0f} s" if seconds >= 0.95 else f"{seconds:.1f} s"


def age(seconds: float | None) -> str:
    """Return a long time in its two largest units: 12 s, 3 min 5 s, 2 h 10 min, 4 d 1 h."""
    if seconds is None:
        return NONE
    whole = int(seconds)
    units = (86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")
    for size_s, name, below_s, below in units:
        if whole >= size_s:
            return f"{whole // size_s} {name} {whole % size_s // below_s} {below}"
    return f"{whole} s"


def percent(share: float | None) -> str:
    """Return a share as a percentage: 0 %, 0.4 %, 63 %."""
    if share is None:
        return NONE
    value = 100 * share
    return f"{value:.1f} %" if 0.05 <= value < 9.95 else f"{value:.0f} %"


def _scaled(value: float, step: int, units: tuple[str, ...]) -> tuple[float, str]:
    """Return a value below `step`, as it is shown with three digits, and its unit."""
    for unit in units[:-1]:
        if value < step - 0.5:
            return value, unit
        value /= step
    return value, units[-1]


def _digits(value: float) -> str:
    """Return at most two significant digits behind the point, none from 100 on: 0, 1.2, 12.3, 512."""
    if value >= 99.95 or value == round(value):
        return f"{value:.0f}"
    return f"{value:.1f}"
