"""Probes: they only read. One file each; importing this package finds them all."""

from ..plugins import discover
from .base import Probe

PROBES: dict[str, type[Probe]] = discover(__name__, __path__, Probe, "probe")
