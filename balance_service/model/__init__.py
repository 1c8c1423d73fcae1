"""The language that read models are written in: sources, steps, folds, outputs, and how a declaration is checked."""
