"""The decoding loop: prefill, decode step, draft, verify, accept or reject, roll back, stream.

`decode` makes every token final at once, wherever it exits. `decode_verified` drafts tokens first, by any drafters, and
the full model checks them all in one pass. The first rejected draft is replaced and the tokens after it are rolled
back.

In shapes, `rows` are the sequences of the batch, `T` the tokens so far and `V` the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from layerjump.errors import BadJumps, argument
from layerjump.generation.block_runner import BlockRunner, DraftCounts
from layerjump.generation.combine_drafters import Choice, Drafting
from layerjump.generation.drafters import DraftContext, Proposal
from layerjump.generation.exit_rules import ExitConfig, LevelReading, checked_levels
from layerjump.generation.packed_llama import pack_unembedding
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import apply_map
from layerjump.lens.lens import Lens
from layerjump.models.model import Model
from layerjump.models.sites import FINAL, JointSource, Site, Term

CacheKind = Literal["exact", "jump", "copy"]
"""The keys and values of a token in the blocks that it skipped: its own, computed later (`exact`); those of a state
predicted by a jump (`jump`); those of the state at its exit level (`copy`)."""
Processors = Iterable[Callable[[Tensor, Tensor], Tensor]]
"""Functions (ids so far, scores) → scores: a `LogitsProcessorList`, whose own call inspects signatures every time."""
StoppingCriteria = Callable[[Tensor, Any], Tensor]
"""(ids so far, scores) → which rows end: a `StoppingCriteriaList`."""
NEAR_TIE = 1e-4
"""The difference between the two largest logits below which rounding may decide between them."""


class RejectedDraft(NamedTuple):
    """A draft that the full model replaced."""

    token: int
    drafter: str


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
        self.tokens: list[list[int]] = prompt.tolist()
        """The same tokens on the host, so that they are read from the device once."""
        self.prompt_length = prompt.shape[1]
        self.eos_tokens = eos_tokens
        self.final_lengths = [self.prompt_length] * len(prompt)
        self.exit_levels: list[dict[int, int]] = [{} for _ in prompt]
        """For each row: column → the level at which its token exited."""
        self.drafters: list[dict[int, str]] = [{} for _ in prompt]
        """For each row: column → the drafter of its token, if a draft was accepted or waits for verification."""
        self.rejected: list[dict[int, RejectedDraft]] = [{} for _ in prompt]
        """For each row: column → the draft that its token took the place of."""
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

    def open_rows(self, column: int) -> list[bool]:
        """For each row, whether its token in this column is still to be decided."""
        rows = zip(self.finished, self.final_lengths, strict=True)
        return [not finished and length <= column for finished, length in rows]

    def write_drafts(
        self, column: int, tokens: list[int], rows: Sequence[bool], levels: list[int], drafters: Mapping[int, str]
    ) -> None:
        """Write drafted tokens into a column of the selected rows, the levels they come from and their drafters."""
        self._write(column, torch.tensor(tokens, device=self.ids.device), rows)
        for row, token in enumerate(tokens):
            if rows[row]:
                self.tokens[row][column] = token
                self._record(row, column, levels[row], drafters.get(row))

    def finalize(
        self,
        column: int,
        tokens: Tensor,
        rows: Sequence[bool],
        levels: list[int],
        scores: Tensor,
        *,
        has_drafts: bool = False,
    ) -> tuple[list[bool], int]:
        """Write tokens, (rows,), into a column of the selected rows; they are final. End rows by the stopping criteria.

        The others keep theirs, or get padding. With `has_drafts`, equal tokens keep their level and drafter. Return
        which rows changed, and the number of near ties. The host reads from the device once.
        """
        drafted = [row[column] if has_drafts else None for row in self.tokens]
        self._write(column, tokens, rows)
        ended = self._stopping_criteria(self.ids[:, : column + 1], scores).to(self.ids.device)
        near = (scores > scores.amax(-1, keepdim=True) - NEAR_TIE).sum(-1) > 1
        read = torch.stack([self.ids[:, column], ended.long(), near.long()]).tolist()
        changed, n_near = [], 0
        for row, (token, has_ended, is_near) in enumerate(zip(*read, strict=True)):
            self.tokens[row][column] = token
            changed.append(rows[row] and token != drafted[row])
            if not rows[row]:
                continue
            n_near += is_near
            if changed[row]:
                drafter, replaced = self.drafters[row].get(column), drafted[row]
                if drafter is not None and replaced is not None:
                    self.rejected[row][column] = RejectedDraft(replaced, drafter)
                self._record(row, column, levels[row], None)
            self.final_lengths[row] = column + 1
            if has_ended and self.last_columns[row] is None:
                self.last_columns[row] = column
        return changed, n_near

    def drop_drafts(self, end: int) -> None:
        """Forget the drafts after each row's final tokens, up to a column."""
        for length, drafters in zip(self.final_lengths, self.drafters, strict=True):
            for column in range(length, end):
                drafters.pop(column, None)

    def _write(self, column: int, tokens: Tensor, rows: Sequence[bool]) -> None:
        if column == self.ids.shape[1]:
            padding = self.ids.new_full((len(self.ids), 1), self._pad)
            self.ids = torch.cat([self.ids, padding], 1)
            for row in self.tokens:
                row.append(self._pad)
        if not all(rows):
            tokens = torch.where(torch.tensor(rows, device=tokens.device), tokens, self.ids[:, column])
        self.ids[:, column] = tokens

    def _record(self, row: int, column: int, level: int, drafter: str | None) -> None:
        self.exit_levels[row][column] = level
        self.drafters[row].pop(column, None)
        if drafter is not None:
            self.drafters[row][column] = drafter

    def stream(self) -> None:
        """Pass the streamer the columns that are final in every row, each after its exit levels and drafters."""
        if self._streamer is None:
            return
        put_exit_levels = getattr(self._streamer, "put_exit_levels", None)
        put_drafters = getattr(self._streamer, "put_drafters", None)
        put_rejected = getattr(self._streamer, "put_rejected", None)
        for column in range(self._n_streamed, self.final_length):
            if put_exit_levels is not None:
                put_exit_levels([levels.get(column) for levels in self.exit_levels])
            if put_drafters is not None:
                put_drafters([drafters.get(column) for drafters in self.drafters])
            if put_rejected is not None:
                put_rejected([rejected.get(column) for rejected in self.rejected])
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
        return self.tokens[row][self.prompt_length : end]


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
    early_final: Tensor | None = None
    """The inputs of the unembedding that these were predicted from, (rows, d); only of a lens with memory."""


