"""The doctor's rules, by what they look at: the input, the device and the host, safety."""
