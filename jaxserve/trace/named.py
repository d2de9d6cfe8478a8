"""Steps without graphs: slower, but every kernel carries the name of its layer."""

import contextlib
from collections.abc import Iterator

from jaxserve.runner import Runner

GRAPHS_OFF = {"xla_gpu_enable_command_buffer": ""}  # the list of what may be recorded: nothing


@contextlib.contextmanager
def graphs_off(runner: Runner) -> Iterator[None]:
    """Run the programs that ran last compiled without graphs, as long as the block lasts.

    Only `last_programs` are compiled again: repeat in the block what was run before it.
    """
    programs = runner.programs
    runner.programs = programs | {
        name: runner.lower(name).compile(compiler_options=GRAPHS_OFF)
        for name in set(runner.last_programs.values())
    }
    try:
        yield
    finally:
        runner.programs = programs
