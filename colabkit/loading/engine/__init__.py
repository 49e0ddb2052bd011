"""What works behind `Loader`: batches planned, built in threads, processes or on a GPU, and moved to the device."""
