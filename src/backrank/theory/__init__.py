"""backward_bottleneck's theory and arithmetic as pure functions: no config, no training, no global random state."""
