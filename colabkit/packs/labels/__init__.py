"""Labels and splits of samples: from columns, from folders, by functions, or dealt out by seeded shares and folds."""
