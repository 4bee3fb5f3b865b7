"""Parts of the training example: text, mesh, optimiser, step, checkpoints and report."""
