"""From an experiment's plan to runs, in two stages: each arm's search on one seed, then its choice on every seed.

A plan has no state of its own: what comes next is a function of the losses that are there, so a sweep that was stopped,
or is shared by several machines, goes on from the run folders alone. Imports no torch.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from omegaconf import DictConfig, OmegaConf

from . import data
from .compose import compose, compose_plan, key_of, no_arm
from .config import CONFIGS, ConfigError, nearest, parent_arm, validate
from .identity import canonical, hash_of, trunk_of
from .run import settle_paths

EXTENSIONS = 2  # how often a grid grows when the best value sits on its edge


@dataclass(frozen=True)
class Job:
    """One run of a plan: `overrides` compose its config, `id` is its identity."""

    experiment: str
    arm: str
    seed: int
    stage: str  # search or final
    id: str
    overrides: tuple[str, ...]
    settings: tuple[tuple[str, float], ...] = ()
    point: str = ""  # of a sweep typed on the command line
    parent: str = ""  # the run that has to be there first
    trunk: str = ""  # equal for runs of which a longer one can go on from a shorter one
    steps: int = 0  # of those

    def __str__(self) -> str:
        values = " ".join(f"{key.split('.')[-1]}={value:g}" for key, value in self.settings)
        parts = (self.experiment.split("/")[-1], self.arm, f"seed {self.seed}", values, self.point)
        return " ".join(p for p in parts if p)


@dataclass
class Choice:
    """The outcome of one arm's search; losses are those of the selecting split, test losses stand beside them."""

    experiment: str
    arm: str
    seed: int
    split: str
    points: list[dict[str, float]]
    losses: list[float]
    test_losses: list[float]
    runs: list[str]
    best: dict[str, float]
    edges: list[str]  # keys whose best value is the last of its grid
    extended: int

    @property
    def edge(self) -> bool:
        return bool(self.edges)


@dataclass
class Progress:
    """What an experiment's plan says now: runs known so far, choices made, and how many runs are still to be named."""

    jobs: list[Job] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    unnamed: int = 0
    blocked: list[str] = field(default_factory=list)  # arms whose search has a failed run


# What is known of a run: None (not finished), or its losses by split; a diverged run has infinite ones.
Losses = Callable[[str], dict[str, float] | None]


def experiments(paper: str | None = None) -> list[str]:
    """Names of all experiment files, `<paper>/<name>`, by name."""
    root = CONFIGS / "experiment"
    return sorted(p.relative_to(root).with_suffix("").as_posix() for p in (root / (paper or "")).rglob("*.yaml"))


