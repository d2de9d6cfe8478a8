"""A job: rows from a file through an engine into another file, which is also the record of what is done.

    rows       every line that is not blank is a row; its id, or its line's number, names it
    finished   what the output already holds: those rows stay as they are, byte for byte
    changed    a finished row that asks something else now is refused, before any work
    run        everything else is answered; each answer is written at once

A killed job leaves at most a torn last line. It is cut off, and its row answered again. The answers are those
of a job that was never interrupted: the engine is a reproducible one, and each line says what else they
depend on that the job may have chosen by itself (`Stamp`).
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from jaxserve.batch import Batch, Meter
from jaxserve.jobs.ledger import Ledger
from jaxserve.jobs.rows import Row, read_row
from jaxserve.params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine import Engine

STANDARD = "-"  # stdin, stdout
NAMED_ROWS = 5  # of those that changed
BLOCK_BYTES = 2**20
ROW_BEGINS = b'{"id": '


class Stamp(NamedTuple):
    """What an answer depends on, as `digest` in its row says it: "0f1e2d3c4b5a6978/64/packed"."""

    digest: str  # of the request
    slots: int  # rows decoded at a time
    weights: str  # how they lie on the device

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> "Stamp":
        """The opposite of `str`."""
        digest, slots, weights = text.split("/")
        return cls(digest, int(slots), weights)


@dataclasses.dataclass(frozen=True)
class Finished:
    """What an output holds."""

    end: int = 0  # bytes of its whole lines
    rows: int = 0
    errors: int = 0
    stamp: Stamp | None = None  # of its last row


@dataclasses.dataclass
class Summary:
    """What a job did."""

    rows: int = 0  # answered now
    kept: int = 0  # answered before
    errors: int = 0  # among both
    prompt_tokens: int = 0  # here and below: of the rows answered now
    cached_tokens: int = 0
    tokens: int = 0  # generated
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second; the time is that of prompts too."""
        return self.tokens / self.seconds if self.tokens else None

    def count(self, answer: "Answer") -> None:
        """One more row."""
        self.rows += 1
        self.errors += answer.is_error
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.tokens += answer.tokens


class Answer(NamedTuple):
    """A line of the output, and what it adds to the summary."""

    line: bytes
    is_error: bool
    prompt_tokens: int
    cached_tokens: int
    tokens: int


def answers(
    engine: "Engine", rows: Iterable[Row], *, weights: str, ordered: bool = False
) -> Iterator[Answer]:
    """What a reproducible engine answers, as rows are done; ordered: in their order.

    weights: their form on the device. EngineError: a step failed; what was in flight is lost.
    """
    asked = ((row, functools.partial(row.request, engine)) for row in rows)
    for row, completion in Batch(engine, asked, strict=True, ordered=ordered):
        stamp = Stamp(row.digest, engine.slots, weights)
        yield Answer(
            row.answer(completion, str(stamp), engine),
            completion.finish_reason == "error",
            completion.prompt_tokens,
            completion.cached_tokens,
            len(completion.tokens),
        )


class Job:
    """A job whose files are known to be fit for it. Nothing is written before `write`."""

    def __init__(
        self,
        source: str,
        target: str,
        defaults: SamplingParams,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ):
        """source, target: files, or "-" for stdin and stdout; defaults: for fields that a row does not set.

        resume: go on where a job with this target ended; overwrite: whatever the target holds is of no value.
        ValueError, OSError: the files do not allow that.
        """
        self.source, self.target, self.defaults = source, target, defaults
        self._ledger = Ledger()
        self._size = check_paths(source, target, resume=resume, overwrite=overwrite)
        self.finished, self.left = Finished(), None
        if resume:
            with open(target, "rb") as output:
                self.finished = read_finished(output, self._ledger)
            self.left = self._count_left()
        elif os.path.isfile(source):
            self.left = count_lines(source)

    def rows(self) -> Iterator[Row]:
        """The rows that the target did not hold when the job was made."""
        with self._lines() as lines:
            yield from unfinished_rows(lines, self.defaults, self._ledger)

    def write(self, answers: Iterable[Answer], *, progress: bool | None = None) -> Summary:
        """Write answers as they come. Whatever ends that, the output holds whole lines."""
        summary = self.nothing_left()
        start = time.perf_counter()
        with self._output() as output, Meter(self.left, shown=progress) as meter:
            for answer in answers:
                output.write(answer.line)
                output.flush()
                summary.count(answer)
                summary.seconds = time.perf_counter() - start
                meter.count(answer.tokens)
        return summary

    def nothing_left(self) -> Summary:
        """The summary of a job that answered no row now."""
        return Summary(kept=self.finished.rows, errors=self.finished.errors)

    def _count_left(self) -> int:
        """How many rows are left. ValueError: some that are finished ask something else now."""
        left = sum(1 for _ in self.rows())
        changed, ids = self._ledger.stale(NAMED_ROWS)
        if changed:
            raise ValueError(
                f"{changed} finished rows of {self.target} ask something else now: "
                f"{', '.join(map(repr, ids))}{', …' if changed > len(ids) else ''}. "
                "Give back the input and the flags that they were answered with, or begin a new output"
            )
        return left

    def _lines(self) -> BinaryIO:
        """The source. A binary file: its lines end at \\n and nowhere else."""
        if self.source == STANDARD:
            return contextlib.nullcontext(sys.stdin.buffer)
        return open(self.source, "rb")

    def _output(self) -> BinaryIO:
        if self.target == STANDARD:
            return contextlib.nullcontext(sys.stdout.buffer)
        output = open(self.target, "ab")
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, by a kill too
        except OSError:
            raise ValueError(f"another job writes to {self.target}") from None
        if output.tell() != self._size:
            raise ValueError(f"{self.target} has changed since this job began: begin again")
        if self._size > self.finished.end:
            output.truncate(self.finished.end)
        return output


