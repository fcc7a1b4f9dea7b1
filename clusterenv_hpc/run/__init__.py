"""A configuration becomes objects and a rank a role: training, checkpoints, metrics, figures, launch."""
