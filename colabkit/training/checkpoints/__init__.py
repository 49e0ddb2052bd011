"""Checkpoints on disk: written atomically, sealed, and loaded from the newest that is still good.

A checkpoint is two files: `checkpoint-00000120.pt`, which is what `torch.save` writes, and `checkpoint-00000120.json`,
its seal, with the name, length and SHA-256 of the first, written last. Without a matching seal a checkpoint counts as
absent. The number is the step after which it was taken.
"""
