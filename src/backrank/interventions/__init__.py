"""Interventions: the only things that may change training. One file each; importing this package finds them all."""

from ..plugins import discover
from .base import Intervention

INTERVENTIONS: dict[str, type[Intervention]] = discover(__name__, __path__, Intervention, "intervention")
