"""The decoding loop: prefill, decode step, draft, verify, accept or reject, roll back, stream.

`decode` makes every token final at once, wherever it exits. `decode_verified` treats tokens that exit early as
drafts: when a token reaches level L, or enough drafts wait, the full model checks them all in one pass through the
remaining blocks. The first rejected draft is replaced and the tokens after it are rolled back.

In shapes, `rows` are the sequences of the batch, `T` the tokens so far and `V` the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from layerjump.errors import BadJumps, argument
from layerjump.generation.block_runner import BlockRunner
from layerjump.generation.packed_llama import pack_unembedding
from layerjump.generation.rules import ExitConfig, LevelReading, checked_levels
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import apply_map
from layerjump.lens.lens import Lens
from layerjump.models.model import Model
from layerjump.models.structure import Site

CacheKind = Literal["exact", "jump", "copy"]
"""The keys and values of a token in the blocks that it skipped: its own, computed later (`exact`); those of a state
predicted by a jump (`jump`); those of the state at its exit level (`copy`)."""
Processors = Callable[[Tensor, Tensor], Tensor]
"""(ids so far, scores) → scores: a `LogitsProcessorList`."""
StoppingCriteria = Callable[[Tensor, Any], Tensor]
"""(ids so far, scores) → which rows end: a `StoppingCriteriaList`."""
NEAR_TIE = 1e-4
"""The difference between the two largest logits below which rounding may decide between them."""
ACCEPTANCE_WINDOW = 16
"""Drafts over which the acceptance rate is measured."""
PAUSE = 64
"""Tokens without drafts after an acceptance rate below the minimum."""


class Sequences:
    """The rows of a batch: their tokens, which of these are final, and where each row ends.

    A token is final once nothing can change it: at once without verification, else when the full model has confirmed
    it. After a rejected draft all rows roll back to the shortest final length; the others replay their final tokens.
    """

    def __init__(
        self,
        prompt: Tensor,
        stopping_criteria: StoppingCriteria,
        *,
        pad: int | None,
        eos_tokens: frozenset[int],
        streamer: Any,
    ) -> None:
        self.ids = prompt  # (rows, T)
        self.prompt_length = prompt.shape[1]
        self.eos_tokens = eos_tokens
        self.final_lengths = [self.prompt_length] * len(prompt)
        self.exit_levels: list[dict[int, int]] = [{} for _ in prompt]
        """For each row: column → the level at which its token exited."""
        self.last_columns: list[int | None] = [None] * len(prompt)
        """For each row: the column of its last token, once it has ended."""
        self._stopping_criteria, self._pad, self._streamer = stopping_criteria, pad or 0, streamer
        self._n_streamed = self.prompt_length
        if streamer is not None:
            streamer.put(prompt.cpu())

    @property
    def finished(self) -> list[bool]:
        """Rows that need no more tokens. Without end-of-text tokens Hugging Face continues until all rows end."""
        return [bool(self.eos_tokens) and last is not None for last in self.last_columns]

    @property
    def final_length(self) -> int:
        """Tokens that are final in every unfinished row."""
        rows = zip(self.final_lengths, self.finished, strict=True)
        return min((length for length, finished in rows if not finished), default=self.width)

    @property
    def width(self) -> int:
        """One more than the last column that any row has ended at."""
        ends = (last + 1 for last in self.last_columns if last is not None)
        return max(ends, default=self.prompt_length)

    @property
    def done(self) -> bool:
        """Whether every row has ended and is final."""
        return None not in self.last_columns and self.final_length >= self.width

    def open_rows(self, column: int) -> Tensor:
        """Rows whose token in this column is still to be decided, (rows,) booleans."""
        rows = zip(self.finished, self.final_lengths, strict=True)
        undecided = [not finished and length <= column for finished, length in rows]
        return torch.tensor(undecided, device=self.ids.device)

    def write(self, column: int, tokens: Tensor, rows: Tensor, levels: list[int]) -> None:
        """Write tokens, (rows,), into a column of the selected rows; the others get padding."""
        if column == self.ids.shape[1]:
            padding = self.ids.new_full((len(self.ids), 1), self._pad)
            self.ids = torch.cat([self.ids, padding], 1)
        self.ids[:, column] = torch.where(rows, tokens, self.ids[:, column])
        for row in rows.nonzero()[:, 0].tolist():
            self.exit_levels[row][column] = levels[row]

    def finalize(self, column: int, rows: Tensor, scores: Tensor) -> None:
        """Make the selected rows' tokens in this column final, and end the rows that meet a stopping criterion."""
        ended = self._stopping_criteria(self.ids[:, : column + 1], scores)
        for row in rows.nonzero()[:, 0].tolist():
            self.final_lengths[row] = column + 1
            if bool(ended[row]) and self.last_columns[row] is None:
                self.last_columns[row] = column

    def stream(self) -> None:
        """Pass the streamer the columns that are final in every row, each after its exit levels."""
        if self._streamer is None:
            return
        put_exit_levels = getattr(self._streamer, "put_exit_levels", None)
        for column in range(self._n_streamed, self.final_length):
            if put_exit_levels is not None:
                put_exit_levels([levels.get(column) for levels in self.exit_levels])
            self._streamer.put(self.padded(column + 1)[:, column].cpu())
        self._n_streamed = max(self._n_streamed, self.final_length)
        if self.done:
            self._streamer.end()

    def padded(self, width: int) -> Tensor:
        """The first `width` columns, (rows, width), with padding after the rows that have ended."""
        ids = self.ids[:, :width].clone()
        for row, last in enumerate(self.last_columns):
            if self.finished[row] and last is not None:
                ids[row, last + 1 :] = self._pad
        return ids

    def new_tokens(self, row: int) -> list[int]:
        """A row's new tokens, without padding."""
        last = self.last_columns[row]
        end = self.width if last is None or not self.finished[row] else last + 1
        return self.ids[row, self.prompt_length : end].tolist()


