"""Train a tuned lens with the package tuned-lens 0.2.0; runs in its environment.

    python tuned.py JOB OUT [--steps 100] [--tokens-per-step 1024] [--least-cpu 0] [--most-cpu 3600]

The script uses the package's lens, optimisers, schedule, gradient clipping and loss (its command line no longer runs).
There are two differences: no bfloat16 autocast, which is several times slower on CPUs, and position 0 is left out, as
for all other lenses.

Short runs try the default learning rate, others (further ones while an outermost one is best), and the other
optimiser. The setting with the lowest KL on the validation sequences is then trained longer, until the last fifth of
the steps lowers the KL by less than 1 % and the run has had `--least-cpu` seconds. The learning rate decays to zero
over a run and the KL falls with it, however long the run is. The gain of the last fifth is therefore measured against a
separate run of four fifths of the steps with its own schedule. The reported cost is that of the last run alone;
`all_cpu` includes every run. A script that was stopped resumes, except for the last few steps.
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

Setting = tuple[str, float]
"""Optimiser, and the factor of its default learning rate."""
SCALES = (1.0, 3.0, 10.0)
OTHER: Setting = ("adam", 10.0)
WIDEST = 1_000.0  # largest factor or divisor of the default that is tried
ENOUGH = 0.01
HELD_OUT_TOKENS = 600
SAVE_EVERY = 25
"""Steps between two saves of a run."""


class Run(NamedTuple):
    """The record of a training run, and its lens."""

    curve: list[tuple[int, float]]
    """Steps and mean KL over levels on the validation sequences: after four fifths of the steps, and at the end."""
    cpu: float
    wall: float
    tokens: int
    lens: TunedLens | None = None
    """None for a run of an earlier start of this script."""

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
    parser.add_argument("--steps", type=int, default=100, help="steps of the short runs")
    parser.add_argument("--tokens-per-step", type=int, default=1024)
    parser.add_argument("--least-cpu", type=float, default=0, help="CPU seconds that the long run takes at least")
    parser.add_argument("--most-cpu", type=float, default=3600, help="CPU seconds beyond which no longer run starts")
    options = parser.parse_args()
    job = Job.read(options.job)
    model = AutoModelForCausalLM.from_pretrained(job.model, torch_dtype=torch.float32).eval()
    job.require_same(lambda ids: model(ids).logits)
    trainer = Trainer(model, job, options.tokens_per_step, options.out / "short.json")
    short = trainer.short_runs(options.steps)
    setting = min(short, key=lambda candidate: short[candidate].kl)
    spent = sum(run.cpu for run in short.values())
    for run, shorter in trainer.longer(setting, short[setting], options.least_cpu, options.most_cpu):
        spent += run.cpu + shorter.cpu
        if run.lens is None:
            continue  # saved by an earlier start of this script
        # Save now: the next run is twice as long, and may be stopped.
        run.lens.save(options.out)
        report(options.out / "cost.json", _cost(run, shorter, setting, short, spent))


def _cost(run: Run, shorter: Run, setting: Setting, short: dict[Setting, Run], spent: float) -> dict[str, Any]:
    assert run.lens is not None
    gain = _last_gain(run, shorter)
    return {
        "cpu_seconds": run.cpu,
        "wall_seconds": run.wall,
        "tokens": run.tokens,
        "backward_passes": run.steps * len(run.lens),
        "all_cpu": spent,
        "optimiser": setting[0],
        "learning_rate_scale": setting[1],
        "short_runs": {f"{name} × {scale:g}": short_run.kl for (name, scale), short_run in short.items()},
        "select_kl": run.kl,
        "four_fifths": [shorter.steps, shorter.kl],
        "last_gain": gain,
        "converged": gain < ENOUGH,
        "curve": run.curve,
    }


def _last_gain(run: Run, shorter: Run) -> float:
    """Return the share by which the last fifth of the steps lowered the KL."""
    return 1 - run.kl / shorter.kl


class Trainer:
    """Trains lenses of one model on one job."""

    def __init__(self, model: Any, job: Job, tokens_per_step: int, record: Path) -> None:
        self.model, self.job, self.tokens_per_step = model, job, tokens_per_step
        self._record = record
        self._held_out = _batch(_first(job.select, HELD_OUT_TOKENS))

    def short_runs(self, steps: int) -> dict[Setting, Run]:
        """Return a short run for each setting to try."""
        runs = {scale: self._run_or_load("sgd", scale, steps) for scale in SCALES}
        while True:
            best = min(runs, key=lambda scale: runs[scale].kl)
            further = {max(runs): 3 * best, min(runs): best / 3}.get(best)
            if further is None or not 1 / WIDEST < further < WIDEST:
                break
            runs[further] = self._run_or_load("sgd", further, steps)
        sgd = {("sgd", scale): run for scale, run in runs.items()}
        return {**sgd, OTHER: self._run_or_load(*OTHER, steps)}

    def _run_or_load(self, optimiser: str, scale: float, steps: int) -> Run:
        """Return the record of an earlier run, or run it now."""
        name = self._name(optimiser, scale, steps)
        run = self._load_record(name) or self.run(optimiser, scale, steps)
        self._save_record(name, run)
        return run

    def _load_record(self, name: str) -> Run | None:
        records = json.loads(self._record.read_text()) if self._record.exists() else {}
        return Run(**records[name]) if name in records else None

    def _save_record(self, name: str, run: Run) -> None:
        records = json.loads(self._record.read_text()) if self._record.exists() else {}
        records[name] = run._replace(lens=None)._asdict()
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self._record.write_text(json.dumps(records, indent=1))

    def _name(self, optimiser: str, scale: float, steps: int) -> str:
        text = hashlib.sha256(json.dumps(self.job.fit).encode()).hexdigest()
        return f"{optimiser} {scale:g} {steps} {self.tokens_per_step} {text}"

    def longer(self, setting: Setting, short: Run, least: float, most: float) -> Iterator[tuple[Run, Run]]:
        """Yield ever longer runs, each with a run of four fifths of its steps, until the last fifth gains little."""
        step_seconds = short.cpu / short.steps
        steps = max(2 * short.steps, int(least / step_seconds) + 1)
        while True:
            shorter = self._run_or_load(*setting, steps * 4 // 5)
            name = self._name(*setting, steps)
            run = self._load_record(name) or self.run(*setting, steps)
            yield run, shorter
            self._save_record(name, run)  # the caller has saved its lens by now
            steps *= 2
            enough = _last_gain(run, shorter) < ENOUGH and run.cpu >= least
            if enough or steps * step_seconds > most:
                return

    def run(self, optimiser: str, scale: float, steps: int) -> Run:
        """Train from the start: the learning rate decays to zero over the steps, so a longer run cannot continue it."""
        torch.manual_seed(0)
        lens, clock = TunedLens.from_model(self.model), Clock()
        recipe = Optimizer(optimizer=OptimizerOption(optimiser), lr_scale=scale)
        if optimiser == "adam":
            recipe.warmup_steps = min(
                1000, steps // 5
            )  # as the package intends; its own check compares the wrong types
        optimizer = recipe.create_optim([p for p in lens.parameters() if p.requires_grad])
        scheduler = recipe.create_scheduler(optimizer, steps)
        marks = {max(1, steps * fifth // 5) for fifth in (4, 5)}
        checkpoint = Checkpoint(self._record.with_name("unfinished.pt"), self._name(optimiser, scale, steps))
        done, tokens, curve = checkpoint.restore(lens, optimizer, scheduler, clock)
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
            if step % SAVE_EVERY == 0:
                checkpoint.save(lens, optimizer, scheduler, clock, (step, tokens, curve))
        checkpoint.path.unlink(missing_ok=True)
        print(f"{optimiser} × {scale:g}, {steps} steps: {[round(kl, 4) for _, kl in curve]}")
        return Run(curve, clock.cpu, clock.wall, tokens, lens)

    def _draws(self) -> Iterator[list[list[int]]]:
        """Yield the sequences of each step, in a new order every epoch."""
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
        kl = [float(_kl(lens(states, idx=level), target)) for level, states in enumerate(levels)]
        return sum(kl) / len(kl)

    @torch.no_grad()
    def _states(self, ids: Tensor, attention: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return states at every level and the model's log-probabilities, at all positions but the first."""
        output = self.model(ids, attention_mask=attention, output_hidden_states=True)
        real = attention.bool()
        real[:, 0] = False
        return [h[real] for h in output.hidden_states[:-1]], output.logits[real].log_softmax(-1)


