"""A job on a Ray cluster: one engine per GPU, with Ray Data between the files and the engines.

    read     one task reads the input and leaves out what is finished
    answer   actors with an engine each take blocks of rows as they become free (`map_batches`)
    write    the process that began the job writes the answers, as they come

The files lie where the reading task and the writing process both see them. Needs `jaxserve[ray]`.
"""

import os
import pickle
from collections.abc import Iterator

import numpy as np
import ray
import ray.data
from ray.exceptions import RayError

from jaxserve.engine import Engine
from jaxserve.errors import EngineError
from jaxserve.gguf.reader import open_gguf
from jaxserve.jobs.job import STANDARD, Answer, Job, answers, rows_left
from jaxserve.models.weights import resolve_mode

MAX_BLOCK_ROWS = 1024  # that an engine takes at a time: its last ones run with slots idle beside them
BLOCKS_PER_ACTOR = 4  # at least, where there are rows enough: engines need not be equally fast
READ_ROWS = 64  # that the reading task hands on at a time
READER_CPUS = 0.5  # another share than the engines have, or Ray would read inside one of them


class Answerer:
    """One engine, in an actor of its own."""

    def __init__(self, model: str, weights: str, options: dict):
        self.weights = resolve_mode(weights, open_gguf(model))
        self.engine = Engine.load(model, weights=self.weights, reproducible=True, **options)

    def __call__(self, batch: dict[str, np.ndarray]) -> Iterator[dict[str, list]]:
        """Answers rows; hands each answer on as it is there."""
        rows = (pickle.loads(row) for row in batch["row"])
        for answer in answers(self.engine, rows, weights=self.weights):
            yield {"answer": [pickle.dumps(answer)]}


def cluster_answers(
    job: Job,
    model: str,
    *,
    weights: str = "auto",
    actors: int,
    gpus: float = 1,
    **options,
) -> Iterator[Answer]:
    """The answers to what is left of a job, from `actors` engines with `gpus` GPUs each, as they are done.

    options: of `Engine.load`. Call `ray.init` before, or a local Ray starts. EngineError: an engine failed.
    """
    if job.left is None or job.target == STANDARD:
        raise ValueError("a job on a cluster is one over files: name them")
    open_gguf(model)  # here, where what is wrong with it has a plain error
    files = {"source": os.path.abspath(job.source), "target": os.path.abspath(job.target)}
    left = files | {"end": job.finished.end, "defaults": job.defaults}
    rows = ray.data.range(1).map_batches(_read, fn_kwargs={"left": left}, batch_size=1, num_cpus=READER_CPUS)
    share = min(MAX_BLOCK_ROWS, -(-job.left // (BLOCKS_PER_ACTOR * actors)))
    done = rows.repartition(target_num_rows_per_block=max(1, share)).map_batches(
        Answerer,
        fn_constructor_kwargs={"model": model, "weights": weights, "options": options},
        batch_size=None,
        concurrency=actors,
        num_gpus=gpus,
        num_cpus=1,
    )
    try:
        for row in done.iter_rows():
            yield pickle.loads(row["answer"])
    except RayError as error:
        raise EngineError(f"an engine of the cluster failed: {error}") from error


def _read(_: dict, left: dict) -> Iterator[dict[str, list]]:
    """The rows that are left, block by block."""
    block = []
    for row in rows_left(**left):
        block.append(pickle.dumps(row))
        if len(block) == READ_ROWS:
            yield {"row": block}
            block = []
    if block:
        yield {"row": block}
