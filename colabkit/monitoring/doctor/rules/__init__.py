"""The doctor's rules. To add one, write it in `data` or `machine`, and list it in `table`."""
