"""Train a tuned lens with the package tuned-lens 0.2.0, as well as its own pieces allow; runs in its environment.

    python tuned.py JOB OUT [--steps 100] [--tokens-per-step 1024] [--least-cpu 0] [--most-cpu 3600]

The package's lens, optimiser, schedule, gradient clipping and loss; its command line no longer runs. Different from it:
no bfloat16 autocast (several times slower on CPUs), and position 0 is left out, as it is for the lenses it is held
against. Short runs with its default and with other learning rates, ever further out while an outer one is best, and
with its other optimiser; the way of least KL on the select sequences is trained again, longer, until the last fifth of
its steps is worth less than 1 % of that KL and it has had `--least-cpu` seconds. The schedule falls to zero over a run
and the KL falls with it, however long the run: so what the last fifth is worth is told by a run of four fifths of the
steps, with a schedule of its own. The cost reported is that of the last run alone; `all_cpu` has every run. A script
that is stopped goes on where it was, but for a few steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from job import Clock, Job, report
from torch import Tensor
from transformers import AutoModelForCausalLM
from tuned_lens import TunedLens
from tuned_lens.scripts.ingredients import Optimizer, OptimizerOption

Way = tuple[str, float]
"""Optimiser, and the factor on its default learning rate."""
SCALES = (1.0, 3.0, 10.0)
OTHER: Way = ("adam", 10.0)
WIDEST = 1_000.0  # times or parts of the default: none but a broken run would want more
ENOUGH = 0.01
HELD_OUT_TOKENS = 600
SAVED = 25
"""Steps between two saves of a run."""


class Run(NamedTuple):
    """How a training went, and its lens."""

    curve: list[tuple[int, float]]
    """Steps, and the mean KL over levels on the select sequences after them: at four fifths, and at the end."""
    cpu: float
    wall: float
    tokens: int
    lens: TunedLens | None = None
    """None: of a run that was made before this script was stopped."""

    @property
    def kl(self) -> float:
        return self.curve[-1][1]

    @property
    def steps(self) -> int:
        return self.curve[-1][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=100, help="of the short runs")
    parser.add_argument("--tokens-per-step", type=int, default=1024)
    parser.add_argument("--least-cpu", type=float, default=0, help="seconds that the long run gets")
    parser.add_argument("--most-cpu", type=float, default=3600, help="after a long run, no longer one is begun")
    options = parser.parse_args()
    job = Job.read(options.job)
    model = AutoModelForCausalLM.from_pretrained(job.model, torch_dtype=torch.float32).eval()
    job.require_same(lambda ids: model(ids).logits)
    trainer = Trainer(model, job, options.tokens_per_step, options.out / "short.json")
    short = trainer.short_runs(options.steps)
    way = min(short, key=lambda each: short[each].kl)
    spent = sum(run.cpu for run in short.values())
    for run, shorter in trainer.longer(way, short[way], options.least_cpu, options.most_cpu):
        spent += run.cpu + shorter.cpu
        if run.lens is None:
            continue  # kept by the script that was stopped
        # At once: the next run is twice as long, and may be stopped.
        run.lens.save(options.out)
        report(options.out / "cost.json", _cost(run, shorter, way, short, spent))


def _cost(run: Run, shorter: Run, way: Way, short: dict[Way, Run], spent: float) -> dict[str, Any]:
    assert run.lens is not None
    gain = _last_gain(run, shorter)
    return {
        "cpu_seconds": run.cpu,
        "wall_seconds": run.wall,
        "tokens": run.tokens,
        "backward_passes": run.steps * len(run.lens),
        "all_cpu": spent,
        "optimiser": way[0],
        "learning_rate_scale": way[1],
        "short_runs": {f"{name} × {scale:g}": each.kl for (name, scale), each in short.items()},
        "select_kl": run.kl,
        "four_fifths": [shorter.steps, shorter.kl],
        "last_gain": gain,
        "converged": gain < ENOUGH,
        "curve": run.curve,
    }


def _last_gain(run: Run, shorter: Run) -> float:
    """By what share the last fifth of the steps lowered the KL."""
    return 1 - run.kl / shorter.kl


class Trainer:
    """Trains lenses of one model on one text."""

    def __init__(self, model: Any, job: Job, tokens_per_step: int, kept: Path) -> None:
        self.model, self.job, self.tokens_per_step = model, job, tokens_per_step
        self._kept = kept
        self._held_out = _batch(_first(job.select, HELD_OUT_TOKENS))

    def short_runs(self, steps: int) -> dict[Way, Run]:
        """A run for each way to train that is worth trying."""
        found = {scale: self._known("sgd", scale, steps) for scale in SCALES}
        while True:
            best = min(found, key=lambda scale: found[scale].kl)
            further = {max(found): 3 * best, min(found): best / 3}.get(best)
            if further is None or not 1 / WIDEST < further < WIDEST:
                break
            found[further] = self._known("sgd", further, steps)
        sgd = {("sgd", scale): run for scale, run in found.items()}
        return {**sgd, OTHER: self._known(*OTHER, steps)}

    def _known(self, optimiser: str, scale: float, steps: int) -> Run:
        """A run, or what is known of it: whoever stops this script need not make it again."""
        name = self._name(optimiser, scale, steps)
        run = self._told(name) or self.run(optimiser, scale, steps)
        self._tell(name, run)
        return run

    def _told(self, name: str) -> Run | None:
        known = json.loads(self._kept.read_text()) if self._kept.exists() else {}
        return Run(**known[name]) if name in known else None

    def _tell(self, name: str, run: Run) -> None:
        known = json.loads(self._kept.read_text()) if self._kept.exists() else {}
        known[name] = run._replace(lens=None)._asdict()
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        self._kept.write_text(json.dumps(known, indent=1))

    def _name(self, optimiser: str, scale: float, steps: int) -> str:
        text = hashlib.sha256(json.dumps(self.job.fit).encode()).hexdigest()
        return f"{optimiser} {scale:g} {steps} {self.tokens_per_step} {text}"

    def longer(self, way: Way, short: Run, least: float, most: float) -> Iterator[tuple[Run, Run]]:
        """Ever longer runs, each with one of four fifths of its steps, until the last fifth is worth little."""
        a_step = short.cpu / short.steps
        steps = max(2 * short.steps, int(least / a_step) + 1)
        while True:
            shorter = self._known(*way, steps * 4 // 5)
            name = self._name(*way, steps)
            run = self._told(name) or self.run(*way, steps)
            yield run, shorter
            self._tell(name, run)  # now that its lens is kept
            steps *= 2
            enough = _last_gain(run, shorter) < ENOUGH and run.cpu >= least
            if enough or steps * a_step > most:
                return

    def run(self, optimiser: str, scale: float, steps: int) -> Run:
        """Train from the start: the schedule falls to zero over the steps, so that no run makes a longer one."""
        torch.manual_seed(0)
        lens, clock = TunedLens.from_model(self.model), Clock()
        recipe = Optimizer(optimizer=OptimizerOption(optimiser), lr_scale=scale)
        if optimiser == "adam":
            recipe.warmup_steps = min(1000, steps // 5)  # what the package means to do; it compares the wrong types
        optimizer = recipe.create_optim([p for p in lens.parameters() if p.requires_grad])
        scheduler = recipe.create_scheduler(optimizer, steps)
        marks = {max(1, steps * fifth // 5) for fifth in (4, 5)}
        saved = Saved(self._kept.with_name("unfinished.pt"), self._name(optimiser, scale, steps))
        done, tokens, curve = saved.restore(lens, optimizer, scheduler, clock)
        for step, sequences in zip(range(1, steps + 1), self._draws(), strict=False):
            if step <= done:
                continue
            with clock:
                tokens += self._step(lens, sequences)
                torch.nn.utils.clip_grad_norm_(lens.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                scheduler.step()
            if step in marks:
                curve.append((step, self.select_kl(lens)))
            if step % SAVED == 0:
                saved.save(lens, optimizer, scheduler, clock, (step, tokens, curve))
        saved.path.unlink(missing_ok=True)
        print(f"{optimiser} × {scale:g}, {steps} steps: {[round(kl, 4) for _, kl in curve]}")
        return Run(curve, clock.cpu, clock.wall, tokens, lens)

    def _draws(self) -> Iterator[list[list[int]]]:
        """Sequences of a step, in a new order every time round."""
        generator, step = torch.Generator().manual_seed(0), []
        while True:
            for index in torch.randperm(len(self.job.fit), generator=generator).tolist():
                step.append(self.job.fit[index])
                if sum(map(len, step)) >= self.tokens_per_step:
                    yield step
                    step = []

    def _step(self, lens: TunedLens, sequences: list[list[int]]) -> int:
        batch = _batch(sequences)
        levels, target = self._states(*batch)
        for level, states in enumerate(levels):
            _kl(lens(states, idx=level), target).backward()
        return int(batch[1].sum())

    @torch.no_grad()
    def select_kl(self, lens: TunedLens) -> float:
        levels, target = self._states(*self._held_out)
        found = [float(_kl(lens(states, idx=at), target)) for at, states in enumerate(levels)]
        return sum(found) / len(found)

    @torch.no_grad()
    def _states(self, ids: Tensor, attention: Tensor) -> tuple[list[Tensor], Tensor]:
        """States at every level, and the model's log-probabilities, of all positions but the first."""
        found = self.model(ids, attention_mask=attention, output_hidden_states=True)
        real = attention.bool()
        real[:, 0] = False
        return [h[real] for h in found.hidden_states[:-1]], found.logits[real].log_softmax(-1)


