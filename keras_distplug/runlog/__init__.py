"""`RunLog`: the log of a run, goodput, and the judgement of its state."""
