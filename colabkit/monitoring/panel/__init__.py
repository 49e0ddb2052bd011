"""`dashboard()` shows a live panel beside `train()` or any loop over a `Loader`."""
