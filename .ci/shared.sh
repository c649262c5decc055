# What the other scripts have in common; they source it.

lowest_stage() { # an environment: one TensorFlow case for every promise, real workers
    "$1/bin/python" -m pytest -n 2 -q --disable-warnings -m tf || return 1
    "$1/bin/python" -m pytest -n 2 -q --disable-warnings --stage all -m cluster \
        -k "in_epoch or forked or lowest and 2_mirrored" \
        --deselect "tests/scenarios/test_forked_workers.py::test_forked_after_a_kill[1]" \
        tests/contracts tests/scenarios/test_killed_workers.py tests/scenarios/test_forked_workers.py
}

upstream_tests() { # an environment: what upstream still does wrong
    "$1/bin/python" -m pytest -n 2 -q --disable-warnings --stage all -k upstream tests/backend
}

find_python() { # a version; prints the path of an interpreter that runs
    local each
    for each in "$(command -v "python$1")" "$HOME/.pyenv/versions/$1".*/bin/python; do
        if [ -x "$each" ] && "$each" --version >/dev/null 2>&1; then
            printf '%s\n' "$each"
            return
        fi
    done
    return 1
}
