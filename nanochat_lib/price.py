"""What a machine costs an hour: as the run's settings say, else by the table of chips."""

from __future__ import annotations

from nanochat_lib.hardware import Chip, find_chip
from nanochat_lib.run_config import OpsConfig

UNKNOWN = "price unknown"


def price(ops: OpsConfig, device_kind: str, devices: int) -> tuple[float | None, str]:
    """(USD an hour of all `devices` together, where the figure comes from); None where there is none.

    `ops.usd_per_hour` counts when it is given, 0 says that the machine is one's own; -1 asks hardware.py's table, which
    knows no spot price of most chips: then nothing is known.
    """
    return price_of(ops, find_chip(device_kind), devices, own=device_kind == "cpu")


def price_of(ops: OpsConfig, chip: Chip | None, devices: int, own: bool = False) -> tuple[float | None, str]:
    """`price` of a chip of the table; `own`: nobody rents it out."""
    if ops.usd_per_hour > 0:
        return ops.usd_per_hour, "ops.usd_per_hour"
    if ops.usd_per_hour == 0 or own:
        return None, "own machine"
    usd = chip and (chip.usd_hour_spot if ops.spot else chip.usd_hour)
    return (usd * devices, "spot" if ops.spot else "on demand") if usd else (None, UNKNOWN)


def price_here(ops: OpsConfig) -> float | None:
    """USD an hour of all devices that JAX computes on, those of other processes included."""
    import jax

    return price(ops, jax.local_devices()[0].device_kind, jax.device_count())[0]
