"""Sample orders: pure functions of the seed and the epoch that compute any range of positions directly.

Shuffling stores no permutation of a large dataset, so an epoch of a billion samples starts immediately, and a resumed
epoch is a slice of the full one.
"""
