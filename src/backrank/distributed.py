"""One run over several processes: torchrun starts them, DDP or FSDP2 joins them. Imports no torch at the top.

Each process takes its rows of every micro-batch and adds its part to the step's loss and gradient: both stay sums over
the tokens of one global batch, whatever the number of processes. The first process (rank 0) alone owns the run's
folder, evaluates and measures; the others wait for it, and what ends one ends all.
"""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from .config import ConfigError, make
from .rundir import Held, RunDir

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .task import Task

    Batch = tuple[Tensor, Tensor]


class Elsewhere(Exception):
    """Another process ended the run, with exit code `code`, and said why."""

    def __init__(self, code: int, why: str = "it is over"):
        super().__init__(f"another process: {why}")
        self.code = code


def exit_code(error: BaseException | None) -> int:
    if isinstance(error, Elsewhere):
        return error.code
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Interrupted":
        return 130
    return 2 if isinstance(error, ConfigError) else int(not (error is None or isinstance(error, Held)))


def is_first() -> bool:
    """Whether this process speaks for those that torchrun started with it."""
    return os.environ.get("RANK", "0") == "0"


def check(cfg: DictConfig) -> None:
    """Raises ConfigError where `parallel` does not go with how this process was started, or with the rest of a run."""
    from .interventions import INTERVENTIONS

    world, mode = int(os.environ.get("WORLD_SIZE", "1")), cfg.parallel
    if mode == "none":
        if world > 1:
            problem = f"but {world} processes were started for this run"
            raise ConfigError("parallel", mode, problem, "Set parallel=ddp or parallel=fsdp")
        return

    def refuse(problem: str, remedy: str = "Set parallel=none") -> None:
        raise ConfigError("parallel", mode, problem, remedy)

    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ):
        refuse("needs processes that torchrun starts", "torchrun --nproc-per-node <n> -m backrank.run ...")
    if cfg.train.batch % world:
        problem = f"is not divisible by the {world} processes of parallel={mode}"
        raise ConfigError("train.batch", cfg.train.batch, problem, "It is the global batch: change one of the two")
    if cfg.study:
        refuse(f"but study={cfg.study} is no training")
    if cfg.train.compile != "none":
        refuse(f"cannot go with train.compile={cfg.train.compile}", "Set one of the two to none")
    if mode == "fsdp" and cfg.optim.name == "muon":
        refuse("cannot go with optim.name=muon, which needs whole matrices", "Set parallel=ddp")
    for name, node in cfg.intervention.items():
        if name in INTERVENTIONS:  # `validate` names the others
            make(INTERVENTIONS[name], node).check_parallel(mode)


# ------------------------------------------------------------------------------------------------------ the processes


class Parallel:
    """One process: every sum is its own, and there is nobody to wait for."""

    mode, world, rank = "none", 1, 0
    listening = True  # the others wait to be told, as they do but in training
    all_reduce: Callable[[Tensor], Tensor] | None = None  # what interventions get: the sum over processes

    def device(self, device: torch.device) -> torch.device:
        return device

    def share(self, batch: Batch) -> Batch:
        """This process's rows of a global micro-batch."""
        return batch

    def wrap(self, task: Task) -> nn.Module:
        """What the training forward pass goes through; the parameters are those to optimise from here on."""
        self.whole_task = task
        return task

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the processes."""
        return tensor

    def any(self, flag: bool) -> bool:
        return flag

    def whole(self, tensor: Tensor) -> Tensor:
        return whole(tensor)

    def unshard(self) -> None:
        """Brings the head together, for what reads it before the step."""

    def accumulating(self, more: bool) -> AbstractContextManager:
        """Around a forward pass; `more`: its gradients are not the step's last."""
        return nullcontext()

    def agreeing(self) -> AbstractContextManager:
        """Around what a process does by itself: if it fails in one of them, all raise."""
        return nullcontext()

    def alone(self, act: Callable[[], None]) -> None:
        """`act` in the first process while the others wait; `whole_task` is there as it stands."""
        act()

    def save(self, rundir: RunDir, task: Task, optimiser: Any, state: dict[str, Any]) -> None:
        rundir.save(state)

    def restore(self, task: Task, optimiser: Any, state: dict[str, Any]) -> None:
        """Weights and the optimiser's state, from a checkpoint of any mode and number of processes."""
        import torch

        del state["rng_cuda"][torch.cuda.device_count() :]  # of a machine with more devices
        if "sharded" in state:
            load_sharded(task, optimiser, state["sharded"])
        else:
            task.load_state_dict(state["task"])
            optimiser.load_state_dict(state["optimiser"])

    def tell(self, what: Any) -> None:
        """From the first process to the others: what to run, or at the end the exit code."""


