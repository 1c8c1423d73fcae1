"""The tasks of a stage: folding, committing, state, changelog, dead letters and tables."""
