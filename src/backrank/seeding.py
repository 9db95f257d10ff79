"""One random generator per role, so that arms that differ in one role share every other draw."""

from __future__ import annotations

import hashlib

import torch

ROLES = ("backbone", "head", "order", "training", "fresh", "route")


def role_seed(seed: int, role: str) -> int:
    """A 63-bit seed for one role of a run; roles and seeds are independent of each other."""
    return int.from_bytes(hashlib.sha256(f"backrank/{seed}/{role}".encode()).digest()[:8], "big") >> 1


def generator(seed: int, role: str) -> torch.Generator:
    """A CPU generator: draws do not depend on the device of the run."""
    return torch.Generator().manual_seed(role_seed(seed, role))


def tensor_hash(named: dict[str, torch.Tensor]) -> str:
    """sha256 over names and bytes, in order: equal for equal initial weights."""
    digest = hashlib.sha256()
    for name, tensor in named.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
