"""Jacobians of residual blocks and the states between them (backward_bottleneck).

A Jacobian is taken at one position, all others held: the last token of a decoder, the class token of a vision
transformer. In a convolutional network the pixels share it: a channel is shifted at all of them alike, and their mean
is read. Shapes: B samples, D width or channels in front of a block, C behind the last one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from .base import Measured, Probe, Snapshot
from .spectra import layer_rows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..task import Task

RESIDUAL = ("gpt2", "pretrained", "toy", "vit", "resnet")
VECTORS = 16  # rows of a Jacobian in one backward pass


def residual_blocks(task: Task) -> dict[str, nn.Module]:
    """The blocks by name, in forward order."""
    names = {id(module): name for name, module in task.named_modules()}
    return {names[id(block)]: block for block in task.backbone.blocks}


def unwrapped(state: Any) -> Tensor:
    """A block's output, which some versions of transformers 5 wrap in a tuple."""
    return state[0] if isinstance(state, tuple) else state


def position(task: Task) -> int:
    return 0 if hasattr(task.backbone, "class_token") else -1


def at_position(task: Task, state: Tensor) -> Tensor:
    """The state after a block, B x T x D or B x D x H x W -> B x D."""
    return state.mean((2, 3)) if state.ndim == 4 else state[:, position(task)]


@dataclass
class ResidualStream(Probe):
    """r_eff of the centred N x D states after each block: of tokens, of class tokens, or of means over the pixels."""

    kinds: ClassVar[tuple[str, ...]] = RESIDUAL

    every: int = 0

    def measure(self, snapshot: Snapshot) -> Measured:
        import torch

        from ..head import IGNORE

        task, states = snapshot.task, {}

        def keep(name: str, block: nn.Module, args: tuple[Any, ...], state: Any) -> None:
            state = unwrapped(state)
            tokens = len(snapshot.targets_N) > len(state)
            state_ND = state.flatten(0, 1) if tokens else at_position(task, state)
            state_ND = state_ND[snapshot.targets_N != IGNORE].double()
            states[name] = state_ND - state_ND.mean(0)

        with ExitStack() as hooks, torch.no_grad():
            for name, block in residual_blocks(task).items():
                hooks.callback(block.register_forward_hook(partial(keep, name)).remove)
            task.hidden(snapshot.x_BT)
        return layer_rows({"block": states}, "residual_stream")


@dataclass
class BackwardProduct(Probe):
    """r_eff of P_{>k} = prod_{j>k} (I + J_j): the Jacobian of the last block's output by block k's, or by the `stem`'s.

    With other positions held at k and free after it, so that in a vision transformer P also has what passes through
    the patches. `erank`: mean over the samples; `erank_of_mean`: of the mean P.
    """

    kinds: ClassVar[tuple[str, ...]] = RESIDUAL

    every: int = 0
    sequences: int = 4

    def measure(self, snapshot: Snapshot) -> Measured:
        shifts, states, _ = shifted(snapshot)
        names = ["stem", *residual_blocks(snapshot.task)][:-1]
        return jacobian_rows("backward_product", names, jacobians(states[-1], shifts))


@dataclass
class LayerJacobian(Probe):
    """r_eff of each block's J_j: its Jacobian less that of its shortcut, which is I but where a ResNet changes width.

    `erank`: mean over the samples; `erank_of_mean`: of the mean J.
    """

    kinds: ClassVar[tuple[str, ...]] = RESIDUAL

    every: int = 0
    sequences: int = 4

    def measure(self, snapshot: Snapshot) -> Measured:
        shifts, _, added = shifted(snapshot)
        found = [jacobians(out, [shift])[0] for out, shift in zip(added, shifts, strict=True)]
        return jacobian_rows("layer_jacobian", residual_blocks(snapshot.task), found)


def shifted(snapshot: Snapshot) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """A forward pass with a shift of the position by zero in front of each block, to differentiate by.

    Returns by block the shift, the state behind it and what the block adds to its shortcut: B x D each, with graph.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    task = snapshot.task
    shifts, states, added = [], [], []

    def before(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        state, *rest = args
        shift = state.new_zeros(len(state), state.shape[1 if state.ndim == 4 else 2], requires_grad=True)
        shifts.append(shift)
        if state.ndim == 4:
            return state + shift[:, :, None, None], *rest
        only_T1 = state.new_zeros(state.shape[1], 1)
        only_T1[position(task)] = 1
        return state + only_T1 * shift[:, None], *rest

    def after(block: nn.Module, args: tuple[Any, ...], state: Any) -> None:
        state, shortcut = unwrapped(state), getattr(block, "downsample", None)
        states.append(at_position(task, state))
        added.append(at_position(task, state - (shortcut(args[0]) if shortcut else args[0])))

    # the plain attention: the gradients of fused ones cannot be batched
    with ExitStack() as hooks, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        for block in residual_blocks(task).values():
            hooks.callback(block.register_forward_pre_hook(before).remove)
            hooks.callback(block.register_forward_hook(after).remove)
        task.hidden(snapshot.x_BT)
    return shifts, states, added


def jacobians(out_BC: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """d out / d input, B x C x D, for each of the inputs (B x D); the samples do not see each other."""
    import torch

    basis_CC = torch.eye(out_BC.shape[1], dtype=out_BC.dtype, device=out_BC.device)
    parts = [
        torch.autograd.grad(
            out_BC, inputs, rows[:, None].expand(-1, len(out_BC), -1), retain_graph=True, is_grads_batched=True
        )
        for rows in basis_CC.split(VECTORS)
    ]
    return [torch.cat(part).transpose(0, 1) for part in zip(*parts, strict=True)]


def jacobian_rows(kind: str, names: Iterable[str], found: Iterable[Tensor]) -> Measured:
    from ..spectra import effective_rank, gram_spectrum

    rows = []
    for name, J_BCD in zip(names, found, strict=True):
        *each, mean = [effective_rank(s) for s in gram_spectrum([*J_BCD, J_BCD.mean(0)])]
        erank = sum(each) / len(each)
        rows.append({"layer": name, "kind": kind, "part": "block", "erank": erank, "erank_of_mean": mean})
    return {f"rank/{kind}_mean": sum(row["erank"] for row in rows) / len(rows)}, rows
