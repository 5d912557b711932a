"""Teaches the draft model: to tell tokens apart as the target does, from an output like the target's own.

Two losses: the cross-entropy of the target's distribution over the most frequent tokens, and the distance of
the two models' last hidden states, which says something of all the others (as in EAGLE, arXiv 2401.15077).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headrace.engine.distillation.corpus import Example, Examples
from headrace.engine.distillation.settings import DistillationProgress, DistillationSettings
from headrace.engine.distillation.student import Student
from headrace.engine.distillation.whole_files import write_whole
from headrace.engine.errors import ConfigError, DraftingFailed
from headrace.engine.models.loader import choose_dtype

_WARM_UP_UPDATES = 50
_SAVE_EVERY_S = 60.0
_HIDDEN_WEIGHT = 0.1
_MEASURED_EXAMPLES = 256
_JUDGED_EXAMPLES = 48
_STAGE = "learning"


@dataclass(frozen=True, slots=True)
class Judgement:
    """How like the target a draft model is on sequences that it has not learnt from, among the tokens that it
    is taught to tell apart.

    Args:
        same_token: how often both hold the same token likeliest.
        overlap: mean over places of the sum over tokens of the smaller of both probabilities: how often a
            draft is kept, were it drawn at temperature 1 and judged by rejection sampling.
    """

    same_token: float
    overlap: float


class Lesson:
    """A batch as tensors.

    Args:
        token_ids: (B, T), int64.
        mask: (B, T), whether a place holds a token.
        hidden: (B, T, width), the target's.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        self.token_ids = pad_sequence([example.token_ids for example in examples], batch_first=True)
        ones = [torch.ones(len(example.token_ids), dtype=torch.bool) for example in examples]
        self.mask = pad_sequence(ones, batch_first=True)
        self.hidden = pad_sequence([example.hidden for example in examples], batch_first=True)


