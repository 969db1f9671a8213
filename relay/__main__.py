"""`python -m relay` is `swarm relay`."""

from swarm.cli.main import run

if __name__ == "__main__":
    run("relay")
