"""Labels and splits of samples: from columns, folders or functions, or from seeded shares and folds."""
