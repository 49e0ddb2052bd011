"""Transforms of whole batches, on any device: random by sample, and the same again after a resume.

Random numbers are a pure function of (seed, epoch, position of the sample), so the same sample gets the same crop on
any number of threads, in any batch, and on any rank. Geometric transforms of `uint8` images on the CPU go sample by
sample where the loader gathers them anyway; on other devices, and for floating images, they go by batch.
"""
