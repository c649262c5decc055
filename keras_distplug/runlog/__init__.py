"""`RunLog`: what happened in a run, where its time went, and the files that say so."""
