"""`python -m swarm` is the `swarm` script."""

from swarm.cli.main import run

if __name__ == "__main__":
    run()