class ExitDrafter:
    """Proposes what a level predicts where an exit rule fires; the newest tokens run to that level first."""

    name = "exit"
    sites: frozenset[Site] = frozenset()

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def propose(self, context: DraftContext, rows: Sequence[int]) -> dict[int, Proposal]:
        return self._decoder.draft_by_exit(context, rows)


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
        self.runner, self._jumps, self._exit = runner, jumps, exit
        self._processors, self._do_sample = processors, do_sample
        self._vocab_size = model.structure.vocab_size
        self._n_blocks = runner.n_blocks
        self._checked_levels = frozenset(checked_levels(exit.rule, runner.n_blocks))
        packed = pack_unembedding(model)
        self._structure = packed.structure
        self._lens = self._early_lens = Lens(packed, jumps)
        self._padding = runner.padding or [0] * len(sequences.ids)
        if exit.shortlist is not None:
            self._early_lens = Lens(exit.shortlist.restrict(model), jumps)
        self._readouts = {level: self._early_lens.readout(level) for level in self._checked_levels}
        self._has_memory = any(isinstance(readout.site, JointSource) for readout in self._readouts.values())
        self._memory: Tensor | None = None
        """For a lens with memory: the final states at the position before the newest, (rows, d); None: not known."""
        self._early_final: Tensor | None = None
        for level, readout in self._readouts.items():
            if not {*readout.site.terms} <= {Term(Site(level), 0), Term(FINAL, -1)}:
                raise BadJumps(
                    f"generation can read final@-1 besides a level, but the jump at level {level} reads "
                    f"{readout.site}; fit with {argument('pairs', 'predictions+final@-1')}"
                )

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
            rows = sequences.open_rows(sequences.prompt_length)
            step = self.decode_step(sequences.ids[:, :-1], rows, may_exit=False)
            self._remember(step)
        while not sequences.done:
            column = sequences.ids.shape[1]
            rows = sequences.open_rows(column)
            step = self.decode_step(sequences.ids, rows)
            if step.level < n_blocks and cache != "exact":
                # The blocks above the exit level get keys and values of a predicted or copied state.
                states = step.states[:, -1:]  # (rows, 1, d_model)
                for level in range(step.level, n_blocks):
                    jump = None if jumps is None or level == step.level else jumps[step.level, level]
                    self.runner.fill(level + 1, states if jump is None else apply_map(jump, states))
                self.counts.record_time("blocks")
            logits = step.early_logits
            if step.level == n_blocks:
                last = self._unembed(step.states[:, -1])
                early = torch.tensor([level < n_blocks for level in step.exit_levels], device=last.device)
                logits = last if logits is None else torch.where(early[:, None], logits, last)
            self._remember(step)
            tokens, scores = self._choose(sequences.ids, logits)
            sequences.finalize(column, tokens, rows, step.exit_levels, scores)
            sequences.stream()
            self.counts.record_time("rest")

    def decode_verified(self, drafting: Drafting, max_length: int | None) -> None:
        """Decode what the full model would: tokens are drafted, and verified before they are final.

        Sequences end at `max_length` at the latest.
        """
        sequences, runner = self.sequences, self.runner
        states_before: dict[Site, Tensor] = {}
        levels = [site for site in drafting.sites if site != FINAL]
        runner.keep_levels(site.index for site in levels)
        while not sequences.done:
            start, starts = sequences.final_length, list(sequences.final_lengths)
            drafts = self._draft(drafting, start, max_length, states_before)
            column = start + len(drafts)
            runner.end_splice(start - 1)
            if runner.length < column:  # an exit drafter may have entered the newest token already
                runner.extend(sequences.ids[:, :column])
            states = runner.run_all()[:, start - column - 1 :]  # (rows, columns to decide, d_model)
            self.counts.record_time("blocks")
            final = self._structure.to_final(states)
            logits = self._structure.decode(final)  # (rows, columns to decide, V)
            self.counts.unembeddings += 1
            self.counts.steps += 1
            self.counts.record_time("unembeddings")
            if drafting.remembers_predictions:
                self._show_predictions(drafting, logits, column)
            accepted = self._verify(logits, start, drafts)
            drafting.learn(sequences.tokens, starts, sequences.final_lengths, accepted)
            sequences.drop_drafts(column)
            at_sites = {site: runner.kept(site.index)[:, -final.shape[1] :] for site in levels} | {FINAL: final}
            states_before = self._states_before(at_sites, start, states_before)
            column = sequences.final_length
            if column - 1 < runner.length and not sequences.done:
                # Drop the tokens that entered the blocks after those that are final in every row.
                self.counts.rollbacks += 1
                runner.rollback(column - 1)
            sequences.stream()
            self.counts.record_time("rest")

    def _draft(
        self, drafting: Drafting, start: int, max_length: int | None, states_before: dict[Site, Tensor]
    ) -> list[dict[int, Choice]]:
        """Write drafts into the columns from `start` on, while they pay; for each column, the choices by row."""
        sequences, drafts = self.sequences, []
        most = drafting.max_tokens if max_length is None else min(drafting.max_tokens, max_length - 1 - start)
        finished, lengths = sequences.finished, sequences.final_lengths
        rows = [row for row, is_finished in enumerate(finished) if not is_finished]
        if most < 1 or not rows:
            return []
        tokens = [row[self._padding[i] : lengths[i]] for i, row in enumerate(sequences.tokens)]
        context = DraftContext(tokens, [len(row) for row in tokens], states_before)
        self._memory = states_before.get(FINAL)
        chances = dict.fromkeys(rows, 1.0)  # that the drafts so far are right
        drafting.begin_step()
        for column in range(start, start + most):
            open_rows = {row: chances[row] for row in rows if lengths[row] <= column}
            context.ids = sequences.ids[:, :column]
            choices = drafting.choose(context, column, open_rows, column - start + 1)
            if not choices:
                break
            # Rows without a proposal run along with their newest token, which is verified like a draft.
            new = [
                choices[row].proposal.token if row in choices else row_tokens[-1]
                for row, row_tokens in enumerate(tokens)
            ]
            levels = [choices[row].proposal.level if row in choices else self._n_blocks for row in range(len(tokens))]
            names = {row: choice.drafter for row, choice in choices.items()}
            sequences.write_drafts(column, new, [row in open_rows for row in range(len(tokens))], levels, names)
            for row in open_rows:
                tokens[row].append(new[row])
                chances[row] = choices[row].chance if row in choices and new[row] not in sequences.eos_tokens else 0.0
            drafts.append(choices)
        self.counts.record_time("drafts")
        return drafts

    def draft_by_exit(self, context: DraftContext, rows: Sequence[int]) -> dict[int, Proposal]:
        """Run the newest tokens to the level where all these rows exit; what they predict there, by row.

        Nothing if a row does not exit; the blocks that have run need not run again.
        """
        ids = context.ids
        assert ids is not None
        is_drafted = [row in rows for row in range(len(ids))]
        step = self.decode_step(ids, is_drafted, to_end=False)
        if self._has_memory and self._memory is not None and step.early_final is not None:
            drafted = torch.tensor(is_drafted, device=self._memory.device)
            self._memory = torch.where(drafted[:, None], step.early_final.to(self._memory.device), self._memory)
        if step.early_logits is None or any(step.exit_levels[row] == self._n_blocks for row in rows):
            return {}
        tokens, scores = self._choose(ids, step.early_logits)
        probs = scores.softmax(-1) if self._do_sample else None
        chosen, levels = tokens.tolist(), step.exit_levels
        return {
            row: Proposal(chosen[row], levels[row], None if probs is None else probs[row], levels[row]) for row in rows
        }

    def _show_predictions(self, drafting: Drafting, logits: Tensor, column: int) -> None:
        """Pass the model's top tokens at all columns of a step to the drafters."""
        predictions = logits.argmax(-1).tolist()
        for row, tokens in enumerate(self.sequences.tokens):
            if not self.sequences.finished[row]:
                drafting.observe(tokens[:column], predictions[row])

    def _states_before(
        self, at_sites: Mapping[Site, Tensor], start: int, before: Mapping[Site, Tensor]
    ) -> dict[Site, Tensor]:
        """The states, (rows, d) by site, at the position that predicted each row's last final token.

        `at_sites`, (rows, columns, d), are those that predicted the columns from `start` on.
        """
        final = at_sites[FINAL]
        indices = [length - 1 - start for length in self.sequences.final_lengths]
        if len(indices) == 1:
            return {site: states[:, max(0, indices[0])] for site, states in at_sites.items()}
        last = torch.tensor(indices, device=final.device).clamp(0, final.shape[1] - 1)
        rows = torch.arange(len(final), device=final.device)
        states = {site: columns[rows, last] for site, columns in at_sites.items()}
        if not before:
            return states
        # Rows that are further ahead than this step's columns, or have ended, keep theirs.
        inside = torch.tensor([0 <= index < final.shape[1] for index in indices], device=final.device)
        return {site: torch.where(inside[:, None], states[site], before[site]) for site in states}

    def _verify(self, logits: Tensor, start: int, drafts: Sequence[Mapping[int, Choice]]) -> list[bool]:
        """Make the tokens of the drafted columns and of one more final; whether each draft was accepted.

        `logits`, (rows, columns, V), are those of the columns from `start` on. A row stops at its first rejected
        draft, which is replaced.
        """
        sequences, accepted_drafts = self.sequences, []
        starts = list(sequences.final_lengths)
        full_model = [self._n_blocks] * len(logits)
        rejected = [False] * len(logits)
        for index in range(logits.shape[1]):
            column = start + index
            rows = [open and not over for open, over in zip(sequences.open_rows(column), rejected, strict=True)]
            if not any(rows):
                continue
            choices = drafts[index] if index < len(drafts) else None
            tokens, scores = self._choose(sequences.ids[:, :column], logits[:, index], choices, column)
            changed, n_near = sequences.finalize(
                column, tokens, rows, full_model, scores, has_drafts=choices is not None
            )
            self.counts.near_ties += 0 if self._do_sample else n_near
            if choices is not None:
                accepted_drafts += self._count_drafts(choices, rows, changed, [column - start for start in starts])
                rejected = [over or new for over, new in zip(rejected, changed, strict=True)]
            if sequences.done:
                break
        return accepted_drafts

    def _count_drafts(
        self, choices: Mapping[int, Choice], rows: Sequence[bool], changed: Sequence[bool], depths: Sequence[int]
    ) -> list[bool]:
        """Count the drafts of a column in the rows that decide it; whether each was accepted."""
        counts, outcomes = self.counts, []
        for row, choice in choices.items():
            if rows[row]:
                accepted = not changed[row]
                counts.drafters.setdefault(choice.drafter, DraftCounts()).add(depths[row], accepted)
                outcomes.append(accepted)
        counts.drafts += len(outcomes)
        counts.accepted += sum(outcomes)
        return outcomes

    def decode_step(self, ids: Tensor, rows: Sequence[bool], *, may_exit: bool = True, to_end: bool = True) -> Step:
        """Run the newest tokens to the level where all selected rows have exited, or to level L.

        `ids` are all tokens so far, (rows, T). Rows that are not selected run along. Without `to_end` they
        run no further than the last level that the rule checks.
        """
        counts, shortlist = self.counts, self._exit.shortlist
        states = self.runner.extend(ids)  # (rows, new tokens, d_model)
        positions = self.runner.positions.expand(len(ids))
        checked = self._checked_levels if may_exit else frozenset()
        if self._has_memory and (self._memory is None or not bool(positions.all())):
            checked = frozenset()  # a text begins here
        exit_levels, exited = [self._n_blocks] * len(ids), [not row for row in rows]
        logits: Tensor | None = None
        final: Tensor | None = None
        earlier_tokens: tuple[Tensor, ...] = ()
        end = self._n_blocks if to_end else max(checked, default=0)
        for level in range(end + 1):
            if level in checked:
                counts.record_time("blocks")
                state = states[:, -1]
                at = positions.to(state.device)
                reading = LevelReading(level, state, at, self._read_level, earlier_tokens)
                decided: list[bool] = self._exit.rule.should_exit(reading).tolist()
                exits = [exit and not before for exit, before in zip(decided, exited, strict=True)]
                if any(exits):
                    exit_logits = reading.logits
                    if shortlist is not None:
                        exit_logits = shortlist.expand(exit_logits, self._vocab_size)
                    if logits is not None:
                        now = torch.tensor(exits, device=logits.device)
                        exit_logits = torch.where(now[:, None], exit_logits, logits)
                    if self._has_memory:
                        here = self._early_final
                        assert here is not None
                        now = torch.tensor(exits, device=here.device)
                        final = here if final is None else torch.where(now[:, None], here, final)
                    logits, exited = exit_logits, [before or exit for before, exit in zip(exited, exits, strict=True)]
                    exit_levels = [level if exit else last for exit, last in zip(exits, exit_levels, strict=True)]
                if reading.has_logits:
                    earlier_tokens += (reading.top_token,)
                    counts.unembeddings += shortlist is None
                    counts.shortlist_unembeddings += shortlist is not None
                counts.probe_evaluations += reading.probe_evaluations
                counts.record_time("rules", reading.unembedding_seconds)
                if logits is not None and all(exited):
                    return Step(level, states, exit_levels, logits, final)
            if level < end:
                counts.wasted_tokens += len(ids) - exit_levels.count(self._n_blocks)
                states = self.runner.run(level + 1)
        counts.record_time("blocks")
        return Step(end, states, exit_levels, logits, final)

    def _read_level(self, level: int, states: Tensor) -> Tensor:
        """The logits of a level's states, (rows, d_model), with the final states before them where the lens has
        memory."""
        readout = self._readouts[level]
        if isinstance(readout.site, JointSource):
            assert self._memory is not None, "a level was read before the position before it"
            states = torch.cat([self._memory if term.offset else states for term in readout.site.terms], -1)
        self._early_final = readout.to_final(states)
        return readout.structure.decode(self._early_final)

    def _remember(self, step: Step) -> None:
        """Keep the final states at the newest position: the model's own, or those predicted where rows exited."""
        if not self._has_memory:
            return
        self._memory = step.early_final
        if step.level == self._n_blocks:
            last = self._structure.to_final(step.states[:, -1])
            early = torch.tensor([level < self._n_blocks for level in step.exit_levels], device=last.device)
            self._memory = last if step.early_final is None else torch.where(early[:, None], step.early_final, last)

    def _unembed(self, states: Tensor) -> Tensor:
        """Level L's logits."""
        self.counts.unembeddings += 1
        logits = self._lens.logits(self._n_blocks, states)
        self.counts.record_time("unembeddings")
        return logits

    def _choose(
        self, ids: Tensor, logits: Tensor | None, drafted: Mapping[int, Choice] | None = None, column: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The next tokens, (rows,), the top ones or a sample, and their scores, (rows, V). Accepted drafts stay.

        Scores are the result of Hugging Face's processors on float32 logits. Sampling accepts a draft x, drawn from q,
        with probability min(1, p(x) / q(x)) and else samples from (p − q)₊, so that the outcome is distributed as p,
        whatever q is (arXiv 2211.17192). `drafted` are the choices of a drafted column; most drafters are certain of
        their token, so that q is 1 there and 0 elsewhere.
        """
        assert logits is not None, "a token exited early without logits"
        # A copy, because they may write in place; the unembedding may be on another device than the tokens.
        scores = logits.to(ids.device, torch.float32, copy=True)
        for process in self._processors:
            scores = process(ids, scores)
        if not self._do_sample:
            return scores.argmax(-1), scores
        p = scores.softmax(-1)  # (rows, V), this model
        if drafted is None:
            return torch.multinomial(p, 1)[:, 0], scores
        drafts = self.sequences.ids[:, column]
        index = drafts[:, None]
        q = torch.zeros_like(p).scatter_(1, index, 1.0)  # (rows, V), what the drafts were sampled from
        for row, choice in drafted.items():
            if choice.proposal.probs is not None:
                q[row] = choice.proposal.probs
        accepted = torch.rand_like(p[:, 0]) * q.gather(1, index)[:, 0] < p.gather(1, index)[:, 0]
        residual = (p - q).clamp_min(0)
        # Where p = q every draft is accepted and the residual is zero; multinomial still needs some weight.
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
        return torch.where(accepted, drafts, torch.multinomial(residual, 1)[:, 0]), scores