class Study:
    """One experiment at one scale."""

    def __init__(
        self,
        experiment: str | None,
        scale: str,
        extra: Sequence[str] = (),
        arms: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        point: str = "",
    ):
        self.name, self.scale, self.point = experiment or "run", scale, point
        self.common = [*([f"experiment={experiment}"] if experiment else []), f"scale={scale}", *extra]
        base = compose_plan(self.common)
        self.plan = base.plan
        planned = list(self.plan.arms)
        for arm in arms or ():
            if arm not in planned:
                raise no_arm(arm, experiment, planned)
        for pattern, own in self.plan.search.arms.items():
            kind = set(own) if OmegaConf.is_dict(own) else set()
            follows = kind == {"follows", "times"} and own.follows in planned and not fnmatch(own.follows, pattern)
            if not follows and not (kind == {"grids"} and OmegaConf.is_dict(own.grids)):
                problem = "is no {grids: {<key>: [...]}} and no {follows: <arm>, times: {<key>: <factor>}}"
                raise ConfigError(f"plan.search.arms.{pattern}", own, problem, "Give it grids")
            if planned and not any(fnmatch(arm, pattern) for arm in planned):
                raise ConfigError("plan.search.arms", pattern, "fits no arm", nearest(pattern, planned))
        for pattern, leader in self.plan.parents.items():
            if leader not in planned or fnmatch(leader, pattern) or not any(fnmatch(arm, pattern) for arm in planned):
                problem = "fits no arm, or names none, or itself"
                raise ConfigError(f"plan.parents.{pattern}", leader, problem, nearest(leader, planned))
        for pattern in self.plan.only:
            if not any(fnmatch(arm, pattern) for arm in planned):
                raise ConfigError("plan.only", pattern, "fits no arm", nearest(pattern, planned))
        here = [arm for arm in planned if not self.plan.only or any(fnmatch(arm, only) for only in self.plan.only)]
        self.arms = list(dict.fromkeys(arms or here or [""]))  # without a plan: the config itself, no arm
        self.seeds = list(dict.fromkeys(int(s) for s in (seeds or self.plan.seeds)))
        if not self.seeds:
            raise ConfigError("plan.seeds", [], "leaves nothing to run", "Name one seed or more")
        self.fixed = {key_of(o) for o in extra}
        self._configs: dict[str, tuple[DictConfig, dict[str, str]]] = {}
        self._canonical: dict[str, dict[str, Any]] = {}
        self._ids: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # run, trunk and its steps
        self._parents: dict[tuple[str, int], str] = {}  # (arm, seed) -> run, as soon as it has a name

    def pick(self, arm: str) -> list[str]:
        return [f"arm={arm}"] if arm else []

    def config(self, arm: str) -> tuple[DictConfig, dict[str, str]]:
        """The composed config of an arm and the content hashes of its data."""
        if arm not in self._configs:
            own = [o for o in self.plan.arms.get(arm, []) if key_of(o) not in self.fixed]
            cfg = compose([*own, *self.common, *self.pick(arm)])
            validate(cfg)
            settle_paths(cfg)
            data.check(cfg.data)
            for key, values in self.grids(arm).items():
                if not isinstance(OmegaConf.select(cfg, key), float):
                    raise ConfigError(
                        "plan.search.grids", key, "is no key that holds a float", "Name one that does, such as optim.lr"
                    )
                if not values or not all(map(math.isfinite, values)):
                    raise ConfigError(
                        f"plan.search.grids.{key}", values, "needs one finite value or more", "For example [0.01]"
                    )
            self._configs[arm] = cfg, data.content_hash(cfg.data)
        return self._configs[arm]

    def job(self, arm: str, seed: int, stage: str, settings: dict[str, float]) -> Job:
        parent = self._parents.get((arm, seed), "")
        key = (arm, seed, parent, *sorted(settings.items()))
        if key not in self._ids:
            if arm not in self._canonical:
                self._canonical[arm] = canonical(*self.config(arm))
            plain = copy.deepcopy(self._canonical[arm])
            plain |= {"seed": seed, **({"parent": parent} if parent else {})}
            for name, value in settings.items():
                *groups, last = name.split(".")
                node = plain
                for group in groups:
                    node = dict(node)[group]  # interventions are a list of (name, settings)
                node[last] = value
            wsd = plain["optim"]["schedule"] == "wsd"
            self._ids[key] = hash_of(plain), *((trunk_of(plain), plain["train"]["steps"]) if wsd else ("", 0))
        overrides = (*self.common, *self.pick(arm), f"seed={seed}", *([f"parent={parent}"] if parent else []),
                     *(f"{k}={v!r}" for k, v in settings.items()))  # fmt: skip
        run, *trunk = self._ids[key]
        return Job(self.name, arm, seed, stage, run, overrides, tuple(settings.items()), self.point, parent, *trunk)

    def own(self, arm: str) -> dict[str, Any] | None:
        """What the plan says of this arm's search alone: of the first pattern that fits."""
        return next((own for pattern, own in self._searches["arms"].items() if fnmatch(arm, pattern)), None)

    @functools.cached_property
    def _searches(self) -> dict[str, Any]:
        return OmegaConf.to_container(self.plan.search, resolve=True)  # type: ignore[return-value]

    def grids(self, arm: str) -> dict[str, list[float]]:
        """The grids of the first pattern that fits the arm, else the common ones; without keys that were typed."""
        own = (self.own(arm) or self._searches).get("grids", {})
        try:
            return {key: sorted({float(v) for v in values}) for key, values in own.items() if key not in self.fixed}
        except (TypeError, ValueError) as error:
            raise ConfigError("plan.search.grids", own, f"holds no numbers ({error})", "For example [0.01]") from error

    def progress(self, losses: Losses, failed: Callable[[str], bool] = lambda _: False) -> Progress:
        out = Progress()
        for arm in self.arms:
            if (leader := parent_arm(self.plan, arm)) and not self._adopt(leader, arm, losses, failed, out):
                continue
            best, unnamed = self._search(arm, losses, failed, out)
            if best is None:
                out.unnamed += unnamed
                continue
            known = {job.id for job in out.jobs}
            out.jobs += [j for s in self.seeds if (j := self.job(arm, s, "final", best)).id not in known]
        return out

    def _adopt(self, leader: str, arm: str, losses: Losses, failed: Callable[[str], bool], out: Progress) -> bool:
        """Names the runs that an arm's start from, and adds them; False while the leader's search is open."""
        apart = Progress()
        if (older := parent_arm(self.plan, leader)) and not self._adopt(older, leader, losses, failed, apart):
            out.unnamed += len(self.seeds)
            return False
        best, _ = self._search(leader, losses, failed, apart)
        known = {job.id for job in out.jobs}
        out.jobs += [job for job in apart.jobs if leader not in self.arms and job.id not in known]
        if best is None:
            out.unnamed += len(self.seeds)
            out.blocked += [arm] * bool(apart.blocked)
            return False
        for seed in {*self.seeds, *([self.plan.search.seed] if self.grids(arm) else [])}:
            job = self.job(leader, seed, "final", best)
            self._parents[arm, seed] = job.id
            if job.id not in {other.id for other in out.jobs}:
                out.jobs.append(job)
            if failed(job.id) and arm not in out.blocked:
                out.blocked.append(arm)
        return True

    def _search(self, arm: str, losses: Losses, failed: Callable[[str], bool], out: Progress):
        """Adds the arm's search runs and its choice; returns the best settings, or None and how many runs must wait."""
        own = self.own(arm) or {}
        if "follows" in own:
            return self._follow(own["follows"], own["times"], arm, losses, failed, out)
        grids, seed, split = self.grids(arm), self.plan.search.seed, self.plan.search.split
        extended = 0
        while True:
            points = [dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values())]
            if len(points) == 1:
                return points[0], 0
            jobs = [self.job(arm, seed, "search", p) for p in points]
            found = [losses(j.id) for j in jobs]
            if any(f is None for f in found):
                out.jobs += jobs
                if any(f is None and failed(j.id) for f, j in zip(found, jobs, strict=True)):
                    out.blocked.append(arm)
                return None, len([s for s in self.seeds if s != seed])
            values = [f[split] for f in found]  # type: ignore[index]
            best = points[min(range(len(points)), key=lambda i: values[i])]
            if not math.isfinite(min(values)):
                out.jobs += jobs
                out.blocked.append(arm)
                return None, 0
            edges = {k: g for k, g in grids.items() if len(g) > 1 and best[k] in (g[0], g[-1]) and best[k] > 0}
            if edges and extended < EXTENSIONS:
                extended += 1
                for key, grid in edges.items():
                    grids[key] = sorted([*grid, beyond(grid, best[key] == grid[0])])
                continue
            out.jobs += [
                Job(**{**vars(j), "stage": "final"}) if p == best and seed in self.seeds else j
                for j, p in zip(jobs, points, strict=True)
            ]
            out.choices.append(
                Choice(
                    self.name,
                    arm,
                    seed,
                    split,
                    points,
                    values,
                    [f["test"] for f in found],
                    [j.id for j in jobs],
                    best,
                    list(edges),
                    extended,
                )
            )
            return best, 0

    def _follow(self, leader: str, times: dict[str, float], arm: str, losses: Losses, failed, out: Progress):
        """The leader's choice with some of its settings multiplied, for an arm that has no search of its own."""
        search = Progress()
        best, _ = self._search(leader, losses, failed, search)
        if leader not in self.arms:  # it has to be searched all the same
            out.jobs += search.jobs
        if best is None:
            out.blocked += [arm] * bool(search.blocked)
            return None, 0 if search.blocked else len(self.seeds)
        given = self.config(leader)[0]
        return best | {k: float(f"{f * best.get(k, OmegaConf.select(given, k)):.6g}") for k, f in times.items()}, 0


def beyond(grid: list[float], low: bool) -> float:
    """The next value of a geometric grid below or above it."""
    near, next_to = (grid[0], grid[1]) if low else (grid[-1], grid[-2])
    factor = near / next_to if next_to > 0 else 2.0  # of [0, x] only x has a neighbour above, and no ratio
    return float(f"{near * factor:.3g}")
