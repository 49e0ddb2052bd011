"""The orders of epochs: pure functions of a seed and an epoch, for any range of positions, in the time of that range.

No permutation is kept, so a billion samples start at once and a resumed epoch is a slice.
"""