def check_paths(source: str, target: str, *, resume: bool, overwrite: bool) -> int:
    """Refuses files that cannot be read or written, and to write over answers. The target's size in bytes."""
    if source != STANDARD and not stat.S_ISFIFO(os.stat(source).st_mode):  # a pipe is opened once
        open(source, "rb").close()
    if resume and overwrite:
        raise ValueError("resume and overwrite: expected one of them")
    if resume and (target == STANDARD or not os.path.isfile(source)):
        raise ValueError("resume reads input and output beforehand: both have to be files")
    if target == STANDARD:
        return 0
    if source != STANDARD and os.path.exists(target) and os.path.samefile(source, target):
        raise ValueError(f"{target} is the input: name another output")
    with open(target, "ab") as output:
        if output.tell() and not (resume or overwrite):
            raise ValueError(f"{target} is not empty: resume goes on with it, overwrite begins anew")
        return output.tell()


def read_rows(lines: Iterable[bytes], defaults: SamplingParams, ledger: Ledger) -> Iterator[Row]:
    """The rows of an input; an id that came before makes a row with an error."""
    ledger.start_again()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = read_row(line, number, defaults)
        first, times = ledger.see(row.id, number)
        if times > 1:
            why = ValueError(f"line {number}: line {first} has the id {row.id!r} already")
            row = row.repeated(times, why)
        yield row


def unfinished_rows(lines: Iterable[bytes], defaults: SamplingParams, ledger: Ledger) -> Iterator[Row]:
    """The rows of an input that the ledger does not hold as finished."""
    rows = read_rows(lines, defaults, ledger)
    return (row for row in rows if not ledger.is_finished(row.id, row.digest))


def rows_left(source: str, target: str, end: int, defaults: SamplingParams) -> Iterator[Row]:
    """The rows of a source that the first `end` bytes of a target do not hold, whatever is added to it."""
    ledger = Ledger()
    with open(target, "rb") as output, open(source, "rb") as lines:
        read_finished(output, ledger, end=end)
        yield from unfinished_rows(lines, defaults, ledger)


def read_finished(output: BinaryIO, ledger: Ledger, *, end: int | None = None) -> Finished:
    """Enters the rows of an output, or of its first `end` bytes, into the ledger.

    A torn last line, one without an end, does not count. ValueError: another line is no row that a job wrote.
    """
    found = Finished()
    for number, line in enumerate(output, 1):
        if found.end == end:
            break
        if not line.endswith(b"\n") and line[: len(ROW_BEGINS)] == ROW_BEGINS[: len(line)]:
            break
        try:
            row = json.loads(line)
            id = row["custom_id"] if "custom_id" in row else row["id"]
            stamp, is_error = Stamp.parse(row["digest"]), row["error"] is not None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"line {number} of {output.name} is no row that a job wrote"
            raise ValueError(f"{what}: {error!r}") from None
        ledger.finish(id, stamp.digest)
        found = Finished(found.end + len(line), found.rows + 1, found.errors + is_error, stamp)
    return found


def count_lines(path: str) -> int:
    """Lines of a file, a last one without an end too."""
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            count, last = count + block.count(b"\n"), block[-1:]
    return count + (last != b"\n")