class Checkpoint(NamedTuple):
    """An unfinished run on disk."""

    path: Path
    name: str

    def save(self, lens: Any, optimizer: Any, scheduler: Any, clock: Clock, so_far: Any) -> None:
        parts = [part.state_dict() for part in (lens, optimizer, scheduler)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        torch.save([self.name, parts, (clock.cpu, clock.wall), so_far], new)
        new.replace(self.path)

    def restore(self, lens: Any, optimizer: Any, scheduler: Any, clock: Clock) -> Any:
        """Restore the same run; return its steps, tokens and curve so far (0, 0 and [] if there is none)."""
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
    """Return the package's loss: KL(model ‖ lens), averaged over positions."""
    return torch.sum(target.exp() * (target - logits.log_softmax(-1)), dim=-1).mean()


def _batch(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids padded on the right, and the attention mask."""
    longest = max(map(len, sequences))
    rows = [ids + [0] * (longest - len(ids)) for ids in sequences]
    real = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences]
    return torch.tensor(rows), torch.tensor(real)


def _first(sequences: list[list[int]], tokens: int) -> list[list[int]]:
    selected: list[list[int]] = []
    for ids in sequences:
        selected.append(ids)
        if sum(map(len, selected)) >= tokens:
            break
    return selected


if __name__ == "__main__":
    main()
