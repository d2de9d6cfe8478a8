"""Steps without graphs: slower, but every kernel carries the name of its layer."""

import contextlib
from collections.abc import Iterator

from jaxserve.runner import Runner

GRAPHS_OFF = {"xla_gpu_enable_command_buffer": ""}  # the list of what may be recorded: nothing


@contextlib.contextmanager
def graphs_off(runner: Runner) -> Iterator[None]:
    """Run the programs of the last trace compiled without graphs, as long as the block lasts.

    Only those are compiled again: repeat in the block what was run there.
    """
    programs = runner.programs
    runner.programs = programs | {
        name: runner.lower(name).compile(compiler_options=GRAPHS_OFF) for name in runner.ran
    }
    try:
        yield
    finally:
        runner.programs = programs
