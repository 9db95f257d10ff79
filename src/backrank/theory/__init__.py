"""The papers' theory and arithmetic as pure functions: no config, no training, no global random state."""
