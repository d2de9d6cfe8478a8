# Sourced by the other tools: makes .venv and installs jaxserve into it. Needs Python >= 3.11 and pip, nothing else.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

# is_recent PYTHON [MINOR]: whether it is Python 3.MINOR (3.11) or newer.
is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, int(sys.argv[1])))' "${2:-11}" 2>/dev/null; }

# The first interpreter that is recent enough; $PYTHON goes before all others. For a GPU rather 3.12, the oldest that
# jax 0.11 supports: its XLA takes a layer's share of a stack without copying it.
find_python() {
    local minor candidate
    for minor in $([[ ${1:-} == *cuda* ]] && echo 12) 11; do
        for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 python; do
            if is_recent "$candidate" "$minor"; then printf '%s\n' "$candidate"; return; fi
        done
    done
    fail "no Python 3.11 or newer found: install one, or name it with PYTHON=/path/to/python3"
}

# The extra that matches this machine's NVIDIA driver; empty without a usable one.
accelerator_extra() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true)
    driver=${driver%%.*}
    [[ $driver =~ ^[0-9]+$ ]] || return 0
    if ((driver >= 580)); then echo cuda13
    elif ((driver >= 525)); then echo cuda12
    else say "NVIDIA driver $driver is older than 525, the oldest that JAX supports: using the CPU"
    fi
}

# make_environment EXTRAS: idempotent; runs pip again only when pyproject.toml changed or the folder moved.
make_environment() {
    local extras=$1 base stamp
    stamp=$venv/.installed-${extras:-base}
    if [[ ! -x $python ]]; then
        base=$(find_python "$extras")
        say "making $venv with $("$base" --version)"
        "$base" -m venv --without-pip "$venv" || fail "$base cannot make a virtual environment in $venv"
    fi
    is_recent "$python" || fail "$python is unusable or older than Python 3.11: remove $venv and run this again"
    [[ $stamp -nt $root/pyproject.toml && $(<"$stamp") == "$root" ]] && return
    # Some systems ship Python without ensurepip: the pip beside it can install into the environment as well.
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null 2>&1 ||
        "$(find_python)" -m pip --python "$python" install --quiet pip ||
        fail "no pip for $python: install pip (or Python's ensurepip), remove $venv and run this again"
    say "installing jaxserve${extras:+[$extras]} into $venv (the first time takes a minute or more)"
    "$python" -m pip install --quiet --editable "$root${extras:+[$extras]}" ||
        fail "pip could not install jaxserve: check the network connection (or pip's settings) and run this again"
    printf '%s\n' "$root" >"$stamp"
}
