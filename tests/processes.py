"""What each process of test_distributed.py does: torchrun processes.py <cases.json> <folder of the exit codes>.

One process group serves all cases, {name: {"overrides": [...], "does": {...}}}, since starting one takes seconds.
"""

import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from backrank import run
from backrank.data.tokens import TokenStream
from backrank.rundir import RunDir
from backrank.trainer import Trainer

ROW = 11  # targets of the first row that `uneven` leaves out of supervision


@contextmanager
def doing(stop=None, fail=None, die=None, uneven=False, apart=False, rank=0):
    """stop, fail, die: steps after which process `rank` gets SIGTERM, fails to measure, or fails in training.

    apart: it has a folder of its own, where the run is further on.
    uneven: the first row of every batch has fewer supervised targets than the others.
    """
    mine = int(os.environ.get("RANK", "0")) == rank
    after_step, measure, batch_at = Trainer.after_step, Trainer.measure, TokenStream.batch_at
    load = RunDir.load

    def then(self):
        if mine and self.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        if mine and self.step == die:
            raise RuntimeError("dies")
        after_step(self)

    def spoilt(self, *args):
        if self.step == fail:
            raise RuntimeError("cannot measure")
        measure(self, *args)

    def masked(self, index):
        x, y = batch_at(self, index)
        y[0, :ROW] = -100
        return x, y

    def elsewhere(self):
        return {"step": 99} if mine and apart else load(self)

    with (
        mock.patch.object(RunDir, "load", elsewhere),
        mock.patch.object(Trainer, "after_step", then),
        mock.patch.object(Trainer, "measure", spoilt),
        mock.patch.object(TokenStream, "batch_at", masked if uneven else batch_at),
    ):
        yield


if __name__ == "__main__":
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    codes = {}
    for name, case in cases.items():
        with doing(**case.get("does", {})):
            codes[name] = run.single(case["overrides"])
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(codes))
    dist.destroy_process_group()