class Saved(NamedTuple):
    """A run on disk: all that its next step depends on."""

    path: Path
    name: str

    def save(self, lens: Any, optimizer: Any, scheduler: Any, clock: Clock, so_far: Any) -> None:
        parts = [part.state_dict() for part in (lens, optimizer, scheduler)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        torch.save([self.name, parts, (clock.cpu, clock.wall), so_far], new)
        new.replace(self.path)

    def restore(self, lens: Any, optimizer: Any, scheduler: Any, clock: Clock) -> Any:
        """Steps, tokens and curve of the same run, as far as it came; of none at all without one."""
        if not self.path.exists():
            return 0, 0, []
        name, parts, spent, so_far = torch.load(self.path, weights_only=True)
        if name != self.name:
            return 0, 0, []
        clock.cpu, clock.wall = spent
        for part, state in zip((lens, optimizer, scheduler), parts, strict=True):
            part.load_state_dict(state)
        return so_far


def _kl(logits: Tensor, target: Tensor) -> Tensor:
    """The package's loss: KL from the model's distribution to the lens', a mean over positions."""
    return torch.sum(target.exp() * (target - logits.log_softmax(-1)), dim=-1).mean()


def _batch(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids padded on the right, and which of them are real."""
    longest = max(map(len, sequences))
    rows = [ids + [0] * (longest - len(ids)) for ids in sequences]
    real = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences]
    return torch.tensor(rows), torch.tensor(real)


def _first(sequences: list[list[int]], tokens: int) -> list[list[int]]:
    found: list[list[int]] = []
    for ids in sequences:
        found.append(ids)
        if sum(map(len, found)) >= tokens:
            break
    return found


if __name__ == "__main__":
    main()