class Processes(Parallel):
    """Several processes. Every method is called by all of them, in the same order."""

    def __init__(self, device: torch.device):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.world, self.rank, self._device = dist.get_world_size(), dist.get_rank(), device
        self.mesh = init_device_mesh(device.type, (self.world,))
        # waits for the first process, which may encode data or measure for hours; never touches a device
        self.control = dist.new_group(backend="gloo", timeout=timedelta(days=30))
        self.all_reduce = self.total

    def device(self, device: torch.device) -> torch.device:
        return self._device

    def share(self, batch: Batch) -> Batch:
        rows = len(batch[1]) // self.world
        return tuple(t[self.rank * rows : (self.rank + 1) * rows] for t in batch)  # type: ignore[return-value]

    def total(self, tensor: Tensor) -> Tensor:
        import torch.distributed as dist

        tensor = tensor.detach().clone()
        dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        import torch
        import torch.distributed as dist

        raised = torch.tensor(int(flag))
        dist.all_reduce(raised, group=self.control)
        return bool(raised)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """The lowest process that failed raises its error, the others Elsewhere."""
        import torch.distributed as dist

        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
        ends: list[Any] = [None] * self.world
        mine = (exit_code(error), f"{type(error).__name__}: {error}") if error else None
        dist.all_gather_object(ends, mine, group=self.control)
        if any(ends):  # all leave by what is raised here
            self.listening = False
        for rank, end in enumerate(ends):
            if end and error and rank == self.rank:
                raise error
            if end:
                raise Elsewhere(*end)

    def alone(self, act: Callable[[], None]) -> None:
        with self.agreeing():
            if self.rank == 0:
                act()

    def save(self, rundir: RunDir, task: Task, optimiser: Any, state: dict[str, Any]) -> None:
        self.alone(lambda: rundir.save(state))

    def tell(self, what: Any) -> None:
        import torch.distributed as dist

        dist.broadcast_object_list([what], src=0, group=self.control)

    def told(self) -> Any:
        """What `tell` sends; raises Elsewhere for an exit code."""
        import torch.distributed as dist

        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self.control)
        if isinstance(box[0], int):
            raise Elsewhere(box[0])
        return box[0]


class Ddp(Processes):
    """Every process holds the whole model; its backward pass sums the gradients over all."""

    mode = "ddp"

    def wrap(self, task: Task) -> nn.Module:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        def summed(_, bucket):  # DDP's own is the mean
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

        self.whole_task = task
        with warnings.catch_warnings():  # broadcast_buffers has another name from torch 2.14 on
            warnings.simplefilter("ignore", FutureWarning)
            # the seed has given all the same weights, and no buffer changes: nothing to broadcast
            self.ddp = DistributedDataParallel(
                task, broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True
            )
        self.ddp.register_comm_hook(None, summed)
        return self.ddp

    def accumulating(self, more: bool) -> AbstractContextManager:
        return self.ddp.no_sync() if more else nullcontext()


