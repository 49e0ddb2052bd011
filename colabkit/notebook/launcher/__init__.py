"""The launcher: `panel` opens it, `view` holds its widgets, and `actions` turns its `settings` into public calls."""
