"""`python -m jaxserve`: the same command line as `jaxserve`."""

from jaxserve.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
