"""`mooncake-lite doctor`: what this machine has and can run, and what each pair of ranks gets from the other.

    command         the command and its report; start here
    probes          short tries in child processes, each with a limit
    links           `--links`: starts ranks that measure each other, and shows the result
    links_program   what each of those ranks runs

Explained in docs/reference/cli.md.
"""
