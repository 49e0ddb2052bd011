"""`Loader` yields batches on the device at memory speed, in an order that can be resumed."""
