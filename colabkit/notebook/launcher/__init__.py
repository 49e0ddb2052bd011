"""The launcher: `panel` opens it, `view` holds its widgets, and `pipeline` turns its `settings` into public calls."""
