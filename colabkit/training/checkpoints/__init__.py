"""Checkpoints on disk: written atomically, sealed, and loaded from the newest undamaged one.

A checkpoint consists of two files. `checkpoint-00000120.pt` is written by `torch.save`. `checkpoint-00000120.json` is
its seal: it is written last and holds the name, size and SHA-256 of the first file. A checkpoint without a matching
seal counts as absent. The number is the step after which the checkpoint was taken.
"""
