"""Numbers as a person reads them, and words without what their spellings differ in.

Spaces inside a number do not break, and a missing one is a dash.
"""

from __future__ import annotations

import math
import unicodedata

MISSING = "–"
_NARROW = "\u202f"
_MINUS = "−"


def spelling(word: str) -> str:
    """A word without what similar spellings differ in."""
    return " ".join(unicodedata.normalize("NFC", word).split()).casefold()


def decimal(x: float, digits: int = 3) -> str:
    """``0.123``; large numbers lose decimals they cannot be read with."""
    if not math.isfinite(x):
        return MISSING
    size = abs(x)
    if size >= 1e6:
        return f"{x:.2e}".replace("-", _MINUS)
    digits = digits if size < 100 else 1 if size < 1000 else 0
    return grouped(f"{x:z.{digits}f}")


def percent(x: float, digits: int = 1) -> str:
    """A fraction as ``95.3 %``."""
    return f"{100 * x:z.{digits}f}{_NARROW}%".replace("-", _MINUS) if math.isfinite(x) else MISSING


def figure(x: float) -> str:
    """``51.78``, ``0.00123``: three digits or more, of a number of any size."""
    return decimal(x, 2) if not 0 < abs(x) < 1 else f"{x:#.3g}".replace("-", _MINUS)


def count(n: float) -> str:
    """``12 345``."""
    return grouped(f"{n:.0f}") if math.isfinite(n) else MISSING


def plural(n: int, one: str) -> str:
    """``1 client``, ``12 345 clients``."""
    return f"{count(n)} {one}" if n == 1 else f"{count(n)} {one}s"


def many(n: int, one: str) -> str:
    """``1 client``, ``12345 clients``: `plural` with digits as a keyboard has them, for terminals and logs."""
    return f"{n} {one}" if n == 1 else f"{n} {one}s"


def done(rounds: int) -> str:
    """``all 30 rounds are done``."""
    return "its only round is done" if rounds == 1 else f"all {rounds} rounds are done"


def dealt(partition: str) -> str:
    """``groups:5 partition``; where nothing was dealt out, whose the examples are."""
    own = {"natural": "clients given by the data", "sites": "each site with its own data"}
    return own.get(partition, f"{partition} partition")


def few_calibration(short: int, total: int, least: int, kind: str, who: str = "client") -> str:
    """``3 of 8 clients have fewer than the 9 calibration examples that 90 % sets need``."""
    if short < total:
        subject = f"{count(short)} of {plural(total, who)} {'has' if short == 1 else 'have'}"
    else:
        subject = f"All {plural(total, who)} have" if total > 1 else f"The only {who} has"
    return f"{subject} fewer than the {least} calibration examples that 90 % {kind} need"


def duration(seconds: float) -> str:
    """``41 s``, ``3 min 20 s``, ``1 h 12 min``."""
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def epsilon(x: float | None, digits: int) -> str:
    """``1.23``; where the accountant found no bound, in words."""
    return f"{x:.{digits}f}" if x is not None and math.isfinite(x) else "without bound"


def typed(shown: str) -> str:
    """As a keyboard has it, for terminals and logs."""
    return shown.replace(_NARROW, " ").replace(_MINUS, "-")


def short(words: str, length: int = 18) -> str:
    """Cut to a length, with an ellipsis where something was cut."""
    return words if len(words) <= length else words[: length - 1] + "…"


def grouped(digits: str) -> str:
    """Thousands apart, from ten thousand on, and a proper minus."""
    whole, dot, rest = digits.lstrip("-").partition(".")
    if len(whole) > 4:
        whole = f"{int(whole):,}".replace(",", _NARROW)
    return (_MINUS if digits.startswith("-") else "") + whole + dot + rest


# --- Words that came from elsewhere, made fit to be shown -------------------------------------------------------------


def plain(words: str, most: int | None = None) -> str:
    """Words on one line, without what a terminal would obey; of many letters, the first."""
    return "".join(letter if letter.isprintable() else "?" for letter in words[:most])