class Fsdp(Processes):
    """Parameters, gradients and the optimiser's state in pieces (FSDP2); each block is whole while it is in use.

    The first process keeps a whole copy besides, on which it evaluates and measures as one process does.
    """

    mode = "fsdp"

    def wrap(self, task: Task) -> nn.Module:
        from torch import nn
        from torch.distributed.fsdp import FSDPModule, fully_shard

        self.task = task
        if self.rank == 0:
            self.whole_task = copy.deepcopy(task, {id(task.interventions): task.interventions})
        for parameter in task.parameters():
            parameter.data = parameter.data.contiguous()  # pieces are rows of memory
        lists = (list(m) for m in task.backbone.modules() if type(m) is nn.ModuleList)
        for block in getattr(task.backbone, "blocks", None) or next(lists, []):
            fully_shard(block, mesh=self.mesh)
        fully_shard(task, mesh=self.mesh)
        for module in task.modules():
            if isinstance(module, FSDPModule):  # sums, not means; and gloo knows no other reduction
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return task

    def unshard(self) -> None:
        self.task.unshard()  # embedding and head alone: the blocks are groups of their own

    def alone(self, act: Callable[[], None]) -> None:
        import torch

        copied = self.whole_task.state_dict() if self.rank == 0 else {}
        with torch.no_grad():
            for name, tensor in self.task.state_dict().items():
                tensor = whole(tensor)
                if self.rank == 0:
                    copied[name].copy_(tensor)
        super().alone(act)

    def save(self, rundir: RunDir, task: Task, optimiser: Any, state: dict[str, Any]) -> None:
        """A sharded checkpoint: `shards-<step>/`, to which every process writes its pieces.

        It counts from the moment at which the folder, whole, gets that name.
        """
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        draft = rundir.path / "shards.tmp"
        with self.agreeing():
            rundir.refuse_nonfinite(state["step"], {name: local(t) for name, t in state["task"].items()})
            if self.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
        pieces = dict(zip(("task", "optimiser"), get_state_dict(task, optimiser), strict=True))
        dcp.save(pieces, checkpoint_id=draft, process_group=self.control)
        with self.agreeing():
            if self.rank == 0:
                torch.save({**state, "task": None, "optimiser": None}, draft / "rest.pt")
                rundir.adopt(draft, state["step"])

    def restore(self, task: Task, optimiser: Any, state: dict[str, Any]) -> None:
        if "sharded" not in state:  # a whole one: each process takes its piece of every tensor
            now = task.state_dict()
            params = [p for group in optimiser.param_groups for p in group["params"]]
            moments = {
                i: {k: like(params[i], v) if v.shape == params[i].shape else v for k, v in of.items()}
                for i, of in state["optimiser"]["state"].items()
            }
            state = state | {
                "task": {name: like(now[name], value) for name, value in state["task"].items()},
                "optimiser": {**state["optimiser"], "state": moments},
            }
        super().restore(task, optimiser, state)


@contextmanager
def joined(cfg: DictConfig) -> Iterator[Parallel]:
    """This process among those of its run. The device is LOCAL_RANK's; nccl between GPUs, gloo otherwise.

    When the first one leaves, it tells the others with what exit code, if they wait for it; where a training step
    failed they do not, and what they meet is its closed connection. Raises ConfigError as `check` does. A process
    group that is there already is used, and left.
    """
    check(cfg)
    if cfg.parallel not in MODES:
        yield Parallel()
        return
    import torch
    import torch.distributed as dist

    from .build import pick_device

    device, local = pick_device(cfg.device), int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            problem = f"has {torch.cuda.device_count()} GPUs here, fewer than the processes"
            raise ConfigError("device", cfg.device, problem, "Start one process a GPU (torchrun --nproc-per-node)")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    parallel = MODES[cfg.parallel](device)
    try:
        yield parallel
    except BaseException as error:
        if parallel.rank == 0 and parallel.listening:
            parallel.tell(exit_code(error))
        raise
    if parallel.rank == 0:
        parallel.tell(0)
    if own:
        dist.destroy_process_group()


MODES = {"ddp": Ddp, "fsdp": Fsdp}


class Silent:
    """The recorder of a process that is not the first."""

    def metrics(self, *_: Any) -> None: ...
    def layers(self, *_: Any) -> None: ...
    def flush(self) -> None: ...
    def truncate(self, *_: Any) -> None: ...
    def offsets(self) -> dict[str, int]:
        return {}


# ------------------------------------------------------------------------------------------------------------- pieces


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be in pieces over the processes as an ordinary one; an ordinary one is returned itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """This process's piece."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def like(target: Tensor, value: Tensor) -> Tensor:
    """The whole `value`, equal in all processes, in pieces as `target` is, if it is; nothing is sent."""
    if not hasattr(target, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


def load_sharded(task: Task, optimiser: Any, folder: Path) -> None:
    """Weights and optimiser from a sharded checkpoint, into whole tensors or pieces, whatever they were then."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    state = dict(zip(("task", "optimiser"), get_state_dict(task, optimiser), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(task, optimiser, model_state_dict=state["task"], optim_state_dict=state["optimiser"])
