"""A job on a local Ray with two engines on the CPU: `tools/test --ray` installs what it needs."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.cli import main
from jaxserve.jobs.job import Job
from tests.oracle import tiny_path

ray = pytest.importorskip("ray", reason="needs Ray: tools/test --ray")
from jaxserve.jobs.cluster import cluster_answers  # noqa: E402  (it imports Ray)

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parent.parent
FLAGS = ["--context", "64", "--slots", "2", "--kv-dtype", "float32", "--weights", "float32"]


@pytest.fixture(scope="module")
def cluster():
    """Two CPUs for the engines, one for the reading task."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    source = tmp_path / "in.jsonl"
    rows = [
        {"id": f"r{i}", "prompt_tokens": [int(i) for i in rng.integers(0, 384, rng.integers(1, 50))]}
        | {"max_tokens": 6, "temperature": 1.5, "ignore_eos": True, "seed": i}
        for i in range(60)
    ]
    lines = [json.dumps(row) for row in [*rows[:40], {"id": "bad", "prompt_tokens": [-1]}, *rows[40:]]]
    source.write_text("\n".join(lines) + "\n")
    return str(source), str(tmp_path / "out.jsonl"), str(tmp_path / "here.jsonl")


def run(source: str, target: str, *flags: str) -> int:
    return main(["batch", str(tiny_path("llama-f32")), source, target, *FLAGS, *flags])


def rows(path: str) -> list[bytes]:
    return sorted(Path(path).read_bytes().splitlines())


def test_two_engines_answer_as_one_and_a_torn_job_goes_on(cluster, files, capsys):
    source, target, here = files
    assert run(source, here) == 1
    assert run(source, target, "--actors", "2", "--json") == 1
    summary = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (summary["rows"], summary["errors"], summary["tokens"]) == (61, 1, 360)
    assert rows(target) == rows(here)

    lines = Path(target).read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[:20])
    Path(target).write_bytes(kept + lines[20][:33])
    assert run(source, target, "--actors", "2", "--resume") == 1
    assert Path(target).read_bytes().startswith(kept) and rows(target) == rows(here)


def test_rows_are_spread_over_the_engines(cluster, files):
    source, target, here = files
    assert run(source, here) == 1
    job = Job(source, target, SamplingParams())
    shape = {"context": 64, "slots": 2, "kv_dtype": "float32", "weights": "float32"}
    done = cluster_answers(job, str(tiny_path("llama-f32")), actors=2, gpus=0, **shape)
    summary = job.write(done)
    assert (summary.rows, summary.errors) == (61, 1)
    assert rows(target) == rows(here)


def test_an_engine_that_fails_ends_the_job_with_its_reason(cluster, files, capsys):
    source, target, _ = files
    assert run(source, target, "--actors", "2", "--context", "999999999") == 1
    err = capsys.readouterr().err
    assert "error: an engine of the cluster failed" in err and "MiB on the device" in err


def test_a_job_on_a_cluster_needs_files(files, capsys):
    source, target, _ = files
    assert run(source, "-", "--actors", "2") == 1
    assert "name them" in capsys.readouterr().err
    assert run(source, target, "--actors", "2", "--ordered") == 1
    assert run(source, target, "--actors", "0") == 1
