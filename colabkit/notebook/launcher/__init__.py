"""The launcher: `panel` opens a panel with buttons; `settings` become a `pipeline` of calls; `view` shows them."""