@dataclass(frozen=True)
class Step:
    """The result of one decode step."""

    level: int
    """The deepest level that any row reached."""
    states: Tensor
    """The states at that level, (rows, tokens, d_model); the newest token is the last."""
    exit_levels: list[int]
    """The exit level of each row's newest token."""
    early_logits: Tensor | None
    """The logits of the rows that exited early, (rows, V); None if none did."""


class Decoder:
    """Decodes a batch of sequences with early exit."""

    def __init__(
        self,
        model: Model,
        jumps: Jumps | None,
        exit: ExitConfig,
        runner: BlockRunner,
        sequences: Sequences,
        processors: Processors,
        *,
        do_sample: bool,
    ) -> None:
        self.counts = runner.counts
        self.sequences = sequences
        self._runner, self._jumps, self._exit = runner, jumps, exit
        self._processors, self._do_sample = processors, do_sample
        self._vocab_size = model.structure.vocab_size
        self._n_blocks = runner.n_blocks
        self._checked_levels = frozenset(checked_levels(exit.rule, runner.n_blocks))
        self._lens = self._early_lens = Lens(pack_unembedding(model), jumps)
        if exit.shortlist is not None:
            self._early_lens = Lens(exit.shortlist.restrict(model), jumps)

    def decode(self, cache: CacheKind) -> None:
        """Decode until all sequences end; every token is final at once.

        Blocks that a token skips get its keys and values as `cache` says.
        """
        sequences, n_blocks = self.sequences, self._n_blocks
        jumps = self._jumps if cache == "jump" else None
        if cache == "jump":
            for level in sorted(self._checked_levels):
                for target in range(level + 1, n_blocks):
                    if jumps is None or (Site(level), Site(target)) not in jumps:
                        raise BadJumps(
                            f"{argument('cache', 'jump')} needs jumps from every level where tokens may exit to all "
                            f"levels above it, but {jumps} has none from {level} to {target}; fit with "
                            f"{argument('pairs', 'all')}, or choose another cache"
                        )
        if cache != "exact" and sequences.prompt_length > 1:
            # The prompt, except its last token, runs through all blocks: its keys and values are the model's own.
            self.decode_step(sequences.ids[:, :-1], sequences.open_rows(sequences.prompt_length), may_exit=False)
        while not sequences.done:
            column = sequences.ids.shape[1]
            rows = sequences.open_rows(column)
            step = self.decode_step(sequences.ids, rows)
            if step.level < n_blocks and cache != "exact":
                # The blocks above the exit level get keys and values of a predicted or copied state.
                states = step.states[:, -1:]  # (rows, 1, d_model)
                for level in range(step.level, n_blocks):
                    jump = None if jumps is None or level == step.level else jumps[step.level, level]
                    self._runner.fill(level + 1, states if jump is None else apply_map(jump, states))
                self.counts.record_time("blocks")
            logits = step.early_logits
            if step.level == n_blocks:
                last = self._unembed(step.states[:, -1])
                early = torch.tensor([level < n_blocks for level in step.exit_levels], device=last.device)
                logits = last if logits is None else torch.where(early[:, None], logits, last)
            tokens, scores = self._choose(sequences.ids, logits)
            sequences.write(column, tokens, rows, step.exit_levels)
            sequences.finalize(column, rows, scores)
            sequences.stream()
            self.counts.record_time("rest")

    def decode_verified(self, max_draft_tokens: int, max_length: int | None) -> None:
        """Decode what the full model would: tokens that exit early are drafts, verified before they are final.

        At most `max_draft_tokens` drafts wait for verification. Sequences end at `max_length` at the latest.
        """
        sequences, column = self.sequences, self.sequences.prompt_length
        recent: list[bool] = []  # whether the latest drafts were accepted
        paused_until = 0
        draft_probs: dict[int, Tensor] = {}  # column → what its drafts were sampled from, (rows, V)
        while not sequences.done:
            rows = sequences.open_rows(column)
            n_drafts = column - sequences.final_length
            may_exit = n_drafts < max_draft_tokens and column >= paused_until and bool(rows.any())
            step = self.decode_step(sequences.ids[:, :column], rows, may_exit=may_exit)
            states, n_drafted = step.states, column
            if step.level < self._n_blocks:
                tokens, scores = self._choose(sequences.ids[:, :column], step.early_logits)
                if self._do_sample:
                    draft_probs[column] = scores.softmax(-1)
                sequences.write(column, tokens, rows, step.exit_levels)
                self.counts.record_time("rest")
                ends = not sequences.eos_tokens.isdisjoint(tokens[rows].tolist())
                if not ends and column + 1 != max_length:
                    column += 1
                    continue
                # A draft that ends its sequence is verified now: nothing follows it.
                n_drafted = column + 1
                for block in range(step.level + 1, self._n_blocks + 1):
                    states = self._runner.run(block)
                self.counts.record_time("blocks")
            recent += self._verify(states, column, n_drafted, draft_probs)
            draft_probs.clear()
            column = sequences.final_length
            if len(recent) >= ACCEPTANCE_WINDOW:
                if sum(recent) < self._exit.min_acceptance * len(recent):
                    paused_until = column + PAUSE
                recent.clear()
            if column - 1 < self._runner.length and not sequences.done:
                # Drop the tokens that entered the blocks after those that are final in every row.
                self.counts.rollbacks += 1
                self._runner.rollback(column - 1)
            sequences.stream()
            self.counts.record_time("rest")

    def _verify(self, states: Tensor, column: int, n_drafted: int, draft_probs: dict[int, Tensor]) -> list[bool]:
        """Make the tokens up to and with this column final; whether each draft was accepted.

        `states` are level L's, (rows, tokens, d_model), and end with those that predict this column. Columns before
        `n_drafted` hold drafts. A row stops at its first rejected draft, which is replaced.
        """
        sequences, accepted_drafts = self.sequences, []
        start = sequences.final_length
        logits = self._unembed(states[:, start - column - 1 :])  # (rows, columns to decide, V)
        full_model = [self._n_blocks] * len(states)
        rejected = torch.zeros(len(states), dtype=torch.bool, device=states.device)
        for at in range(start, column + 1):
            rows = sequences.open_rows(at) & ~rejected
            if not bool(rows.any()):
                continue
            drafts = sequences.ids[:, at] if at < n_drafted else None
            tokens, scores = self._choose(sequences.ids[:, :at], logits[:, at - start], drafts, draft_probs.get(at))
            changed = rows
            if drafts is not None:
                changed = (tokens != drafts) & rows
                accepted_drafts += (~changed[rows]).tolist()
                rejected = rejected | changed
            sequences.write(at, tokens, changed, full_model)
            if not self._do_sample:
                two = scores.topk(2).values  # (rows, 2)
                self.counts.near_ties += int(((two[:, 0] - two[:, 1] < NEAR_TIE) & rows).sum())
            sequences.finalize(at, rows, scores)
        self.counts.drafts += len(accepted_drafts)
        self.counts.accepted += sum(accepted_drafts)
        return accepted_drafts

    def decode_step(self, ids: Tensor, rows: Tensor, *, may_exit: bool = True) -> Step:
        """Run the newest tokens to the level where all selected rows have exited, or to level L.

        `ids` are all tokens so far, (rows, T). Rows that are not selected, (rows,), run along.
        """
        counts, shortlist = self.counts, self._exit.shortlist
        states = self._runner.extend(ids)  # (rows, new tokens, d_model)
        checked = self._checked_levels if may_exit else frozenset()
        positions = self._runner.positions.expand(len(ids))
        exit_levels, exited, logits = [self._n_blocks] * len(ids), ~rows, None
        earlier_tokens: tuple[Tensor, ...] = ()
        for level in range(self._n_blocks):
            if level in checked:
                counts.record_time("blocks")
                reading = LevelReading(level, states[:, -1], positions, self._early_lens.logits, earlier_tokens)
                exits = self._exit.rule.should_exit(reading) & ~exited
                if bool(exits.any()):
                    exit_logits = reading.logits
                    if shortlist is not None:
                        exit_logits = shortlist.expand(exit_logits, self._vocab_size)
                    if logits is not None:
                        exit_logits = torch.where(exits[:, None], exit_logits, logits)
                    logits, exited = exit_logits, exited | exits
                    for row in exits.nonzero()[:, 0].tolist():
                        exit_levels[row] = level
                if reading.has_logits:
                    earlier_tokens += (reading.top_token,)
                    counts.unembeddings += shortlist is None
                    counts.shortlist_unembeddings += shortlist is not None
                counts.probe_evaluations += reading.probe_evaluations
                counts.record_time("rules", reading.unembedding_seconds)
                if logits is not None and bool(exited.all()):
                    return Step(level, states, exit_levels, logits)
            counts.wasted_tokens += len(ids) - exit_levels.count(self._n_blocks)
            states = self._runner.run(level + 1)
        counts.record_time("blocks")
        return Step(self._n_blocks, states, exit_levels, logits)

    def _unembed(self, states: Tensor) -> Tensor:
        """Level L's logits."""
        self.counts.unembeddings += 1
        logits = self._lens.logits(self._n_blocks, states)
        self.counts.record_time("unembeddings")
        return logits

    def _choose(
        self, ids: Tensor, logits: Tensor | None, drafts: Tensor | None = None, draft_probs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The next tokens, (rows,), the top ones or a sample, and their scores, (rows, V). Accepted drafts stay.

        Scores are the result of Hugging Face's processors on float32 logits. Sampling accepts a draft x, drawn from q,
        with probability min(1, p(x) / q(x)) and else samples from (p − q)₊, so that the outcome is distributed as p,
        whatever q is (arXiv 2211.17192).
        """
        assert logits is not None, "a token exited early without logits"
        scores = self._processors(ids, logits.to(torch.float32, copy=True))  # they may write in place
        if not self._do_sample:
            return scores.argmax(-1), scores
        p = scores.softmax(-1)  # (rows, V), this model
        if drafts is None or draft_probs is None:
            return torch.multinomial(p, 1)[:, 0], scores
        q, index = draft_probs, drafts[:, None]  # (rows, V), what the drafts were sampled from
        accepted = torch.rand_like(p[:, 0]) * q.gather(1, index)[:, 0] < p.gather(1, index)[:, 0]
        residual = (p - q).clamp_min(0)
        # Where p = q every draft is accepted and the residual is zero; multinomial still needs some weight.
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
        return torch.where(accepted, drafts, torch.multinomial(residual, 1)[:, 0]), scores
