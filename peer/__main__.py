"""`python -m peer` is `swarm join`."""

from swarm.cli.main import run

if __name__ == "__main__":
    run("join")
