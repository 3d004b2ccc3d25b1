"""Units: bytes and seconds inside the code, words only where something is printed.

Memory is reported in GiB, MiB and KiB (powers of 2), bandwidth in GB/s (1e9 bytes per second).
"""

KIB, MIB, GIB = 2**10, 2**20, 2**30
GB = 10**9


def format_bytes(num_bytes: float) -> str:
    """Format bytes in powers of 2: `1536 -> '1.5 KiB'`, `3 * 2**30 -> '3 GiB'`."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= size:
            return f"{_short(num_bytes / size)} {name}"
    return f"{_short(num_bytes)} B"


def format_seconds(seconds: float) -> str:
    """Format seconds in s, ms or us: `0.00123 -> '1.23 ms'`."""
    for size, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= size:
            return f"{_short(seconds / size)} {name}"
    return f"{_short(seconds / 1e-6)} us"


def format_rate(bytes_per_s: float) -> str:
    """Format a bandwidth in GB/s or MB/s (powers of 10): `2.5e9 -> '2.5 GB/s'`."""
    if abs(bytes_per_s) >= GB:
        return f"{_short(bytes_per_s / GB)} GB/s"
    return f"{_short(bytes_per_s / 1e6)} MB/s"


def _short(value: float) -> str:
    """Format three significant digits, without a trailing `.0`."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