class Training:
    """Updates a student until its time is over; may be broken off at any moment and gone on with.

    Args:
        student: what learns.
        examples: what from.
        checkpoint: file that its state is kept in from time to time.
        vocabulary: (C,), int64: tokens that it is taught to tell apart.
    """

    def __init__(
        self,
        student: Student,
        examples: Examples,
        settings: DistillationSettings,
        checkpoint: Path,
        vocabulary: Tensor,
    ) -> None:
        self._student, self._examples, self._settings = student, examples, settings
        self._checkpoint = checkpoint
        self._rows = student.head_rows(vocabulary)
        # Some of a hidden state's numbers are a hundred times as large as others: each is measured by its own
        # usual size, or a few would be all that is learnt.
        some = torch.cat([example.hidden for example in examples.learnt[:_MEASURED_EXAMPLES]]).float()
        self._reach = some.square().mean(0).sqrt().clamp_min(1e-6)
        self._dtype = choose_dtype("auto", torch.device("cpu"))
        self._optimiser = torch.optim.AdamW(student.learning(), lr=settings.learning_rate, betas=(0.9, 0.98))
        self._num_updates, self._spent_s, self._epoch, self._place = 0, 0.0, 0, 0
        self._best: dict[str, Tensor] = {}
        self._best_overlap = -1.0
        self._restore()

    @property
    def num_updates(self) -> int:
        """So far, in all runs together."""
        return self._num_updates

    def run(self, progress: DistillationProgress) -> None:
        """Learn until the time is over; the student is then as it was when it knew unseen text best.

        Raises:
            DraftingFailed: the loss is no number any more, or its state can't be kept.
        """
        try:
            self._learn(progress)
        except DraftingFailed:
            # What went astray is not kept: the last state on disk is the better one.
            raise
        except BaseException:
            # Half an update, where one was broken off, is a state to learn on from as good as any.
            self._save()
            raise
        self._save()
        # From little text it ends up learning by heart, and foresees less of any other.
        self._student.restore(self._best)

    def _learn(self, progress: DistillationProgress) -> None:
        total_s = self._settings.training_s
        already_s, began_s = self._spent_s, time.monotonic()
        saved_s = began_s
        while self._spent_s < total_s:
            losses: list[float] = []
            groups = self._examples.batches(self._settings.batch_tokens, self._settings.seed + self._epoch)
            for group in islice(groups, self._place, None):
                losses.append(self._update(Lesson(group)))
                self._place += 1
                self._spent_s = already_s + time.monotonic() - began_s
                progress(_STAGE, round(min(self._spent_s, total_s)), round(total_s))
                if time.monotonic() - saved_s > _SAVE_EVERY_S:
                    self._save()
                    saved_s = time.monotonic()
                if self._spent_s >= total_s:
                    break
            else:
                self._epoch, self._place = self._epoch + 1, 0
            self._tell(progress, losses)
            self._spent_s = already_s + time.monotonic() - began_s

    def _tell(self, progress: DistillationProgress, losses: Sequence[float]) -> None:
        if losses:
            judged = self.judge()
            if judged.overlap >= self._best_overlap:
                self._best, self._best_overlap = self._student.state(), judged.overlap
            progress.note(
                f"update {self._num_updates}, pass {self._epoch + (self._place > 0)} over the text: "
                f"loss {sum(losses) / len(losses):.3f}; of unseen text, among the tokens it is taught, "
                f"the same token {judged.same_token:.1%}, overlap {judged.overlap:.1%}"
            )

    @torch.no_grad()
    def judge(self) -> Judgement:
        """How like the target the student is.

        Raises:
            DraftingFailed: what it says is no number.
        """
        num_places = same = overlap = 0.0
        # It is to take little of the time: the first will do.
        for example in self._examples.held_back[:_JUDGED_EXAMPLES]:
            lesson = Lesson([example])
            with self._narrow():
                theirs = self._student.logits(lesson.hidden, self._rows).softmax(-1)
                hidden = self._student.hidden(lesson.token_ids, lesson.mask)
                ours = self._student.logits(hidden, self._rows).softmax(-1)
            same += float((theirs.argmax(-1) == ours.argmax(-1)).sum())
            overlap += float(torch.minimum(theirs, ours).sum())
            num_places += lesson.mask.numel()
        if not math.isfinite(overlap):
            raise self._astray("what the draft model says")
        return Judgement(same / num_places, overlap / num_places)

    def _update(self, lesson: Lesson) -> float:
        for group in self._optimiser.param_groups:
            group["lr"] = self._settings.learning_rate * self._pace()
        self._optimiser.zero_grad(set_to_none=True)
        with self._narrow():
            ours = self._student.hidden(lesson.token_ids, lesson.mask)[lesson.mask]
            theirs = lesson.hidden[lesson.mask]
            with torch.no_grad():
                wanted = self._student.logits(theirs, self._rows).softmax(-1)
            told = self._student.logits(ours, self._rows).log_softmax(-1)
            likeness = F.smooth_l1_loss(ours.float() / self._reach, theirs.float() / self._reach)
        loss = -(wanted * told).sum(-1).mean() + _HIDDEN_WEIGHT * likeness
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._student.learning(), 1.0)
        told_loss = float(loss.detach())
        if not (math.isfinite(told_loss) and math.isfinite(norm)):
            raise self._astray("the loss")
        self._optimiser.step()
        self._num_updates += 1
        return told_loss

    def _narrow(self) -> torch.autocast:
        """Within it, products are made in bfloat16 where the processor multiplies that."""
        return torch.autocast("cpu", self._dtype, enabled=self._dtype is torch.bfloat16)

    def _pace(self) -> float:
        """Share of the greatest learning rate: up within some updates, then down along a cosine."""
        warm = min(1.0, (self._num_updates + 1) / _WARM_UP_UPDATES)
        done = min(1.0, self._spent_s / self._settings.training_s)
        return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))

    def _save(self) -> None:
        state = {
            "student": self._student.state(),
            "optimiser": self._optimiser.state_dict(),
            "num_updates": self._num_updates,
            "spent_s": self._spent_s,
            "epoch": self._epoch,
            "place": self._place,
            "best": self._best,
            "best_overlap": self._best_overlap,
        }
        write_whole(self._checkpoint, lambda partial: torch.save(state, partial))

    def _restore(self) -> None:
        if not self._checkpoint.is_file():
            return
        try:
            # Nothing but tensors and numbers is read: a checkpoint can't run code.
            state = torch.load(self._checkpoint, weights_only=True)
            self._student.restore(state["student"])
            self._optimiser.load_state_dict(state["optimiser"])
            self._num_updates, self._spent_s = state["num_updates"], state["spent_s"]
            self._epoch, self._place = state["epoch"], state["place"]
            self._best, self._best_overlap = state["best"], state["best_overlap"]
        except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
            raise ConfigError(
                f"{self._checkpoint} is no state of this draft model, or is damaged: delete it, and "
                "learning begins anew from the same text"
            ) from error

    def _astray(self, what: str) -> DraftingFailed:
        return DraftingFailed(
            f"after {self._num_updates} updates {what} is no finite number any more, and nothing was kept of "
            f"it: delete {self._checkpoint}, if there is one, and go on with a learning rate below "
            f"{self._settings.learning_rate}"
        )
