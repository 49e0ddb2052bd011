"""`open_launcher()` opens a panel with buttons: from far files to a trained network without a line of code."""
