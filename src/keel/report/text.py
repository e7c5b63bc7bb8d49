"""How numbers and costs are written for a reader."""

from __future__ import annotations

import math

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, *, like: float | None = None, signed: bool = False) -> str:
    """Write a number with four significant digits; `like` borrows the decimals of another number.

    Missing is "–", an infinite one "∞", and from 100,000 on it is a power of ten.
    """
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    sign = "−" if value < 0 else "+" if signed else ""
    size = abs(value)
    if math.isinf(size):
        return f"{sign}∞"
    if size >= 1e5:
        mantissa, exponent = f"{size:.1e}".split("e")
        return f"{sign}{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return f"{sign}{size:,.{_decimals(size if like is None else like)}f}"


def interval(ci95: tuple[float, float] | None, *, like: float | None, signed: bool = False) -> str:
    """Write an interval with one decimal less than `like` is written with; nothing where there is no interval."""
    if ci95 is None:
        return ""
    coarse = None if like is None else abs(like) * 10 if abs(like) < 1000 else like
    low, high = (number(bound, like=coarse, signed=signed) for bound in ci95)
    return f"[{low}, {high}]"


def probability(p: float | None) -> str:
    """Write a p-value: four decimals below 0.001, else three."""
    if p is None:
        return "–"
    return f"{p:.4f}" if p < 0.001 else f"{p:.3f}"


def size_of(count_bytes: int | None) -> str:
    """Write an amount of memory in MiB, from 10 GiB on in GiB."""
    if count_bytes is None:
        return "–"
    mebibytes = count_bytes / 2**20
    return f"{mebibytes / 1024:,.1f} GiB" if mebibytes >= 10240 else f"{mebibytes:,.0f} MiB"


def duration(seconds: float) -> str:
    """Write a duration with the two largest of days, hours, minutes, seconds."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s"


def joined(items: list[str]) -> str:
    """Join words as a sentence does: "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def capitalised(text: str) -> str:
    """Return a text with a capital at its beginning; a Greek letter stays small, since it is a symbol."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def _decimals(size: float) -> int:
    size = abs(size)
    if size == 0 or not math.isfinite(size):
        return 3
    return min(4, max(0, 3 - math.floor(math.log10(size))))
