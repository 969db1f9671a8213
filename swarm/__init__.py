"""swarm: volunteers' machines together serve Mixture-of-Experts models that none of them could hold."""

__version__ = "0.1.0"
