"""`stage()` brings a far source near: read concurrently, checked, published whole or not at all."""
