"""Where the step runs: which strategy, and how a model gets under it."""
